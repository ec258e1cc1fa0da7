"""Attention of a batch's tokens on the host, over all that they see.

A query sees segments of keys: shared prefixes, the prompt that it is part of, or its sequence's
cache. All segments of a tile of queries are taken one after the other with a running maximum and
sum of the softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), so scores never leave the
caches of the processor, and no partial results are merged.

Shapes: T tokens, Hq query heads, Hk key heads, S keys, D elements of a head.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.kernels.team import DTYPE_CODES, constants, empty, run_on_threads, team_size
from flexgen_helm.kernels.trial import Loops

Records = np.ndarray[Any, np.dtype[Any]]

_FLOAT_BYTES = 4
# Keys of a block, whose scores stay in the first cache. Blocks begin at its multiples, whatever
# segments they lie in: so a query's sums have one order.
BLOCK_KEYS = 64
# Elements of keys and values, read by one tile of queries, that occupy a thread for longer than it
# takes to wake.
_THREAD_ELEMENTS = 1 << 14

# A segment as the loop reads it. Pairs are of keys and values: where the first one is, and bytes
# from a row to the next, and from a head to the next.
SEGMENT = np.dtype(
    [(name, np.int64, 2) for name in ("address", "row_bytes", "head_bytes")]
    + [(name, np.int64) for name in ("length", "position", "source", "slot", "first")]
)
# A group of tokens: its tokens, its segments, and the key positions that it takes, each from the
# first to the one behind the last (`TokenGroup`).
JOB = np.dtype(
    [(name, np.int64) for name in ("token", "count", "segment", "last_segment", "begin", "end")]
)
# What the loop is given (`attention_loop.attend`).
Call = namedtuple(
    "Call",
    "jobs num_jobs segments q q_row q_head out out_row out_head lse state key_heads group dim "
    "window is_chunked factors positions slopes kind scratch scratch_bytes",
)


class Segment(NamedTuple):
    """Neighbouring keys.

    source: names the tensors [slots, Hk, S, D] that they are in (`SegmentTable.at`).
    position: of the first key.
    slot, first: where it is in the tensors.
    """

    source: Hashable
    position: int
    length: int
    slot: int = 0
    first: int = 0


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens of a batch that see the same segments, as far as their positions.

    token, count: of the batch.
    segments: in order, none missing between them.
    begin, end: key positions that this attention takes, whole blocks; end 0: all from `begin` on.
        What a group begins is gone on with by one that begins where it ends (`attend_segments`).
    """

    token: int
    count: int
    segments: Sequence[Segment]
    begin: int = 0
    end: int = 0


class Segments(NamedTuple):
    """A table with the addresses of its segments in `operands`, which are kept for as long."""

    table: SegmentTable
    rows: Records
    operands: Sequence[Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """What the tokens of a batch see, as the compiled function reads it; the same for all layers.

    positions: [T].
    jobs, segments: records `JOB` and `SEGMENT`, without addresses.
    sources: of the segments, by number.
    """

    positions: Records
    jobs: Records
    segments: Records
    sources: tuple[Any, ...]

    @classmethod
    def of(cls, groups: Iterable[TokenGroup], positions: Sequence[int]) -> SegmentTable:
        """Segments that a group takes nothing of are left out."""
        jobs: list[tuple[int, ...]] = []
        rows: list[tuple[Any, ...]] = []
        sources: dict[Hashable, int] = {}
        unknown = ((0, 0),) * 3
        for group in groups:
            first, end = len(rows), group.end or math.inf
            for source, position, length, *at in group.segments:
                if position < end and position + length > group.begin:
                    number = sources.setdefault(source, len(sources))
                    rows.append((*unknown, length, position, number, *at))
            jobs.append((group.token, group.count, first, len(rows), group.begin, group.end))
        tables = np.array(jobs, JOB), np.array(rows, SEGMENT)
        return cls(np.array(positions, np.int64), *tables, tuple(sources))

    @cached_property
    def keys(self) -> Records:
        """Keys that each job takes."""
        jobs, first = self.jobs, self.segments[self.jobs["segment"]]
        last = self.segments[jobs["last_segment"] - 1]
        until, end = last["position"] + last["length"], jobs["end"]
        begin = np.maximum(first["position"], jobs["begin"])
        return np.where(end > 0, np.minimum(until, end), until) - begin

    def at(self, operands: Sequence[Sequence[Tensor]]) -> Segments:
        """Fill in where keys and values are; operands: of each source, [slots, Hk, S, D], all of
        one dtype.
        """
        dtype, rows = operands[0][0].dtype, self.segments.copy()
        for x in (x for pair in operands for x in pair):
            assert x.device.type == "cpu" and x.stride(-1) == 1 and x.dtype == dtype
        source, first, slot = rows["source"], rows["first"], rows["slot"]
        slots, keys = np.array([k.shape[::2] for k, _ in operands])[source].T
        assert (slot < slots).all() and (first + rows["length"] <= keys).all()
        memory = np.array([[(x.data_ptr(), *x.stride()[:3]) for x in pair] for pair in operands])
        memory[..., 1:] *= dtype.itemsize
        address, slot_bytes, head_bytes, row_bytes = memory[source].transpose(2, 0, 1)
        rows["row_bytes"], rows["head_bytes"] = row_bytes, head_bytes
        rows["address"] = address + slot_bytes * slot[:, None] + row_bytes * first[:, None]
        return Segments(self, rows, operands)


def can_attend_caches(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `attend_segments` takes keys and values of caches in `dtype` on a device in a
    loop.
    """
    if device.type != "cpu" or dtype not in DTYPE_CODES or (module := loops()) is None:
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


class Way(NamedTuple):
    """How scores are computed: scale q·k, then the soft cap, then slopes times distances.

    window: a token sees so many positions, itself included, or those of its own chunk of so many;
        None: all.
    slopes: [Hq] of ALiBi, in float32, neighbours.
    """

    scale: float
    window: tuple[int, bool] | None = None
    softcap: float | None = None
    slopes: Tensor | None = None


def attend_segments(
    q: Tensor, segments: Segments, way: Way, begun: Begun | None = None
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] -> output [T, Hq, D], log-sum-exp [T, Hq].

    segments: of tokens that their table leaves out, nothing is written.
    begun: what groups with a `begin` go on from, and where all results are written; None: new
        memory.
    """
    (_, heads, dim), (table, rows, operands) = q.shape, segments
    assert q.dtype == torch.float32 and q.device.type == "cpu" and q.stride(-1) == 1
    begun = begun or Begun.empty(q)
    if (module := loops()) is None:
        return _attend_plainly(q, segments, way, begun)
    out, lse, state = begun
    assert lse.is_contiguous() and state.is_contiguous()
    keys, jobs = operands[0][0], table.jobs
    key_heads = keys.shape[1]
    group = heads // key_heads
    tiles = key_heads * (-(-jobs["count"] * group // module.TILE_QUERIES))
    max_threads = min(int(tiles.sum()), int(tiles @ table.keys) * dim // _THREAD_ELEMENTS)
    threads, floats = team_size(max_threads), module.scratch_floats(dim)
    memory, factors = empty([threads * floats]), constants(way.scale, way.softcap or 0.0)
    window, is_chunked = way.window or (0, False)
    call = Call(
        jobs=jobs.ctypes.data,
        num_jobs=len(jobs),
        segments=rows.ctypes.data,
        q=q.data_ptr(),
        q_row=_FLOAT_BYTES * q.stride(0),
        q_head=_FLOAT_BYTES * q.stride(1),
        out=out.data_ptr(),
        out_row=_FLOAT_BYTES * out.stride(0),
        out_head=_FLOAT_BYTES * out.stride(1),
        lse=lse.data_ptr(),
        state=state.data_ptr(),
        key_heads=key_heads,
        group=group,
        dim=dim,
        window=window,
        is_chunked=is_chunked,
        factors=factors.ctypes.data,
        positions=table.positions.ctypes.data,
        slopes=0 if way.slopes is None else way.slopes.data_ptr(),
        kind=DTYPE_CODES[keys.dtype],
        scratch=memory.data_ptr(),
        scratch_bytes=_FLOAT_BYTES * floats,
    )
    run_on_threads(module.attend, call, threads)
    return out, lse


def _attend_plainly(q: Tensor, segments: Segments, way: Way, begun: Begun) -> tuple[Tensor, Tensor]:
    """The formula, one group of tokens after the other, over all keys of its segments."""
    positions, (out, lse, _) = segments.table.positions, begun
    for job in segments.table.jobs:
        tokens = slice(job["token"], job["token"] + job["count"])
        seen = segments.rows[job["segment"] : job["last_segment"]]
        numbers = [segment["position"] + np.arange(segment["length"]) for segment in seen]
        pairs = [_keys_and_values(segments.operands, segment) for segment in seen]
        k, v = (torch.cat(x, 1) for x in zip(*pairs))
        k, v = (x.repeat_interleave(q.shape[1] // len(x), 0) for x in (k, v))
        at, keys = torch.tensor(positions[tokens])[:, None], torch.tensor(np.concatenate(numbers))
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


def _keys_and_values(operands: Sequence[Sequence[Tensor]], segment: Any) -> list[Tensor]:
    """Keys and values [Hk, S, D] of a segment, in float32."""
    keys = slice(segment["first"], segment["first"] + segment["length"])
    return [x[segment["slot"], :, keys].float() for x in operands[segment["source"]]]


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Prompts, one of them behind a shared prefix, and tokens over caches, one of them in two
    steps.
    """
    draw, dim, before, counts = torch.Generator().manual_seed(0), 20, 67, (70, 9)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    total, shared = sum(counts), Segment("prefix", 0, before)
    q, cached = normal(total + 2, 4, dim), Segment("cache", before, 57, 1)
    positions = [*range(before, before + counts[0]), *range(counts[1]), 4, before + 56]
    first = (
        TokenGroup(0, counts[0], [shared, Segment("new", before, counts[0])]),
        TokenGroup(counts[0], counts[1], [Segment("new", 0, counts[1], first=counts[0])]),
        TokenGroup(total + 1, 1, [shared], end=BLOCK_KEYS),
    )
    rest = (
        TokenGroup(total, 1, [Segment("cache", 0, 5)]),
        TokenGroup(total + 1, 1, [shared, cached], begin=BLOCK_KEYS),
    )
    tables = SegmentTable.of(first, positions), SegmentTable.of(rest, positions)
    sizes = {"prefix": (1, before), "new": (1, total), "cache": (2, 57)}
    ways = Way(0.3), Way(0.3, (50, False), 2.0), Way(0.3, (50, True), None, normal(4))
    for dtype in DTYPE_CODES:
        if can_attend_caches(q.device, dtype):
            given = {
                source: tuple(normal(2, slots, 2, keys, dim).to(dtype))
                for source, (slots, keys) in sizes.items()
            }
            steps = [table.at([given[source] for source in table.sources]) for table in tables]
            yield from (partial(_attend_in_steps, q, steps, way) for way in ways)


def _attend_in_steps(q: Tensor, steps: Sequence[Segments], way: Way) -> Tensor:
    begun = Begun.empty(q)
    for segments in steps:
        attend_segments(q, segments, way, begun)
    return torch.cat((begun.out, begun.lse[..., None]), -1)


loops = Loops("attention", "flexgen_helm.kernels.attention_loop", _examples, tolerance=1e-4)
