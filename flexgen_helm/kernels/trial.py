"""Decides which compiled loops this process uses: those that compile here, and whose results on
small examples equal PyTorch's.

`FLEXGEN_HELM_LOOPS=0` uses none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from threading import RLock
from types import ModuleType

import torch
from torch import Tensor

from flexgen_helm.progress import Message, report

# For records: what loops are for -> "compiled", or the reason why PyTorch computes it instead.
loops_in_use: dict[str, str] = {}


@cache
def imported(name: str) -> ModuleType | str:
    """Import a module that needs numba; if that fails, report and return the reason. Tried once."""
    if os.environ.get("FLEXGEN_HELM_LOOPS") == "0":
        return "FLEXGEN_HELM_LOOPS=0"
    try:
        return import_module(name)
    # numba raises what it likes, for example where no memory may be executed
    except Exception as error:
        reason = _first_line(error)
    if reason != "ModuleNotFoundError: No module named 'numba'":
        report(
            Message(
                "numba does not work here, so PyTorch computes what it compiles, more slowly "
                f"({reason})"
            )
        )
    return reason


class Loops:
    """The compiled loops of one module, tried before their first use.

        loops = Loops("norms", "flexgen_helm.kernels.layer_loop", examples)
        loops()                   the module, or None if PyTorch computes instead

    what: the loops are for, in records and messages.
    examples: returns computations that ask `loops()` and use what it returns; each is made with the
        module and with None, and the results are compared.
    tolerance: relative; a tenth of it is the absolute one.
    """

    def __init__(
        self,
        what: str,
        module: str,
        examples: Callable[[], Iterable[Callable[[], Tensor]]],
        tolerance: float = 1e-5,
    ) -> None:
        self._purpose, self._module_name, self._examples, self._tolerance = (
            what,
            module,
            examples,
            tolerance,
        )
        self._lock = RLock()
        self.forget()

    def forget(self) -> None:
        """Try the loops again at the next call."""
        self._module: ModuleType | None = None
        self._is_decided = self._is_on_trial = False

    def __call__(self) -> ModuleType | None:
        if not self._is_decided:
            # Other threads wait for the end of the trial. Its examples call this from the thread
            # that has the lock, and get what they are to be made with.
            with self._lock:
                if not (self._is_decided or self._is_on_trial):
                    self._try()
        return self._module

    def _try(self) -> None:
        module = imported(self._module_name)
        reason: str | None
        if isinstance(module, str):
            reason = module
        elif reason := self._failure(module):
            report(
                Message(
                    f"the compiled loop for {self._purpose} does not work here, so PyTorch is "
                    f"used, more slowly ({reason})"
                )
            )
        self._module = module if reason is None and isinstance(module, ModuleType) else None
        loops_in_use[self._purpose] = reason or "compiled"
        self._is_decided = True

    def _failure(self, module: ModuleType) -> str | None:
        self._is_on_trial, self._module = True, module
        try:
            for example in self._examples():
                found = example()
                self._module = None
                expected = example()
                self._module = module
                if not torch.allclose(
                    found, expected, rtol=self._tolerance, atol=0.1 * self._tolerance
                ):
                    return "it computes wrong numbers"
        except Exception as error:  # of a numba or an LLVM that we do not know
            return _first_line(error)
        finally:
            self._is_on_trial = False
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
