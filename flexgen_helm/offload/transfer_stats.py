"""Bytes moved between tiers, seconds of loading, storing and waiting, and uses of experts.
Thread-safe counters.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from flexgen_helm.tiers import KINDS, Kind

LinkName = Literal["disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu"]

LINKS: tuple[LinkName, ...] = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")


class ExpertUses(NamedTuple):
    """Uses of a layer by so many tokens, and experts that these used, all together."""

    num_uses: int = 0
    num_experts: int = 0


@dataclass
class ExpertCounts:
    """Uses of experts; a use is one layer, by the tokens whose experts are computed together.

    touched: so many tokens -> uses by them.
    routed_bytes: of the offloaded experts that were used, as if each use had read its own.
    read_bytes: of offloaded experts; less than `routed_bytes` where experts were kept.
    wasted_bytes: of those, expected and not used before they were dropped.
    """

    touched: dict[int, ExpertUses] = field(default_factory=dict)
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
            before = self.experts.touched.get(tokens, ExpertUses())
            uses = ExpertUses(before.num_uses + 1, before.num_experts + experts)
            self.experts.touched[tokens] = uses
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
        self._num_passes, self._pass_bytes = 1, disk_bytes
        self._earlier_bytes = 0  # that earlier passes read
        # Times, and bytes of all kinds that were read until then, of the last reports, so that the
        # rate is a recent one.
        self._readings = deque([(time.perf_counter(), 0)], maxlen=20)

    def progress(self, num_passes: int) -> dict[str, Any]:
        """Return fields of `Progress`.

        The first pass is to read all weights, a later one as much as that before.
        num_passes: begun so far.
        """
        read = self._stats.bytes()["disk_to_cpu"]
        weights = read["weights"]
        if new_passes := num_passes - self._num_passes:
            # What the begun pass has read ahead is not the earlier passes'.
            earlier_bytes = max(
                weights - self._ahead_bytes,
                min(weights, self._earlier_bytes + new_passes * self._disk_bytes),
            )
            self._pass_bytes = (earlier_bytes - self._earlier_bytes) // new_passes
            self._earlier_bytes = earlier_bytes
            self._num_passes = num_passes
        self._readings.append((time.perf_counter(), sum(read.values())))
        (first_s, first_bytes), (last_s, last_bytes) = self._readings[0], self._readings[-1]
        return {
            "read_bytes": min(weights - self._earlier_bytes, self._pass_bytes),
            "pass_bytes": self._pass_bytes,
            "read_bytes_s": (last_bytes - first_bytes) / max(1e-9, last_s - first_s),
        }
