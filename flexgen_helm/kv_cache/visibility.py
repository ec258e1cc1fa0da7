"""What each query sees of a cache, and in which version: the one place that says so.

Without a cache format every query sees all earlier tokens as they were computed. With one, what a query sees depends
on absolute positions alone: tokens that are older than its residual window, as far as they fill whole groups, are
seen quantized, the others as they were computed. Sliding windows hide what is older still. So scores do not depend on
batching, schedule or prefix sharing.

Masks are made where attention is computed, from positions that are there. What can be known from the smallest and the
largest position is known on the host, so that nothing waits for a device.

Shapes: B sequences of a block, t queries, S keys, W tokens of a residual window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec
from flexgen_helm.models.attention import QueryChunk, additive_mask, num_selected, num_selected_tensor
from flexgen_helm.models.config import QUERY_CHUNK_TOKENS, Window
from flexgen_helm.planner.placement import KEPT_MASK_BYTES
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock

# Elements of keys and values that are dequantized at once: 16 MiB in float32.
_DEQUANTIZED_ELEMENTS = 4 << 20
# Query chunks are kept for so many prompt lengths, because they come again in the next layer. Those of longer prompts
# are made for each layer, which costs a few percent of their attention.
_KEPT_LENGTHS = 32


@dataclass(frozen=True)
class Extent:
    """The stored units of a block that its next queries read.

    counts: of each slot, from its first unit on.
    room: units of a slot that are appended before they are read: 1, or 0 where nothing is.
    """

    counts: SequenceOf[int]
    room: int

    @property
    def num_slots(self) -> int:
        return len(self.counts)

    @property
    def num_units(self) -> int:
        return max(self.counts) + self.room


def stored_extent(block: CacheBlock, codec: Codec) -> Extent:
    """Return what the next queries of a block's sequences read, or, of shared sequences, their readers do."""
    is_shared, size = block.sequences[0].is_shared, codec.group_tokens
    room = 0 if codec.window_tokens or is_shared else 1
    tokens = [own.prompt_len if is_shared else codec.num_stored(own.num_computed) for own in block.sequences]
    return Extent([count // size - room for count in tokens], room)


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """What each of some queries sees of some keys.

    mask: additive, [B, 1, 1, S] or [t, S]; None: every query sees all keys.
    sees_none: [B] or [t], true for queries that see no key; None: there is none.
    num_selected: [B], of these keys, with sparse attention; max_selected: the largest.
    """

    mask: Tensor | None = None
    sees_none: Tensor | None = None
    num_selected: Tensor | None = None
    max_selected: int = 0


@dataclass(frozen=True, eq=False)
class DecodePart:
    """Keys that the decoding sequences of a block read and attend to together.

    sequences: of the block, as a slice.
    num_units: of each slot, that are read from the storage; 0: the keys come from the residual window.
    visible: by sliding window (None: without one).
    key_positions: [B, S] where the keys are not in order.
    seen_quantized: places [B, W] of the residual window that are seen quantized; None where none can be.
    is_sparse: only the values of selected keys are read.
    """

    sequences: slice
    num_units: int
    visible: Mapping[Window | None, VisibleKeys]
    key_positions: Tensor | None = None
    seen_quantized: Tensor | None = None
    is_sparse: bool = False


def decode_parts(
    block: CacheBlock,
    positions: Tensor,
    starts: Tensor | int,
    windows: Iterable[Window | None],
    codec: Codec,
    dtype: torch.dtype,
) -> tuple[DecodePart, ...]:
    """Divide what the block's next queries see; the first part covers all sequences.

    positions: [B], of the queries among their sequences' own tokens, where attention is computed.
    starts: [B], absolute positions of their sequences' first own tokens, there too; 0 where no window needs them.
    windows: of the model's layers.
    dtype: of masks.
    """
    counts, device = [sequence.num_computed for sequence in block.sequences], positions.device
    own_starts = [sequence.start for sequence in block.sequences]
    fmt, everyone = codec.cache_format, slice(0, len(block.sequences))
    if fmt is None:
        #  key 0 1 2 3     a sequence with 2 cached tokens + itself sees keys 0 … 2
        keys = torch.arange(max(counts) + 1, device=device)
        plain = {}
        for window in windows:
            oldest = (0 if window is None else window.oldest(*own) for own in zip(counts, own_starts))
            if min(counts) == max(counts) and max(oldest) <= 0:
                plain[window] = VisibleKeys()
            else:
                hidden = keys > positions[:, None]
                plain[window] = VisibleKeys(_decode_mask(positions, starts, keys, hidden, window, dtype))
        return (DecodePart(everyone, len(keys), plain),)

    places = torch.arange(codec.window_tokens, device=device)
    stored = _whole_groups(positions, fmt.residual_window, codec.group_tokens)
    #  place 0 1 2 3 4     of a sequence at token 7 with W = 5: tokens 5 6 7 3 4
    ring = positions[:, None] - (positions[:, None] - places) % codec.window_tokens
    outside = (ring < stored[:, None]) | (ring < 0)
    quantized = None
    if codec.window_copies > 1:
        quantized = ring < _whole_groups(positions, fmt.residual_window, fmt.group_tokens)[:, None]
    newest = {w: VisibleKeys(_decode_mask(positions, starts, ring, outside, w, dtype)) for w in windows}
    parts = [DecodePart(everyone, 0, newest, ring, quantized)]
    stored_counts = [codec.num_stored(count) for count in counts]
    if not (longest := max(stored_counts)):
        return tuple(parts)
    older = torch.arange(longest, device=device)
    step = max(1, _DEQUANTIZED_ELEMENTS // (2 * longest * codec.token_elements))
    for first in range(0, everyone.stop, step):
        rows = slice(first, min(first + step, everyone.stop))
        visible = {
            window: _visible_older(positions[rows], _part(starts, rows), older, stored[rows], window, fmt, dtype,
                                   [*zip(counts, own_starts, stored_counts)][rows])
            for window in windows
        }  # fmt: skip
        parts.append(DecodePart(rows, longest // codec.group_tokens, visible, is_sparse=fmt.is_sparse))
    return tuple(parts)


def whole_part(block: CacheBlock) -> DecodePart:
    """Return all that the block's next queries see of a plain cache, without masks."""
    longest = max(sequence.num_computed for sequence in block.sequences)
    return DecodePart(slice(0, len(block.sequences)), longest + 1, {})


def _visible_older(
    positions: Tensor,
    starts: Tensor | int,
    keys: Tensor,
    stored: Tensor,
    window: Window | None,
    fmt: CacheFormat,
    dtype: torch.dtype,
    on_host: SequenceOf[tuple[int, int, int]],
) -> VisibleKeys:
    """What queries [B] see of their sequences' first `stored` [B] keys; on_host: each position, start, and count."""
    mask = _decode_mask(positions, starts, keys, keys >= stored[:, None], window, dtype)
    num_visible = [max(0, num_stored - _oldest_visible(count, window, start)) for count, start, num_stored in on_host]
    on_device = stored
    if window is not None:
        on_device = (stored - window.oldest(positions, starts).clamp_min(0)).clamp_min(0)
    sees_none = None if min(num_visible) else on_device == 0
    if not fmt.is_sparse:
        return VisibleKeys(mask, sees_none)
    selected = num_selected_tensor(on_device, fmt.value_share)
    return VisibleKeys(mask, sees_none, selected, num_selected(max(num_visible), fmt.value_share))


@dataclass(frozen=True, eq=False)
class PrefixPart:
    """Tokens first … last - 1 of a shared prefix or prompt, as its readers attend to them.

    start: absolute position of the prefix's first token.
    stored: they come from the storage, else from the residual window.
    span: the smallest and the largest position of the queries, counted from the prefix's first token.
    borders: of stored tokens a query sees those that this format quantizes for it, of others those that it does not;
        None: all.
    """

    start: int
    first: int
    last: int
    stored: bool
    span: tuple[int, int]
    borders: CacheFormat | None = None
    _kept: dict[object, VisibleKeys] = field(default_factory=dict)

    def visible(self, positions: Tensor, window: Window | None, dtype: torch.dtype) -> VisibleKeys:
        """Return what queries at `positions` [t] of the span see.

        Large masks are made when they are needed: of all batches that are under way, they would be as large as caches.

        positions: where attention is computed.
        window: the layer's.
        dtype: of masks.
        """
        if window is not None and window.oldest(self.span[1], self.start) <= self.first:  # it hides no key
            window = None
        if self.borders is None and window is None:
            return VisibleKeys()
        kept = self._kept.get(window)
        if kept is None or kept.mask is None or kept.mask.device != positions.device:
            kept = self._visible(positions, window, dtype)
            if kept.mask is not None and kept.mask.nbytes <= KEPT_MASK_BYTES // _KEPT_LENGTHS:
                self._kept[window] = kept
        return kept

    def _visible(self, positions: Tensor, window: Window | None, dtype: torch.dtype) -> VisibleKeys:
        # A query sees keys lower … upper - 1.
        earliest, latest = self.span
        lower = torch.zeros_like(positions) if window is None else window.oldest(positions, self.start)
        upper = torch.full_like(positions, self.last)
        some_see_none = window is not None
        if (fmt := self.borders) is not None:
            border = _whole_groups(positions, fmt.residual_window, fmt.group_tokens)
            if self.stored:
                upper = border.clamp_max_(self.last)
                some_see_none |= fmt.num_quantized(earliest) <= self.first
            else:
                lower = torch.maximum(lower, border)
                some_see_none |= fmt.num_quantized(latest) >= self.last
        keys = torch.arange(self.first, self.last, device=positions.device)
        mask = additive_mask((keys < lower[:, None]) | (keys >= upper[:, None]), dtype)
        return VisibleKeys(mask, lower.clamp_min_(self.first) >= upper if some_see_none else None)


def prefix_parts(start: int, end: int, positions: SequenceOf[int], codec: Codec) -> tuple[PrefixPart, ...]:
    """Divide what queries see of a prefix of `end` tokens.

        tokens    0 … low | low … high | low … end      low, high: the first and the last border of the queries
                  stored    stored       newest
        seen by   all       some         the others

    start: absolute position of its first token.
    positions: of the queries, from the prefix's first token on.
    """
    fmt, span = codec.cache_format, (min(positions), max(positions))
    if fmt is None:
        return (PrefixPart(start, 0, end, True, span),)
    low, high = (min(end, fmt.num_quantized(position)) for position in span)
    step = max(1, _DEQUANTIZED_ELEMENTS // (2 * codec.token_elements))
    parts = [PrefixPart(start, first, last, True, span) for first, last in _ranges(0, low, step)]
    parts += [PrefixPart(start, first, last, True, span, fmt) for first, last in _ranges(low, high, step)]
    if low < end:
        parts.append(PrefixPart(start, low, end, False, span, fmt))
    return tuple(parts)


def query_chunks(
    tokens: int, start: int, window: Window | None, fmt: CacheFormat, device: torch.device, dtype: torch.dtype
) -> Iterable[QueryChunk]:
    """Divide a prompt that no cache is needed for: what its tokens see quantized and as it was computed.

    start: absolute position of its first token.
    dtype: of masks.
    """
    if window is None or not window.is_chunked:
        start = 0  # the same chunks wherever a prompt begins
    arguments = tokens, start, window, fmt, device, dtype
    mask_bytes = 2 * tokens * tokens  # in float32, of which half is never seen
    return _make_chunks(*arguments) if mask_bytes > KEPT_MASK_BYTES // _KEPT_LENGTHS else _kept_chunks(*arguments)


@lru_cache(maxsize=_KEPT_LENGTHS)
def _kept_chunks(
    tokens: int, start: int, window: Window | None, fmt: CacheFormat, device: torch.device, dtype: torch.dtype
) -> tuple[QueryChunk, ...]:
    return tuple(_make_chunks(tokens, start, window, fmt, device, dtype))


def _make_chunks(
    tokens: int, start: int, window: Window | None, fmt: CacheFormat, device: torch.device, dtype: torch.dtype
) -> Iterator[QueryChunk]:
    for first in range(0, tokens, QUERY_CHUNK_TOKENS):
        end = min(first + QUERY_CHUNK_TOKENS, tokens)
        low, high = fmt.num_quantized(first), fmt.num_quantized(end - 1)
        oldest = _oldest_visible(first, window, start)
        quantized, plain = slice(min(oldest, high), high), slice(max(oldest, low), end)
        at = torch.arange(first, end, device=device)[:, None]
        borders = _whole_groups(at, fmt.residual_window, fmt.group_tokens)
        old = torch.arange(quantized.start, quantized.stop, device=device)
        new = torch.arange(plain.start, plain.stop, device=device)
        keys = torch.cat((old, new))
        hidden = torch.cat((old >= borders, (new < borders) | (new > at)), 1)
        if window is not None:
            hidden |= keys < window.oldest(at, start)
        selected, most = None, 0
        if fmt.is_sparse:
            hidden_before = 0 if window is None else window.oldest(at, start).clamp_min(0)
            visible = (borders - hidden_before).clamp_min(0)
            selected = num_selected_tensor(visible[:, 0], fmt.value_share)
            nearest = max(max(0, fmt.num_quantized(p) - _oldest_visible(p, window, start)) for p in range(first, end))
            most = num_selected(nearest, fmt.value_share)
        mask = additive_mask(hidden, dtype)
        yield QueryChunk(slice(first, end), quantized, plain, keys, mask, selected, most)


def _oldest_visible(position: int, window: Window | None, start: int) -> int:
    """Return the first token that the window of a query at `position` shows, both counted from `start`."""
    return 0 if window is None else max(0, window.oldest(position, start))


def _whole_groups(positions: Tensor, residual_window: int, group_tokens: int) -> Tensor:
    """Return the tokens of whole groups that are older than the residual windows of queries at `positions`."""
    return (positions + (1 - residual_window)).clamp_min_(0) // group_tokens * group_tokens


def _decode_mask(
    positions: Tensor, starts: Tensor | int, keys: Tensor, hidden: Tensor, window: Window | None, dtype: torch.dtype
) -> Tensor:
    """Mask `hidden` keys [B, S] and those that a window hides -> [B, 1, 1, S]; keys: positions [S] or [B, S]."""
    if window is not None:
        hidden = hidden | (keys < window.oldest(positions, starts)[:, None])
    return additive_mask(hidden[:, None, None], dtype)


def _part(starts: Tensor | int, rows: slice) -> Tensor | int:
    return starts[rows] if isinstance(starts, Tensor) else starts


def _ranges(first: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)
