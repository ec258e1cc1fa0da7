"""Attention of a batch's tokens on the host, over all that they see.

A query sees segments of keys: shared prefixes, the prompt that it is part of, or its sequence's
cache. All segments of a tile of queries are taken one after the other with a running maximum and
sum of the softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), so scores never leave the
caches of the processor, and no partial results are merged.

Shapes: T tokens, Hq query heads, Hk key heads, S keys, D elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.team import KINDS, empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import Loops

Integers = np.ndarray[Any, np.dtype[np.int64]]

_FLOAT_BYTES = 4
# Keys of a block, whose scores stay in the first cache. Blocks begin at its multiples, whatever
# segments they lie in: so a query's sums have one order.
BLOCK_KEYS = 64
# Elements of keys and values, read by one tile of queries, that occupy a thread for longer than it
# takes to wake.
_THREAD_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens of a batch that see the same shared segments, and behind them keys of
    their sequence.

    first, count: tokens of the batch.
    shared: numbers of the segments, each of which begins where the one before it ends.
    cache: slot of their sequence's cache, and the position of its first key; None: no token sees a
        cache.
    is_prompt: they see those before them in the group instead.
    begin, end: key positions that this attention takes, whole blocks; end 0: all from `begin` on.
        What a group begins is gone on with by one that begins where it ends (`attend_segments`).
    """

    first: int
    count: int
    shared: Sequence[int] = ()
    cache: tuple[int, int] | None = None
    is_prompt: bool = False
    begin: int = 0
    end: int = 0


_SHARED, _PROMPT, _CACHE = range(3)


class Segments(NamedTuple):
    """Where keys and values of a table's segments are.

    rows: [n, 8], with addresses in `operands`, which are kept for as long.
    """

    table: SegmentTable
    rows: Integers
    key_heads: int
    operands: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """What the tokens of a batch see, as the compiled function reads it; the same for all layers.

    positions: [T].
    jobs: [groups, 6]; segments: [n, 8] without addresses (`attention_loop.attend`).
    kinds: [n], whether a segment is shared, of a prompt, or a cache.
    source: [n], the number of a shared segment, the first token of a prompt, or the slot of a
        cache.
    """

    positions: Integers
    jobs: Integers
    segments: Integers
    kinds: Integers
    source: Integers

    @classmethod
    def of(
        cls,
        groups: Iterable[TokenGroup],
        positions: Sequence[int] | Integers,
        shared: Sequence[tuple[int, int]] = (),
    ) -> SegmentTable:
        """shared: length and first position of the shared segments."""
        jobs: list[tuple[int, ...]] = []
        rows: list[tuple[int, ...]] = []  # length, first position, kind, source
        for group in groups:
            first, position = len(rows), int(positions[group.first])
            rows += [(*shared[number], _SHARED, number) for number in group.shared]
            if group.is_prompt:
                rows.append((group.count, position, _PROMPT, group.first))
            if group.cache is not None:
                slot, start = group.cache
                rows.append((position + 1 - start, start, _CACHE, slot))
            jobs.append((group.first, group.count, first, len(rows), group.begin, group.end))
        table = np.array(rows, np.int64).reshape(-1, 4)
        segments = np.concatenate((np.zeros((len(rows), 6), np.int64), table[:, :2]), 1)
        return cls(
            np.array(positions, np.int64),
            np.array(jobs, np.int64).reshape(-1, 6),
            segments,
            *table.T[2:],
        )

    @cached_property
    def keys(self) -> Integers:
        """Keys that each job takes."""
        first, last, begin, end = self.jobs.T[2:]
        until = self.segments[last - 1, 6:].sum(1)
        return np.where(end > 0, np.minimum(until, end), until) - np.maximum(
            self.segments[first, 7], begin
        )

    def at(
        self,
        shared: Sequence[tuple[Tensor, Tensor]] = (),
        batch: tuple[Tensor, Tensor] | None = None,
        caches: tuple[Tensor, Tensor] | None = None,
    ) -> Segments:
        """Fill in where keys and values are, all of one dtype.

        shared: of the shared segments, [Hk, S, D].
        batch: of the batch's tokens, [T, Hk, D]; None if no token sees another of them.
        caches: [slots, Hk, S, D]; None if no token sees a cache.
        """
        operands = (*chain(*shared), *(batch or ()), *(caches or ()))
        assert all(
            x.device.type == "cpu" and x.stride(-1) == 1 and x.dtype == operands[0].dtype
            for x in operands
        )
        rows, key_heads = self.segments.copy(), 0
        if shared:
            addresses = np.array(
                [_addresses(keys, values, 1, 0) for keys, values in shared], np.int64
            )
            is_shared = self.kinds == _SHARED
            rows[is_shared, :6] = addresses[self.source[is_shared]]
            key_heads = shared[0][0].shape[0]
        for kind, pair, row_axis, head_axis in ((_PROMPT, batch, 0, 1), (_CACHE, caches, 2, 1)):
            if pair is None:
                continue
            chosen = self.kinds == kind
            first = self.source[chosen]
            if kind == _CACHE:
                assert (
                    first.max() < len(pair[0])
                    and self.segments[chosen, 6].max() <= pair[0].shape[2]
                )
            rows[chosen, :6] = _addresses(*pair, row_axis, head_axis)
            for column, x in enumerate(pair):
                rows[chosen, column] += first * (x.element_size() * x.stride(0))
            key_heads = pair[0].shape[head_axis]
        return Segments(self, rows, key_heads, operands)


def _addresses(k: Tensor, v: Tensor, row: int, head: int) -> list[int]:
    """The first six integers of a segment; row, head: axes."""
    strides = [x.element_size() * x.stride(axis) for axis in (row, head) for x in (k, v)]
    return [k.data_ptr(), v.data_ptr(), *strides]


def can_attend(*operands: Tensor) -> bool:
    """Return whether `attend_segments` takes such queries, keys and values in a loop."""
    suit = all(
        x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 for x in operands
    )
    return suit and loops() is not None


def can_attend_caches(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend_segments` takes keys and values of caches in `dtype` on a device in a
    loop.
    """
    if device.type != "cpu" or dtype not in KINDS or (module := loops()) is None:
        return False
    return bool(module.CONVERTS_HALVES or dtype != torch.float16)


class Begun(NamedTuple):
    """Results [T, Hq, D] and log-sum-exps [T, Hq] of attention that has more keys to come.

    state: [T, Hq, D + 1] in float64: outputs before the division, and sums of weights.
    """

    out: Tensor
    lse: Tensor
    state: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> Begun:
        """For queries [T, Hq, D]."""
        state = torch.empty((*q.shape[:2], q.shape[2] + 1), dtype=torch.float64, device="cpu")
        return cls(empty(q.shape), empty(q.shape[:2]), state)


def attend_segments(
    q: Tensor,
    segments: Segments,
    scale: float,
    window: tuple[int, bool] | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    begun: Begun | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] -> output [T, Hq, D], log-sum-exp [T, Hq].

    segments: of tokens that their table leaves out, nothing is written.
    window: a token sees so many positions, itself included, or those of its own chunk of so many;
        None: all.
    slopes: [Hq] of ALiBi, in float32, neighbours.
    begun: what groups with a `begin` go on from, and where all results are written; None: new
        memory.
    """
    (_, heads, dim), (table, rows, key_heads, operands) = q.shape, segments
    assert q.dtype == torch.float32 and q.device.type == "cpu" and q.stride(-1) == 1
    if (module := loops()) is None:
        return _attend_plainly(q, segments, Way(scale, window, softcap, slopes))
    group = heads // key_heads
    out, lse, state = begun or Begun.empty(q)
    assert lse.is_contiguous() and state.is_contiguous()
    tiles = key_heads * (-(-table.jobs[:, 1] * group // module.TILE_QUERIES))
    most_threads = min(int(tiles.sum()), int(tiles @ table.keys) * dim // _THREAD_ELEMENTS)
    threads, floats = team_size(most_threads), module.scratch_floats(dim)
    memory, factors = empty([threads * floats]), _scale_and_cap(scale, softcap)
    window_tokens, is_chunked = window or (0, False)
    addresses = [table.jobs.ctypes.data, len(table.jobs), rows.ctypes.data]
    for x in (q, out):
        addresses += [x.data_ptr(), _FLOAT_BYTES * x.stride(0), _FLOAT_BYTES * x.stride(1)]
    addresses += [lse.data_ptr(), state.data_ptr(), key_heads, group, dim, window_tokens]
    addresses += [
        factors.ctypes.data,
        table.positions.ctypes.data,
        0 if slopes is None else slopes.data_ptr(),
    ]
    addresses += [is_chunked, KINDS[operands[0].dtype], memory.data_ptr(), _FLOAT_BYTES * floats]
    run_on_threads(module.attend.address, addresses, threads)
    return out, lse


@cache
def _scale_and_cap(scale: float, softcap: float | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return both where the compiled function reads them, for as long as the process runs; no soft
    cap is 0.
    """
    return np.array([scale, softcap or 0.0], np.float32)


class Way(NamedTuple):
    """How scores are computed: see `attend_segments`."""

    scale: float
    window: tuple[int, bool] | None
    softcap: float | None
    slopes: Tensor | None


def _attend_plainly(q: Tensor, segments: Segments, way: Way) -> tuple[Tensor, Tensor]:
    """The formula, one group of tokens after the other, over all keys that the group sees wherever
    it begins.
    """
    table = segments.table
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:2], -math.inf)
    for first, count, begin, end, *_ in table.jobs.tolist():
        tokens = slice(first, first + count)
        seen = [_keys_and_values(segments, number) for number in range(begin, end)]
        k, v = (
            torch.cat(x, 1).repeat_interleave(q.shape[1] // segments.key_heads, 0)
            for x in zip(*seen)
        )
        numbers = [
            np.arange(length) + start for length, start in table.segments[begin:end, 6:].tolist()
        ]
        at, keys = (
            torch.tensor(table.positions[tokens])[:, None],
            torch.tensor(np.concatenate(numbers)),
        )
        scores = q[tokens].transpose(0, 1) @ k.transpose(1, 2) * way.scale
        scores = scores if way.softcap is None else way.softcap * torch.tanh(scores / way.softcap)
        scores = scores if way.slopes is None else scores + way.slopes[:, None, None] * (keys - at)
        hidden = keys > at
        if way.window is not None:
            size, is_chunked = way.window
            hidden |= keys < (at // size * size if is_chunked else at + 1 - size)
        scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        out[tokens], lse[tokens] = (weights @ v).transpose(0, 1), torch.logsumexp(scores, -1).t()
    return out, lse


def _keys_and_values(segments: Segments, number: int) -> list[Tensor]:
    """Keys and values [Hk, S, D] of a segment, in float32."""
    table, operands = segments.table, segments.operands
    kind, source, length = (
        int(table.kinds[number]),
        int(table.source[number]),
        int(table.segments[number, 6]),
    )
    if kind == _CACHE:
        pair = [x[source] for x in operands[-2:]]
    elif kind == _PROMPT:
        pair = [x[source : source + length].transpose(0, 1) for x in operands[-2:]]
    else:
        pair = list(operands[2 * source : 2 * source + 2])
    return [x[:, :length].float() for x in pair]


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Prompts, one of them behind a shared prefix, and tokens over caches, one of them in two
    steps.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    dim, before, counts = 20, 67, (70, 9)
    q, prefix, (k, v) = (
        normal(sum(counts), 4, dim),
        normal(2, 2, before, dim),
        normal(2, sum(counts), 2, dim),
    )
    prompts = (
        TokenGroup(0, counts[0], (0,), is_prompt=True),
        TokenGroup(counts[0], counts[1], is_prompt=True),
    )
    positions, shared = [*range(before, before + counts[0]), *range(counts[1])], [(before, 0)]
    segments = SegmentTable.of(prompts, positions, shared).at([(prefix[0], prefix[1])], (k, v))
    ways = (
        Way(0.3, None, None, None),
        Way(0.3, (50, False), 2.0, None),
        Way(0.3, (50, True), None, normal(4)),
    )
    for way in ways:
        yield lambda way=way: _joined(*attend_segments(q, segments, *way))  # type: ignore[misc]
    positions = [4, before + 56]
    first = SegmentTable.of([TokenGroup(1, 1, (0,), end=64)], positions, shared)
    rest = SegmentTable.of(
        [TokenGroup(0, 1, (), (0, 0)), TokenGroup(1, 1, (0,), (1, before), begin=64)],
        positions,
        shared,
    )
    alone = SegmentTable.of([TokenGroup(row, 1, (), (row, 0)) for row in range(2)], [4, 56])
    for dtype in KINDS:
        if not can_attend_caches(q.device, dtype):
            continue
        caches, pair = normal(2, 2, 2, 57, dim).to(dtype), prefix.to(dtype)
        cached = caches[0], caches[1]
        whole, begin, finish = (
            alone.at(caches=cached),
            first.at([(pair[0], pair[1])]),
            rest.at([(pair[0], pair[1])], None, cached),
        )
        for way in ways:
            yield lambda way=way, whole=whole: _joined(*attend_segments(q[:2], whole, *way))  # type: ignore[misc]

            def in_two_steps(
                way: Way = way, begin: Segments = begin, finish: Segments = finish
            ) -> Tensor:
                begun = Begun.empty(q[:2])
                attend_segments(q[:2], begin, *way, begun)
                return _joined(*attend_segments(q[:2], finish, *way, begun))

            yield in_two_steps


def _joined(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat((out, lse[..., None]), -1)


loops = Loops("attention", "flexgen_helm.kernels.attention_loop", _examples, tolerance=1e-4)
