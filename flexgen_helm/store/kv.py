"""The KV cache at rest: each slot group on the tier that its share of the policy names (`kv_groups` says how it lies).

Groups elsewhere are brought beside the computing when a batch attends to them, one layer ahead of it; or, in host
memory, attention is computed there and only queries and outputs cross the link (`delegates`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexgen_helm.core.rows import Row, SlotGroup
from flexgen_helm.models.spec import ModelSpec
from flexgen_helm.policy.placement import TIERS, Tier, neediest
from flexgen_helm.store.kv_groups import DiskCache, GroupCache, HostCache, KeysValues, MemoryCache, NearCache
from flexgen_helm.store.tiers import Tiers
from flexgen_helm.store.traffic import Kind


class KVCache:
    """Caches of all open slot groups.

    fractions: of the cache's bytes on each tier; a new group goes where most is missing. delegate: attention over
    groups in host memory is computed by the host although a device computes the rest.
    """

    def __init__(
        self, spec: ModelSpec, tiers: Tiers, dtype: torch.dtype, fractions: Mapping[Tier, float], delegate: bool = False
    ) -> None:
        self._spec, self._tiers, self._dtype = spec, tiers, dtype
        self._fractions, self._delegate = fractions, delegate
        self._groups: dict[SlotGroup, GroupCache] = {}
        self._held = dict.fromkeys(TIERS, 0)
        self.placed = dict.fromkeys(TIERS, 0)  # bytes ever opened, by tier

    @property
    def bytes_per_token(self) -> int:
        return self._spec.kv_bytes_per_token(self._dtype.itemsize)

    def write(self, row: Row, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [S, Hk, D] of `row`'s own tokens start … start + S - 1."""
        group = self._open(row)
        if self._is_delegated(group):
            k, v = self.to_host("cache", k, v)
        group.write(row.slot, layer, start, k, v)

    def append(self, group: SlotGroup, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one token [B, Hk, D] for each of the group's rows, at `positions` [B] of their own tokens."""
        found = self._open(group.rows[0])
        self._grow(found, group, layer)
        found.append(layer, positions, k, v)

    def active(self, group: SlotGroup, layer: int, length: int) -> KeysValues:
        """Keys and values of the group's rows, their first `length` positions: [B, Hk, length, D] each."""
        keys, values = self._groups[group].read(layer)
        rows = len(group.rows)
        return keys[:rows, :, :length], values[:rows, :, :length]

    def segment(self, row: Row, layer: int) -> KeysValues:
        """Keys and values of everything `row` has computed: [Hk, computed, D] each."""
        assert row.group is not None
        keys, values = self._groups[row.group].read(layer)
        return keys[row.slot, :, : row.computed], values[row.slot, :, : row.computed]

    def prefetch(self, group: SlotGroup, layer: int) -> None:
        """Begin to bring one layer of a group beside the computing; harmless where it is there."""
        found = self._groups.get(group)
        if found is not None:
            found.prefetch(layer)

    def done(self, group: SlotGroup, layer: int) -> None:
        """A batch has attended to this layer: what was brought is given back."""
        found = self._groups.get(group)
        if found is not None:
            found.drop(layer)

    def delegates(self, group: SlotGroup) -> bool:
        """Whether the host computes attention over this group."""
        return self._is_delegated(self._groups.get(group))

    def to_host(self, kind: Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
        link = self._tiers.link
        assert link is not None
        self._tiers.traffic.moved("gpu_to_cpu", kind, sum(t.numel() * t.element_size() for t in tensors))
        return tuple(link.to_host(tensor) for tensor in tensors)

    def to_device(self, kind: Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
        link = self._tiers.link
        assert link is not None
        self._tiers.traffic.moved("cpu_to_gpu", kind, sum(t.numel() * t.element_size() for t in tensors))
        return tuple(link.to_device(tensor) for tensor in tensors)

    def _is_delegated(self, group: GroupCache | None) -> bool:
        return isinstance(group, NearCache) and group.tier != self._tiers.home

    def move(self, group: SlotGroup, source: int, target: int, length: int, stale: int) -> None:
        """Let slot `target`, which held `stale` tokens, become a copy of the first `length` of slot `source`."""
        self._groups[group].move(source, target, length, stale)

    def free(self, group: SlotGroup) -> None:
        """Give a group's memory back; harmless for one that never wrote."""
        found = self._groups.pop(group, None)
        if found is not None:
            found.close()
            for claim in found.claims:
                self._tiers.ledgers[found.tier].release(claim)
                self._held[found.tier] -= claim.num_bytes

    def close(self) -> None:
        for group in list(self._groups):
            self.free(group)

    def _open(self, row: Row) -> GroupCache:
        assert row.group is not None
        found = self._groups.get(row.group)
        if found is None:
            group = row.group
            capacity = group.paged(max(row.prompt_len for row in group.rows) + 1)
            num_bytes = group.num_slots * capacity * self.bytes_per_token
            tier = self._tier_for(num_bytes)
            parts = self._spec, self._tiers, self._dtype, group
            if tier == "disk":
                found = DiskCache(*parts)
            else:
                claim = self._tiers.ledgers[tier].claim("cache", num_bytes)
                near = tier == self._tiers.home or self._delegate
                found = NearCache(*parts, capacity, tier, claim) if near else HostCache(*parts, capacity, claim)
            self._held[tier] += found.claims[0].num_bytes
            self.placed[tier] += found.claims[0].num_bytes
            self._groups[group] = found
        return found

    def _grow(self, found: GroupCache, group: SlotGroup, layer: int) -> None:
        """Room for the token that is about to be appended, a page at a time."""
        if not isinstance(found, MemoryCache):
            return
        wanted = group.paged(max(row.computed for row in group.rows) + 1)
        if wanted > found.capacity:
            num_bytes = group.num_slots * (wanted - found.capacity) * self.bytes_per_token
            found.claims.append(self._tiers.ledgers[found.tier].claim("cache", num_bytes))
            self._held[found.tier] += num_bytes
            self.placed[found.tier] += num_bytes
            found.capacity = wanted
        found.widen(layer)

    def _tier_for(self, num_bytes: int) -> Tier:
        """Where most is missing, of those tiers that have room; the whole groups of a block rarely divide exactly."""
        total = sum(self._held.values()) + num_bytes
        allowed = [tier for tier in TIERS if self._fractions[tier] > 0]
        roomy = [tier for tier in allowed if (free := self._tiers.ledgers[tier].free) is None or free >= num_bytes]
        return neediest(roomy or allowed, self._fractions, self._held, total)
