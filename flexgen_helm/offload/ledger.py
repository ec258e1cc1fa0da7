"""The byte ledger of a tier: what is allocated, by kind, and no more than the tier's limit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.tiers import Tier, limit_flag
from flexgen_helm.units import exact_size


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
