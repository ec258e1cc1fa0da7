"""The tests marked `gpu`, as steps; as a plugin of pytest this module writes what becomes of each test."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.gpu.step import FAKE, emit


def run_tests(*, tests: Sequence[str], quick: str) -> None:
    """Run tests, files of the folder `tests` or parts of them, and exit as pytest does.

    Several files run in processes for all processors but those of the steps beside them, where pytest-xdist is here.
    """
    folder = Path(str(import_module("tests").__file__)).parent
    arguments = ["-m", "gpu", "-q", "-rfE", "--tb=short", "--maxfail=60", "-p", "no:cacheprovider", "-p", __name__]
    workers = (os.cpu_count() or 1) - 4
    if FAKE:
        arguments += ["-k", quick]
    elif len(tests) > 1 and workers > 1 and find_spec("xdist") is not None:
        arguments += ["-n", str(workers), "--dist", "load"]
    sys.argv = ["pytest", *arguments, *(str(folder / name) for name in tests)]
    runpy.run_module("pytest", run_name="__main__")


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that began them has the same report
        return
    name = report.nodeid.rpartition("/")[2]
    if report.failed:
        emit(name=name, error=report.longreprtext.rstrip().splitlines()[-1][:500])
    elif report.when == "call" and report.passed:
        emit(name=name, s=report.duration)
