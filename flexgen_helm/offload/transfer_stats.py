"""Bytes moved between tiers, and the seconds that loading, storing and waiting took. Thread-safe counters."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LinkName = Literal["disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu"]
Kind = Literal["weights", "cache", "activations"]

LINKS: tuple[LinkName, ...] = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
KINDS: tuple[Kind, ...] = ("weights", "cache", "activations")


class TransferStats:
    """Counters of one engine since the last `reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[LinkName, Kind]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def count_bytes(self, link: LinkName, kind: Kind, num_bytes: int) -> None:
        with self._lock:
            self._bytes[link, kind] += num_bytes

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Add the block's seconds to `activity`: 'load_', 'store_' or 'wait_' and a kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._seconds[activity] += seconds

    def bytes(self) -> dict[str, dict[str, int]]:
        """Return {link: {kind: bytes}} for all links and kinds."""
        with self._lock:
            return {link: {kind: self._bytes[link, kind] for kind in KINDS} for link in LINKS}

    def seconds(self) -> dict[str, float]:
        """Return {activity: seconds} for the activities that occurred."""
        with self._lock:
            return dict(self._seconds)

    def reset(self) -> None:
        with self._lock:
            self._bytes.clear()
            self._seconds.clear()
