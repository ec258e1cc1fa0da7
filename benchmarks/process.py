"""One measurement in a process of its own: fresh memory, and a memory control group where one is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flexgen_helm.benchmarks.memory_group import MemoryGroup
from flexgen_helm.errors import FlexgenError


class ProcessKilled(FlexgenError):
    """The process ended by a signal: in a memory control group, by the lack of memory."""


def in_own_process(
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    group: MemoryGroup | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """`function(**arguments)`, a function of a module, arguments and result in JSON's types.

    Raises `ProcessKilled`, or `FlexgenError` with the end of what the process wrote where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        answer, log = Path(scratch) / "answer.json", Path(scratch) / "log.txt"
        task = json.dumps([function.__module__, function.__qualname__, dict(arguments)])
        command = [sys.executable, "-m", __name__, str(answer)]
        with log.open("wb") as sink:
            done = subprocess.run(
                command if group is None else group.enter(command),
                input=task.encode(),
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            )
        if done.returncode < 0:
            raise ProcessKilled(f"{function.__qualname__} was ended by signal {-done.returncode}")
        if done.returncode or not answer.is_file():
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
            raise FlexgenError(f"{function.__qualname__} ended with {done.returncode}:\n{tail}")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _main() -> None:
    module, name, arguments = json.load(sys.stdin)
    answer = getattr(import_module(module), name)(**arguments)
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main()
