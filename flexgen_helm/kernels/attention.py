"""Attention of a batch's tokens on the host, over all that they see.

A query sees segments of keys: shared prefixes, the prompt that it is part of, or its sequence's cache. All segments of
a tile of queries are taken one after the other with a running maximum and sum of the softmax (Milakov and Gimelshein,
2018; Dao et al., 2022), so scores never leave the caches of the processor, and no partial results are merged.

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
# Elements of keys and values, read by one tile of queries, that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens of a batch that see the same shared segments.

    first, count: tokens of the batch.
    shared: numbers of the segments.
    is_prompt: they also see those before them in the group.
    follows: they have results over earlier keys, which this attention goes on from.
    """

    first: int
    count: int
    shared: Sequence[int]
    is_prompt: bool = True
    follows: bool = False


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
    jobs: [groups, 5]; segments: [n, 8] without addresses (`attention_loop.attend`).
    source: [n], the first token of a prompt's segment, or the number of a shared one.
    is_prompt: [n], whose keys are those of the batch's tokens.
    """

    positions: Integers
    jobs: Integers
    segments: Integers
    source: Integers
    is_prompt: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def of(
        cls, groups: Iterable[TokenGroup], positions: Sequence[int] | Integers, shared: Sequence[tuple[int, int]]
    ) -> SegmentTable:
        """shared: length and first position of the shared segments."""
        jobs: list[tuple[int, ...]] = []
        segments: list[list[int]] = []
        source: list[int] = []
        prompts: list[bool] = []
        for group in groups:
            first = len(segments)
            seen = [(*shared[number], number, False) for number in group.shared]
            if group.is_prompt:
                seen.append((group.count, int(positions[group.first]), group.first, True))
            for length, position, number, is_prompt in seen:
                segments.append([0] * 6 + [length, position])
                source.append(number)
                prompts.append(is_prompt)
            jobs.append((group.first, group.count, first, len(segments), group.follows))
        at, table, rows, numbers = (np.array(x, np.int64) for x in (positions, jobs, segments, source))
        return cls(at, table, rows.reshape(-1, 8), numbers, np.array(prompts, np.bool_))

    @classmethod
    def of_caches(cls, positions: Sequence[int], starts: Sequence[int], follows: Sequence[bool]) -> SegmentTable:
        """One token a sequence, which sees what its sequence's cache has.

        positions, starts: of the tokens, and of the first key in each cache.
        """
        groups = [TokenGroup(row, 1, (row,), False, goes_on) for row, goes_on in enumerate(follows)]
        return cls.of(groups, positions, [(at + 1 - start, start) for at, start in zip(positions, starts)])

    @cached_property
    def keys(self) -> Integers:
        """Keys of each job's segments together."""
        until = np.concatenate(([0], np.cumsum(self.segments[:, 6])))
        return until[self.jobs[:, 3]] - until[self.jobs[:, 2]]

    def at(self, shared: Sequence[tuple[Tensor, Tensor]], batch: tuple[Tensor, Tensor] | None = None) -> Segments:
        """Fill in where keys and values are.

        shared: of the shared segments, [Hk, S, D].
        batch: of the batch's tokens, [T, Hk, D]; None if no token sees another of them.
        """
        operands = tuple(chain(*shared, batch or ()))
        assert _suit(*operands)
        rows, key_heads = self.segments.copy(), 0
        if shared:
            addresses = np.array([_addresses(keys, values, 1, 0) for keys, values in shared], np.int64)
            rows[~self.is_prompt, :6] = addresses[self.source[~self.is_prompt]]
            key_heads = shared[0][0].shape[0]
        if batch is not None:
            first = self.source[self.is_prompt]
            rows[self.is_prompt, :6] = _addresses(*batch, 0, 1)
            for column, x in enumerate(batch):
                rows[self.is_prompt, column] += first * (_FLOAT_BYTES * x.stride(0))
            key_heads = batch[0].shape[1]
        return Segments(self, rows, key_heads, operands)

    def at_caches(self, k: Tensor, v: Tensor) -> Segments:
        """Fill in where keys and values are; k and v [T, Hk, S, D], the caches of a table `of_caches`."""
        assert k.device.type == "cpu" and k.dtype == v.dtype and k.stride(-1) == v.stride(-1) == 1
        assert self.source.max() < len(k) and self.segments[:, 6].max() <= k.shape[2]
        rows = self.segments.copy()
        rows[:, :6] = _addresses(k, v, 2, 1)
        for column, x in enumerate((k, v)):
            rows[:, column] += self.source * (x.element_size() * x.stride(0))
        return Segments(self, rows, k.shape[1], (k, v))


def _addresses(k: Tensor, v: Tensor, row: int, head: int) -> list[int]:
    """The first six integers of a segment; row, head: axes."""
    strides = [x.element_size() * x.stride(axis) for axis in (row, head) for x in (k, v)]
    return [k.data_ptr(), v.data_ptr(), *strides]


def can_attend(*operands: Tensor) -> bool:
    """Return whether `attend_segments` takes such queries, keys and values in a loop."""
    return _suit(*operands) and loops() is not None


def can_attend_caches(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend_segments` takes keys and values of caches in `dtype` on a device in a loop."""
    if device.type != "cpu" or dtype not in KINDS or (module := loops()) is None:
        return False
    return bool(module.CONVERTS_HALVES or dtype != torch.float16)


def _suit(*operands: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 for x in operands)


def attend_segments(
    q: Tensor,
    segments: Segments,
    scale: float,
    window: tuple[int, bool] | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] -> output [T, Hq, D], log-sum-exp [T, Hq].

    segments: of tokens that their table leaves out, nothing is written.
    window: a token sees so many positions, itself included, or those of its own chunk of so many; None: all.
    slopes: [Hq] of ALiBi, in float32, neighbours.
    before: results over earlier keys of the tokens that follow some; both are written. None: no token follows any.
    """
    (tokens, heads, dim), (table, rows, key_heads, operands) = q.shape, segments
    if not _suit(q) or (module := loops()) is None:
        return _attend_plainly(q, segments, Way(scale, window, softcap, slopes), before)
    group = heads // key_heads
    out, lse = before if before is not None else (empty(q.shape), empty((tokens, heads)))
    tiles = key_heads * (-(-table.jobs[:, 1] * group // module.TILE_QUERIES))
    most_threads = min(int(tiles.sum()), int(tiles @ table.keys) * dim // _THREAD_ELEMENTS)
    threads, floats = team_size(most_threads), module.scratch_floats(dim)
    memory, factors = empty([threads * floats]), _scale_and_cap(scale, softcap)
    window_tokens, is_chunked = window or (0, False)
    addresses = [table.jobs.ctypes.data, len(table.jobs), rows.ctypes.data]
    for x in (q, out):
        addresses += [x.data_ptr(), _FLOAT_BYTES * x.stride(0), _FLOAT_BYTES * x.stride(1)]
    addresses += [lse.data_ptr(), _FLOAT_BYTES * lse.stride(0), key_heads, group, dim, window_tokens]
    addresses += [factors.ctypes.data, table.positions.ctypes.data, 0 if slopes is None else slopes.data_ptr()]
    addresses += [is_chunked, KINDS[operands[0].dtype], before is not None, memory.data_ptr(), _FLOAT_BYTES * floats]
    run_on_threads(module.attend.address, addresses, threads)
    return out, lse


@cache
def _scale_and_cap(scale: float, softcap: float | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return both where the compiled function reads them, for as long as the process runs; no soft cap is 0."""
    return np.array([scale, softcap or 0.0], np.float32)


class Way(NamedTuple):
    """How scores are computed: see `attend_segments`."""

    scale: float
    window: tuple[int, bool] | None
    softcap: float | None
    slopes: Tensor | None


def _attend_plainly(
    q: Tensor, segments: Segments, way: Way, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The formula, one group of tokens after the other."""
    table = segments.table
    out, lse = before or (q.new_zeros(q.shape), q.new_full(q.shape[:2], -math.inf))
    for first, count, begin, end, follows in table.jobs.tolist():
        tokens = slice(first, first + count)
        seen = [_keys_and_values(segments, number) for number in range(begin, end)]
        k, v = (torch.cat(x, 1).repeat_interleave(q.shape[1] // segments.key_heads, 0) for x in zip(*seen))
        numbers = [np.arange(length) + start for length, start in table.segments[begin:end, 6:].tolist()]
        at, keys = torch.tensor(table.positions[tokens])[:, None], torch.tensor(np.concatenate(numbers))
        scores = q[tokens].transpose(0, 1) @ k.transpose(1, 2) * way.scale
        scores = scores if way.softcap is None else way.softcap * torch.tanh(scores / way.softcap)
        scores = scores if way.slopes is None else scores + way.slopes[:, None, None] * (keys - at)
        hidden = keys > at
        if way.window is not None:
            size, is_chunked = way.window
            hidden |= keys < (at // size * size if is_chunked else at + 1 - size)
        scores = scores.masked_fill(hidden, -math.inf)
        weights, total = torch.softmax(scores, -1).nan_to_num(0.0), torch.logsumexp(scores, -1).t()
        joined = torch.logaddexp(lse[tokens], total) if follows else total
        result = (weights @ v).transpose(0, 1) * (total - joined).exp().nan_to_num(0.0)[..., None]
        if follows:
            result += out[tokens] * (lse[tokens] - joined).exp().nan_to_num(0.0)[..., None]
        out[tokens], lse[tokens] = result, joined
    return out, lse


def _keys_and_values(segments: Segments, number: int) -> list[Tensor]:
    """Keys and values [Hk, S, D] of a segment, in float32."""
    table, operands = segments.table, segments.operands
    source, length = int(table.source[number]), int(table.segments[number, 6])
    if operands[0].dim() == 4:
        pair = [x[source] for x in operands]
    elif table.is_prompt[number]:
        pair = [x[source : source + length].transpose(0, 1) for x in operands[-2:]]
    else:
        pair = list(operands[2 * source : 2 * source + 2])
    return [x[:, :length].float() for x in pair]


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Prompts, one of them behind a shared prefix, and tokens that go on from what they have seen in caches."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    dim, before, counts = 20, 67, (70, 9)
    q, prefix, (k, v) = normal(sum(counts), 4, dim), normal(2, 2, before, dim), normal(2, sum(counts), 2, dim)
    prompts = TokenGroup(0, counts[0], (0,)), TokenGroup(counts[0], counts[1], ())
    positions = [*range(before, before + counts[0]), *range(counts[1])]
    table = SegmentTable.of(prompts, positions, [(before, 0)])
    segments = table.at([(prefix[0], prefix[1])], (k, v))
    ways = Way(0.3, None, None, None), Way(0.3, (50, False), 2.0, None), Way(0.3, (50, True), None, normal(4))
    for way in ways:
        yield lambda way=way: _joined(*attend_segments(q, segments, *way))  # type: ignore[misc]
    groups = TokenGroup(0, 1, (0,), False), TokenGroup(1, 1, (1,), False)
    first = SegmentTable.of(groups, [4, 85], [(5, 0), (30, 0)])
    second = SegmentTable.of([TokenGroup(1, 1, (1,), False, True)], [4, 85], [(0, 0), (56, 30)])
    for dtype in KINDS:
        if not can_attend_caches(q.device, dtype):
            continue
        caches = normal(2, 2, 2, 90, dim).to(dtype)  # two sequences, the second in two steps
        at_first, rest = first.at_caches(*caches), second.at_caches(*caches[..., 30:, :])
        for way in ways:

            def in_two_steps(way: Way = way, first: Segments = at_first, rest: Segments = rest) -> Tensor:
                before = attend_segments(q[:2], first, way.scale, way.window, way.softcap, way.slopes)
                return _joined(*attend_segments(q[:2], rest, way.scale, way.window, way.softcap, way.slopes, before))

            yield in_two_steps


def _joined(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat((out, lse[..., None]), -1)


loops = Loops("attention", "flexgen_helm.kernels.attention_loop", _examples, tolerance=1e-4)
