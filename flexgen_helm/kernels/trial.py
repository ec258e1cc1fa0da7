"""Which compiled loops this process uses: those that compile here, and have computed what is known.

`FLEXGEN_HELM_LOOPS=0` uses none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import ModuleType

from flexgen_helm.progress import Message, report

_LOOPS = "flexgen_helm.kernels.compiled"
# For records: what was tried -> "compiled", or why PyTorch computes it.
loops_in_use: dict[str, str] = {}


@cache
def imported(name: str) -> ModuleType | str:
    """Import a module that needs numba, once; return why not, if it cannot be, after a sentence."""
    if os.environ.get("FLEXGEN_HELM_LOOPS") == "0":
        return "FLEXGEN_HELM_LOOPS=0"
    try:
        return import_module(name)
    except Exception as error:  # numba raises what it likes, for example where no memory may be executed
        reason = _first_line(error)
    if reason != "ModuleNotFoundError: No module named 'numba'":
        report(Message(f"numba does not work here, so PyTorch computes what it compiles, more slowly ({reason})"))
    return reason


def tried(what: str, is_right: Callable[[ModuleType], bool], name: str = _LOOPS) -> ModuleType | None:
    """Return a module of compiled functions if they compute `what` right; else None, after a sentence.

    name: of the module.
    """
    module = imported(name)
    if isinstance(module, str):
        loops_in_use[what] = module
        return None
    reason = _why_not(module, is_right)
    loops_in_use[what] = reason or "compiled"
    if reason is None:
        return module
    report(Message(f"the compiled loop for {what} does not work here, so PyTorch is used, more slowly ({reason})"))
    return None


def _why_not(module: ModuleType, is_right: Callable[[ModuleType], bool], is_first: bool = True) -> str | None:
    """Return why a module's functions are not used; None if they may be."""
    try:
        return None if is_right(module) else "it computes wrong numbers"
    except Exception as error:  # of a numba or an LLVM that we do not know
        if is_first and type(error).__name__ in ("EOFError", "UnpicklingError"):
            _forget(module, error)
            return _why_not(module, is_right, is_first=False)
        return _first_line(error)


def _forget(module: ModuleType, error: Exception) -> None:
    """Delete what numba has kept of the functions in a module's folder, so that it compiles them again."""
    from numba.core.caching import FunctionCache

    functions = (getattr(value, "py_func", value) for value in vars(module).values())
    function = next(value for value in functions if isfunction(value) and value.__module__.startswith("flexgen_helm."))
    folder = Path(FunctionCache(function).cache_path)
    for path in folder.glob("*.nb[ic]"):
        path.unlink(missing_ok=True)
    report(Message(f"what numba kept in {folder} was damaged ({_first_line(error)}); it compiles again"))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
