"""Look one deployment up as HELM does: `flexgen-helm doctor` runs this file's text in a fresh
interpreter.

HELM loads plugins by entry point and swallows what goes wrong there, so only a look-up tells.
Nothing of ours is imported here, or the entry point would not be what is tested.
"""

import sys

from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.run import load_entry_point_plugins

if __name__ == "__main__":
    load_entry_point_plugins()
    get_model_deployment(sys.argv[1])
