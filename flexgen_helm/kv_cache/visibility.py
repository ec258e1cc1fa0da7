"""What each query sees of a cache, and in which version: the one place that says so.

Without a cache format every query sees all earlier tokens as they were computed. With one, what a query sees depends
on absolute positions alone: tokens that are older than its residual window, as far as they fill whole groups, are
seen quantized, the others as they were computed. Sliding windows hide what is older still. So scores do not depend on
batching, schedule or prefix sharing.

Shapes: B sequences of a block, t queries, S keys, W tokens of a residual window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec
from flexgen_helm.models.attention import QueryChunk
from flexgen_helm.models.config import QUERY_CHUNK_TOKENS
from flexgen_helm.planner.constants import KEPT_MASK_BYTES
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence

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
    room = 0 if codec.window_tokens or block.sequences[0].is_shared else 1
    return Extent([codec.num_visible_units(sequence) - room for sequence in block.sequences], room)


@dataclass(frozen=True, eq=False)
class DecodePart:
    """Keys that the decoding sequences of a block read and attend to together.

    sequences: of the block, as a slice.
    num_units: of each slot, that are read from the storage; 0: the keys come from the residual window.
    masks: by sliding window (None: without one): additive [B, 1, 1, S]; None where every sequence sees all keys.
    key_positions: [B, S] where the keys are not in order.
    seen_quantized: places [B, W] of the residual window that are seen quantized; None where none can be.
    value_share: of the visible keys, the share whose values are read (sparse attention); 1: all.
    """

    sequences: slice
    num_units: int
    masks: Mapping[int | None, Tensor | None]
    key_positions: Tensor | None = None
    seen_quantized: Tensor | None = None
    value_share: float = 1.0


def decode_parts(
    block: CacheBlock, windows: Iterable[int | None], codec: Codec, device: torch.device
) -> tuple[DecodePart, ...]:
    """Divide what the block's next queries see; the first part covers all sequences.

    windows: the sliding windows of the model's layers.
    """
    positions = torch.tensor([sequence.num_computed for sequence in block.sequences])
    fmt, everyone = codec.cache_format, slice(0, len(block.sequences))
    if fmt is None:
        #  key 0 1 2 3     a sequence with 2 cached tokens + itself sees keys 0 … 2
        keys = torch.arange(int(positions.max()) + 1)
        masks = {w: _mask(_hidden(positions, keys, keys[None, :] > positions[:, None], w), device) for w in windows}
        return (DecodePart(everyone, len(keys), masks),)

    stored = torch.tensor([codec.num_stored(sequence.num_computed) for sequence in block.sequences])
    quantized = torch.tensor([fmt.num_quantized(sequence.num_computed) for sequence in block.sequences])
    places = torch.arange(codec.window_tokens)
    #  place 0 1 2 3 4     of a sequence at token 7 with W = 5: tokens 5 6 7 3 4
    ring = positions[:, None] - (positions[:, None] - places) % codec.window_tokens
    outside = (ring < stored[:, None]) | (ring < 0)
    newest = DecodePart(
        everyone,
        0,
        {w: _additive(_hidden(positions, ring, outside, w), device) for w in windows},
        ring.to(device),
        (ring < quantized[:, None]).to(device) if codec.window_copies > 1 else None,
    )
    older = torch.arange(int(stored.max()))
    if not len(older):
        return (newest,)
    beyond = older >= stored[:, None]
    older_masks = {w: _additive(_hidden(positions, older, beyond, w), device) for w in windows}
    num_units = len(older) // codec.group_tokens
    step = max(1, _DEQUANTIZED_ELEMENTS // (2 * len(older) * codec.token_elements))
    slices = [slice(first, min(first + step, everyone.stop)) for first in range(0, everyone.stop, step)]
    return (
        newest,
        *(
            DecodePart(part, num_units, {w: mask[part] for w, mask in older_masks.items()}, value_share=fmt.value_share)
            for part in slices
        ),
    )


@dataclass(frozen=True, eq=False)
class PrefixPart:
    """Tokens first … last - 1 of a shared prefix or prompt, as its readers attend to them.

    stored: they come from the storage, else from the residual window.
    borders: [t]: of stored tokens a query sees those before its border, of others those from it on; None: all.
    """

    first: int
    last: int
    stored: bool
    borders: Tensor | None = None

    def mask(self, positions: Tensor, latest: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the additive mask [t, S], None where every query sees all keys.

        It is made when it is needed: of all batches that are under way at once, masks would be as large as caches.

        positions: [t] of the queries from the prefix's first token on; latest: the largest of them.
        window: the layer's sliding window.
        """
        if window is not None and latest - self.first < window:  # it reaches back to the first key
            window = None
        if self.borders is None and window is None:
            return None
        keys = torch.arange(self.first, self.last)
        hidden = torch.zeros(len(positions), len(keys), dtype=torch.bool)
        if self.borders is not None:
            hidden |= keys >= self.borders[:, None] if self.stored else keys < self.borders[:, None]
        if window is not None:
            hidden |= positions.cpu()[:, None] - keys >= window
        return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).to(device)


def prefix_parts(prefix: Sequence, positions: SequenceOf[int], codec: Codec) -> tuple[PrefixPart, ...]:
    """Divide what queries see of a prefix.

        tokens    0 … low | low … high | low … end      low, high: the first and the last border of the queries
                  stored    stored       newest
        seen by   all       some         the others

    positions: of the queries, from the prefix's first token on.
    """
    fmt, end = codec.cache_format, prefix.prompt_len
    if fmt is None:
        return (PrefixPart(0, end, True),)
    borders = torch.tensor([fmt.num_quantized(position) for position in positions]).clamp_max(end)
    low, high = int(borders.min()), int(borders.max())
    step = max(1, _DEQUANTIZED_ELEMENTS // (2 * codec.token_elements))
    parts = [PrefixPart(first, last, True) for first, last in _ranges(0, low, step)]
    parts += [PrefixPart(first, last, True, borders) for first, last in _ranges(low, high, step)]
    if low < end:
        parts.append(PrefixPart(low, end, False, borders))
    return tuple(parts)


def query_chunks(tokens: int, window: int | None, fmt: CacheFormat, device: torch.device) -> Iterable[QueryChunk]:
    """Divide a prompt that no cache is needed for: what its tokens see quantized and as it was computed."""
    arguments = tokens, window, fmt, device
    mask_bytes = 2 * tokens * tokens  # in float32, of which half is never seen
    return _make_chunks(*arguments) if mask_bytes > KEPT_MASK_BYTES // _KEPT_LENGTHS else _kept_chunks(*arguments)


@lru_cache(maxsize=_KEPT_LENGTHS)
def _kept_chunks(tokens: int, window: int | None, fmt: CacheFormat, device: torch.device) -> tuple[QueryChunk, ...]:
    return tuple(_make_chunks(tokens, window, fmt, device))


def _make_chunks(tokens: int, window: int | None, fmt: CacheFormat, device: torch.device) -> Iterator[QueryChunk]:
    for first in range(0, tokens, QUERY_CHUNK_TOKENS):
        at = torch.arange(first, min(first + QUERY_CHUNK_TOKENS, tokens))
        borders = torch.tensor([fmt.num_quantized(position) for position in at.tolist()])
        oldest = 0 if window is None else max(0, first - window + 1)
        low, high = int(borders[0]), int(borders[-1])
        quantized, plain = slice(min(oldest, high), high), slice(max(oldest, low), int(at[-1]) + 1)
        old, new = torch.arange(quantized.start, quantized.stop), torch.arange(plain.start, plain.stop)
        keys = torch.cat((old, new))
        mask = torch.zeros(len(at), len(keys))
        certain = max(0, low - quantized.start)  # keys that all of these queries see quantized
        hidden = torch.cat((old[certain:] >= borders[:, None], (new < borders[:, None]) | (new > at[:, None])), 1)
        mask[:, certain:].masked_fill_(hidden, -math.inf)
        if window is not None:
            mask.masked_fill_(at[:, None] - keys >= window, -math.inf)
        yield QueryChunk(slice(first, int(at[-1]) + 1), quantized, plain, keys.to(device), mask.to(device))


def _hidden(positions: Tensor, keys: Tensor, hidden: Tensor, window: int | None) -> Tensor:
    """Return `hidden` [B, S] and what lies outside a sliding window; keys: positions [S] or [B, S]."""
    return hidden if window is None else hidden | (positions[:, None] - keys >= window)


def _mask(hidden: Tensor, device: torch.device) -> Tensor | None:
    return _additive(hidden, device) if hidden.any() else None


def _additive(hidden: Tensor, device: torch.device) -> Tensor:
    """Return the additive mask [B, 1, 1, S] of hidden keys [B, S]."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None, :].to(device)


def _ranges(first: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)
