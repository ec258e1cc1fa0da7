"""How the tokens of one batch lie side by side, and the attention that binds them to their caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models import attention, sparse
from flexgen_helm.models.attention import AttentionConfig, PartialAttention, QueryChunk
from flexgen_helm.planner.workspace import KEPT_MASK_BYTES, QUERY_CHUNK_TOKENS
from flexgen_helm.quant.kv_codec import TokenCodec
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.sequence import Batch, CacheBlock, Sequence

# Tokens from which on a segment in host memory is brought to them, instead of their queries to the host: keys and
# values of a few hundred positions cross the link faster than a processor attends to them.
_BROUGHT_FROM = 8
# Masks of such views are kept for lengths that come again in the next layer, up to so many bytes in all; those of
# longer prompts are made for each layer, which costs a few percent of their attention.
_KEPT_LENGTHS = 32
# Elements of keys and values that are unpacked at once: 16 MiB in float32.
_UNPACKED_ELEMENTS = 4 << 20


@dataclass(frozen=True, eq=False)
class _Decode:
    """The rows of one slot group, one token each: `tokens` of the flat list, at `positions` [B] of their slots."""

    tokens: slice
    group: CacheBlock
    positions: Tensor
    length: int
    masks: dict[int | None, Tensor | None]  # by window

    def attend(
        self, layer: int, window: int | None, scoring: AttentionConfig, cache: KVCache, q: Tensor, k: Tensor, v: Tensor
    ) -> PartialAttention:
        mask, positions, delegated = self.masks[window], self.positions, cache.delegates(self.group)
        if delegated:
            q, k, v = cache.to_host("activations", q, k, v)
            scoring, positions, mask = (
                scoring.to_device(q.device),
                positions.cpu(),
                None if mask is None else mask.cpu(),
            )
        cache.append(self.group, layer, positions, k, v)
        keys, values = cache.active(self.group, layer, self.length)
        part = attention.attend_cached(q, keys, values, scoring, positions, mask)
        cache.done(self.group, layer)
        return _back(cache, part) if delegated else part


@dataclass(frozen=True, eq=False)
class _PackedDecode:
    """The rows of one slot group whose cache is packed: what each sees of it, and of the newest tokens' ring.

    slices: rows whose part of the packed cache is unpacked at once, with their masks by window; tail_positions [B, W]:
    of the tokens in the ring; tail_packed [B, W]: those that are seen packed, None where none can be. value_share: of
    the packed tokens, the share whose values are taken.
    """

    tokens: slice
    group: CacheBlock
    positions: Tensor
    length: int
    slices: tuple[tuple[slice, dict[int | None, Tensor]], ...]
    tail_positions: Tensor
    tail_packed: Tensor | None
    tail_masks: dict[int | None, Tensor]
    value_share: float

    def attend(
        self, layer: int, window: int | None, scoring: AttentionConfig, cache: KVCache, q: Tensor, k: Tensor, v: Tensor
    ) -> PartialAttention:
        cache.append(self.group, layer, self.positions, k, v)
        packed = cache.packed(self.group)
        keys, values = packed.tail_part(layer, self.tail_packed)
        masks = self.tail_masks[window]
        out, lse = attention.attend_cached(q, keys, values, scoring, self.positions, masks, self.tail_positions)
        for rows, by_window in self.slices:
            older = packed.older_keys(layer, rows)
            asked = q[rows], older, scoring, self.positions[rows], by_window[window]
            if self.value_share < 1:
                choice = sparse.select_top_k(*asked, self.value_share)
                part = choice.attend(packed.chosen_values(layer, rows, choice.tokens))
            else:
                part = attention.attend_cached(q[rows], older, packed.older_values(layer, rows), *asked[2:])
            out[rows], lse[rows] = attention.merge_partial((out[rows], lse[rows]), part)
        cache.done(self.group, layer)
        return out, lse


@dataclass(frozen=True, eq=False)
class _Shared:
    """The flat tokens [t] that attend to all of a parent row, at `positions` [t] from its first token on, the last of
    them at `latest`. tokens: a slice where they are neighbours, which spares copies.

    Masks are made when they are needed: of all batches that are under way at once, they would be as large as caches.
    """

    parent: Sequence
    tokens: Tensor | slice
    positions: Tensor
    latest: int

    def attend(
        self, layer: int, window: int | None, scoring: AttentionConfig, cache: KVCache, q: Tensor
    ) -> Iterator[PartialAttention]:
        assert self.parent.block is not None
        delegated = cache.delegates(self.parent.block) and len(self.positions) < _BROUGHT_FROM
        positions = self.positions
        if delegated:
            (q,) = cache.to_host("activations", q)
            scoring, positions = scoring.to_device(q.device), positions.cpu()
        keys, values = cache.segment(self.parent, layer)
        if keys.device != q.device:
            keys, values = cache.to_device("cache", keys, values)
        mask = None
        if window is not None and self.latest >= window:  # else it reaches back to the first key
            mask = attention.window_mask(positions.cpu(), torch.arange(keys.shape[1]), window, q.device)
        part = attention.attend_prefix(q, keys, values, scoring, positions, mask)
        cache.done(self.parent.block, layer)
        yield _back(cache, part) if delegated else part


@dataclass(frozen=True, eq=False)
class _PackedShared:
    """As `_Shared`, of a parent whose cache is packed. borders [t]: the query sees the parent's tokens before this one
    packed, and the others as they are.

        parent's tokens   0 … low | low … high | low … end      low, high: the first and the last border
                          packed    packed       as they are
        seen by           all       some         the others

    slice_tokens: unpacked at once.
    """

    parent: Sequence
    tokens: Tensor | slice
    positions: Tensor
    latest: int
    borders: Tensor
    slice_tokens: int

    def attend(
        self, layer: int, window: int | None, scoring: AttentionConfig, cache: KVCache, q: Tensor
    ) -> Iterator[PartialAttention]:
        parent, end = self.parent, self.parent.prompt_len
        assert parent.block is not None
        low, high = int(self.borders.min()), int(self.borders.max())
        for first, last in _slices(0, low, self.slice_tokens):
            yield self._part(first, cache.packed_segment(parent, layer, first, last), None, window, scoring, q)
        for first, last in _slices(low, high, self.slice_tokens):
            hidden = torch.arange(first, last) >= self.borders[:, None]
            yield self._part(first, cache.packed_segment(parent, layer, first, last), hidden, window, scoring, q)
        if low < end:
            hidden = torch.arange(low, end) < self.borders[:, None]
            yield self._part(low, cache.plain_segment(parent, layer, low, end), hidden, window, scoring, q)
        cache.done(parent.block, layer)

    def _part(
        self,
        first: int,
        segment: PartialAttention,
        hidden: Tensor | None,
        window: int | None,
        scoring: AttentionConfig,
        q: Tensor,
    ) -> PartialAttention:
        """Over keys and values [Hk, n, D] of the tokens from `first` on; hidden [t, n]: what a query does not see."""
        keys, values = segment
        if window is not None and self.latest - first >= window:
            beyond = self.positions.cpu()[:, None] - torch.arange(first, first + keys.shape[1]) >= window
            hidden = beyond if hidden is None else hidden | beyond
        mask = None
        if hidden is not None:
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).to(q.device)
        return attention.attend_prefix(q, keys, values, scoring, self.positions - first, mask)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Flat view of a batch of T tokens; built once, used by every layer.

    token_ids and positions [T]; prompts: the slice of each row that is computed from its first token on; shared:
    for each parent row, the flat tokens that attend to it.
    """

    token_ids: Tensor
    positions: Tensor
    prompts: tuple[tuple[Sequence, slice], ...]
    decodes: tuple[_Decode | _PackedDecode, ...]
    shared: tuple[_Shared | _PackedShared, ...]

    def attend(
        self, layer: int, window: int | None, scoring: AttentionConfig, cache: KVCache, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of one layer over all segments; q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D]."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for row, tokens in self.prompts:
            mine = q[tokens], k[tokens], v[tokens]
            if cache.codec is None:
                out[tokens], lse[tokens] = attention.attend_causal(*mine, scoring, window)
            else:
                out[tokens], lse[tokens] = _packed_prompt(*mine, scoring, window, cache.codec)
            if row.needs_cache:
                cache.write(row, layer, 0, k[tokens], v[tokens])
        for part in self.decodes:
            tokens = part.tokens
            out[tokens], lse[tokens] = part.attend(layer, window, scoring, cache, q[tokens], k[tokens], v[tokens])
        for common in self.shared:
            index = common.tokens
            joined = out[index], lse[index]
            for theirs in common.attend(layer, window, scoring, cache, q[index]):
                joined = attention.merge_partial(joined, theirs)
            out[index], lse[index] = joined
        return out

    def prefetch(self, layer: int, cache: KVCache) -> None:
        """Begin to bring what this layer's attention reads beside the computing, if it has been computed."""
        for group in self.groups():
            if not any(
                row.is_prefill for row in group.sequences
            ):  # the prefix of a batch that has its turn before this one
                cache.prefetch(group, layer)

    @property
    def longest_prompt(self) -> int:
        return max((tokens.stop - tokens.start for _, tokens in self.prompts), default=0)

    @property
    def cached_positions(self) -> int:
        """Positions of their own caches that tokens attend to, over all tokens."""
        return sum((part.tokens.stop - part.tokens.start) * part.length for part in self.decodes)

    @property
    def shared_positions(self) -> tuple[int, int]:
        """Of the largest segment that several rows attend to: tokens that do, and its positions."""
        sizes = [(len(common.positions), common.parent.prompt_len) for common in self.shared]
        return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))

    def groups(self) -> Iterator[CacheBlock]:
        """Slot groups that the batch attends to."""
        for part in self.decodes:
            yield part.group
        for common in self.shared:
            assert common.parent.block is not None
            yield common.parent.block


def build_attention_metadata(
    batch: Batch, windows: Iterable[int | None], device: torch.device, codec: TokenCodec | None = None
) -> AttentionMetadata:
    """Lay a batch out. Rows of a slot group are adjacent and in slot order (the scheduler's promise).

    windows: those that occur among the layers; each has its own masks. codec: of a packed cache.
    """
    kinds = set(windows) or {None}
    token_ids: list[int] = []
    positions: list[int] = []
    prompts: list[tuple[Sequence, slice]] = []
    groups: dict[CacheBlock, int] = {}  # first flat token
    shared: dict[Sequence, list[int]] = {}
    for chunk in batch.scheduled:
        row, first = chunk.sequence, len(token_ids)
        token_ids += row.tokens[row.num_computed : row.num_computed + chunk.count]
        positions += range(row.start + row.num_computed, row.start + row.num_computed + chunk.count)
        if row.num_computed == 0 and row.prompt_len:
            prompts.append((row, slice(first, first + chunk.count)))
        else:
            assert row.block is not None and chunk.count == 1
            groups.setdefault(row.block, first)
        for parent in row.prefixes:
            shared.setdefault(parent, []).extend(range(first, first + chunk.count))

    decodes: list[_Decode | _PackedDecode] = []
    for group, first in groups.items():
        if codec is not None:
            decodes.append(_packed_decode(group, first, kinds, device, codec))
            continue
        lengths = torch.tensor([row.num_computed for row in group.sequences])
        longest = int(lengths.max()) + 1
        rows = slice(first, first + len(group.sequences))
        masks = {window: _decode_mask(lengths, longest, window, device) for window in kinds}
        decodes.append(_Decode(rows, group, lengths.to(device), longest, masks))

    at = torch.tensor(positions)
    commons: list[_Shared | _PackedShared] = []
    for parent, index in shared.items():
        ages = at[index] - parent.start
        adjacent = index[-1] - index[0] == len(index) - 1  # ascending, no token twice
        tokens = slice(index[0], index[-1] + 1) if adjacent else torch.tensor(index, device=device)
        common = parent, tokens, ages.to(device), int(ages.max())
        if codec is None:
            commons.append(_Shared(*common))
        else:
            borders = torch.tensor([codec.cache_format.num_quantized(age) for age in ages.tolist()]).clamp_max(
                parent.prompt_len
            )
            commons.append(_PackedShared(*common, borders, max(1, _UNPACKED_ELEMENTS // (2 * codec.token_elements))))

    return AttentionMetadata(
        token_ids=torch.tensor(token_ids, device=device),
        positions=at.to(device),
        prompts=tuple(prompts),
        decodes=tuple(decodes),
        shared=tuple(commons),
    )


def _packed_prompt(
    q: Tensor, k: Tensor, v: Tensor, scoring: AttentionConfig, window: int | None, codec: TokenCodec
) -> PartialAttention:
    """A prompt in which every token sees the older ones packed, as it would in a cache."""
    whole = codec.cache_format.num_quantized(q.shape[0] - 1)
    if not whole:
        return attention.attend_causal(q, k, v, scoring, window)
    sights = _sights(q.shape[0], window, codec.cache_format, q.device)
    older = codec.round_trip(k[:whole], v[:whole])
    if codec.cache_format.is_sparse:
        return sparse.attend_top_k(q, older, (k, v), scoring, sights, codec.cache_format.value_share)
    return attention.attend_two_versions(q, older, (k, v), scoring, sights)


def _sights(tokens: int, window: int | None, fmt: CacheFormat, device: torch.device) -> Iterable[QueryChunk]:
    """What the tokens of a prompt see packed and as it is, some neighbours at a time."""
    wanted = tokens, window, fmt, device
    mask_bytes = 2 * tokens * tokens  # in float32, of which half is never seen
    return _made_sights(*wanted) if mask_bytes > KEPT_MASK_BYTES // _KEPT_LENGTHS else _kept_sights(*wanted)


@lru_cache(maxsize=_KEPT_LENGTHS)
def _kept_sights(tokens: int, window: int | None, fmt: CacheFormat, device: torch.device) -> tuple[QueryChunk, ...]:
    """The same, once for all layers and all prompts of a length."""
    return tuple(_made_sights(tokens, window, fmt, device))


def _made_sights(tokens: int, window: int | None, fmt: CacheFormat, device: torch.device) -> Iterator[QueryChunk]:
    for first in range(0, tokens, QUERY_CHUNK_TOKENS):
        at = torch.arange(first, min(first + QUERY_CHUNK_TOKENS, tokens))
        borders = torch.tensor([fmt.num_quantized(position) for position in at.tolist()])
        oldest = 0 if window is None else max(0, first - window + 1)
        low, high = int(borders[0]), int(borders[-1])
        packed, plain = slice(min(oldest, high), high), slice(max(oldest, low), int(at[-1]) + 1)
        old, new = torch.arange(packed.start, packed.stop), torch.arange(plain.start, plain.stop)
        keys = torch.cat((old, new))
        mask = torch.zeros(len(at), len(keys))
        certain = max(0, low - packed.start)  # keys that are packed for all of these queries
        hidden = torch.cat((old[certain:] >= borders[:, None], (new < borders[:, None]) | (new > at[:, None])), 1)
        mask[:, certain:].masked_fill_(hidden, -math.inf)
        if window is not None:
            mask.masked_fill_(at[:, None] - keys >= window, -math.inf)
        yield QueryChunk(slice(first, int(at[-1]) + 1), packed, plain, keys.to(device), mask.to(device))


def _packed_decode(
    group: CacheBlock, first: int, windows: Iterable[int | None], device: torch.device, codec: TokenCodec
) -> _PackedDecode:
    fmt, width = codec.cache_format, codec.window_tokens
    at = torch.tensor([row.num_computed for row in group.sequences])
    stored = torch.tensor([codec.num_stored(row.num_computed) for row in group.sequences])
    borders = torch.tensor([fmt.num_quantized(row.num_computed) for row in group.sequences])
    places = torch.arange(width)
    #  place 0 1 2 3 4     of a row at token 7 in a ring of 5: tokens 5 6 7 3 4
    ring = at[:, None] - (at[:, None] - places) % width
    old, longest = torch.arange(int(stored.max())), int(at.max()) + 1

    def mask(hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None, :].to(device)

    tail_masks, old_masks = {}, {}
    for window in windows:
        beyond = (ring < stored[:, None]) | (ring < 0)
        hidden = old >= stored[:, None]
        if window is not None:
            beyond = beyond | (at[:, None] - ring >= window)
            hidden = hidden | (at[:, None] - old >= window)
        tail_masks[window], old_masks[window] = mask(beyond), mask(hidden)
    slices = []
    rows = len(group.sequences)
    if len(old):
        elements = 2 * len(old) * codec.token_elements
        step = max(1, _UNPACKED_ELEMENTS // elements)
        for begin in range(0, rows, step):
            some = slice(begin, min(begin + step, rows))
            slices.append((some, {window: found[some] for window, found in old_masks.items()}))
    return _PackedDecode(
        slice(first, first + rows),
        group,
        at.to(device),
        longest,
        tuple(slices),
        ring.to(device),
        (ring < borders[:, None]).to(device) if fmt.group_tokens == 1 else None,
        tail_masks,
        fmt.value_share,
    )


def _slices(first: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)


def _back(cache: KVCache, part: PartialAttention) -> PartialAttention:
    out, lse = cache.to_device("activations", *part)
    return out, lse


def _decode_mask(lengths: Tensor, longest: int, window: int | None, device: torch.device) -> Tensor | None:
    """Additive mask [B, 1, 1, S] over the rows' own caches; None where every row sees all of it."""
    keys = torch.arange(longest)
    #  key 0 1 2 3     a row of 2 cached tokens + itself sees keys 0 … 2; columns of longer neighbours are masked
    hidden = keys[None, :] > lengths[:, None]
    if window is not None:
        hidden |= lengths[:, None] - keys[None, :] >= window
    if not hidden.any():
        return None
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None, :].to(device)
