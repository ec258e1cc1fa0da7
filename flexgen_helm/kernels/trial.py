"""Compiled functions are used once they have computed what is known, in this process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from flexgen_helm.progress import Message, report


def tried(what: str, is_right: Callable[[ModuleType], bool]) -> ModuleType | None:
    """Return the compiled functions; None where they cannot compute `what`, or compute it wrong, after a sentence."""
    try:
        from flexgen_helm.kernels import compiled
    except ImportError:  # a machine without numba
        return None
    try:
        if is_right(compiled):
            return compiled
        reason = "it computes wrong numbers"
    except Exception as error:  # of a numba or an LLVM that we do not know
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    report(
        Message(f"the compiled loop for {what} does not work here, so PyTorch computes them, more slowly ({reason})")
    )
    return None
