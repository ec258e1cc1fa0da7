"""The KV cache at rest: keys and values of each slot group on the tier that its share of the policy names.

A group beside the computing, or in host memory, has a tensor of keys and one of values a layer. A group on the disk
has, for every layer, the prompt of each slot in one piece and then one piece for each step of all slots, so that both
are written once and read in long runs:

    layer 0: | slot 0: K V of its prompt | slot 1 … | step 0: K V of all slots | step 1 … |   layer 1: …

Groups elsewhere are brought beside the computing when a batch attends to them, one layer ahead of it; or, in host
memory, attention is computed there and only queries and outputs cross the link (`delegates`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.core.rows import Row, SlotGroup
from flexgen_helm.models.spec import ModelSpec
from flexgen_helm.policy.placement import TIERS, Tier
from flexgen_helm.store.disk import DirectFile
from flexgen_helm.store.ledger import Allocation
from flexgen_helm.store.ring import Ring, aligned
from flexgen_helm.store.tiers import Tiers

KeysValues = tuple[Tensor, Tensor]  # [slots, Hk, S, D] each


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
        self._groups: dict[SlotGroup, _Group] = {}
        self._held = dict.fromkeys(TIERS, 0)
        self.placed = dict.fromkeys(TIERS, 0)  # bytes ever opened, by tier

    @property
    def bytes_per_token(self) -> int:
        return self._spec.kv_bytes_per_token(self._dtype.itemsize)

    def write(self, row: Row, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [S, Hk, D] of `row`'s own tokens start … start + S - 1."""
        self._open(row).write(row.slot, layer, start, k, v)

    def append(self, group: SlotGroup, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one token [B, Hk, D] for each of the group's rows, at `positions` [B] of their own tokens."""
        self._open(group.rows[0]).append(layer, positions, k, v)

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
        found = self._groups.get(group)
        return self._delegate and isinstance(found, _Held) and found.tier == "cpu" and self._tiers.home == "gpu"

    def move(self, group: SlotGroup, source: int, target: int, length: int, stale: int) -> None:
        """Let slot `target`, which held `stale` tokens, become a copy of the first `length` of slot `source`."""
        self._groups[group].move(source, target, length, stale)

    def free(self, group: SlotGroup) -> None:
        """Give a group's memory back; harmless for one that never wrote."""
        found = self._groups.pop(group, None)
        if found is not None:
            found.close()
            self._tiers.ledgers[found.tier].release(found.claim)
            self._held[found.tier] -= found.claim.num_bytes

    def close(self) -> None:
        for group in list(self._groups):
            self.free(group)

    def _open(self, row: Row) -> "_Group":
        assert row.group is not None
        found = self._groups.get(row.group)
        if found is None:
            group = row.group
            num_bytes = group.num_slots * group.capacity * self.bytes_per_token
            tier = self._tier_for(num_bytes)
            if tier == "disk":
                found = _OnDisk(self._spec, self._tiers, self._dtype, group)
            else:
                claim = self._tiers.ledgers[tier].claim("cache", num_bytes)
                found = _Held(self._spec, self._tiers, self._dtype, group, tier, claim)
            self._held[tier] += found.claim.num_bytes
            self.placed[tier] += found.claim.num_bytes
            self._groups[group] = found
        return found

    def _tier_for(self, num_bytes: int) -> Tier:
        total = sum(self._held.values()) + num_bytes
        allowed = [tier for tier in TIERS if self._fractions[tier] > 0]
        return max(allowed, key=lambda tier: round(self._fractions[tier] * total - self._held[tier], 3))


class _Group(ABC):
    """One slot group's cache on one tier."""

    tier: Tier
    claim: Allocation

    @abstractmethod
    def write(self, slot: int, layer: int, start: int, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def read(self, layer: int) -> KeysValues:
        """All slots' keys and values [slots, Hk, capacity, D], beside the computing or where attention runs."""

    @abstractmethod
    def move(self, source: int, target: int, length: int, stale: int) -> None: ...

    def prefetch(self, layer: int) -> None:
        return None

    def drop(self, layer: int) -> None:
        return None

    def close(self) -> None:
        return None


class _Held(_Group):
    """In memory: beside the computing, or in the host's behind the link."""

    def __init__(
        self, spec: ModelSpec, tiers: Tiers, dtype: torch.dtype, group: SlotGroup, tier: Tier, claim: Allocation
    ) -> None:
        self.tier, self.claim = tier, claim
        self._tiers = tiers
        self._far = tiers.is_far(tier)
        device = torch.device("cpu") if self._far else tiers.device
        shape = (group.num_slots, spec.num_kv_heads, group.capacity, spec.head_dim)
        self._layers = [(_zeros(shape, device, dtype), _zeros(shape, device, dtype)) for _ in range(spec.num_layers)]
        self._coming: dict[int, tuple[Future[KeysValues], Allocation]] = {}
        self._group = group

    def write(self, slot: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        end = start + k.shape[0]
        for held, new in zip(self._layers[layer], (k, v)):
            held[slot, :, start:end] = self._here(new).transpose(0, 1)

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        slots = torch.arange(k.shape[0], device=k.device)
        coming = self._coming.get(layer)
        if coming is not None:  # the copy that attention is about to read needs the new token too
            for brought, new in zip(self._tiers.wait(coming[0], "cache"), (k, v)):
                brought[slots, :, positions] = new
        for held, new in zip(self._layers[layer], (k, v)):
            new = self._here(new)
            held[slots.to(held.device), :, positions.to(held.device)] = new

    def read(self, layer: int) -> KeysValues:
        if not self._far or self._delegated:
            return self._layers[layer]
        self.prefetch(layer)
        return self._tiers.wait(self._coming[layer][0], "cache")

    def prefetch(self, layer: int) -> None:
        if not self._far or self._delegated or layer in self._coming:
            return
        # Only what rows have computed crosses the link; the rest of a slot is not read.
        length = max((row.computed for row in self._group.rows), default=0)
        held = self._layers[layer]
        size = sum(tensor.numel() * tensor.element_size() for tensor in held)
        claim = self._tiers.ledgers[self._tiers.home].claim("staging", size)

        def bring() -> KeysValues:
            return self._brought(held[0], length), self._brought(held[1], length)

        self._coming[layer] = self._tiers.background("cache in", bring), claim

    def drop(self, layer: int) -> None:
        coming = self._coming.pop(layer, None)
        if coming is not None:
            coming[0].exception()  # waits; an error was raised where the data was needed
            self._tiers.ledgers[self._tiers.home].release(coming[1])

    def move(self, source: int, target: int, length: int, stale: int) -> None:
        # What remains of the old row is cleared: a masked position still takes part in the product with weight 0, and
        # 0 times a value that is not finite would carry one row's fault into its neighbours.
        for pair in self._layers:
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]
                tensor[target, :, length:stale] = 0

    def close(self) -> None:
        for layer in list(self._coming):
            self.drop(layer)

    @property
    def _delegated(self) -> bool:
        return self.delegated

    delegated = False

    def _brought(self, held: Tensor, length: int) -> Tensor:
        link = self._tiers.link
        assert link is not None
        near = torch.zeros(held.shape, dtype=held.dtype, device=self._tiers.device)
        if length:
            # One contiguous piece over the link, spread out on the other side.
            near[:, :, :length] = link.to_device(held[:, :, :length].contiguous())
            moved = held[:, :, :length].numel() * held.element_size()
            self._tiers.traffic.moved("cpu_to_gpu", "cache", moved)
        return near

    def _here(self, new: Tensor) -> Tensor:
        """New keys or values on the side where the group rests."""
        if not self._far or self._delegated and new.device.type == "cpu" and self._tiers.device.type != "cpu":
            return new
        if not self._far:
            return new
        link = self._tiers.link
        assert link is not None
        self._tiers.traffic.moved("gpu_to_cpu", "cache", new.numel() * new.element_size())
        return link.to_host(new)
