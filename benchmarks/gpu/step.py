"""One step of `make gpu-check`, in its process: a function of a module here, and what it reports."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

GIB = 1 << 30
# Tried out on the tests' CUDA device in host memory: everything is small, and no figure means anything.
FAKE = bool(os.environ.get("FAKE"))
_failed: list[str] = []


def emit(**values: Any) -> None:
    """Append a result to results.jsonl, and print it into the step's log."""
    line = json.dumps({"step": os.environ["STEP"], **values}, default=str)
    with Path(os.environ["OUT"], "results.jsonl").open("a", encoding="utf-8") as sink:
        sink.write(line + "\n")
    print(line)


def part(name: str, function: Callable[..., Mapping[str, Any] | None], *arguments: Any) -> None:
    """Emit what a function returns, or its error: the step then fails at its end, and the next part runs."""
    began = time.perf_counter()
    try:
        found = function(*arguments) or {}
    except Exception as error:
        _failed.append(name)
        traceback.print_exc()
        emit(name=name, error=f"{type(error).__name__}: {error}"[:500])
    else:
        emit(name=name, s=time.perf_counter() - began, **found)


def fake_device() -> Any:
    """Return a context in which torch has a CUDA device in host memory, if FAKE is set."""
    if not FAKE:
        return nullcontext()
    from tests.cuda.device import cuda_in_host_memory

    return cuda_in_host_memory(memory=4 * GIB)


def main() -> None:
    """Call the function that the command line names, 'module.function', with arguments as JSON."""
    module, function = sys.argv[1].split(".")
    with fake_device() as device:
        getattr(import_module(f"{__package__}.{module}"), function)(**json.loads(sys.argv[2]))
        if device is not None:
            device.check()
    sys.exit(f"failed: {', '.join(_failed)}" if _failed else 0)


if __name__ == "__main__":
    # As a module that others import too: their `part` and this one's list of failures are the same.
    import_module(f"{__package__}.step").main()
