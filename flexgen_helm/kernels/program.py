"""Programs: calls of compiled functions that were recorded, and are run again without Python between them.

A recorded call has the addresses of what it reads and writes. What it writes is in memory of the recording, which all
programs may share that run one at a time. What it reads besides must stay where it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from flexgen_helm.kernels.team import Recording, openmp_library, run_on_threads

_T = TypeVar("_T")


class Program:
    """Recorded calls, for as many threads as PyTorch has now.

    functions: their addresses.
    """

    def __init__(self, recorded: Recording) -> None:
        from flexgen_helm.kernels import compiled

        self._threads = torch.get_num_threads()
        openmp = openmp_library() if self._threads > 1 else None
        header = [0, 0, 0, 1] if openmp is None else [openmp.thread_num, openmp.num_threads, 0, 0]
        self._kept = recorded.kept
        self._numbers = [array("q", [*header, *numbers]) for _, numbers in recorded.calls]
        self.functions = tuple(address for address, _ in recorded.calls)
        pairs = zip(self.functions, (numbers.buffer_info()[0] for numbers in self._numbers))
        self._table = array("q", chain.from_iterable(pairs))
        self._address = compiled.address_of(compiled.run_calls)
        self._given = [self._table.buffer_info()[0], len(self.functions), 0 if openmp is None else openmp.barrier]

    def run(self) -> None:
        run_on_threads(self._address, self._given, self._threads)


def can_record() -> bool:
    """Return whether programs can run here on PyTorch's threads."""
    try:
        from flexgen_helm.kernels import compiled  # noqa: F401
    except ImportError:  # a machine without numba
        return False
    return torch.get_num_threads() == 1 or openmp_library() is not None


def recorded(part: Callable[[], _T], memory: Tensor) -> tuple[Program, _T]:
    """Compute a part of a layer and record its calls; memory: bytes for what they return.

    Raises `MemoryError` if these are too few.
    """
    with Recording(memory) as own:
        result = part()
    return Program(own), result


def is_whole(
    program: Program, part: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> bool:
    """Return whether a program computes all that a part does, from other inputs than those that it was recorded with.

    inputs: what the part reads at fixed addresses; they are left as they were.
    outputs: where the program writes its results; some may be inputs.
    """
    kept = [x.clone() for x in inputs]
    for number, x in enumerate(inputs):
        x.mul_(0.75).add_(0.01 * (number + 1))
    changed = [x.clone() for x in inputs]
    program.run()
    by_program = [x.clone() for x in outputs]
    restore(inputs, changed)
    by_part = [x.clone() for x in part()]
    restore(inputs, kept)
    return all(torch.equal(own, other) for own, other in zip(by_program, by_part, strict=True))


def restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors the values that they had."""
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)
