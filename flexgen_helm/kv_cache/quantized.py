"""The packed cache of one slot group: whole groups of tokens as bytes on one tier, the newest tokens as they are.

What a query sees packed is brought beside the computing as bytes and unpacked there; its newest tokens, whose group
is not whole yet or which it sees as they are, lie beside the computing in a ring, token p in place p mod W:

    tokens  0 … 31 | 32 … 63 | 64 …           W = residual + group - 1
            packed   packed    the ring        a group is packed and stored when its last token comes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_helm.kv_cache.blocks import CacheShape, LayerTransfers, zeros
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.staging import aligned
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.planner.placement import Tier
from flexgen_helm.quant.kv_codec import TokenCodec
from flexgen_helm.sequence import CacheBlock

_HOST = torch.device("cpu")


class PackedCache:
    """One slot group's cache, packed. tail_claims: of its rings, on the home tier; `packed.claims` of the bytes."""

    def __init__(
        self,
        config: CacheShape,
        tiers: Tiers,
        dtype: torch.dtype,
        group: CacheBlock,
        codec: TokenCodec,
        packed: "PackedGroups",
        tail_claims: list[Allocation],
    ) -> None:
        self._group, self._codec, self.packed, self.tail_claims = group, codec, packed, tail_claims
        self._device = tiers.device
        shape = (2, group.num_slots, codec.window_tokens, config.num_kv_heads, config.head_dim)
        self._tails = [zeros(shape, tiers.device, dtype) for _ in range(config.num_layers)]
        # Where every token is packed for itself, those of a group that is not whole yet are seen packed too.
        self._seen = [zeros(shape, tiers.device, dtype) for _ in range(config.num_layers)] if self._alone else None

    @property
    def tier(self) -> Tier:
        return self.packed.tier

    @property
    def _alone(self) -> bool:
        return self._codec.cache_format.group_tokens == 1

    def write(self, slot: int, layer: int, k: Tensor, v: Tensor) -> None:
        """A row's prompt [S, Hk, D], from its first token on."""
        codec, length = self._codec, k.shape[0]
        first = max(0, length - codec.window_tokens)
        places = torch.arange(first, length, device=self._device) % codec.window_tokens
        for half, new in enumerate((k, v)):
            self._tails[layer][half, slot, places] = new[first:]
        if self._seen is not None:
            for half, new in enumerate(codec.round_trip(k[first:], v[first:])):
                self._seen[layer][half, slot, places] = new
        whole = length // codec.group_tokens * codec.group_tokens
        if whole:
            self.packed.put(layer, [slot], 0, codec.quantize(k[:whole], v[:whole])[None])

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """One token [B, Hk, D] for each row, behind what it has computed."""
        codec, tail, rows = self._codec, self._tails[layer], self._group.sequences
        index = torch.arange(len(rows), device=self._device)
        places = torch.tensor([row.num_computed % codec.window_tokens for row in rows], device=self._device)
        tail[0, index, places], tail[1, index, places] = k, v
        if self._seen is not None:
            seen = self._seen[layer]
            seen[0, index, places], seen[1, index, places] = codec.round_trip(k, v)
        # Rows that began together come to the end of a group together.
        ends: dict[int, list[int]] = {}
        for slot, row in enumerate(rows):
            if (row.num_computed + 1) % codec.group_tokens == 0:
                ends.setdefault(row.num_computed, []).append(slot)
        for last, slots in ends.items():
            tokens = torch.arange(last - codec.group_tokens + 1, last + 1, device=self._device) % codec.window_tokens
            k, v = (half[slots][:, tokens].flatten(0, 1) for half in tail)
            self.packed.put(layer, slots, last // codec.group_tokens, codec.quantize(k, v)[:, None])

    def older_keys(self, layer: int, rows: slice) -> Tensor:
        """Keys [B, Hk, S, D] of the whole groups that some rows see, S that of the oldest row."""
        return self._codec.dequantize_keys(self.packed.take(layer, self._counts())[rows]).transpose(1, 2)

    def older_values(self, layer: int, rows: slice) -> Tensor:
        """Their values [B, Hk, S, D]."""
        return self._codec.dequantize_values(self.packed.take(layer, self._counts())[rows]).transpose(1, 2)

    def packed_segment(self, slot: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hk, n, D] of tokens first … last - 1 of a row that others go on from, as they are packed."""
        codec, size = self._codec, self._codec.group_tokens
        low, high = first // size, -(-last // size)
        taken = self.packed.take(layer, self._counts())[slot : slot + 1, low:high]
        keys, values = (
            unpack(taken)[0, first - low * size : last - low * size].transpose(0, 1)
            for unpack in (codec.dequantize_keys, codec.dequantize_values)
        )
        return keys, values

    def plain_segment(self, slot: int, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The same of its newest tokens, as they were computed."""
        assert last - first <= self._codec.window_tokens
        places = torch.arange(first, last, device=self._device) % self._codec.window_tokens
        keys, values = self._tails[layer][:, slot, places].transpose(1, 2)
        return keys, values

    def chosen_values(self, layer: int, rows: slice, tokens: Tensor) -> Tensor:
        """Values [B, Hk, k, D] of tokens [B, Hk, k] of the whole groups; those of no other are brought."""
        return self._codec.dequantize_selected(self.packed.pick(layer, rows, tokens))

    def tail_part(self, layer: int, packed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows' rings: keys and values [B, Hk, W, D]. packed: places [B, W] that are seen packed, if any may be."""
        count = len(self._group.sequences)
        found = self._tails[layer][:, :count]
        if self._seen is not None and packed is not None:
            found = torch.where(packed[None, :, :, None, None], self._seen[layer][:, :count], found)
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    def prefetch(self, layer: int) -> None:
        counts = self._counts()
        if max(counts):
            self.packed.prefetch(layer, counts)

    def _counts(self) -> list[int]:
        """Stored groups of each row that its own query sees, or, of a row that others go on from, those others'."""
        size = self._codec.group_tokens
        return [
            (row.prompt_len if row.is_shared else self._codec.num_stored(row.num_computed)) // size
            for row in self._group.sequences
        ]

    def move(self, source: int, target: int) -> None:
        for tensors in (self._tails, self._seen or ()):
            for tensor in tensors:
                tensor[:, target] = tensor[:, source]
        self.packed.move(source, target)


class PackedGroups(ABC):
    """Bytes [slots, groups, group_bytes] a layer, on one tier."""

    tier: Tier
    claims: list[Allocation]

    @abstractmethod
    def put(self, layer: int, slots: Sequence[int], first: int, packed: Tensor) -> None:
        """Store groups [len(slots), n, group_bytes], from number `first` on."""

    @abstractmethod
    def take(self, layer: int, counts: Sequence[int]) -> Tensor:
        """The first groups of all rows, `counts` of each [rows, max(counts), at least taken_bytes], beside the
        computing."""

    @abstractmethod
    def pick(self, layer: int, rows: slice, tokens: Tensor) -> Tensor:
        """The values of single tokens [B, Hk, k] of some rows: bytes [B, Hk, k, value_bytes], beside the computing.

        The layer has been taken and not been dropped.
        """

    @abstractmethod
    def move(self, source: int, target: int) -> None: ...

    def prefetch(self, layer: int, counts: Sequence[int]) -> None:
        return None

    def drop(self, layer: int) -> None:
        return None

    def cancel(self) -> None:
        """A pass has broken off: what was brought for it is dropped."""
        return None

    def close(self) -> None:
        return None


class NearGroups(PackedGroups):
    """In memory: beside the computing, or (`HostGroups`) behind the link. Room for `capacity` groups a slot."""

    def __init__(self, config: CacheShape, tiers: Tiers, group: CacheBlock, codec: TokenCodec, tier: Tier) -> None:
        self.tier, self.claims, self.capacity = tier, [], 0
        self._tiers, self._group, self._codec = tiers, group, codec
        self._where = tiers.device if tier == tiers.compute_tier else _HOST
        self._layers = [self._room(0) for _ in range(config.num_layers)]

    def widen(self, layer: int) -> None:
        """Bring a layer to the capacity that was claimed."""
        held = self._layers[layer]
        if held.shape[1] < self.capacity:
            wider = self._room(self.capacity)
            wider[:, : held.shape[1]] = held
            self._layers[layer] = wider

    def put(self, layer: int, slots: Sequence[int], first: int, packed: Tensor) -> None:
        self.widen(layer)
        self._layers[layer][slots, first : first + packed.shape[1]] = packed

    def take(self, layer: int, counts: Sequence[int]) -> Tensor:
        return self._layers[layer][: len(counts), : max(counts)]

    def pick(self, layer: int, rows: slice, tokens: Tensor) -> Tensor:
        return self._codec.select_values(self._layers[layer][rows], tokens)

    def move(self, source: int, target: int) -> None:
        for held in self._layers:
            held[target] = held[source]

    def _room(self, groups: int) -> Tensor:
        return zeros((self._group.num_slots, groups, self._codec.group_bytes), self._where, torch.uint8)


class HostGroups(NearGroups):
    """In host memory behind the link."""

    def __init__(self, config: CacheShape, tiers: Tiers, group: CacheBlock, codec: TokenCodec) -> None:
        super().__init__(config, tiers, group, codec, "cpu")
        self._transfers: LayerTransfers[Tensor] = LayerTransfers(tiers)
        assert tiers.copy_engine is not None
        self._link = tiers.copy_engine

    def put(self, layer: int, slots: Sequence[int], first: int, packed: Tensor) -> None:
        def store() -> None:
            self.widen(layer)
            self._layers[layer][slots, first : first + packed.shape[1]] = self._link.to_host(packed)
            self._transfers.moved("gpu_to_cpu", packed.numel())

        self._transfers.leave(layer, packed.numel(), store)

    def prefetch(self, layer: int, counts: Sequence[int]) -> None:
        rows, groups, taken = len(counts), max(counts), self._codec.fetched_bytes

        def bring() -> Tensor:
            filled = self._layers[layer][:rows, :groups, :taken].contiguous()
            self._transfers.moved("cpu_to_gpu", filled.numel())
            return self._link.to_device(filled)

        self._transfers.fetch(layer, rows * groups * taken, bring)

    def take(self, layer: int, counts: Sequence[int]) -> Tensor:
        self.prefetch(layer, counts)
        return self._transfers.get(layer)[:, : max(counts)]

    def pick(self, layer: int, rows: slice, tokens: Tensor) -> Tensor:
        picked = super().pick(layer, rows, tokens.cpu())
        self._transfers.moved("cpu_to_gpu", picked.numel())
        return self._link.to_device(picked)

    def drop(self, layer: int) -> None:
        self._transfers.drop(layer)

    def move(self, source: int, target: int) -> None:
        self._transfers.settle_all()
        super().move(source, target)

    def cancel(self) -> None:
        self._transfers.cancel()

    def close(self) -> None:
        self._transfers.close()


class DiskGroups(PackedGroups):
    """In a file of the run, each slot's groups one behind the other. Slots do not move, their numbers do.

    Groups are read whole: the tokens that sparse attention takes lie in nearly every page.
    """

    def __init__(
        self, config: CacheShape, tiers: Tiers, group: CacheBlock, codec: TokenCodec, claim: Allocation
    ) -> None:
        self.tier, self.claims = "disk", [claim]
        self._tiers, self._group, self._codec = tiers, group, codec
        self._transfers: LayerTransfers[tuple[Tensor, Tensor]] = LayerTransfers(
            tiers
        )  # beside the computing, and in host memory
        self._stored = list(range(group.num_slots))  # slot of the group -> slot of the file
        self._slot_bytes = slot_bytes(group, codec)
        self._layer_bytes = group.num_slots * self._slot_bytes
        self._file = tiers.directory().scratch(f"cache-{claim.serial}", max(aligned(1), claim.num_bytes))

    def put(self, layer: int, slots: Sequence[int], first: int, packed: Tensor) -> None:
        offsets = [self._offset(layer, slot) + first * aligned(self._codec.group_bytes) for slot in slots]

        def store() -> None:
            near = packed
            if self._tiers.copy_engine is not None:
                near = self._tiers.copy_engine.to_host(packed)
                self._transfers.moved("gpu_to_cpu", packed.numel())
            whole = zeros((*near.shape[:2], aligned(self._codec.group_bytes)), _HOST, torch.uint8)
            whole[:, :, : near.shape[2]] = near
            for offset, groups in zip(offsets, whole):
                self._file.write_tensor(offset, groups)
            self._transfers.moved("cpu_to_disk", packed.numel())

        self._transfers.leave(layer, packed.numel(), store)

    def prefetch(self, layer: int, counts: Sequence[int]) -> None:
        size, each, groups = self._codec.group_bytes, aligned(self._codec.group_bytes), max(counts)
        wanted = [(self._offset(layer, slot), count) for slot, count in enumerate(counts)]

        def bring() -> tuple[Tensor, Tensor]:
            near = zeros((len(wanted), groups, size), _HOST, torch.uint8)
            for slot, (offset, count) in enumerate(wanted):
                if count:
                    found = self._file.read_tensor(offset, (count, each), torch.uint8)
                    near[slot, :count] = found[:, :size]
                    self._transfers.moved("disk_to_cpu", count * size)
            return self._beside(near[:, :, : self._codec.fetched_bytes]), near

        self._transfers.fetch(layer, len(wanted) * groups * size, bring)

    def take(self, layer: int, counts: Sequence[int]) -> Tensor:
        self.prefetch(layer, counts)
        return self._transfers.get(layer)[0]

    def pick(self, layer: int, rows: slice, tokens: Tensor) -> Tensor:
        return self._beside(self._codec.select_values(self._transfers.get(layer)[1][rows], tokens.cpu()))

    def _beside(self, near: Tensor) -> Tensor:
        if self._tiers.copy_engine is None:
            return near
        self._transfers.moved("cpu_to_gpu", near.numel())
        return self._tiers.copy_engine.to_device(near.contiguous())

    def drop(self, layer: int) -> None:
        self._transfers.drop(layer)

    def move(self, source: int, target: int) -> None:
        self._stored[target], self._stored[source] = self._stored[source], self._stored[target]

    def cancel(self) -> None:
        self._transfers.cancel()

    def close(self) -> None:
        self._transfers.close()
        self._file.close(delete=True)

    def _offset(self, layer: int, slot: int) -> int:
        return layer * self._layer_bytes + self._stored[slot] * self._slot_bytes


def slot_bytes(group: CacheBlock, codec: TokenCodec) -> int:
    """Of one layer of a slot on the disk: every group begins a page."""
    return group.capacity // codec.group_tokens * aligned(codec.group_bytes)
