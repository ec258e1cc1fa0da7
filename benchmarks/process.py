"""One measurement in a process of its own: with fresh memory, and in a memory control group if one is given."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flexgen_helm.benchmarks.common import run_logged
from flexgen_helm.benchmarks.memory_group import MemoryGroup


def in_own_process(
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    group: MemoryGroup | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Call `function(**arguments)`, a module's function, in a new process; arguments and result are JSON types.

    Raises `ProcessKilled`, or `FlexgenError` with the end of the process's output if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        answer = Path(scratch) / "answer.json"
        task = json.dumps([function.__module__, function.__qualname__, dict(arguments)])
        command = [sys.executable, "-m", __name__, str(answer)]
        run_logged(
            command if group is None else group.enter(command),
            Path(scratch) / "log.txt",
            function.__qualname__,
            input=task.encode(),
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


def _main() -> None:
    module, name, arguments = json.load(sys.stdin)
    result = getattr(import_module(module), name)(**arguments)
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    _main()
