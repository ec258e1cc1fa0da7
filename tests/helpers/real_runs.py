"""`flexgen-helm` on the real engine, in a forked process whose state, models and data are in one folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.helpers.forks import python


def flexgen_helm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; its `models.yaml`, `data` and `home` are the user's."""
    main = "import sys; from flexgen_helm.cli import main; sys.exit(main())"
    variables = {"FLEXGEN_HELM_HOME": str(folder / "home"), "FLEXGEN_HELM_DATA": str(folder / "data"),
                 "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    return subprocess.run([*python("all"), "-c", main, *arguments], cwd=folder, env={**os.environ, **variables},
                          capture_output=True, text=True)  # fmt: skip


def run_suite(folder: Path, *entries: str, instances: int, more: tuple[str, ...] = ()) -> Path:
    """Run entries as suite `s`; return its folder."""
    done = flexgen_helm(folder, "run", "-r", *entries, "-m", str(instances), "--suite", "s", *more)
    assert done.returncode == 0, done.stderr
    return folder / "benchmark_output" / "runs" / "s"
