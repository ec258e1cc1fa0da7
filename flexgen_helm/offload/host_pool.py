"""Pinned host memory for caches and hidden states: regions that are registered once and used again.

Registering takes as long as writing the pages. So a region that is given back stays registered, as a spare, until the
tier's limit needs its bytes. The ledger knows all that is registered, and plans leave room for the excess:

    taken   | cache of a layer, claimed by its user      | excess |    at most a share of it: `PINNED_EXCESS_SHARE`
    spare   | registered and not used                             |    gives way to any claim
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from flexgen_helm.offload.copy_engine import CopyEngine
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.offload.staging import ALIGNMENT, aligned
from flexgen_helm.offload.staging import pages as unpinned
from flexgen_helm.planner.constants import PINNED_EXCESS_SHARE

# Smaller memory is not pinned: its last page alone would exceed the share.
SMALLEST_REGION = int(ALIGNMENT / PINNED_EXCESS_SHARE)


@dataclass(frozen=True, eq=False)
class HostRegion:
    """memory: [num_bytes] that was asked for; pages: of the whole region; None if it is not kept."""

    memory: Tensor
    pages: Tensor | None


class HostPool:
    """The regions of one engine. Thread-safe."""

    def __init__(self, ledger: Ledger, copy_engine: CopyEngine) -> None:
        """ledger: of host memory."""
        self._ledger, self._copy_engine = ledger, copy_engine
        self._spares: list[Tensor] = []
        self._excess = 0  # of taken regions
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, zeros: bool = False) -> HostRegion:
        """Take memory that the caller has claimed; pinned unless it is small or the driver refuses.

        zeros: without them the memory has what its last user left.
        """
        with self._lock:
            try:
                pages = self._reused(num_bytes)
                is_used = pages is not None
                if pages is None:
                    pages = self._registered(num_bytes)
                self._excess += pages.numel() - num_bytes if pages is not None else 0
                self._drop_spares(0)
            finally:
                self._note()
        if pages is None:
            return HostRegion(unpinned(num_bytes)[:num_bytes], None)
        memory = pages[:num_bytes]
        return HostRegion(memory.zero_() if zeros and is_used else memory, pages)

    def give_back(self, region: HostRegion) -> None:
        """Take a region back; its claim is released before, and no copy uses it any more."""
        if region.pages is None:
            return
        with self._lock:
            self._excess -= region.pages.numel() - region.memory.numel()
            if self._copy_engine.pins:
                self._spares.append(region.pages)
            self._drop_spares(0)
            self._note()

    def make_room(self) -> None:
        """Unregister spares until the claims of other memory on the tier have room."""
        with self._lock:
            self._drop_spares(0)
            self._note()

    def close(self) -> None:
        """Unregister all spares."""
        with self._lock:
            self._spares.clear()
            self._note()

    def _reused(self, num_bytes: int) -> Tensor | None:
        """Return the smallest spare that is large enough, if its excess has room."""
        largest = max(aligned(num_bytes), int((1 + PINNED_EXCESS_SHARE) * num_bytes))
        fitting = [pages for pages in self._spares if num_bytes <= pages.numel() <= largest]
        best = min(fitting, key=Tensor.numel, default=None)
        if best is None or not self._has_room(best.numel() - num_bytes):
            return None
        self._spares = [pages for pages in self._spares if pages is not best]
        return best

    def _registered(self, num_bytes: int) -> Tensor | None:
        """Register a new region; of a size that others of similar sizes can reuse, if that has room."""
        if num_bytes < SMALLEST_REGION:
            return None
        exact = aligned(num_bytes)
        step = int((1 << exact.bit_length() - 1) * PINNED_EXCESS_SHARE)
        for size in (aligned(-(-exact // step) * step), exact):
            if size <= max(exact, (1 + PINNED_EXCESS_SHARE) * num_bytes) and self._has_room(size - num_bytes):
                self._drop_spares(size - num_bytes)
                return self._copy_engine.host_memory(size)
        return None

    def _has_room(self, excess: int) -> bool:
        """Return whether there is room for more excess, once all spares are gone."""
        return self._ledger.in_use + self._excess + excess <= self._ledger.limit

    def _drop_spares(self, excess: int) -> None:
        """Unregister spares, the oldest first, until there is room for all claims and more excess."""
        while self._spares and self._ledger.in_use + self._excess + excess + self._spare_bytes > self._ledger.limit:
            self._spares.pop(0)

    @property
    def _spare_bytes(self) -> int:
        return sum(pages.numel() for pages in self._spares)

    def _note(self) -> None:
        self._ledger.note_beside(self._excess, self._spare_bytes)
