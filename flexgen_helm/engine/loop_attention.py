"""Attention of a batch on the host by the compiled loop, as one list of steps.

A step is one call of the loop, in which tokens attend to segments of keys of one or more sources. A
token goes on from what the step before has left, which whole blocks of keys make exact. Of plain
caches each token sees all keys before it:

    step              keys                                      tokens of the batch
    first             whole blocks of shared prefixes; prompts  those that share; all of prompts
    of a block        the rest of prefixes, its caches          one of each sequence

In quantized caches a query sees the keys below its border as quantizing leaves them, and the others
as they were computed. Borders and ends of shared prefixes are multiples of a block of keys. One
part after the other is read, so few keys are dequantized at once:

    part of a prefix  quantized, or as they were computed       those that see it so
    prompts           of their sequences, both versions         all of prompts
    rows of a block   of their caches, both versions            one of each sequence
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.engine.attention_metadata import (
    AttentionBackend,
    AttentionMetadata,
    Decoding,
    LayerAttention,
    SharedPrefix,
    store_prompts,
)
from flexgen_helm.kernels.attention import (
    BLOCK_KEYS,
    AttentionState,
    Segment,
    SegmentTable,
    TokenGroup,
    attend_segments,
    can_attend_caches,
)
from flexgen_helm.kv_cache.codec import Codec, KeysValues
from flexgen_helm.kv_cache.visibility import (
    DecodePart,
    PrefixPart,
    Queries,
    decode_parts,
    prefix_parts,
    whole_part,
)
from flexgen_helm.models.attention import PartialAttention
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence


@dataclass(frozen=True, eq=False)
class KeySource:
    """Keys and values that steps read.

    read: those [slots, Hk, S, D] of a layer; given those of the batch's tokens, and of each
        prompt's older tokens as quantizing leaves them.
    block: of the caches that are read; None where none is.
    """

    read: Callable[[LayerAttention, KeysValues, SequenceOf[KeysValues]], KeysValues]
    block: CacheBlock | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the loop.

    tokens: of the batch, which the table numbers from 0 on.
    stores: whose new tokens are stored before.
    read_last: cache blocks that no later step reads.
    """

    tokens: slice
    table: SegmentTable
    stores: Decoding | None = None
    read_last: list[CacheBlock] = field(default_factory=list)


def has_packed_steps(fmt: CacheFormat) -> bool:
    """Return whether the compiled loop attends to caches of a format."""
    return not fmt.is_sparse and fmt.group_tokens % BLOCK_KEYS == 0


def attends_in_a_loop(codec: Codec, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one loop attends to all that a batch with queries in `dtype` sees."""
    fmt = codec.cache_format
    has_loop = dtype == torch.float32 and can_attend_caches(device, dtype)
    return has_loop and (fmt is None or has_packed_steps(fmt))


class LoopAttention(AttentionBackend):
    """The host computes, in float32; see the top of this file."""

    def __init__(self, metadata: AttentionMetadata, codec: Codec) -> None:
        self.metadata = metadata
        make = _plain_steps if codec.cache_format is None else _packed_steps
        self._steps = [*make(metadata, codec)]
        seen: set[CacheBlock | None] = {None}
        for step in reversed(self._steps):
            blocks = {source.block for source in step.table.sources} - seen
            step.read_last.extend(block for block in blocks if block is not None)
            seen |= blocks

    def attend(self, at: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        state, cache, options = AttentionState.empty(q), at.cache, at.score_options
        # a prefix is read in the batch that computes it
        older = [seen for _, seen in store_prompts(self.metadata, at, k, v)]
        for step in self._steps:
            tokens = step.tokens
            if (new := step.stores) is not None:
                cache.append(new.block, at.layer, new.target, k[new.tokens], v[new.tokens])
            operands = [source.read(at, (k, v), older) for source in step.table.sources]
            part = AttentionState(*(x[tokens] for x in state))
            attend_segments(q[tokens], step.table.with_addresses(operands), options, part)
            for block in step.read_last:
                cache.done(block, at.layer)
        return state.out, state.lse


_NEW = KeySource(lambda _, new, __: _by_head(*new))


def _prefix(prefix: Sequence, part: PrefixPart) -> KeySource:
    block, slot = prefix.seat

    def read(at: LayerAttention, *_: Any) -> KeysValues:
        k, v = at.cache.read_prefix(block, slot, at.layer, part)
        return k[None], v[None]

    return KeySource(read, block)


def _cached(block: CacheBlock, part: DecodePart) -> KeySource:
    return KeySource(lambda at, *_: at.cache.read(block, at.layer, part), block)


def _by_head(k: Tensor, v: Tensor) -> KeysValues:
    """Keys and values of tokens [T, Hk, D] -> [1, Hk, T, D]."""
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _plain_steps(metadata: AttentionMetadata, codec: Codec) -> Iterator[Step]:
    positions, shared = metadata.positions.on_host.tolist(), {}
    for prefix in (at.prefix for at in metadata.prefixes):
        (part,) = prefix_parts(prefix.start, prefix.prompt_len, [0], codec)
        shared[prefix] = Segment(_prefix(prefix, part), prefix.start, prefix.prompt_len)

    def before(sequence: Sequence) -> list[Segment]:
        return [shared[prefix] for prefix in sequence.prefixes]

    groups = []
    for prompt in metadata.prompts:
        first, size = prompt.tokens.start, prompt.tokens.stop - prompt.tokens.start
        new = Segment(_NEW, positions[first], size, first=first)
        groups.append(TokenGroup(first, size, [*before(prompt.sequence), new]))
    for decoding in metadata.decodes:
        first = decoding.tokens.start
        for _, alike in groupby(decoding.block.sequences, lambda sequence: sequence.prefixes):
            sequence, *more = alike
            if end := _whole_blocks(sequence):
                groups.append(TokenGroup(first, 1 + len(more), before(sequence), end=end))
            first += 1 + len(more)
    if groups:
        yield Step(slice(None), SegmentTable.of(groups, positions))
    for decoding in metadata.decodes:
        source, groups = _cached(decoding.block, whole_part(decoding.block)), []
        for row, seq in enumerate(decoding.block.sequences):
            cached = Segment(source, seq.start, seq.num_computed + 1, row)
            groups.append(TokenGroup(row, 1, [*before(seq), cached], begin=_whole_blocks(seq)))
        table = SegmentTable.of(groups, positions[decoding.tokens])
        yield Step(decoding.tokens, table, decoding)


def _whole_blocks(sequence: Sequence) -> int:
    """Return the positions of a sequence's shared prefixes that whole blocks of keys have."""
    return sequence.start // BLOCK_KEYS * BLOCK_KEYS


def _packed_steps(metadata: AttentionMetadata, codec: Codec) -> Iterator[Step]:
    positions, fmt = metadata.positions.on_host.tolist(), codec.cache_format
    assert fmt is not None
    for shared in metadata.prefixes:
        prefix = shared.prefix
        for part in prefix_parts(prefix.start, prefix.prompt_len, shared.positions.numbers, codec):
            groups = _prefix_groups(shared, part, positions)
            yield Step(slice(None), SegmentTable.of(groups, positions))
    if metadata.prompts:
        yield Step(slice(None), SegmentTable.of(_prompt_groups(metadata, fmt), positions))
    for decoding in metadata.decodes:
        queries = Queries(decoding.positions, 0, torch.float32)
        window, *stored = decode_parts(decoding.block, queries, (), codec)
        for number, rest in enumerate(stored or [window]):
            first, rows = decoding.tokens.start, rest.sequences
            tokens = slice(first + rows.start, first + rows.stop)
            groups = _block_groups(decoding.block, window, rest, codec)
            table = SegmentTable.of(groups, positions[tokens])
            yield Step(tokens, table, None if number else decoding)


def _prefix_groups(
    shared: SharedPrefix, part: PrefixPart, positions: SequenceOf[int]
) -> Iterator[TokenGroup]:
    """Runs of tokens that see as much of a part of a prefix."""
    prefix, fmt, tokens = shared.prefix, part.borders, shared.tokens.numbers
    first, end = prefix.start + part.first, prefix.start + part.last
    segment = Segment(_prefix(prefix, part), first, end - first)
    borders = [end if fmt is None else fmt.num_quantized(positions[token]) for token in tokens]
    for (_, border), run in groupby(
        zip(tokens, borders, count()), lambda at: (at[0] - at[2], at[1])
    ):
        begin, until = (first, min(end, border)) if part.stored else (max(first, border), end)
        if begin < until:
            seeing = [token for token, *_ in run]
            yield TokenGroup(seeing[0], len(seeing), [segment], begin, until)


def _prompt_groups(metadata: AttentionMetadata, fmt: CacheFormat) -> Iterator[TokenGroup]:
    """Runs of a prompt's tokens with one border."""
    for number, prompt in enumerate(metadata.prompts):
        first, start = prompt.tokens.start, prompt.sequence.start
        older = KeySource(lambda _, __, older, number=number: _by_head(*older[number]))  # type: ignore[misc]
        for border, run in groupby(range(prompt.tokens.stop - first), fmt.num_quantized):
            queries = [*run]
            size = queries[-1] + 1 - border
            segments = [Segment(older, start, border)] if border else []
            segments.append(Segment(_NEW, start + border, size, first=first + border))
            yield TokenGroup(first + queries[0], len(queries), segments, begin=start)


def _block_groups(
    block: CacheBlock, window: DecodePart, part: DecodePart, codec: Codec
) -> Iterator[TokenGroup]:
    """Some sequences of a block over their caches.

    window: the residual window.
    part: what is stored of them; the window again where nothing is.
    """
    newest, older, ring = _cached(block, window), _cached(block, part), codec.window_tokens
    for row, seq in enumerate(block.sequences[part.sequences]):
        at, end = codec.num_stored(seq.num_computed), seq.num_computed + 1
        segments = [Segment(older, seq.start, at, row)] if at else []
        while at < end:  # the window is a ring: token p lies at p mod its length
            size = min(end - at, ring - at % ring)
            slot = part.sequences.start + row
            segments.append(Segment(newest, seq.start + at, size, slot, at % ring))
            at += size
        yield TokenGroup(row, 1, segments, begin=seq.start)
