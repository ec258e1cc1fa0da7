"""`flexgen-helm plan` as a process that must not import torch."""

import os
import subprocess

from tests.helpers.forks import python


def plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from flexgen_helm.cli import main\n"
        "try:\n    code = main(['plan', *sys.argv[1:]])\n"
        "except SystemExit as end:\n    code = end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\nsys.exit(code)"
    )
    return subprocess.run(
        [*python("plan"), "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **environment},
    )  # fmt: skip
