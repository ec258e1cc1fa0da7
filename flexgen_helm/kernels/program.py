"""Programs: calls of compiled functions that were recorded, and are run again without Python between them.

A recorded call has the addresses of what it reads and writes. What it writes is in memory of the recording, which all
programs may share that run one at a time. What it reads besides must stay where it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
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

    def __init__(self, functions: tuple[int, ...], numbers: Sequence[array[int]], kept: object) -> None:
        """numbers: of each function, a header and its arguments; kept: what they are addresses of."""
        from flexgen_helm.kernels import compiled

        self.functions = functions
        self._numbers, self._kept, self._threads = numbers, kept, torch.get_num_threads()
        pairs = zip(functions, (own.buffer_info()[0] for own in numbers))
        self._table = array("q", chain.from_iterable(pairs))
        openmp = openmp_library() if self._threads > 1 else None
        self._address = compiled.address_of(compiled.run_calls)
        self._given = [self._table.buffer_info()[0], len(functions), 0 if openmp is None else openmp.barrier]

    @classmethod
    def of(cls, recorded: Recording) -> Program:
        openmp = openmp_library() if torch.get_num_threads() > 1 else None
        header = [0, 0, 0, 1] if openmp is None else [openmp.thread_num, openmp.num_threads, 0, 0]
        numbers = [array("q", [*header, *own]) for _, own in recorded.calls]
        return cls(tuple(address for address, _ in recorded.calls), numbers, recorded.kept)

    @classmethod
    def joined(cls, programs: Sequence[Program]) -> Program:
        """Return what runs programs one behind the other, by one call."""
        functions = tuple(chain.from_iterable(one.functions for one in programs))
        return cls(functions, [*chain.from_iterable(one._numbers for one in programs)], programs)

    def moved(self, places: Mapping[int, int]) -> Program:
        """Return the same calls with operands elsewhere; places: addresses of some, and what takes their place."""
        numbers = [array("q", [places.get(number, number) for number in own]) for own in self._numbers]
        return Program(self.functions, numbers, self._kept)

    def run(self) -> None:
        run_on_threads(self._address, self._given, self._threads)


def can_record() -> bool:
    """Return whether programs can run here on PyTorch's threads."""
    try:
        from flexgen_helm.kernels import compiled  # noqa: F401
    except ImportError:  # a machine without numba
        return False
    return torch.get_num_threads() == 1 or openmp_library() is not None


def recorded(part: Callable[[], _T], memory: Tensor, computes: bool = True) -> tuple[Program, _T]:
    """Compute a part of a layer and record its calls; memory: bytes for what they return.

    computes: False to run none of the calls. What is no compiled function is computed all the same, from whatever is in
        memory.

    Raises `MemoryError` if these are too few.
    """
    with Recording(memory, computes) as own:
        result = part()
    return Program.of(own), result


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


def has_same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors in float32 are equal, what is no number too."""
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors the values that they had."""
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)
