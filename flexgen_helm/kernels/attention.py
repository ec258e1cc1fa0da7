"""Attention of a batch's tokens on the host, over all that they see.

A query sees segments of keys: shared prefixes, the prompt that it is part of, or its sequence's
cache. A tile of queries goes over all its segments with a running maximum and sum of the softmax
(Milakov and Gimelshein, 2018; Dao et al., 2022), so scores never leave the caches of the processor,
and no partial results are merged.

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

Array = np.ndarray[Any, np.dtype[Any]]

_FLOAT_BYTES = 4
# Keys of a block, whose scores stay in the L1 cache. Blocks begin at multiples of it, whatever
# segments they lie in, so that a query's sums have one order.
BLOCK_KEYS = 64
# Least work of a thread, for which it is worth waking: elements of keys and values, counted once
# for each tile of queries that reads them.
_THREAD_ELEMENTS = 1 << 14

# A `Segment` as the loop reads it. Of keys and of values: the address of the first, and bytes from
# a row to the next, and from a head to the next.
SEGMENT = np.dtype(
    [(name, np.int64, 2) for name in ("address", "row_stride", "head_stride")]
    + [(name, np.int64) for name in ("length", "position", "source", "slot", "first")]
)
# A `TokenGroup` as the loop reads it, with its range of records `SEGMENT`.
JOB = np.dtype(
    [
        (name, np.int64)
        for name in ("first_token", "num_tokens", "first_segment", "end_segment", "begin", "end")
    ]
)
# Arguments of `attention_loop.attend`; strides and sizes in bytes:
#
#     jobs, num_jobs, segments    addresses of records `JOB` and `SEGMENT`
#     q, out                      addresses of tensors [T, Hq, D], and bytes from a row (of a token)
#                                 to the next, and from a head to the next
#     lse, sums                   of an `AttentionState`
#     key_heads, group_size       Hk, and the query heads of each
#     window, is_chunked          of `ScoreOptions`; 0: all positions are seen
#     scale_and_cap               address of two float32 numbers; no soft cap is 0
#     positions                   address of the tokens' positions [T]
#     slopes                      address, or 0
#     dtype                       of keys and values, one of `DTYPE_CODES`
#     scratch, scratch_bytes      address of the threads' memory, and bytes of each thread
AttendArgs = namedtuple(
    "AttendArgs",
    "jobs num_jobs segments q q_row_stride q_head_stride out out_row_stride out_head_stride lse "
    "sums key_heads group_size head_dim window is_chunked scale_and_cap positions slopes dtype "
    "scratch scratch_bytes",
)


class Segment(NamedTuple):
    """Keys and values of neighbouring positions.

    source: names the tensors [slots, Hk, S, D] that they are in
        (`SegmentTable.with_addresses` is given these).
    position, length: of the first key, and how many.
    slot, first: index of the first key in the tensors, along their dimensions slots and S.
    """

    source: Hashable
    position: int
    length: int
    slot: int = 0
    first: int = 0


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens of a batch that see the same segments, each up to its own position.

    first_token, num_tokens: which tokens of the batch.
    segments: in the order of positions, without gaps.
    begin, end: positions of the keys that are attended to, multiples of `BLOCK_KEYS`; end 0: all
        from `begin` on. Attention up to an `end` is continued by a later call, in which a group of
        the same tokens begins there (`attend_segments`, state).
    """

    first_token: int
    num_tokens: int
    segments: Sequence[Segment]
    begin: int = 0
    end: int = 0


class LocatedSegments(NamedTuple):
    """A table and its records `SEGMENT` with addresses, which lie in the tensors of `operands`."""

    table: SegmentTable
    records: Array
    operands: Sequence[Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """What the tokens of a batch see, as the compiled loop reads it; the same for all layers.

    positions: [T].
    jobs, segments: records `JOB` and `SEGMENT`; these still without addresses.
    sources: the distinct sources of the segments, which name their source by its index here.
    """

    positions: Array
    jobs: Array
    segments: Array
    sources: tuple[Any, ...]

    @classmethod
    def of(cls, groups: Iterable[TokenGroup], positions: Sequence[int]) -> SegmentTable:
        """Make the table of some groups, from the positions [T] of all tokens.

        Segments of which a group attends to no key are left out.
        """
        jobs: list[tuple[int, ...]] = []
        records: list[tuple[Any, ...]] = []
        sources: dict[Hashable, int] = {}
        no_addresses = ((0, 0),) * 3
        for group in groups:
            first_segment, end = len(records), group.end or math.inf
            for source, position, length, *slot_and_first in group.segments:
                if position < end and position + length > group.begin:
                    number = sources.setdefault(source, len(sources))
                    records.append((*no_addresses, length, position, number, *slot_and_first))
            jobs.append(
                (
                    group.first_token,
                    group.num_tokens,
                    first_segment,
                    len(records),
                    group.begin,
                    group.end,
                )
            )
        tables = np.array(jobs, JOB), np.array(records, SEGMENT)
        return cls(np.array(positions, np.int64), *tables, tuple(sources))

    @cached_property
    def num_keys(self) -> Array:
        """Return to how many keys each job attends, masked ones included."""
        jobs, first = self.jobs, self.segments[self.jobs["first_segment"]]
        last = self.segments[jobs["end_segment"] - 1]
        known, end = last["position"] + last["length"], jobs["end"]
        begin = np.maximum(first["position"], jobs["begin"])
        return np.where(end > 0, np.minimum(known, end), known) - begin

    def with_addresses(self, operands: Sequence[Sequence[Tensor]]) -> LocatedSegments:
        """Return the table with the addresses of one layer's keys and values.

        operands: keys and values of each source [slots, Hk, S, D], all of one dtype.
        """
        dtype, records = operands[0][0].dtype, self.segments.copy()
        for tensor in (tensor for pair in operands for tensor in pair):
            assert tensor.device.type == "cpu" and tensor.stride(-1) == 1 and tensor.dtype == dtype
        source, first, slot = records["source"], records["first"], records["slot"]
        slots, keys = np.array([k.shape[::2] for k, _ in operands])[source].T
        assert (slot < slots).all() and (first + records["length"] <= keys).all()
        layout = np.array(
            [[(tensor.data_ptr(), *tensor.stride()[:3]) for tensor in pair] for pair in operands]
        )
        layout[..., 1:] *= dtype.itemsize
        address, slot_stride, head_stride, row_stride = layout[source].transpose(2, 0, 1)
        records["row_stride"], records["head_stride"] = row_stride, head_stride
        records["address"] = address + slot_stride * slot[:, None] + row_stride * first[:, None]
        return LocatedSegments(self, records, operands)


def can_attend_caches(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a compiled loop attends to caches in `dtype` on a device."""
    if device.type != "cpu" or dtype not in DTYPE_CODES or (module := loops()) is None:
        return False
    return bool(module.CONVERTS_HALVES or dtype != torch.float16)


class AttentionState(NamedTuple):
    """Attention that a later call may continue with more keys.

    out: [T, Hq, D], results; lse: [T, Hq], log-sum-exps. While more keys are to come, `lse` has the
        maxima of the scores, and `out` nothing.
    sums: [T, Hq, D + 1] in float64; while more keys are to come, the weighted sums of values, and
        behind them the sum of weights.
    """

    out: Tensor
    lse: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> AttentionState:
        """Return uninitialized memory for queries [T, Hq, D]."""
        sums = torch.empty((*q.shape[:2], q.shape[2] + 1), dtype=torch.float64, device="cpu")
        return cls(empty(q.shape), empty(q.shape[:2]), sums)


class ScoreOptions(NamedTuple):
    """How scores are computed: scale q·k, then the soft cap, then ALiBi: slope times distance.

    window: (size, is_chunked). A token sees the last `size` positions, its own included; with
        chunks those of its own chunk of `size` positions. None: it sees all.
    slopes: of ALiBi [Hq], in float32, contiguous.
    """

    scale: float
    window: tuple[int, bool] | None = None
    softcap: float | None = None
    slopes: Tensor | None = None


def attend_segments(
    q: Tensor, segments: LocatedSegments, options: ScoreOptions, state: AttentionState | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with q [T, Hq, D] -> output [T, Hq, D], log-sum-exp [T, Hq].

    segments: for tokens that are in no group of their table, nothing is written.
    state: what groups with a `begin` continue, and where all results are written; None: new memory.
    """
    (_, heads, head_dim), (table, records, operands) = q.shape, segments
    assert q.dtype == torch.float32 and q.device.type == "cpu" and q.stride(-1) == 1
    state = state or AttentionState.empty(q)
    if (module := loops()) is None:
        return _attend_with_torch(q, segments, options, state)
    out, lse, sums = state
    assert lse.is_contiguous() and sums.is_contiguous()
    keys, jobs = operands[0][0], table.jobs
    key_heads = keys.shape[1]
    group_size = heads // key_heads
    tiles = key_heads * (-(-jobs["num_tokens"] * group_size // module.TILE_QUERIES))
    max_threads = min(int(tiles.sum()), int(tiles @ table.num_keys) * head_dim // _THREAD_ELEMENTS)
    threads, scratch_floats = team_size(max_threads), module.scratch_floats(head_dim)
    scratch = empty([threads * scratch_floats])
    window, is_chunked = options.window or (0, False)
    args = AttendArgs(
        jobs=jobs.ctypes.data,
        num_jobs=len(jobs),
        segments=records.ctypes.data,
        q=q.data_ptr(),
        q_row_stride=_FLOAT_BYTES * q.stride(0),
        q_head_stride=_FLOAT_BYTES * q.stride(1),
        out=out.data_ptr(),
        out_row_stride=_FLOAT_BYTES * out.stride(0),
        out_head_stride=_FLOAT_BYTES * out.stride(1),
        lse=lse.data_ptr(),
        sums=sums.data_ptr(),
        key_heads=key_heads,
        group_size=group_size,
        head_dim=head_dim,
        window=window,
        is_chunked=is_chunked,
        scale_and_cap=constants(options.scale, options.softcap or 0.0).ctypes.data,
        positions=table.positions.ctypes.data,
        slopes=0 if options.slopes is None else options.slopes.data_ptr(),
        dtype=DTYPE_CODES[keys.dtype],
        scratch=scratch.data_ptr(),
        scratch_bytes=_FLOAT_BYTES * scratch_floats,
    )
    run_on_threads(module.attend, args, threads)
    return out, lse


def _attend_with_torch(
    q: Tensor, segments: LocatedSegments, options: ScoreOptions, state: AttentionState
) -> tuple[Tensor, Tensor]:
    """Attend by PyTorch, one group of tokens after the other, to all keys of its segments at once:
    a group with an `end` has its results before they are asked for, one with a `begin` anew.
    """
    positions, (out, lse, _) = segments.table.positions, state
    for job in segments.table.jobs:
        tokens = slice(job["first_token"], job["first_token"] + job["num_tokens"])
        job_segments = segments.records[job["first_segment"] : job["end_segment"]]
        key_numbers = [
            segment["position"] + np.arange(segment["length"]) for segment in job_segments
        ]
        keys_values = [_keys_and_values(segments.operands, segment) for segment in job_segments]
        k, v = (torch.cat(x, 1) for x in zip(*keys_values))
        k, v = (x.repeat_interleave(q.shape[1] // len(x), 0) for x in (k, v))
        query_positions = torch.tensor(positions[tokens])[:, None]
        key_positions = torch.tensor(np.concatenate(key_numbers))
        scores = q[tokens].transpose(0, 1) @ k.transpose(1, 2) * options.scale
        if (cap := options.softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        if options.slopes is not None:
            scores = scores + options.slopes[:, None, None] * (key_positions - query_positions)
        hidden = key_positions > query_positions
        if options.window is not None:
            size, is_chunked = options.window
            hidden |= key_positions < (
                query_positions // size * size if is_chunked else query_positions + 1 - size
            )
        scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        out[tokens], lse[tokens] = (weights @ v).transpose(0, 1), torch.logsumexp(scores, -1).t()
    return out, lse


def _keys_and_values(operands: Sequence[Sequence[Tensor]], segment: Any) -> list[Tensor]:
    """Return the keys and values [Hk, S, D] of a record `SEGMENT`, in float32."""
    keys = slice(segment["first"], segment["first"] + segment["length"])
    return [x[segment["slot"], :, keys].float() for x in operands[segment["source"]]]


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Prompts, one of them behind a shared prefix, and tokens over caches, one of them in two
    calls.
    """
    draw, head_dim, before, counts = torch.Generator().manual_seed(0), 20, 67, (70, 9)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    total, shared = sum(counts), Segment("prefix", 0, before)
    q, cached = normal(total + 2, 4, head_dim), Segment("cache", before, 57, 1)
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
    every_options = (
        ScoreOptions(0.3),
        ScoreOptions(0.3, (50, False), 2.0),
        ScoreOptions(0.3, (50, True), None, normal(4)),
    )
    for dtype in DTYPE_CODES:
        if can_attend_caches(q.device, dtype):
            tensors = {
                source: tuple(normal(2, slots, 2, keys, head_dim).to(dtype))
                for source, (slots, keys) in sizes.items()
            }
            parts = [
                table.with_addresses([tensors[source] for source in table.sources])
                for table in tables
            ]
            yield from (partial(_attend_in_steps, q, parts, options) for options in every_options)


def _attend_in_steps(q: Tensor, parts: Sequence[LocatedSegments], options: ScoreOptions) -> Tensor:
    state = AttentionState.empty(q)
    for segments in parts:
        attend_segments(q, segments, options, state)
    return torch.cat((state.out, state.lse[..., None]), -1)


loops = Loops("attention", "flexgen_helm.kernels.attention_loop", _examples, tolerance=1e-4)
