"""The byte ledger of a tier: what is held, by kind, and the limit that it enforces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.placement import Tier, limit_flag


@dataclass(frozen=True)
class Allocation:
    """A claim on a tier; give it back with `Ledger.release`."""

    kind: str
    num_bytes: int
    serial: int


class Ledger:
    """Counts the bytes of one tier. Every allocation is claimed here first; thread-safe.

    limit: bytes, None for no limit. Kinds are words such as 'weights', 'cache', 'activations'.
    """

    def __init__(self, tier: Tier, limit: int | None = None) -> None:
        self.tier = tier
        self.limit = limit
        self.peak = 0
        self._held: dict[int, Allocation] = {}
        self._in_use = 0
        self._serial = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        return self._in_use

    @property
    def free(self) -> int | None:
        """Bytes left below the limit; None without a limit."""
        return None if self.limit is None else self.limit - self._in_use

    def claim(self, kind: str, num_bytes: int) -> Allocation:
        """Claim bytes before allocating them; raises `MemoryLimitError` and changes nothing if they do not fit."""
        with self._lock:
            if self.limit is not None and self._in_use + num_bytes > self.limit:
                raise MemoryLimitError(
                    f"the {self.tier} tier is limited to {self.limit:,} bytes, of which {self._in_use:,} are in use; "
                    f"{num_bytes:,} more bytes of {kind} do not fit: raise {limit_flag(self.tier)} or take a smaller "
                    "block"
                )
            self._serial += 1
            allocation = Allocation(kind, num_bytes, self._serial)
            self._held[allocation.serial] = allocation
            self._in_use += num_bytes
            self.peak = max(self.peak, self._in_use)
            return allocation

    @contextmanager
    def claimed(self, kind: str, num_bytes: int) -> Iterator[Allocation]:
        """A claim for what the block allocates, given back if that fails."""
        allocation = self.claim(kind, num_bytes)
        try:
            yield allocation
        except BaseException:
            self.release(allocation)
            raise

    def release(self, allocation: Allocation) -> None:
        """Give a claim back; a claim that is not held is a defect of ours."""
        with self._lock:
            assert self._held.pop(allocation.serial, None) is not None, f"{allocation} was not held"
            self._in_use -= allocation.num_bytes

    def by_kind(self) -> dict[str, int]:
        with self._lock:
            totals: dict[str, int] = {}
            for allocation in self._held.values():
                totals[allocation.kind] = totals.get(allocation.kind, 0) + allocation.num_bytes
            return totals

    def check(self, expected: dict[str, int] | None = None) -> None:
        """The books balance and (if given) hold just these bytes by kind; tests call it when the engine is idle."""
        by_kind = self.by_kind()
        assert sum(by_kind.values()) == self._in_use, f"{self.tier}: {by_kind} does not sum to {self._in_use}"
        assert self.limit is None or self._in_use <= self.limit
        assert expected is None or by_kind == expected, f"{self.tier}: holds {by_kind}, expected {expected}"
