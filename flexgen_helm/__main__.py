"""`python -m flexgen_helm` is `flexgen-helm`; `torchrun -m flexgen_helm` runs it on the ranks of a
pipeline.
"""

import sys

from flexgen_helm.cli import main

sys.exit(main())
