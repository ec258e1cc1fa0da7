"""The KV cache at rest: each slot group on the tier that its share of the policy names (`kv_groups` says how it lies).

Groups elsewhere are brought beside the computing when a batch attends to them, one layer ahead of it; or, in host
memory, attention is computed there and only queries and outputs cross the link (`delegates`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexgen_helm.kv_cache.blocks import (
    CacheShape,
    DiskCache,
    GroupCache,
    HostCache,
    KeysValues,
    MemoryCache,
    NearCache,
)
from flexgen_helm.kv_cache.quantized import DiskGroups, HostGroups, NearGroups, PackedCache, PackedGroups, slot_bytes
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.offload.staging import ALIGNMENT, aligned
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.offload.transfer_stats import Kind
from flexgen_helm.planner.placement import TIERS, Tier, most_underfilled
from flexgen_helm.quant.kv_codec import TokenCodec
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.sequence import CacheBlock, Sequence


class KVCache:
    """Caches of all open slot groups.

    fractions: of the cache's bytes on each tier; a new group goes where most is missing. delegate: attention over
    groups in host memory is computed by the host although a device computes the rest. form: what is packed of it, None
    for nothing. one_layer: a pass takes all its batches through a layer before the next one and nobody decodes, so
    what prefixes keep of one layer takes the place of the last one's.
    """

    def __init__(
        self,
        config: ModelConfig,
        tiers: Tiers,
        dtype: torch.dtype,
        fractions: Mapping[Tier, float],
        delegate: bool = False,
        fmt: CacheFormat | None = None,
        one_layer: bool = False,
    ) -> None:
        self._config = CacheShape(1 if one_layer else config.num_layers, config.num_kv_heads, config.head_dim)
        self._plain_bytes = config.kv_bytes_per_token(dtype.itemsize) // config.num_layers * self._config.num_layers
        self._tiers, self._dtype, self.one_layer = tiers, dtype, one_layer
        self._fractions, self._delegate = fractions, delegate
        self._groups: dict[CacheBlock, GroupCache | PackedCache] = {}
        self._held = dict.fromkeys(TIERS, 0)
        self.placed = dict.fromkeys(TIERS, 0)  # bytes ever opened, by tier
        self.codec = None if fmt is None else TokenCodec(fmt, config.num_kv_heads, config.head_dim, dtype)

    @property
    def host_attends(self) -> bool:
        """Whether attention over groups in host memory is computed there, so that they are not brought."""
        return self._delegate and self.codec is None

    @property
    def prefix_tokens(self) -> int | None:
        """Shared beginnings end at a multiple of so many tokens; None where none can be shared."""
        return 1 if self.codec is None else self.codec.cache_format.prefix_multiple

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
        return -(-self._config.num_layers * each // self.codec.group_tokens)

    @property
    def layer_bytes_per_token(self) -> int:
        return self.bytes_per_token // self._config.num_layers

    @property
    def bytes_per_row(self) -> int:
        """Beside the tokens': of the newest ones, which a packed cache keeps as they are."""
        if self.codec is None:
            return 0
        fmt = self.codec.cache_format
        return fmt.window_copies * fmt.window_tokens * self._plain_bytes

    @property
    def fill_tokens(self) -> int:
        """Positions that the last page of a prompt, or of a step of a group, may take beside it on the disk."""
        if self.codec is not None or not self._fractions["disk"] or self.layer_bytes_per_token % ALIGNMENT == 0:
            return 0
        return -(-ALIGNMENT // self.layer_bytes_per_token)

    def write(self, row: Sequence, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [S, Hk, D] of `row`'s own tokens start … start + S - 1."""
        group, layer = self._open(row), self._kept(layer)
        if isinstance(group, PackedCache):
            assert start == 0, "a prompt is written whole"
            group.write(row.slot, layer, k, v)
            return
        if self._is_delegated(group):
            k, v = self.to_host("cache", k, v)
        group.write(row.slot, layer, start, k, v)

    def append(self, group: CacheBlock, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one token [B, Hk, D] for each of the group's rows, at `positions` [B] of their own tokens."""
        found, layer = self._open(group.sequences[0]), self._kept(layer)
        self._grow(found, group, layer)
        if isinstance(found, PackedCache):
            found.append(layer, k, v)
        else:
            found.append(layer, positions, k, v)

    def packed(self, group: CacheBlock) -> PackedCache:
        """The cache of a group that is packed and has been written."""
        found = self._groups[group]
        assert isinstance(found, PackedCache)
        return found

    def active(self, group: CacheBlock, layer: int, length: int) -> KeysValues:
        """Keys and values of the group's rows, their first `length` positions: [B, Hk, length, D] each."""
        keys, values = self._plain(group).read(self._kept(layer))
        rows = len(group.sequences)
        return keys[:rows, :, :length], values[:rows, :, :length]

    def segment(self, row: Sequence, layer: int) -> KeysValues:
        """Keys and values of the prompt of `row`, whose layer has been written: [Hk, prompt_len, D] each."""
        assert row.block is not None
        keys, values = self._plain(row.block).read(self._kept(layer))
        return keys[row.slot, :, : row.prompt_len], values[row.slot, :, : row.prompt_len]

    def packed_segment(self, row: Sequence, layer: int, first: int, last: int) -> KeysValues:
        """Tokens first … last - 1 of the prompt of `row` as they are packed: [Hk, n, D] each."""
        assert row.block is not None
        return self.packed(row.block).packed_segment(row.slot, self._kept(layer), first, last)

    def plain_segment(self, row: Sequence, layer: int, first: int, last: int) -> KeysValues:
        """The same of the newest tokens of a prompt that is packed, as they were computed."""
        assert row.block is not None
        return self.packed(row.block).plain_segment(row.slot, self._kept(layer), first, last)

    def prefetch(self, group: CacheBlock, layer: int) -> None:
        """Begin to bring one layer of a group beside the computing; harmless where it is there."""
        found = self._groups.get(group)
        if found is not None:
            found.prefetch(self._kept(layer))

    def done(self, group: CacheBlock, layer: int) -> None:
        """A batch has attended to this layer: what was brought is given back."""
        found = self._groups.get(group)
        if isinstance(found, PackedCache):
            found.packed.drop(self._kept(layer))
        elif found is not None:
            found.drop(self._kept(layer))

    def delegates(self, group: CacheBlock) -> bool:
        """Whether the host computes attention over this group."""
        return self._is_delegated(self._groups.get(group))

    def to_host(self, kind: Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
        link = self._tiers.copy_engine
        assert link is not None
        self._tiers.stats.count_bytes("gpu_to_cpu", kind, sum(t.numel() * t.element_size() for t in tensors))
        return tuple(link.to_host(tensor) for tensor in tensors)

    def to_device(self, kind: Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
        link = self._tiers.copy_engine
        assert link is not None
        self._tiers.stats.count_bytes("cpu_to_gpu", kind, sum(t.numel() * t.element_size() for t in tensors))
        return tuple(link.to_device(tensor) for tensor in tensors)

    def _kept(self, layer: int) -> int:
        """Where a layer lies among those that exist."""
        return 0 if self.one_layer else layer

    def _plain(self, group: CacheBlock) -> GroupCache:
        found = self._groups[group]
        assert isinstance(found, GroupCache)
        return found

    def _is_delegated(self, group: GroupCache | PackedCache | None) -> bool:
        return isinstance(group, NearCache) and group.tier != self._tiers.compute_tier

    def move(self, group: CacheBlock, source: int, target: int, length: int, stale: int) -> None:
        """Let slot `target`, which held `stale` tokens, become a copy of the first `length` of slot `source`."""
        found = self._groups[group]
        if isinstance(found, PackedCache):
            found.move(source, target)
        else:
            found.move(source, target, length, stale)

    def free(self, group: CacheBlock) -> None:
        """Give a group's memory back; harmless for one that never wrote."""
        found = self._groups.pop(group, None)
        if found is None:
            return
        if isinstance(found, PackedCache):
            found.packed.close()
            claims = found.packed.claims
            for claim in found.tail_claims:
                self._tiers.ledgers[self._tiers.compute_tier].release(claim)
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

    def _open(self, row: Sequence) -> GroupCache | PackedCache:
        assert row.block is not None
        found = self._groups.get(row.block)
        if found is None and self.codec is not None:
            found = self._groups[row.block] = self._open_packed(row.block, self.codec)
        if found is None:
            group = row.block
            capacity = group.allocated_tokens(max(row.prompt_len for row in group.sequences) + 1)
            num_bytes = group.num_slots * capacity * self.bytes_per_token
            tier = self._tier_for(num_bytes)
            parts = self._config, self._tiers, self._dtype, group
            if tier == "disk":
                found = DiskCache(*parts)
            else:
                near = tier == self._tiers.compute_tier or self._delegate
                with self._tiers.ledgers[tier].claimed("cache", num_bytes) as claim:
                    found = NearCache(*parts, capacity, tier, claim) if near else HostCache(*parts, capacity, claim)
            self._held[tier] += found.claims[0].num_bytes
            self.placed[tier] += found.claims[0].num_bytes
            self._groups[group] = found
        return found

    def _open_packed(self, group: CacheBlock, codec: TokenCodec) -> PackedCache:
        ledgers, home, layers = self._tiers.ledgers, self._tiers.compute_tier, self._config.num_layers
        groups = group.allocated_tokens(max(row.prompt_len for row in group.sequences) + 1) // codec.group_tokens
        num_bytes = layers * group.num_slots * groups * codec.group_bytes
        tier = self._tier_for(num_bytes)
        if tier == "disk":
            num_bytes = layers * group.num_slots * slot_bytes(group, codec)
        tails, parts = group.num_slots * self.bytes_per_row, (self._config, self._tiers, group, codec)
        packed: PackedGroups
        with ledgers[home].claimed("cache", tails) as tail, ledgers[tier].claimed("cache", num_bytes) as claim:
            if tier == "disk":
                packed = DiskGroups(*parts, claim)
            else:
                packed = NearGroups(*parts, tier) if tier == home else HostGroups(*parts)
                packed.claims.append(claim)
                packed.capacity = groups
            try:
                found = PackedCache(self._config, self._tiers, self._dtype, group, codec, packed, [tail])
            except BaseException:
                packed.close()
                raise
        self._held[tier] += num_bytes
        self.placed[tier] += num_bytes
        return found

    def _grow(self, found: GroupCache | PackedCache, group: CacheBlock, layer: int) -> None:
        """Room for the token that is about to be appended, a page at a time."""
        if isinstance(found, PackedCache):
            assert self.codec is not None
            groups = (
                group.allocated_tokens(max(row.num_computed for row in group.sequences) + 1) // self.codec.group_tokens
            )
            if isinstance(found.packed, NearGroups) and groups > found.packed.capacity:
                more = groups - found.packed.capacity
                num_bytes = self._config.num_layers * group.num_slots * more * self.codec.group_bytes
                found.packed.claims.append(self._tiers.ledgers[found.tier].claim("cache", num_bytes))
                self._held[found.tier] += num_bytes
                self.placed[found.tier] += num_bytes
                found.packed.capacity = groups
            return
        if not isinstance(found, MemoryCache):
            return
        wanted = group.allocated_tokens(max(row.num_computed for row in group.sequences) + 1)
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
        return most_underfilled(roomy or allowed, self._fractions, self._held, total)
