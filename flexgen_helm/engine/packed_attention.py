"""Attention by the compiled loop to caches whose older keys are quantized in whole blocks of keys.

A query sees the keys below its border as quantizing leaves them, and the others as they were
computed. Borders and ends of shared prefixes are multiples of a block of keys, so each step of a
token goes on from what the one before it left.

    step              keys                                      tokens of the batch
    part of a prefix  quantized, or as they were computed       those that see it so
    prompts           of their own sequences, both versions     all of prompts
    rows of a block   of their own caches, both versions        one of each sequence
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count, groupby

from flexgen_helm.kernels.attention import BLOCK_KEYS, SegmentTable, TokenGroup
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.kv_cache.codec import Codec, KeysValues
from flexgen_helm.kv_cache.visibility import DecodePart, PrefixPart
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence

# Reads a layer's keys and values [Hk, S, D] of a step's segments; given those of the batch's tokens
# [T, Hk, D], and of each prompt's older tokens as quantizing leaves them.
ReadSegments = Callable[[KVCache, int, KeysValues, SequenceOf[KeysValues]], list[KeysValues]]


@dataclass(frozen=True, eq=False)
class PackedStep:
    """Keys that some tokens of a batch attend to in one call of the loop.

    tokens: of the batch, which the table numbers from 0 on.
    block: of the caches that are read; None where none is.
    """

    tokens: slice
    table: SegmentTable
    read: ReadSegments
    block: CacheBlock | None = None


def has_packed_steps(fmt: CacheFormat) -> bool:
    """Return whether the compiled loop attends to caches of a format."""
    return not fmt.is_sparse and fmt.group_tokens % BLOCK_KEYS == 0


def prefix_step(
    prefix: Sequence, part: PrefixPart, tokens: SequenceOf[int], positions: SequenceOf[int]
) -> PackedStep:
    """Attend to a part of a shared prefix; tokens: of the batch, that see the prefix."""
    fmt, first, end = part.borders, prefix.start + part.first, prefix.start + part.last
    groups = []
    borders = [end if fmt is None else fmt.num_quantized(positions[token]) for token in tokens]
    for (_, border), run in groupby(
        zip(tokens, borders, count()), lambda at: (at[0] - at[2], at[1])
    ):
        begin, until = (first, min(end, border)) if part.stored else (max(first, border), end)
        if begin < until:
            seeing = [token for token, *_ in run]
            groups.append(TokenGroup(seeing[0], len(seeing), (0,), begin=begin, end=until))
    table = SegmentTable.of(groups, positions, [(end - first, first)])
    block, slot = prefix.seat
    return PackedStep(
        slice(None),
        table,
        lambda cache, layer, *_: [cache.read_prefix(block, slot, layer, part)],
        block,
    )


def prompt_step(
    prompts: SequenceOf[tuple[Sequence, slice]], positions: SequenceOf[int], fmt: CacheFormat
) -> PackedStep:
    """Attend to the prompts themselves; prompts: with their tokens of the batch."""
    groups, lengths = [], []
    # number of a prompt, whether as computed, tokens of it
    pieces: list[tuple[int, bool, slice]] = []
    for number, (seq, tokens) in enumerate(prompts):
        for border, run in groupby(range(tokens.stop - tokens.start), fmt.num_quantized):
            queries, begin = [*run], len(pieces)
            seen = [(False, slice(0, border))] * (border > 0) + [
                (True, slice(border, queries[-1] + 1))
            ]
            pieces += [(number, is_plain, keys) for is_plain, keys in seen]
            lengths += [(keys.stop - keys.start, seq.start + keys.start) for _, keys in seen]
            shared = range(begin, len(pieces))
            groups.append(
                TokenGroup(tokens.start + queries[0], len(queries), shared, begin=seq.start)
            )

    def read(
        _: KVCache, __: int, new: KeysValues, older: SequenceOf[KeysValues]
    ) -> list[KeysValues]:
        k, v = new
        plain = [(k[tokens], v[tokens]) for _, tokens in prompts]
        chosen = ((plain if is_plain else older)[number] for number, is_plain, _ in pieces)
        return [
            (x[keys].transpose(0, 1), y[keys].transpose(0, 1))
            for (x, y), (*_, keys) in zip(chosen, pieces)
        ]

    return PackedStep(slice(None), SegmentTable.of(groups, positions, lengths), read)


def block_step(
    block: CacheBlock,
    first: int,
    positions: SequenceOf[int],
    parts: tuple[DecodePart, DecodePart],
    codec: Codec,
) -> PackedStep:
    """Attend to the caches of some of a block's sequences.

    first: the block's first token of the batch.
    parts: the residual window, and what is stored of them; twice the window where nothing is.
    """
    window, part = parts
    rows, ring, groups, lengths = part.sequences, codec.window_tokens, [], []
    # whether in the window, the row there or in the part, keys
    pieces: list[tuple[bool, int, slice]] = []
    for row, seq in enumerate(block.sequences[rows]):
        at, end, begin = codec.num_stored(seq.num_computed), seq.num_computed + 1, len(pieces)
        if at:
            pieces.append((False, row, slice(0, at)))
            lengths.append((at, seq.start))
        while at < end:  # the window is a ring: token p lies at p mod its length
            size = min(end - at, ring - at % ring)
            pieces.append((True, rows.start + row, slice(at % ring, at % ring + size)))
            lengths.append((size, seq.start + at))
            at += size
        groups.append(TokenGroup(row, 1, range(begin, len(pieces)), begin=seq.start))
    tokens = slice(first + rows.start, first + rows.stop)

    def read(cache: KVCache, layer: int, *_: object) -> list[KeysValues]:
        newest = older = cache.read(block, layer, window)
        if part is not window:
            older = cache.read(block, layer, part)
        chosen = ((newest if is_newest else older, row, keys) for is_newest, row, keys in pieces)
        return [(k[row, :, keys], v[row, :, keys]) for (k, v), row, keys in chosen]

    return PackedStep(tokens, SegmentTable.of(groups, positions[tokens], lengths), read, block)
