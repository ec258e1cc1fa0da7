"""`flexgen-helm` on the real engine, in a forked process whose state, models and data are in one
folder.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.forks import python

MAIN = "import sys; from flexgen_helm.cli import main; sys.exit(main())"


def flexgen_helm(
    folder: Path, *arguments: str, program: str = MAIN, start: Sequence[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, whose `models.yaml`, `data` and `home` are the user's.

    program: Python code that gets the arguments.
    start: of the process, where it is no fork.
    """
    variables = {"FLEXGEN_HELM_HOME": str(folder / "home"), "FLEXGEN_HELM_DATA": str(folder / "data"),
                 "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    command = [*(start or python("all")), "-c", program, *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True
    )


def run_suite(folder: Path, *entries: str, instances: int, more: tuple[str, ...] = ()) -> Path:
    """Run entries as suite `s`; return its folder."""
    done = flexgen_helm(folder, "run", "-r", *entries, "-m", str(instances), "--suite", "s", *more)
    assert done.returncode == 0, done.stderr
    return folder / "benchmark_output" / "runs" / "s"


def pass_answers(patch: pytest.MonkeyPatch) -> None:
    """Let `verify` take all answers for equal, which it would need the engine for."""
    equal = {"equal": True, "differences": [], "largest_difference": 0.0, "tolerance": 0.0,
             "why": "", "has_sums": False}  # fmt: skip
    patch.setattr(
        "flexgen_helm.cli.verify.check_answers", lambda *given: [(equal, None) for _ in given[2]]
    )
