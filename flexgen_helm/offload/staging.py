"""Page-aligned host memory, and the ledger of a tier's bytes."""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.tiers import ALIGNMENT, Tier, aligned, limit_flag
from flexgen_helm.units import exact_size

# Allocations from this size on ask for huge pages (2 MiB on most machines).
_HUGE_PAGES_FROM = 4 << 20
# Bytes of an allocation that tensors share: what no tensor uses was never written, and takes no
# memory.
_PAGES_BYTES, _LINE_BYTES = 64 << 20, 64


def pages(num_bytes: int) -> Tensor:
    """Allocate page-aligned, zeroed host memory [num_bytes rounded up to whole pages].

    The system provides a page when it is first written. Large allocations use huge pages where the
    system has them, because direct I/O looks up every page.
    """
    memory = mmap.mmap(
        -1, max(ALIGNMENT, aligned(num_bytes)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if num_bytes >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


class Pages:
    """Hands out parts of large allocations, whose huge pages tensors share that are smaller than
    one.

    A processor looks up every page that it reads: a plain sum of 300 MB takes 0.75 of the time in
    huge pages. An allocation is freed with its last tensor.
    """

    def __init__(self) -> None:
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that begins at a line of the cache."""
        num_bytes = prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._memory):
            self._memory, self._used = pages(max(_PAGES_BYTES, num_bytes)), 0
        part = self._memory[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return part.view(dtype).view(*shape)


# The byte ledger of a tier: it records what is allocated, by kind, and enforces the tier's limit.


@dataclass(frozen=True)
class Allocation:
    """Bytes that a ledger has granted, until `Ledger.release`."""

    kind: str
    num_bytes: int
    serial: int


class Ledger:
    """Counts the bytes of one tier. Whoever allocates memory claims it here first. Thread-safe.

    limit: bytes.
    peak: the most bytes that were in use so far.
    make_room: releases claims that nobody uses yet, for a claim that does not fit; called by that
        claim's thread.
    """

    def __init__(self, tier: Tier, limit: int) -> None:
        self.tier, self.limit, self.peak = tier, limit, 0
        self._allocations: dict[int, Allocation] = {}
        self._in_use = 0
        self._serial = 0
        self._lock = threading.Lock()
        self.make_room: Callable[[], None] | None = None

    @property
    def in_use(self) -> int:
        return self._in_use

    @property
    def free(self) -> int:
        return self.limit - self._in_use

    def claim(self, kind: str, num_bytes: int, *, ahead: bool = False) -> Allocation:
        """Claim bytes before allocating them.

        kind: 'weights', 'staging', 'buffers' (of threads that load), 'cache' or 'activations'.
        ahead: they are not needed yet, so nothing makes room for them.

        Raises `MemoryLimitError` and claims nothing if they exceed the limit.
        """
        try:
            return self._claim(kind, num_bytes)
        except MemoryLimitError:
            if ahead or self.make_room is None:
                raise
        self.make_room()
        return self._claim(kind, num_bytes)

    def _claim(self, kind: str, num_bytes: int) -> Allocation:
        with self._lock:
            if self._in_use + num_bytes > self.limit:
                raise MemoryLimitError(
                    f"the {self.tier} tier is limited to {exact_size(self.limit)}, of which "
                    f"{exact_size(self._in_use)} are in use; {exact_size(num_bytes)} more of "
                    f"{kind} do not fit: raise {limit_flag(self.tier)} or take a smaller block"
                )
            self._serial += 1
            allocation = Allocation(kind, num_bytes, self._serial)
            self._allocations[allocation.serial] = allocation
            self._in_use += num_bytes
            self.peak = max(self.peak, self._in_use)
            return allocation

    @contextmanager
    def claimed(self, kind: str, num_bytes: int, *, ahead: bool = False) -> Iterator[Allocation]:
        """Claim bytes for what the block allocates; release them if the block fails."""
        allocation = self.claim(kind, num_bytes, ahead=ahead)
        try:
            yield allocation
        except BaseException:
            self.release(allocation)
            raise

    def release(self, allocation: Allocation) -> None:
        with self._lock:
            held = self._allocations.pop(allocation.serial, None)
            assert held is not None, f"{allocation} was not held"
            self._in_use -= allocation.num_bytes

    def by_kind(self) -> dict[str, int]:
        """Return {kind: bytes in use}."""
        with self._lock:
            totals: Counter[str] = Counter()
            for allocation in self._allocations.values():
                totals[allocation.kind] += allocation.num_bytes
            return dict(totals)

    def check(self, expected: dict[str, int] | None = None) -> None:
        """Assert that the books balance, and that just `expected` bytes by kind are in use (None:
        any).
        """
        by_kind = self.by_kind()
        assert sum(by_kind.values()) == self._in_use, (
            f"{self.tier}: {by_kind} does not sum to {self._in_use}"
        )
        assert self._in_use <= self.limit
        assert expected is None or by_kind == expected, (
            f"{self.tier}: holds {by_kind}, expected {expected}"
        )
