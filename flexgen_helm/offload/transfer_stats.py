"""Bytes moved between tiers, seconds of loading, storing and waiting, and uses of experts.
Thread-safe counters.

On request also what each thread did when, for a timeline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

LinkName = Literal["disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu"]
Kind = Literal["weights", "cache", "activations"]

LINKS: tuple[LinkName, ...] = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
KINDS: tuple[Kind, ...] = ("weights", "cache", "activations")


@dataclass
class ExpertCounts:
    """Uses of experts; a use is one layer, by the tokens whose experts are computed together.

    touched: so many tokens -> uses by them, and experts that these used, all together.
    routed_bytes: of the offloaded experts that were used, as if each use had read its own.
    read_bytes: of offloaded experts; less than `routed_bytes` where experts were kept.
    wasted_bytes: of those, expected and not used before they were dropped.
    """

    touched: dict[int, tuple[int, int]] = field(default_factory=dict)
    routed_bytes: int = 0
    read_bytes: int = 0
    wasted_bytes: int = 0


class TransferStats:
    """Counters of one engine since the last `reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[LinkName, Kind]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.experts = ExpertCounts()

    def count_bytes(self, link: LinkName, kind: Kind, num_bytes: int) -> None:
        with self._lock:
            self._bytes[link, kind] += num_bytes

    def count_experts(self, tokens: int, experts: int, routed_bytes: int) -> None:
        """Count the experts that `tokens` tokens use in one layer."""
        with self._lock:
            uses, touched = self.experts.touched.get(tokens, (0, 0))
            self.experts.touched[tokens] = uses + 1, touched + experts
            self.experts.routed_bytes += routed_bytes

    def count_expert_reads(self, read_bytes: int, wasted_bytes: int = 0) -> None:
        with self._lock:
            self.experts.read_bytes += read_bytes
            self.experts.wasted_bytes += wasted_bytes

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
            self.experts = ExpertCounts()


class PassReads:
    """What the passes of a run read of the disk, for `Progress`."""

    def __init__(self, stats: TransferStats, disk_bytes: int, ahead_bytes: int) -> None:
        """disk_bytes: of weights there. ahead_bytes: of the next pass, that may be read before a
        pass ends.
        """
        self._stats, self._disk_bytes, self._ahead_bytes = stats, disk_bytes, ahead_bytes
        # before: that earlier passes read
        self._num_passes, self._before, self._pass_bytes = 1, 0, disk_bytes
        # Times and bytes of all kinds until then, of the last reports: 2 s or more, or a few
        # layers.
        self._seen = deque([(time.perf_counter(), 0)], maxlen=20)

    def of(self, num_passes: int) -> dict[str, Any]:
        """Return fields of `Progress`: the first pass is to read all weights, a later one as much
        as that before.
        """
        read = self._stats.bytes()["disk_to_cpu"]
        weights = read["weights"]
        if more := num_passes - self._num_passes:
            before = max(
                weights - self._ahead_bytes, min(weights, self._before + more * self._disk_bytes)
            )
            self._pass_bytes = (before - self._before) // more
            self._before = before
            self._num_passes = num_passes
        self._seen.append((time.perf_counter(), sum(read.values())))
        (since, until), (then, total) = self._seen[0], self._seen[-1]
        return {
            "read_bytes": min(weights - self._before, self._pass_bytes),
            "pass_bytes": self._pass_bytes,
            "read_bytes_s": (total - until) / max(1e-9, then - since),
        }


# Links and disks that are simulated: transfers that take as long as they would at a given rate.


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
