"""The KV cache of a run: cache blocks on the tiers that the plan names, each a storage with a
codec.

A block is opened when its first prompt is written. Its storage is where most of the planned share
of a tier is missing, and so is that of its residual window, if the codec has one. Attention writes
by `write` and `append` and reads by `read`, `read_selected` and `read_prefix`, whatever the
placement. Units and planes are explained in `kv_cache.codec`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flexgen_helm.kv_cache.block_states import BlockStates
from flexgen_helm.kv_cache.codec import (
    Codec,
    KeysValues,
    Planes,
    QuantizedCodec,
    WindowCodec,
    make_codec,
    zeros,
)
from flexgen_helm.kv_cache.fetched_storage import DiskStorage, HostStorage, file_layout
from flexgen_helm.kv_cache.new_tokens import NewTokens
from flexgen_helm.kv_cache.storage import MemoryStorage, SlotSource, Storage
from flexgen_helm.kv_cache.visibility import DecodePart, PrefixPart
from flexgen_helm.models.attention import TopK
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.cache_sizes import state_bytes
from flexgen_helm.planner.placement import most_underfilled
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock
from flexgen_helm.tiers import TIERS, Kind, Tier


@dataclass(eq=False)
class _BlockCache:
    """An open block.

    storages: of the codec's units, and of the residual window if there is one.
    claim: of the storages, on their tier.
    state_claim: of the states, on the compute tier.
    attends_on_host: attention over it is computed there.
    """

    storages: tuple[Storage, ...]
    states: BlockStates
    claim: Allocation
    state_claim: Allocation
    attends_on_host: bool

    @property
    def storage(self) -> Storage:
        return self.storages[0]

    @property
    def newest(self) -> Storage:
        """The storage that new tokens go to."""
        return self.storages[-1]


class KVCache:
    """Caches of all open blocks.

    codec: how keys and values are stored; of a cache with a residual window, the older ones.
    placed: tier -> bytes of all blocks opened so far, closed ones too.
    one_layer: see `__init__`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tiers: TransferManager,
        dtype: torch.dtype,
        fractions: Mapping[Tier, float],
        *,
        room: Mapping[Tier, int] | None = None,
        cpu_attention: bool = False,
        cache_format: CacheFormat | None = None,
        one_layer: bool = False,
        names_tiers: bool = True,
    ) -> None:
        """Open nothing yet.

        dtype: of keys and values as they are computed.
        fractions: of the cache's bytes on each tier.
        room: bytes that blocks may take on each tier; None for all that is free.
        cpu_attention: the host attends to plain blocks in its memory although a device computes the
            rest.
        cache_format: how older tokens are quantized; None: not at all.
        one_layer: a pass takes all batches through a layer before the next one and nobody decodes
            (prefill-only), so one layer's keys and values take the place of the last one's.
        names_tiers: the scheduler may see where a block is, and joins blocks of one tier only.
            Ranks of a pipeline must schedule alike, wherever each of them has its caches.
        """
        self.codec = make_codec(cache_format, config.num_kv_heads, config.head_dim, dtype)
        self._window = WindowCodec(self.codec) if isinstance(self.codec, QuantizedCodec) else None
        self._codecs: tuple[Codec, ...] = (
            (self.codec,) if self._window is None else (self.codec, self._window)
        )
        self.one_layer, self._names_tiers = one_layer, names_tiers
        self._num_layers = 1 if one_layer else config.num_cache_layers
        # Layer 0 keeps a state, and layer 3 attends with the keys of layer 2:
        #
        #     layer of the model           0    1    2    3
        #     layer of every storage      None  0    1    1
        #     stores its keys, values           yes  yes  no
        numbers = config.cache_layers
        self._storage_layers = tuple(
            0 if one_layer and number is not None else number for number in numbers
        )
        self._stores_keys = [
            one_layer or number not in numbers[:layer] for layer, number in enumerate(numbers)
        ]
        self._states, self._state_bytes = config.layer_states, state_bytes(config, one_layer)
        self._tiers, self._fractions, self._room = tiers, fractions, room
        self._cpu_attention = cpu_attention and cache_format is None
        self._blocks: dict[CacheBlock, _BlockCache] = {}
        self._open_bytes = dict.fromkeys(TIERS, 0)
        self.placed = dict.fromkeys(TIERS, 0)
        tiers.ledgers[tiers.compute_tier].make_room = self._drop_unused

    @property
    def prefix_multiple(self) -> int | None:
        """Shared prefixes end at a multiple of so many tokens; None where none can be shared.

        Tokens that are quantized together belong to one sequence. What sparse attention selects, it
        selects among all older tokens.
        """
        fmt = self.codec.cache_format
        return 1 if fmt is None else fmt.prefix_multiple

    @property
    def shares_prompts(self) -> bool:
        """Whether sequences may continue the whole of another's prompt, wherever it ends."""
        return self.codec.cache_format is None

    # Writing

    def write(
        self, seat: tuple[CacheBlock, int], layer: int, keys_values: KeysValues, units: Planes
    ) -> None:
        """Store keys and values [S, Hk, D] of a whole prompt; units: its whole groups, encoded."""
        if not self._stores_keys[layer]:
            return
        block, slot = seat
        storage_layer, cache = self._storage_layer(layer), self._open(block)
        if self._window is not None:
            cache.newest.write(storage_layer, slot, self._window.encode_ring(*keys_values))
        if len(units[0]):
            planes = self.copy_to_host("cache", *units) if cache.attends_on_host else units
            cache.storage.write(storage_layer, slot, planes)

    def append(self, block: CacheBlock, layer: int, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """Store one token [B, Hk, D] of each sequence.

        An earlier layer may have stored this one's: then only what is fetched for this one lacks
        the token.
        """
        storage_layer, cache = self._storage_layer(layer), self._open(block)
        cache.newest.prefetch(storage_layer)
        store = cache.newest.append if self._stores_keys[layer] else cache.newest.patch_prefetched
        store(storage_layer, new.target, self._codecs[-1].encode(k, v))
        if self._window is not None and self._stores_keys[layer]:
            for group in new.groups:
                slots, index = group.units.slots.on_device[:, None], group.window_index.on_device
                keys, values = self._window.tokens(
                    cache.newest.read(storage_layer)[0], slots, index
                )
                encoded = self.codec.encode(keys.flatten(0, 1), values.flatten(0, 1))
                cache.storage.append(storage_layer, group.units, encoded)

    # States of layers that keep them

    def write_prompt_state(self, block: CacheBlock, slot: int, layer: int, state: Tensor) -> None:
        """Store the state [1, elements] behind a whole prompt."""
        self._open(block).states.write_prompt(layer, slot, state)

    def read_prompt_state(self, block: CacheBlock, slot: int, layer: int) -> Tensor:
        """Return the state [1, elements] behind a prompt that others go on from."""
        return self._blocks[block].states.read_prompt(layer, slot)

    def read_states(self, block: CacheBlock, layer: int) -> Tensor:
        """Return the states [B, elements] before the next token of each sequence; the same until
        all have one more.
        """
        states = self._open(block).states.read(layer)
        for slot, sequence in enumerate(block.sequences):
            if not sequence.num_computed:  # it goes on from another's prompt
                states[slot] = self.read_prompt_state(*sequence.prefixes[-1].seat, layer)[0]
        return states

    def write_states(self, block: CacheBlock, layer: int, states: Tensor) -> None:
        """Store the states [B, elements] behind the next token."""
        self._blocks[block].states.write(layer, states)

    # Reading

    def read(self, block: CacheBlock, layer: int, part: DecodePart) -> KeysValues:
        """Return keys and values [B, Hk, S, D] of a part of what the block's queries see."""
        storage_layer, cache = self._storage_layer(layer), self._blocks[block]
        if not part.num_units:
            assert self._window is not None
            return self._window.read(
                cache.newest.read(storage_layer)[0][part.sequences], part.seen_quantized
            )
        planes = self._read(cache, storage_layer, part.sequences, slice(0, part.num_units))
        return self.codec.decode(0, planes[0]), self.codec.decode(1, planes[1])

    def read_keys(self, block: CacheBlock, layer: int, part: DecodePart) -> Tensor:
        """Return the keys [B, Hk, S, D] of a stored part, by which values are selected."""
        units = slice(0, part.num_units)
        planes = self._read(self._blocks[block], self._storage_layer(layer), part.sequences, units)
        return self.codec.decode(0, planes[0])

    def read_selected(
        self, block: CacheBlock, layer: int, part: DecodePart, selected: TopK
    ) -> Tensor:
        """Return the values [B, Hk, k, D] of selected keys; no others are brought."""
        storage = self._blocks[block].storage
        assert isinstance(self.codec, QuantizedCodec)
        return self.codec.decode_selected(
            storage.select(self._storage_layer(layer), part.sequences, selected.keys)
        )

    def read_prefix(self, block: CacheBlock, slot: int, layer: int, part: PrefixPart) -> KeysValues:
        """Return keys and values [Hk, n, D] of a part of a shared sequence."""
        storage_layer = self._storage_layer(layer)
        cache = self._blocks[block]
        size = self.codec.group_tokens
        if not part.stored:
            assert self._window is not None and part.last - part.first <= self._window.ring_units
            index = (
                torch.arange(part.first, part.last, device=self._tiers.device)
                % self._window.ring_units
            )
            keys, values = self._window.tokens(cache.newest.read(storage_layer)[0], slot, index)
            return keys.transpose(0, 1), values.transpose(0, 1)
        first, last = part.first // size, -(-part.last // size)
        planes = self._read(cache, storage_layer, slice(slot, slot + 1), slice(first, last))
        tokens = slice(part.first - first * size, part.last - first * size)
        keys, values = (
            self.codec.decode(half, plane)[0, :, tokens] for half, plane in enumerate(planes)
        )
        return keys, values

    def prefetch(self, block: CacheBlock, layer: int) -> None:
        """Begin to bring one layer of a block to where attention is computed; harmless where it is
        there.
        """
        cache = self._blocks.get(block)
        if cache is not None and self._storage_layers[layer] is not None:
            for storage in cache.storages:
                storage.prefetch(self._storage_layer(layer), ahead=True)

    def done(self, block: CacheBlock, layer: int) -> None:
        """Give back what was brought of a layer, after a batch has attended to it."""
        cache = self._blocks.get(block)
        if cache is not None:
            for storage in cache.storages:
                storage.drop(self._storage_layer(layer))

    # Attention on the host

    def attends_on_host(self, block: CacheBlock) -> bool:
        """Whether the host computes attention over this block, so that queries go there instead of
        keys here.
        """
        # opened here by the first tokens of a prompt's completions
        return self._open(block).attends_on_host

    def copy_to_host(self, kind: Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._tiers.to_host(tensor, kind) for tensor in tensors)

    def copy_to_device(self, kind: Kind, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._tiers.to_device(tensor, kind) for tensor in tensors)

    # Blocks

    def move(
        self, block: CacheBlock, source: int, target: int, tokens: int, stale_tokens: int
    ) -> None:
        """Make slot `target`, which has `stale_tokens`, a copy of slot `source` with its
        `tokens`.
        """
        cache = self._blocks[block]
        cache.states.move(source, target)
        for codec, storage in zip(self._codecs, cache.storages):
            storage.move(source, target, codec.num_units(tokens), codec.num_units(stale_tokens))

    def regroup(self, block: CacheBlock, sources: Sequence[tuple[CacheBlock, int]]) -> None:
        """Move sequences into a new block in memory, and free the blocks that they come from.

        sources: block and slot that each sequence of `block` comes from.
        If memory runs out, the caches of these sequences are lost, and the error is raised.
        """
        old = {source: self._blocks.pop(source) for source, _ in sources if source in self._blocks}
        if not old:  # nothing was written yet
            return
        # before the new block claims its memory: their tensors are dropped layer by layer below
        for cache in old.values():
            self._release(cache)
        num_bytes, tier = self._storage_bytes(block), block.tier
        if tier is None or self._tiers.ledgers[tier].free < num_bytes:
            tier = self._choose_tier(block, num_bytes)
        try:
            slots = [(old[source], slot) for source, slot in sources]
            new = self._blocks[block] = self._claimed(block, tier, num_bytes, slots)
            for target, (cache, slot) in enumerate(slots):
                new.states.copy_slot(target, cache.states, slot)
        finally:
            _close(storage for cache in old.values() for storage in cache.storages)

    def free(self, block: CacheBlock) -> None:
        """Give a block's memory back; harmless for one that never wrote."""
        cache = self._blocks.pop(block, None)
        if cache is not None:
            self._release(cache)
            _close(cache.storages)

    def _release(self, cache: _BlockCache) -> None:
        tier, ledgers = cache.storage.tier, self._tiers.ledgers
        ledgers[tier].release(cache.claim)
        self._open_bytes[tier] -= cache.claim.num_bytes
        ledgers[self._tiers.compute_tier].release(cache.state_claim)

    def cancel(self) -> None:
        """Drop what was prefetched: a pass has broken off, and the next one may mean other
        layers.
        """
        for cache in self._blocks.values():
            for storage in cache.storages:
                storage.cancel()

    def close(self) -> None:
        for block in list(self._blocks):
            self.free(block)
        self._tiers.ledgers[self._tiers.compute_tier].make_room = None

    def _drop_unused(self) -> None:
        """Give back what was brought ahead: something else needs its memory."""
        for cache in self._blocks.values():
            for storage in cache.storages:
                storage.drop_unused()

    def _storage_layer(self, layer: int) -> int:
        """Return the layer of every storage that has the keys and values which a layer of the model
        attends with.
        """
        number = self._storage_layers[layer]
        assert number is not None, f"layer {layer} has no keys"
        return number

    def _open(self, block: CacheBlock) -> _BlockCache:
        cache = self._blocks.get(block)
        if cache is None:
            tier = self._choose_tier(block, self._storage_bytes(block))
            cache = self._blocks[block] = self._claimed(
                block, tier, self._storage_bytes(block, tier)
            )
        return cache

    def _storage_bytes(self, block: CacheBlock, tier: Tier | None = None) -> int:
        """Return the bytes of a block's storages; a file has whole pages."""
        if tier == "disk":
            return sum(
                file_layout(block, codec, self._num_layers).num_bytes for codec in self._codecs
            )
        slot_bytes = sum(_units_per_slot(block, codec) * codec.unit_bytes for codec in self._codecs)
        return self._num_layers * block.num_slots * slot_bytes

    def _claimed(
        self,
        block: CacheBlock,
        tier: Tier,
        num_bytes: int,
        sources: Sequence[tuple[_BlockCache, int]] = (),
    ) -> _BlockCache:
        """Claim memory on a tier and open the block there, with copies of other blocks' slots if
        given.
        """
        compute_tier, ledgers = self._tiers.compute_tier, self._tiers.ledgers
        storages: list[Storage] = []
        with (
            ledgers[compute_tier].claimed(
                "cache", block.num_slots * self._state_bytes
            ) as state_claim,
            ledgers[tier].claimed("cache", num_bytes) as claim,
        ):
            try:
                for number, codec in enumerate(self._codecs):
                    copied = [
                        SlotSource(
                            cache.storages[number].settled(),
                            slot,
                            codec.num_units(sequence.num_computed),
                        )
                        for sequence, (cache, slot) in zip(block.sequences, sources)
                    ]
                    storages.append(
                        self._new_storage(
                            block, tier, codec, f"cache-{claim.serial}-{number}", copied
                        )
                    )
                states = BlockStates(block, self._states, self._tiers.device, self.one_layer)
            except BaseException:
                _close(storages)
                raise
        self._open_bytes[tier] += num_bytes
        self.placed[tier] += num_bytes
        on_host = self._cpu_attention and tier == "cpu" != compute_tier
        return _BlockCache(tuple(storages), states, claim, state_claim, on_host)

    def _new_storage(
        self,
        block: CacheBlock,
        tier: Tier,
        codec: Codec,
        name: str,
        sources: Sequence[SlotSource],
    ) -> Storage:
        """Open a storage; name: of its file on the disk."""
        tiers, layers = self._tiers, self._num_layers
        if tier == "disk":
            layout = file_layout(block, codec, layers)
            return DiskStorage(
                tiers, codec, block, layout, tiers.directory().scratch(name, layout.num_bytes)
            )
        is_fetched = tier != tiers.compute_tier and not self._cpu_attention
        device = tiers.device if tier == tiers.compute_tier else torch.device("cpu")

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if is_fetched and tiers.copy_engine is not None:
                return (
                    tiers.copy_engine.host_memory(prod(shape) * dtype.itemsize)
                    .view(dtype)
                    .view(shape)
                )
            return zeros(shape, dtype, device)

        memory = MemoryStorage(
            tier, codec, block.num_slots, _units_per_slot(block, codec), allocate
        )
        try:
            if sources:
                memory.gather(sources)
            else:
                for _ in range(layers):
                    memory.add_layer()
        except BaseException:
            memory.close()
            raise
        return HostStorage(tiers, codec, block, memory) if is_fetched else memory

    def _read(self, cache: _BlockCache, storage_layer: int, slots: slice, units: slice) -> Planes:
        """Return some units of some slots, of all planes."""
        indices = [
            (slots, *[slice(None)] * (plane.unit_axis - 1), units) for plane in self.codec.planes
        ]
        return tuple(data[index] for data, index in zip(cache.storage.read(storage_layer), indices))

    def _choose_tier(self, block: CacheBlock, num_bytes: int) -> Tier:
        """Return the tier that lacks most of its planned share, of those whose planned room takes
        the block: the blocks of a run rarely divide exactly.

        If there is none, the slowest tier with free memory takes the block, as it has most of it.
        """
        total = sum(self._open_bytes.values()) + num_bytes
        allowed = [tier for tier in TIERS if self._fractions[tier] > 0]
        free = [tier for tier in allowed if self._tiers.ledgers[tier].free >= num_bytes]
        planned = [
            tier
            for tier in free
            if self._room is None or self._open_bytes[tier] + num_bytes <= self._room[tier]
        ]
        tier = most_underfilled(
            planned or free[-1:] or allowed, self._fractions, self._open_bytes, total
        )
        if self._names_tiers:
            block.tier = tier
        return tier


def _units_per_slot(block: CacheBlock, codec: Codec) -> int:
    return codec.ring_units or block.capacity // codec.group_tokens


def _close(storages: Iterable[Storage]) -> None:
    for storage in storages:
        storage.close()
