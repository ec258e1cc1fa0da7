"""Programs: calls of compiled functions that were recorded, and are run again without Python between them.

A recorded call has the addresses of what it reads and writes. What it writes is in memory of the recording, which all
programs may share that run one at a time. What it reads besides must stay where it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
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
        self.functions = functions
        self._numbers, self._kept, self._threads = numbers, kept, torch.get_num_threads()
        self._uses: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}

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

    def moved(self, places: Sequence[int], others: Sequence[int]) -> Program:
        """Return the same calls with operands elsewhere.

        places: addresses of some; others: what takes the place of each.
        """
        numbers = [own[:] for own in self._numbers]
        for call, argument, operand in self._uses_of(tuple(places)):
            numbers[call][argument] = others[operand]
        return Program(self.functions, numbers, self._kept)

    def _uses_of(self, places: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Find operands among the arguments of calls: the call, the argument, and which one of `places` it is."""
        if places not in self._uses:
            operands = {place: operand for operand, place in enumerate(places)}
            self._uses[places] = [
                (call, argument, operands[number])
                for call, own in enumerate(self._numbers)
                for argument, number in enumerate(own)
                if number in operands
            ]
        return self._uses[places]

    @cached_property
    def _calls(self) -> tuple[int, list[int], array[int]]:
        """The address and the arguments of what runs the calls, and the table that it reads."""
        from flexgen_helm.kernels import compiled

        pairs = zip(self.functions, (own.buffer_info()[0] for own in self._numbers))
        table = array("q", chain.from_iterable(pairs))
        openmp = openmp_library() if self._threads > 1 else None
        given = [table.buffer_info()[0], len(self.functions), 0 if openmp is None else openmp.barrier]
        return compiled.address_of(compiled.run_calls), given, table

    def run(self) -> None:
        address, given, _ = self._calls
        run_on_threads(address, given, self._threads)


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
