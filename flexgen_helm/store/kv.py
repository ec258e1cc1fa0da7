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
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.quant.tokens import TokenCodec
from flexgen_helm.store.kv_groups import CacheSpec, DiskCache, GroupCache, HostCache, KeysValues, MemoryCache, NearCache
from flexgen_helm.store.kv_packed import DiskGroups, HostGroups, NearGroups, PackedCache, PackedGroups, slot_bytes
from flexgen_helm.store.ring import ALIGNMENT, aligned
from flexgen_helm.store.tiers import Tiers
from flexgen_helm.store.traffic import Kind


class KVCache:
    """Caches of all open slot groups.

    fractions: of the cache's bytes on each tier; a new group goes where most is missing. delegate: attention over
    groups in host memory is computed by the host although a device computes the rest. form: what is packed of it, None
    for nothing. one_layer: a pass takes all its batches through a layer before the next one and nobody decodes, so
    what prefixes keep of one layer takes the place of the last one's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tiers: Tiers,
        dtype: torch.dtype,
        fractions: Mapping[Tier, float],
        delegate: bool = False,
        form: CacheFormat | None = None,
        one_layer: bool = False,
    ) -> None:
        self._spec = CacheSpec(1 if one_layer else spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self._plain_bytes = spec.kv_bytes_per_token(dtype.itemsize) // spec.num_layers * self._spec.num_layers
        self._tiers, self._dtype, self.one_layer = tiers, dtype, one_layer
        self._fractions, self._delegate = fractions, delegate
        self._groups: dict[SlotGroup, GroupCache | PackedCache] = {}
        self._held = dict.fromkeys(TIERS, 0)
        self.placed = dict.fromkeys(TIERS, 0)  # bytes ever opened, by tier
        self.codec = None if form is None else TokenCodec(form, spec.num_kv_heads, spec.head_dim, dtype)

    @property
    def host_attends(self) -> bool:
        """Whether attention over groups in host memory is computed there, so that they are not brought."""
        return self._delegate and self.codec is None

    @property
    def prefix_tokens(self) -> int | None:
        """Shared beginnings end at a multiple of so many tokens; None where none can be shared."""
        return 1 if self.codec is None else self.codec.form.shared_tokens

    @property
    def shares_prompts(self) -> bool:
        """Whether rows may go on from the whole of another's prompt."""
        return self.codec is None

    @property
    def bytes_per_token(self) -> int:
        if self.codec is None:
            return self._plain_bytes
        # On the disk every group of tokens begins a page.
        each = aligned(self.codec.group_bytes) if self._fractions["disk"] > 0 else self.codec.group_bytes
        return -(-self._spec.num_layers * each // self.codec.group_tokens)

    @property
    def layer_bytes_per_token(self) -> int:
        return self.bytes_per_token // self._spec.num_layers

    @property
    def bytes_per_row(self) -> int:
        """Beside the tokens': of the newest ones, which a packed cache keeps as they are."""
        if self.codec is None:
            return 0
        form = self.codec.form
        return form.tail_copies * form.tail_tokens * self._plain_bytes

    @property
    def fill_tokens(self) -> int:
        """Positions that the last page of a prompt, or of a step of a group, may take beside it on the disk."""
        if self.codec is not None or not self._fractions["disk"] or self.layer_bytes_per_token % ALIGNMENT == 0:
            return 0
        return -(-ALIGNMENT // self.layer_bytes_per_token)

    def write(self, row: Row, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [S, Hk, D] of `row`'s own tokens start … start + S - 1."""
        group, layer = self._open(row), self._kept(layer)
        if isinstance(group, PackedCache):
            assert start == 0, "a prompt is written whole"
            group.write(row.slot, layer, k, v)
            return
        if self._is_delegated(group):
            k, v = self.to_host("cache", k, v)
        group.write(row.slot, layer, start, k, v)

    def append(self, group: SlotGroup, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one token [B, Hk, D] for each of the group's rows, at `positions` [B] of their own tokens."""
        found, layer = self._open(group.rows[0]), self._kept(layer)
        self._grow(found, group, layer)
        if isinstance(found, PackedCache):
            found.append(layer, k, v)
        else:
            found.append(layer, positions, k, v)

    def packed(self, group: SlotGroup) -> PackedCache:
        """The cache of a group that is packed and has been written."""
        found = self._groups[group]
        assert isinstance(found, PackedCache)
        return found

    def active(self, group: SlotGroup, layer: int, length: int) -> KeysValues:
        """Keys and values of the group's rows, their first `length` positions: [B, Hk, length, D] each."""
        keys, values = self._plain(group).read(self._kept(layer))
        rows = len(group.rows)
        return keys[:rows, :, :length], values[:rows, :, :length]

    def segment(self, row: Row, layer: int) -> KeysValues:
        """Keys and values of the prompt of `row`, whose layer has been written: [Hk, prompt_len, D] each."""
        assert row.group is not None
        keys, values = self._plain(row.group).read(self._kept(layer))
        return keys[row.slot, :, : row.prompt_len], values[row.slot, :, : row.prompt_len]

    def packed_segment(self, row: Row, layer: int, first: int, last: int) -> KeysValues:
        """Tokens first … last - 1 of the prompt of `row` as they are packed: [Hk, n, D] each."""
        assert row.group is not None
        return self.packed(row.group).packed_segment(row.slot, self._kept(layer), first, last)

    def plain_segment(self, row: Row, layer: int, first: int, last: int) -> KeysValues:
        """The same of the newest tokens of a prompt that is packed, as they were computed."""
        assert row.group is not None
        return self.packed(row.group).plain_segment(row.slot, self._kept(layer), first, last)

    def prefetch(self, group: SlotGroup, layer: int) -> None:
        """Begin to bring one layer of a group beside the computing; harmless where it is there."""
        found = self._groups.get(group)
        if found is not None:
            found.prefetch(self._kept(layer))

    def done(self, group: SlotGroup, layer: int) -> None:
        """A batch has attended to this layer: what was brought is given back."""
        found = self._groups.get(group)
        if isinstance(found, PackedCache):
            found.packed.drop(self._kept(layer))
        elif found is not None:
            found.drop(self._kept(layer))

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

    def _kept(self, layer: int) -> int:
        """Where a layer lies among those that exist."""
        return 0 if self.one_layer else layer

    def _plain(self, group: SlotGroup) -> GroupCache:
        found = self._groups[group]
        assert isinstance(found, GroupCache)
        return found

    def _is_delegated(self, group: GroupCache | PackedCache | None) -> bool:
        return isinstance(group, NearCache) and group.tier != self._tiers.home

    def move(self, group: SlotGroup, source: int, target: int, length: int, stale: int) -> None:
        """Let slot `target`, which held `stale` tokens, become a copy of the first `length` of slot `source`."""
        found = self._groups[group]
        if isinstance(found, PackedCache):
            found.move(source, target)
        else:
            found.move(source, target, length, stale)

    def free(self, group: SlotGroup) -> None:
        """Give a group's memory back; harmless for one that never wrote."""
        found = self._groups.pop(group, None)
        if found is None:
            return
        if isinstance(found, PackedCache):
            found.packed.close()
            claims = found.packed.claims
            for claim in found.tail_claims:
                self._tiers.ledgers[self._tiers.home].release(claim)
        else:
            found.close()
            claims = found.claims
        for claim in claims:
            self._tiers.ledgers[found.tier].release(claim)
            self._held[found.tier] -= claim.num_bytes

    def cancel(self) -> None:
        """A pass has broken off: the next one brings what it needs anew, by its own names for layers."""
        for found in self._groups.values():
            (found.packed if isinstance(found, PackedCache) else found).cancel()

    def close(self) -> None:
        for group in list(self._groups):
            self.free(group)

    def _open(self, row: Row) -> GroupCache | PackedCache:
        assert row.group is not None
        found = self._groups.get(row.group)
        if found is None and self.codec is not None:
            found = self._groups[row.group] = self._open_packed(row.group, self.codec)
        if found is None:
            group = row.group
            capacity = group.paged(max(row.prompt_len for row in group.rows) + 1)
            num_bytes = group.num_slots * capacity * self.bytes_per_token
            tier = self._tier_for(num_bytes)
            parts = self._spec, self._tiers, self._dtype, group
            if tier == "disk":
                found = DiskCache(*parts)
            else:
                near = tier == self._tiers.home or self._delegate
                with self._tiers.ledgers[tier].claimed("cache", num_bytes) as claim:
                    found = NearCache(*parts, capacity, tier, claim) if near else HostCache(*parts, capacity, claim)
            self._held[tier] += found.claims[0].num_bytes
            self.placed[tier] += found.claims[0].num_bytes
            self._groups[group] = found
        return found

    def _open_packed(self, group: SlotGroup, codec: TokenCodec) -> PackedCache:
        ledgers, home, layers = self._tiers.ledgers, self._tiers.home, self._spec.num_layers
        groups = group.paged(max(row.prompt_len for row in group.rows) + 1) // codec.group_tokens
        num_bytes = layers * group.num_slots * groups * codec.group_bytes
        tier = self._tier_for(num_bytes)
        if tier == "disk":
            num_bytes = layers * group.num_slots * slot_bytes(group, codec)
        tails, parts = group.num_slots * self.bytes_per_row, (self._spec, self._tiers, group, codec)
        packed: PackedGroups
        with ledgers[home].claimed("cache", tails) as tail, ledgers[tier].claimed("cache", num_bytes) as claim:
            if tier == "disk":
                packed = DiskGroups(*parts, claim)
            else:
                packed = NearGroups(*parts, tier) if tier == home else HostGroups(*parts)
                packed.claims.append(claim)
                packed.capacity = groups
            try:
                found = PackedCache(self._spec, self._tiers, self._dtype, group, codec, packed, [tail])
            except BaseException:
                packed.close()
                raise
        self._held[tier] += num_bytes
        self.placed[tier] += num_bytes
        return found

    def _grow(self, found: GroupCache | PackedCache, group: SlotGroup, layer: int) -> None:
        """Room for the token that is about to be appended, a page at a time."""
        if isinstance(found, PackedCache):
            assert self.codec is not None
            groups = group.paged(max(row.computed for row in group.rows) + 1) // self.codec.group_tokens
            if isinstance(found.packed, NearGroups) and groups > found.packed.capacity:
                more = groups - found.packed.capacity
                num_bytes = self._spec.num_layers * group.num_slots * more * self.codec.group_bytes
                found.packed.claims.append(self._tiers.ledgers[found.tier].claim("cache", num_bytes))
                self._held[found.tier] += num_bytes
                self.placed[found.tier] += num_bytes
                found.packed.capacity = groups
            return
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
