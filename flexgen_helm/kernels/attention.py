"""Attention of a batch's tokens on the host, over all that they see together, in one call.

A query sees segments of keys: shared prefixes, and the prompt that it is part of. All segments of a tile of queries are
taken one after the other with a running maximum and sum of the softmax (Milakov and Gimelshein, 2018; Dao et al.,
2022), so scores never leave the caches of the processor, and no partial results are merged. What a decoding token sees
of its own cache is no segment (`decode_attention`).

Shapes: T tokens, Hq query heads, Hk key heads, S keys, D elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.decode_attention import Integers, scale_and_cap
from flexgen_helm.kernels.team import empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import tried

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens of a batch that see the same shared segments.

    first, count: tokens of the batch.
    shared: numbers of the segments.
    is_prompt: they also see each other, causally.
    """

    first: int
    count: int
    shared: Sequence[int]
    is_prompt: bool = True


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """What the tokens of a batch see, as the compiled function reads it; the same for all layers.

    positions: [T].
    jobs: [groups, 4]; segments: [n, 8] without addresses (`prompt_loop.attend`).
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
            for length, position, number, own in seen:
                segments.append([0] * 6 + [length, position])
                source.append(number)
                is_own.append(own)
            jobs.append((group.first, group.count, first, len(segments)))
        each, table, rows, numbers = (np.array(x, np.int64) for x in (positions, jobs, segments, source))
        return cls(each, table, rows.reshape(-1, 8), numbers, np.array(is_own, np.bool_))

    def at(self, shared: Sequence[tuple[Tensor, Tensor]], own: tuple[Tensor, Tensor] | None = None) -> Integers:
        """Fill in where keys and values are.

        shared: of the shared segments, [Hk, S, D].
        own: of the batch's tokens, [T, Hk, D]; None if no token sees another of them.
        """
        assert _suit(*chain(*shared, own or ()))
        segments = self.segments.copy()
        if shared:
            places = np.array([_places(keys, values, 1, 0) for keys, values in shared], np.int64)
            segments[~self.is_own, :6] = places[self.source[~self.is_own]]
        if own is not None:
            k, v = own
            first = self.source[self.is_own]
            segments[self.is_own, :6] = _places(k, v, 0, 1)
            for column, x in enumerate(own):
                segments[self.is_own, column] += first * (_FLOAT_BYTES * x.stride(0))
        return segments


def _places(k: Tensor, v: Tensor, row: int, head: int) -> list[int]:
    """The first six integers of a segment; row, head: axes."""
    strides = [_FLOAT_BYTES * x.stride(axis) for axis in (row, head) for x in (k, v)]
    return [k.data_ptr(), v.data_ptr(), *strides]


def can_attend(*operands: Tensor) -> bool:
    """Return whether `attend_prompts` takes such queries, keys and values."""
    return _suit(*operands) and _compiled() is not None


def _suit(*operands: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 for x in operands)


def attend_prompts(
    table: SegmentTable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Integers,
    scale: float,
    window: int | None = None,
    is_chunked: bool = False,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    compiled: ModuleType | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hk, D] -> output [T, Hq, D], log-sum-exp [T, Hq].

    All operands, and those of shared segments, are such that `can_attend` is true.

    table: of tokens that it leaves out, nothing is written.
    segments: of `SegmentTable.at`.
    window: a token sees so many positions, itself included; None: all.
    is_chunked: it sees those of its own chunk of so many positions.
    slopes: [Hq] of ALiBi, in float32, neighbours.
    compiled: on trial; None: what has passed its trial.
    """
    if compiled is None:
        assert can_attend(q, k, v)
        compiled = _compiled()
        assert compiled is not None
    (tokens, heads, dim), key_heads = q.shape, k.shape[1]
    group = heads // key_heads
    out, lse = empty(q.shape), empty((tokens, heads))
    tiles = key_heads * sum(-(-count * group // compiled.TILE_QUERIES) for count in table.jobs[:, 1].tolist())
    threads, floats = team_size(tiles), compiled.scratch_floats(dim)
    memory, factors = empty([threads * floats]), scale_and_cap(scale, softcap)
    addresses = [table.jobs.ctypes.data, len(table.jobs), segments.ctypes.data]
    for x in (q, out):
        addresses += [x.data_ptr(), _FLOAT_BYTES * x.stride(0), _FLOAT_BYTES * x.stride(1)]
    addresses += [lse.data_ptr(), _FLOAT_BYTES * heads, key_heads, group, dim, window or 0, factors.ctypes.data]
    addresses += [memory.data_ptr(), _FLOAT_BYTES * floats, table.positions.ctypes.data]
    addresses += [0 if slopes is None else slopes.data_ptr(), is_chunked]
    run_on_threads(compiled.address_of(compiled.attend), addresses, threads)
    return out, lse


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("attention", _is_right)


def _is_right(compiled: ModuleType) -> bool:
    """Compare a prompt of 70 tokens behind 67 shared ones, one behind nothing, and a window, with the formula."""
    draw = torch.Generator().manual_seed(0)
    dim, before, counts = compiled.LANES + 4, 67, (70, 9)
    q, k, v = (torch.randn(sum(counts), heads, dim, generator=draw) for heads in (4, 2, 2))
    pair = torch.randn(2, before, dim, generator=draw), torch.randn(2, before, dim, generator=draw)
    prompts = TokenGroup(0, counts[0], (0,)), TokenGroup(counts[0], counts[1], ())
    positions = [*range(before, before + counts[0]), *range(counts[1])]
    table = SegmentTable.of(prompts, positions, [(before, 0)])
    segments = table.at([pair], (k, v))
    slopes = torch.rand(4, generator=draw)
    for window, is_chunked, softcap, biases in (
        (None, False, None, None),
        (50, False, 2.0, None),
        (50, True, None, slopes),
    ):
        out, lse = attend_prompts(table, q, k, v, segments, 0.3, window, is_chunked, softcap, biases, compiled)
        for prompt in prompts:
            own = slice(prompt.first, prompt.first + prompt.count)
            keys, values = k[own].transpose(0, 1), v[own].transpose(0, 1)
            if prompt.shared:
                keys, values = torch.cat((pair[0], keys), 1), torch.cat((pair[1], values), 1)
            queries, places = torch.tensor(positions)[own, None], torch.arange(keys.shape[1])
            hidden = places > queries
            if window is not None:
                hidden |= places < (queries // window * window if is_chunked else queries + 1 - window)
            scores = q[own].transpose(0, 1) @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            scores = scores if biases is None else scores + biases[:, None, None] * (places - queries)
            scores = scores.masked_fill(hidden, -math.inf)
            expected = torch.softmax(scores, -1) @ values.repeat_interleave(2, 0), torch.logsumexp(scores, -1)
            if not torch.allclose(out[own].transpose(0, 1), expected[0], rtol=1e-4, atol=1e-5):
                return False
            if not torch.allclose(lse[own].t(), expected[1], rtol=1e-4, atol=1e-5):
                return False
    return True
