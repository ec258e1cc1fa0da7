"""What each query sees of a cache, and in which version: the one place that says so.

Without a cache format every query sees all earlier tokens as they were computed. With one, what a
query sees depends on absolute positions alone: tokens that are older than its residual window, as
far as they fill whole groups, are seen quantized, the others as they were computed. Sliding windows
hide what is older still. So scores do not depend on batching, schedule or prefix sharing.

Masks are made where attention is computed, from positions that are there. What can be known from
the smallest and the largest position is known on the host, so that nothing waits for a device.

A codec's `group_tokens` are those that it stores together, a format's those that are quantized
together; they differ where tokens are quantized one by one.

Shapes: B sequences of a block, t queries, S keys, W tokens of a residual window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec
from flexgen_helm.models.attention import (
    Positions,
    QueryChunk,
    VisibleKeys,
    additive_mask,
    mask_dtype,
    num_selected,
    num_selected_tensor,
)
from flexgen_helm.models.config import Window
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock
from flexgen_helm.shared_sizes import QUERY_CHUNK_TOKENS

# Elements of keys and values that are dequantized at once: 16 MiB in float32.
_DEQUANTIZED_ELEMENTS = 4 << 20


@dataclass(frozen=True, eq=False)
class DecodePart:
    """Keys that the decoding sequences of a block read and attend to together.

    sequences: of the block, as a slice.
    num_units: of each slot (a unit is a token, or a quantized group of tokens), that are read from
        the storage; 0: the keys come from the residual window.
    visible: by sliding window (None: without one).
    seen_quantized: [B, W], tokens of the residual window that are seen quantized; None where none
        can be.
    is_sparse: only the values of selected keys are read.
    """

    sequences: slice
    num_units: int
    visible: Mapping[Window | None, VisibleKeys]
    seen_quantized: Tensor | None = None
    is_sparse: bool = False


@dataclass(frozen=True, eq=False)
class Queries:
    """The next queries of a block's sequences, where attention is computed.

    positions: [B], among their sequences' own tokens.
    starts: [B], absolute positions of their sequences' first own tokens; 0 where no window needs
        them.
    dtype: of masks.
    """

    positions: Tensor
    starts: Tensor | int
    dtype: torch.dtype

    def __getitem__(self, rows: slice) -> Queries:
        starts = self.starts[rows] if isinstance(self.starts, Tensor) else self.starts
        return Queries(self.positions[rows], starts, self.dtype)

    def mask(self, hidden: Tensor, keys: Tensor, window: Window | None) -> Tensor:
        """Mask `hidden` keys [B, S] and those that a window hides -> [B, 1, 1, S]; keys: positions
        [S] or [B, S].
        """
        if window is not None:
            hidden = hidden | (keys < window.oldest(self.positions, self.starts)[:, None])
        return additive_mask(hidden[:, None, None], self.dtype)


def decode_parts(
    block: CacheBlock, queries: Queries, windows: Iterable[Window | None], codec: Codec
) -> tuple[DecodePart, ...]:
    """Divide what the block's next queries see; the first part covers all sequences.

    windows: of the model's layers.
    """
    positions, fmt, num_sequences = queries.positions, codec.cache_format, len(block.sequences)
    if fmt is None:
        return (_plain_part(block, queries, windows),)
    index = torch.arange(codec.window_tokens, device=positions.device)
    num_stored = _whole_groups(positions, fmt.residual_window, codec.group_tokens)
    #  index 0 1 2 3 4     of a sequence at token 7 with W = 5: tokens 5 6 7 3 4
    ring = positions[:, None] - (positions[:, None] - index) % codec.window_tokens
    hidden = (ring < num_stored[:, None]) | (ring < 0)
    seen_quantized = None
    if codec.window_copies > 1:
        # A token may be seen quantized before its group is whole and stored: the window has it in
        # both versions.
        num_quantized = _whole_groups(positions, fmt.residual_window, fmt.group_tokens)
        seen_quantized = ring < num_quantized[:, None]
    newest = {
        window: VisibleKeys(queries.mask(hidden, ring, window), key_positions=ring)
        for window in windows
    }
    parts = [DecodePart(slice(0, num_sequences), 0, newest, seen_quantized)]
    # the same as `num_stored`, known on the host
    stored_on_host = [codec.num_stored(sequence.num_computed) for sequence in block.sequences]
    if not (longest := max(stored_on_host)):
        return tuple(parts)
    stored_keys = torch.arange(longest, device=positions.device)

    def visible(rows: slice, window: Window | None) -> VisibleKeys:
        """Return what the queries of some sequences see of the stored keys."""
        row_queries, num_seen = queries[rows], num_stored[rows]
        mask = row_queries.mask(stored_keys >= num_seen[:, None], stored_keys, window)
        counts = [
            max(0, count - _oldest_visible(sequence.num_computed, window, sequence.start))
            for sequence, count in zip(block.sequences[rows], stored_on_host[rows])
        ]
        if window is not None:
            oldest = window.oldest(row_queries.positions, row_queries.starts).clamp_min(0)
            num_seen = (num_seen - oldest).clamp_min(0)
        sees_none = None if min(counts) else num_seen == 0
        if not fmt.is_sparse:
            return VisibleKeys(mask, sees_none)
        selected = num_selected_tensor(num_seen, fmt.value_share)
        return VisibleKeys(mask, sees_none, selected, num_selected(max(counts), fmt.value_share))

    units = longest // codec.group_tokens
    at_once = _dequantized_at_once(longest * codec.token_elements)
    for first, end in _ranges(0, num_sequences, at_once):
        rows = slice(first, end)
        by_window = {window: visible(rows, window) for window in windows}
        parts.append(DecodePart(rows, units, by_window, is_sparse=fmt.is_sparse))
    return tuple(parts)


def _plain_part(
    block: CacheBlock, queries: Queries, windows: Iterable[Window | None]
) -> DecodePart:
    #  key 0 1 2 3     a sequence with 2 cached tokens + itself sees keys 0 … 2
    counts = [sequence.num_computed for sequence in block.sequences]
    keys, plain = torch.arange(max(counts) + 1, device=queries.positions.device), {}
    for window in windows:
        oldest = max(_oldest_visible(s.num_computed, window, s.start) for s in block.sequences)
        sees_all = min(counts) == max(counts) and oldest <= 0
        hidden = keys > queries.positions[:, None]
        plain[window] = VisibleKeys(None if sees_all else queries.mask(hidden, keys, window))
    return DecodePart(slice(0, len(counts)), len(keys), plain)


def whole_part(block: CacheBlock) -> DecodePart:
    """Return all that the block's next queries see of a plain cache, without masks, for compiled
    loops, which mask by themselves.
    """
    longest = max(sequence.num_computed for sequence in block.sequences)
    return DecodePart(slice(0, len(block.sequences)), longest + 1, {})


@dataclass(frozen=True, eq=False)
class PrefixPart:
    """Tokens first … last - 1 of a shared prefix or prompt, as its readers attend to them.

    start: absolute position of the prefix's first token.
    stored: they come from the storage, else from the residual window.
    span: the smallest and the largest position of the queries, counted from the prefix's first
        token.
    borders: the format that says which of them a query sees: of stored tokens those that it
        quantizes for the query, of others those that it does not. None: a query sees all.
    """

    start: int
    first: int
    last: int
    stored: bool
    span: tuple[int, int]
    borders: CacheFormat | None = None

    def visible(self, positions: Tensor, window: Window | None, dtype: torch.dtype) -> VisibleKeys:
        """Return what queries at `positions` [t] of the span see.

        Masks are made when they are needed: of all batches that are under way, they would be as
        large as caches.

        positions: where attention is computed.
        window: the layer's.
        dtype: of masks.
        """
        if window is not None and window.oldest(self.span[1], self.start) <= self.first:
            window = None  # it hides no key, even from the last query
        if self.borders is None and window is None:
            return VisibleKeys()
        # A query sees keys lower … upper - 1.
        earliest, latest = self.span
        lower = (
            torch.zeros_like(positions) if window is None else window.oldest(positions, self.start)
        )
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


def prefix_parts(
    start: int, end: int, positions: Sequence[int], codec: Codec
) -> tuple[PrefixPart, ...]:
    """Divide what queries see of a prefix of `end` tokens.

        tokens    0 … low | low … high | low … end    low, high: the queries' first and last border
                  stored    stored       newest
        seen by   all       some         the others

    start: absolute position of its first token.
    positions: of the queries, from the prefix's first token on.
    """
    fmt, span = codec.cache_format, (min(positions), max(positions))
    if fmt is None:
        return (PrefixPart(start, 0, end, True, span),)
    low, high = (min(end, fmt.num_quantized(position)) for position in span)
    step = (
        max(1, _dequantized_at_once(codec.token_elements) // codec.group_tokens)
        * codec.group_tokens
    )
    parts = [PrefixPart(start, first, last, True, span) for first, last in _ranges(0, low, step)]
    parts += [
        PrefixPart(start, first, last, True, span, fmt) for first, last in _ranges(low, high, step)
    ]
    if low < end:
        parts.append(PrefixPart(start, low, end, False, span, fmt))
    return tuple(parts)


@lru_cache(maxsize=16)
def _token_table(fmt: CacheFormat, tokens: int, device: torch.device) -> Tensor:
    """Return positions of tokens, and of the first queries that see them quantized, [2, tokens].

    Kept, because masks that are made from it take few launches in each layer.
    """
    positions = torch.arange(tokens, device=device)
    group_ends = (positions // fmt.group_tokens + 1) * fmt.group_tokens
    return torch.stack((positions, group_ends + fmt.residual_window - 1))


def query_chunks(
    q: Tensor, start: int, window: Window | None, fmt: CacheFormat
) -> Iterator[QueryChunk]:
    """Divide a prompt that no cache is needed for into chunks of queries, and what each of them
    sees into tokens that are seen quantized and tokens as they were computed.

    q: [tokens, …].
    start: absolute position of its first token.
    """
    num_tokens = len(q)
    positions, quantized_from = _token_table(fmt, 1 << num_tokens.bit_length(), q.device)
    for first in range(0, num_tokens, QUERY_CHUNK_TOKENS):
        end = min(first + QUERY_CHUNK_TOKENS, num_tokens)
        # The first query sees tokens before `low` quantized, the last one those before `high`.
        low, high = fmt.num_quantized(first), fmt.num_quantized(end - 1)
        oldest = _oldest_visible(first, window, start)
        quantized, plain = slice(min(oldest, high), high), slice(max(oldest, low), end)
        queries, keys = positions[first:end, None], (positions[quantized], positions[plain])
        hidden_plain = (queries < keys[1]) | (queries >= quantized_from[plain])
        hidden = torch.cat((queries < quantized_from[quantized], hidden_plain), 1)
        if window is not None:
            hidden |= torch.cat(keys) < window.oldest(queries, start)
        selected, max_selected = None, 0
        if fmt.is_sparse:
            borders = _whole_groups(queries, fmt.residual_window, fmt.group_tokens)
            hidden_before = 0 if window is None else window.oldest(queries, start).clamp_min(0)
            selected = num_selected_tensor(
                (borders - hidden_before).clamp_min(0)[:, 0], fmt.value_share
            )
            most_quantized = max(
                max(0, fmt.num_quantized(position) - _oldest_visible(position, window, start))
                for position in range(first, end)
            )
            max_selected = num_selected(most_quantized, fmt.value_share)
        mask = additive_mask(hidden, mask_dtype(q.device, q.dtype))
        yield QueryChunk(
            slice(first, end),
            quantized,
            plain,
            mask,
            positions=Positions(queries[:, 0], keys),
            num_selected=selected,
            max_selected=max_selected,
        )


def _oldest_visible(position: int, window: Window | None, start: int) -> int:
    """Return the first token that the window of a query at `position` shows.

    position: like the result counted from the sequence's own first token, whose absolute position
        is `start`.
    """
    return 0 if window is None else max(0, window.oldest(position, start))


def _whole_groups(positions: Tensor, residual_window: int, group_tokens: int) -> Tensor:
    """Return the tokens of whole groups that are older than the residual windows of queries at
    `positions`.
    """
    return (positions + (1 - residual_window)).clamp_min_(0) // group_tokens * group_tokens


def _dequantized_at_once(elements: int) -> int:
    """Return how many pairs of keys and values, of `elements` elements each, are dequantized at
    once.
    """
    return max(1, _DEQUANTIZED_ELEMENTS // (2 * elements))


def _ranges(first: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)
