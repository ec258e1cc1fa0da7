"""What moved between tiers, by link and kind, and how long computing waited for it. Thread-safe counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LinkName = Literal["disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu"]
Kind = Literal["weights", "cache", "activations"]

LINKS: tuple[LinkName, ...] = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
KINDS: tuple[Kind, ...] = ("weights", "cache", "activations")


class TransferStats:
    """Bytes by link and kind, and seconds by what they were spent on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[tuple[LinkName, Kind], int] = {}
        self._seconds: dict[str, float] = {}

    def count_bytes(self, link: LinkName, kind: Kind, num_bytes: int) -> None:
        with self._lock:
            self._bytes[link, kind] = self._bytes.get((link, kind), 0) + num_bytes

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds of a block to `what`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(what, time.perf_counter() - began)

    def add_seconds(self, what: str, seconds: float) -> None:
        with self._lock:
            self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def bytes(self) -> dict[str, dict[str, int]]:
        """{link: {kind: bytes}}, every link and kind named."""
        with self._lock:
            return {link: {kind: self._bytes.get((link, kind), 0) for kind in KINDS} for link in LINKS}

    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)

    def reset(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self._bytes.clear()
            self._seconds.clear()
