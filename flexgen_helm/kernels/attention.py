"""Attention of a batch's tokens on the host, over all that they see.

A query sees segments of keys: shared prefixes, the prompt that it is part of, or its sequence's cache. All segments of
a tile of queries are taken one after the other with a running maximum and sum of the softmax (Milakov and Gimelshein,
2018; Dao et al., 2022), so scores never leave the caches of the processor, and no partial results are merged.

Shapes: T tokens, Hq query heads, Hk key heads, S keys, D elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.team import KINDS, empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import tried

Integers = np.ndarray[Any, np.dtype[np.int64]]

_FLOAT_BYTES = 4
# Elements of keys and values, read by one tile of queries, that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens of a batch that see the same shared segments.

    first, count: tokens of the batch.
    shared: numbers of the segments.
    is_prompt: they also see each other, causally.
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
    source: [n], the first token of an own segment, or the number of a shared one.
    is_own: [n].
    """

    positions: Integers
    jobs: Integers
    segments: Integers
    source: Integers
    is_own: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def of(
        cls, groups: Iterable[TokenGroup], positions: Sequence[int] | Integers, shared: Sequence[tuple[int, int]]
    ) -> SegmentTable:
        """shared: length and first position of the shared segments."""
        jobs: list[tuple[int, ...]] = []
        segments: list[list[int]] = []
        source: list[int] = []
        is_own: list[bool] = []
        for group in groups:
            first = len(segments)
            seen = [(*shared[number], number, False) for number in group.shared]
            if group.is_prompt:
                seen.append((group.count, int(positions[group.first]), group.first, True))
            for length, position, number, is_prompt in seen:
                segments.append([0] * 6 + [length, position])
                source.append(number)
                is_own.append(is_prompt)
            jobs.append((group.first, group.count, first, len(segments), group.follows))
        at, table, rows, numbers = (np.array(x, np.int64) for x in (positions, jobs, segments, source))
        return cls(at, table, rows.reshape(-1, 8), numbers, np.array(is_own, np.bool_))

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

    def at(self, shared: Sequence[tuple[Tensor, Tensor]], own: tuple[Tensor, Tensor] | None = None) -> Segments:
        """Fill in where keys and values are.

        shared: of the shared segments, [Hk, S, D].
        own: of the batch's tokens, [T, Hk, D]; None if no token sees another of them.
        """
        operands = tuple(chain(*shared, own or ()))
        assert _suit(*operands)
        rows, key_heads = self.segments.copy(), 0
        if shared:
            addresses = np.array([_addresses(keys, values, 1, 0) for keys, values in shared], np.int64)
            rows[~self.is_own, :6] = addresses[self.source[~self.is_own]]
            key_heads = shared[0][0].shape[0]
        if own is not None:
            first = self.source[self.is_own]
            rows[self.is_own, :6] = _addresses(*own, 0, 1)
            for column, x in enumerate(own):
                rows[self.is_own, column] += first * (_FLOAT_BYTES * x.stride(0))
            key_heads = own[0].shape[1]
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
    """Return whether `attend_segments` takes such queries, keys and values."""
    return _suit(*operands) and _compiled() is not None


def can_attend_caches(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend_segments` takes keys and values of caches in `dtype` on a device."""
    compiled = _compiled() if device.type == "cpu" and dtype in KINDS else None
    return compiled is not None and (compiled.CONVERTS_HALVES or dtype != torch.float16)


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
    compiled: ModuleType | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] -> output [T, Hq, D], log-sum-exp [T, Hq].

    `can_attend` is true of q.

    segments: of tokens that their table leaves out, nothing is written.
    window: a token sees so many positions, itself included, or those of its own chunk of so many; None: all.
    slopes: [Hq] of ALiBi, in float32, neighbours.
    before: results over earlier keys of the tokens that follow some; both are written. None: no token follows any.
    compiled: on trial; None: what has passed its trial.
    """
    if compiled is None:
        assert can_attend(q)
        compiled = _compiled()
        assert compiled is not None
    (tokens, heads, dim), (table, rows, key_heads, operands) = q.shape, segments
    group = heads // key_heads
    out, lse = before if before is not None else (empty(q.shape), empty((tokens, heads)))
    tiles = key_heads * (-(-table.jobs[:, 1] * group // compiled.TILE_QUERIES))
    most_threads = min(int(tiles.sum()), int(tiles @ table.keys) * dim // _THREAD_ELEMENTS)
    threads, floats = team_size(most_threads), compiled.scratch_floats(dim)
    memory, factors = empty([threads * floats]), _scale_and_cap(scale, softcap)
    window_tokens, is_chunked = window or (0, False)
    addresses = [table.jobs.ctypes.data, len(table.jobs), rows.ctypes.data]
    for x in (q, out):
        addresses += [x.data_ptr(), _FLOAT_BYTES * x.stride(0), _FLOAT_BYTES * x.stride(1)]
    addresses += [lse.data_ptr(), _FLOAT_BYTES * lse.stride(0), key_heads, group, dim, window_tokens]
    addresses += [factors.ctypes.data, memory.data_ptr(), _FLOAT_BYTES * floats, table.positions.ctypes.data]
    addresses += [0 if slopes is None else slopes.data_ptr(), is_chunked, KINDS[operands[0].dtype], before is not None]
    run_on_threads(compiled.address_of(compiled.attend), addresses, threads)
    return out, lse


@cache
def _scale_and_cap(scale: float, softcap: float | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return both where the compiled function reads them, for as long as the process runs; no soft cap is 0."""
    return np.array([scale, softcap or 0.0], np.float32)


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("attention", _is_right)


def _is_right(compiled: ModuleType) -> bool:
    """Compare prompts, one of them behind a shared prefix, and tokens that go on from caches, with the formula."""
    draw = torch.Generator().manual_seed(0)
    dim, before, counts = compiled.LANES + 4, 67, (70, 9)
    q, k, v = (torch.randn(sum(counts), heads, dim, generator=draw) for heads in (4, 2, 2))
    prefix = torch.randn(2, before, dim, generator=draw), torch.randn(2, before, dim, generator=draw)
    prompts = TokenGroup(0, counts[0], (0,)), TokenGroup(counts[0], counts[1], ())
    positions = [*range(before, before + counts[0]), *range(counts[1])]
    segments = SegmentTable.of(prompts, positions, [(before, 0)]).at([prefix], (k, v))
    ways: list[tuple[Any, Any, Any]] = [
        (None, None, None),
        ((50, False), 2.0, None),
        ((50, True), None, torch.rand(4, generator=draw)),
    ]
    for way in ways:
        found = attend_segments(q, segments, 0.3, *way, None, compiled)
        for prompt in prompts:
            tokens = slice(prompt.first, prompt.first + prompt.count)
            keys, values = (x[tokens].transpose(0, 1) for x in (k, v))
            if prompt.shared:
                keys, values = torch.cat((prefix[0], keys), 1), torch.cat((prefix[1], values), 1)
            exact = _formula(q[tokens], keys, values, torch.tensor(positions[tokens]), 0.3, *way)
            if not _are_close(found, exact, tokens):
                return False
    for dtype in KINDS if compiled.CONVERTS_HALVES else (torch.bfloat16, torch.float32):
        k, v = torch.randn(2, 2, 2, 90, dim, generator=draw).to(dtype)  # two sequences, the second in two steps
        groups = TokenGroup(0, 1, (0,), False), TokenGroup(1, 1, (1,), False)
        first = SegmentTable.of(groups, [4, 85], [(5, 0), (30, 0)]).at_caches(k, v)
        second = SegmentTable.of([TokenGroup(1, 1, (1,), False, True)], [4, 85], [(0, 0), (56, 30)])
        rest = second.at_caches(k[:, :, 30:], v[:, :, 30:])
        for way in ways:
            found = attend_segments(q[:2], first, 0.3, *way, None, compiled)
            found = attend_segments(q[:2], rest, 0.3, *way, found, compiled)
            for row in range(2):
                one = slice(row, row + 1)
                exact = _formula(q[one], k[row].float(), v[row].float(), torch.tensor([4, 85])[one], 0.3, *way)
                if not _are_close(found, exact, one):
                    return False
    return True


def _formula(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float,
    window: tuple[int, bool] | None, softcap: float | None, slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [t, Hq, D], k and v [Hk, S, D], positions [t] -> output [t, Hq, D], log-sum-exp [t, Hq]."""
    group, at, keys = q.shape[1] // len(k), positions[:, None], torch.arange(k.shape[1])
    scores = q.transpose(0, 1) @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if slopes is None else scores + slopes[:, None, None] * (keys - at)
    hidden = keys > at
    if window is not None:
        tokens, is_chunked = window
        hidden |= keys < (at // tokens * tokens if is_chunked else at + 1 - tokens)
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.softmax(scores, -1) @ v.repeat_interleave(group, 0)
    return out.transpose(0, 1), torch.logsumexp(scores, -1).t()


def _are_close(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], tokens: slice) -> bool:
    return all(torch.allclose(x[tokens], y, rtol=1e-4, atol=1e-5) for x, y in zip(found, exact))
