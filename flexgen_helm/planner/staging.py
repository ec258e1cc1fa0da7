"""Memory of the compute tier through which offloaded weights reach it, and of the host through
which those on the disk pass. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.models.config import EMBED, HEAD, expert_of
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.shared_sizes import (
    COPY_BUFFER_BYTES,
    GATHER_BYTES,
    MIN_EXPERT_SLOTS,
    MIN_STAGING_BYTES,
    NUM_LOADERS,
    aligned_read_bytes,
)
from flexgen_helm.tiers import Tier

# Share of the compute tier for the staging ring, and its share if only a larger ring holds a whole
# layer.
_STAGING_SHARE, _MAX_STAGING_SHARE = 0.25, 0.5
# Share of a layer's experts that may be in slots before they are used: the disk goes on while
# attention computes.
_AHEAD_SHARE = 0.25


@dataclass(frozen=True)
class StagingSizes:
    """Bytes on the compute tier through which offloaded weights reach it: the staging ring, and
    slots for experts.
    """

    ring: int
    experts: int = 0

    @property
    def num_bytes(self) -> int:
        return self.ring + self.experts

    def used(self, placed: Mapping[str, Tier], compute_tier: Tier) -> StagingSizes:
        """Return what a placement needs; a ring that it does not need is slots, too."""
        offloaded = [name for name, tier in placed.items() if tier != compute_tier]
        any_experts = any(expert_of(name) for name in offloaded)
        any_others = not all(expert_of(name) for name in offloaded)
        if not any_experts:
            return StagingSizes(self.ring if any_others else 0)
        return self if any_others else StagingSizes(0, self.num_bytes)


def expert_slot_bytes(storage: StorageSizes) -> int:
    """Return the bytes of the largest expert in a slot; 0 without experts."""
    return max(stage.expert_slot for stage in storage.stages.values())


def staging_sizes(storage: StorageSizes, limit: int) -> StagingSizes:
    """Size the memory through which offloaded weights reach a compute tier of `limit` bytes."""
    slot = expert_slot_bytes(storage)
    dense = {
        name: stage.num_bytes - stage.expert_bytes
        for name, stage in storage.stages.items()
        if name != EMBED
    }
    largest = wanted = max(dense.values())
    # Two stages: one is used while the next arrives. Where a mixture's head is the largest, a ring
    # of its size holds two layers without their experts anyway.
    if not slot or largest != dense.get(HEAD):
        wanted *= 2
    total = max(MIN_STAGING_BYTES, min(wanted + MIN_STAGING_BYTES, int(_STAGING_SHARE * limit)))
    # What does not fit is loaded again for every batch, so a larger ring pays if it makes it fit.
    if total < largest + MIN_STAGING_BYTES <= limit * _MAX_STAGING_SHARE:
        total = largest + MIN_STAGING_BYTES
    if not slot:
        return StagingSizes(total)
    experts = max(stage.expert_bytes for stage in storage.stages.values())
    ahead = min(_AHEAD_SHARE * experts, _STAGING_SHARE / 2 * limit)
    return StagingSizes(total, max(MIN_EXPERT_SLOTS * slot, int(ahead)))


def loader_buffer_bytes(storage: StorageSizes, has_gpu: bool) -> int:
    """Bound the host memory through which loaders read weights from the disk: to a device, or to
    gather rows.
    """
    gathered = (
        NUM_LOADERS
        * gather_bytes(storage.largest_matrix)
        * storage.precision.published.are_gathered
    )
    if not has_gpu:
        return gathered
    largest = (storage.largest_matrix, expert_slot_bytes(storage))  # each kind has its own loaders
    buffers = (aligned_read_bytes(min(COPY_BUFFER_BYTES, size)) for size in largest if size)
    return gathered + NUM_LOADERS * sum(buffers)


def gather_bytes(matrix_bytes: int) -> int:
    """Bound the memory through which a thread gathers rows of a matrix, in pages."""
    return aligned_read_bytes(min(GATHER_BYTES, matrix_bytes))
