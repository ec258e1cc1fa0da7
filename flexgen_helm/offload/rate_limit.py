"""Links and disks that are simulated: transfers that take as long as they would at a given rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class RateLimit:
    """One direction of a link or disk: one transfer at a time, no faster than a rate."""

    def __init__(self, gb_s: float | None) -> None:
        """gb_s: GB/s; None for as fast as a transfer is."""
        self._lock, self._gb_s = threading.Lock(), gb_s

    @contextmanager
    def transfer(self, num_bytes: int) -> Iterator[None]:
        """Wait for the transfers before; then let this one take the time of its bytes."""
        with self._lock:
            start = time.perf_counter()
            yield
            if self._gb_s is not None:
                time.sleep(max(0.0, num_bytes / (self._gb_s * 1e9) - (time.perf_counter() - start)))


class DiskRates(NamedTuple):
    """Both directions of a simulated disk, which all of its files share."""

    read: RateLimit
    write: RateLimit

    def of(self, writes: bool) -> RateLimit:
        return self.write if writes else self.read
