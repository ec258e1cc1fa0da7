"""Memory of the compute tier through which offloaded weights reach it, and of the host through which the disk's pass.

A staging ring takes two layers, at most a quarter of the tier, or half of it if only that holds one layer. Of a
mixture, most of it is slots for experts. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.models.config import EMBED, expert_of, stage_names
from flexgen_helm.planner.constants import (
    ALIGNMENT,
    COPY_BUFFER_BYTES,
    MIN_EXPERT_SLOTS,
    MIN_STAGING_BYTES,
    NUM_LOADERS,
)
from flexgen_helm.planner.placement import StorageSizes, Tier

# Share of the compute tier for the staging ring, and its share if only a larger ring holds a whole layer.
_STAGING_SHARE, _MAX_STAGING_SHARE = 0.25, 0.5


@dataclass(frozen=True)
class StagingSizes:
    """Bytes on the compute tier through which offloaded weights reach it: the staging ring, and slots for experts."""

    ring: int
    experts: int = 0

    @property
    def num_bytes(self) -> int:
        return self.ring + self.experts

    def used(self, placed: Mapping[str, Tier], compute_tier: Tier) -> StagingSizes:
        """Return what a placement needs; a ring that it does not need is slots, too."""
        offloaded = {expert_of(name) is not None for name, tier in placed.items() if tier != compute_tier}
        if True not in offloaded:
            return StagingSizes(self.ring if offloaded else 0)
        return self if False in offloaded else StagingSizes(0, self.num_bytes)


def expert_slot_bytes(storage: StorageSizes) -> int:
    """Return the bytes of the largest expert; 0 without experts.

    Each of its matrices is padded to a page, and has one more, because it may begin within a page of its file.
    """
    sizes: dict[str, int] = {}
    for name, num_bytes in storage.matrices.items():
        if (expert := expert_of(name)) is not None:
            sizes[expert] = sizes.get(expert, 0) + (-(-num_bytes // ALIGNMENT) + 1) * ALIGNMENT
    return max(sizes.values(), default=0)


def staging_sizes(storage: StorageSizes, limit: int) -> StagingSizes:
    """Size the memory through which offloaded weights reach a compute tier of `limit` bytes."""
    stages = [stage for stage in stage_names(storage.config) if stage != EMBED]
    total = _staging_bytes(max(map(storage.stage_bytes, stages)), limit)
    slot = expert_slot_bytes(storage)
    if not slot:
        return StagingSizes(total)
    always = max(storage.stage_bytes(stage) - storage.stage_expert_bytes(stage) for stage in stages)
    ring = max(MIN_STAGING_BYTES, min(2 * always + MIN_STAGING_BYTES, total // 2))
    return StagingSizes(ring, max(MIN_EXPERT_SLOTS * slot, total - ring))


def _staging_bytes(largest: int, limit: int) -> int:
    """Size staging memory for stages of up to `largest` bytes."""
    staging = max(MIN_STAGING_BYTES, min(2 * largest + MIN_STAGING_BYTES, int(_STAGING_SHARE * limit)))
    # A layer that does not fit is loaded again for every batch, so a larger ring pays if it makes one fit.
    one_layer = largest + MIN_STAGING_BYTES
    return one_layer if staging < one_layer <= limit * _MAX_STAGING_SHARE else staging


def loader_buffer_bytes(storage: StorageSizes) -> int:
    """Bound the host memory into which loaders read weights from the disk, on their way to a device."""
    largest = (max(storage.matrices.values()), expert_slot_bytes(storage))  # each kind has its own loaders
    pages = (-(-min(COPY_BUFFER_BYTES, size) // ALIGNMENT) + 2 for size in largest if size)
    return NUM_LOADERS * sum(pages) * ALIGNMENT  # aligned reads begin before and end behind
