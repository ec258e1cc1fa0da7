"""Attention of tokens to all segments that they see, compiled (`attention`)."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.attention import BLOCK_KEYS, JOB, SEGMENT, Call
from flexgen_helm.kernels.emit import (
    CONVERTS_HALVES,
    FLOAT,
    HAS_AVX512,
    INT32,
    INT64,
    LANES,
    VECTOR,
    Loop,
    call_llvm,
    floats,
    half_to_float,
    integers,
    ir_statement,
    load,
    multiply_add,
    njit,
    pointer,
    records,
    spread,
    store,
    transposed,
)
from flexgen_helm.kernels.team import FLOAT16, FLOAT32

# Queries of a tile, in vectors, and keys (of the scores) or elements (of the output) of one step of
# a product: the sums stay in registers.
_QUERY_VECTORS, _STEP_ROWS = (3, 8) if HAS_AVX512 else (3, 4)
TILE_QUERIES = _QUERY_VECTORS * LANES
_ROW_BYTES = 4 * TILE_QUERIES
# Rows of a tile, with a number for each query: the maximum of its scores, by what a new one shrinks
# the sums, the first key that it sees, the one behind the last, its slope, its distance from key 0.
# Twice two rows have 64 bits: the sum of its weights, and addresses. Scores [BLOCK_KEYS], queries
# [D] and a block's outputs [D] follow, and the outputs [D] in 64 bits.
_MAXIMUM, _SHRINKING, _LOW, _HIGH, _SLOPE, _DISTANCE, _SUM, _, _ADDRESSES, _, _SCORES = range(11)
_QUERIES = _SCORES + BLOCK_KEYS


def scratch_floats(head_dim: int) -> int:
    """Numbers of 32 bits that a thread needs: of a tile, and of a block of keys or values that has
    16 bits.
    """
    return TILE_QUERIES * (_QUERIES + 4 * head_dim) + BLOCK_KEYS * head_dim


# A product of some rows with a tile: c [rows, vectors] = or += a [rows, count] b [count, vectors].
# a has any distances, b and c whole tiles.
# totals: 0, or rows of 64 bits which have the result instead: totals = totals shrinking + c, where
#     c is not written.
_Product = namedtuple("_Product", "rows vectors a a_row a_column b count c adds totals shrinking")


@ir_statement((1, _STEP_ROWS), tuple(range(1, _QUERY_VECTORS + 1)))
def _step(builder: Any, given: Any) -> None:
    """Compute a product of so few rows that its sums stay in registers."""
    rows, vectors = range(given.rows), range(given.vectors)
    targets = _tile_vectors(builder, given.c, given)
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    keeps = builder.icmp_signed("!=", given.adds, INT64(0))
    starts = [builder.select(keeps, load(builder, at, VECTOR, 4), zero) for at in targets]
    a_rows = [builder.add(given.a, builder.mul(given.a_row, INT64(i))) for i in rows]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, b_at, a_at = builder.phi(INT64), builder.phi(INT64), builder.phi(INT64)
    sums = [builder.phi(VECTOR) for _ in targets]
    values = [load(builder, builder.add(b_at, INT64(4 * LANES * j)), VECTOR, 4) for j in vectors]
    results: list[Any] = []
    for row in a_rows:
        factor = spread(builder, load(builder, builder.add(row, a_at), FLOAT, 4))
        totals = sums[len(results) :]
        results += [multiply_add(builder, factor, *pair) for pair in zip(values, totals)]
    following = builder.add(number, INT64(1))
    for phi, start, result in (
        *zip(sums, starts, results),
        (number, INT64(0), following),
        (b_at, given.b, builder.add(b_at, INT64(_ROW_BYTES))),
        (a_at, INT64(0), builder.add(a_at, given.a_column)),
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, given.count), loop, behind)
    builder.position_at_end(behind)
    with builder.if_else(builder.icmp_signed("==", given.totals, INT64(0))) as (is_part, is_whole):
        with is_part:
            for at, result in zip(targets, results):
                store(builder, result, at, 4)
        with is_whole:
            _add_to_totals(builder, given, results)


def _tile_vectors(builder: Any, first: Any, given: Any, size: int = 4) -> list[Any]:
    """Addresses of the vectors of some rows of a tile, row by row; size: bytes of an element."""
    return [
        builder.add(first, INT64(size * (i * TILE_QUERIES + LANES * j)))
        for i, j in product(range(given.rows), range(given.vectors))
    ]


def _add_to_totals(builder: Any, given: Any, results: list[Any]) -> None:
    starts = [builder.add(given.shrinking, INT64(4 * LANES * j)) for j in range(given.vectors)]
    factors = [_wide(builder, load(builder, at, VECTOR, 4)) for at in starts]
    targets = _tile_vectors(builder, given.totals, given, size=8)
    for at, factor, result in zip(targets, cycle(factors), results):
        total = load(builder, at, _WIDE, 8)
        store(builder, multiply_add(builder, total, factor, _wide(builder, result)), at, 8)


# Sums over all blocks: what each adds to a sum of a hundred thousand keys would be lost in 32 bits.
_WIDE = ir.VectorType(ir.DoubleType(), LANES)


def _wide(builder: Any, vector: Any) -> Any:
    return builder.fpext(vector, _WIDE)


# The compiler may take a multiplication and an addition together, as the emitted code does.
_contracted: Any = numba.njit(error_model="numpy", fastmath={"contract"})


@_contracted
def _tanh(x: Any) -> Any:
    """The hyperbolic tangent to a few units in the last place (Eigen's rational approximation)."""
    bound = np.float32(7.90531110763549805)
    x = min(max(x, -bound), bound)
    square = x * x
    upper = np.float32(-2.76076847742355e-16)
    upper = upper * square + np.float32(2.00018790482477e-13)
    upper = upper * square + np.float32(-8.60467152213735e-11)
    upper = upper * square + np.float32(5.12229709037114e-08)
    upper = upper * square + np.float32(1.48572235717979e-05)
    upper = upper * square + np.float32(6.37261928875436e-04)
    upper = upper * square + np.float32(4.89352455891786e-03)
    lower = np.float32(1.19825839466702e-06)
    lower = lower * square + np.float32(1.18534705686654e-04)
    lower = lower * square + np.float32(2.26843463243900e-03)
    lower = lower * square + np.float32(4.89352518554385e-03)
    return x * upper / lower


@_contracted
def _bend(tile: Any, lanes: Any, count: Any, first_key: Any, cap: Any) -> None:
    """Give the scores of a block [count, queries] a soft cap, if it is not 0, and ALiBi's slope
    times distance.
    """
    slope, distance = tile[_SLOPE], tile[_DISTANCE]
    for key in range(count):
        scores, number = tile[_SCORES + key], np.float32(first_key + key)
        for lane in range(lanes):
            score = scores[lane]
            if cap != np.float32(0):
                score = cap * _tanh(score / cap)
            scores[lane] = score + slope[lane] * (number + distance[lane])


def _exponential(builder: Any, x: Any) -> Any:
    """e^x for x <= 0 to about one unit in the last place; 0 below -87 (Moshier, Cephes: `expf`)."""
    nearest = multiply_add(builder, x, _constant(1.4426950408889634), _constant(0.5))
    power = call_llvm(builder, f"llvm.floor.v{LANES}f32", VECTOR, nearest)
    rest = multiply_add(builder, power, _constant(-0.693359375), x)
    rest = multiply_add(builder, power, _constant(2.12194440e-4), rest)
    value = _constant(1.9875691500e-4)
    for factor in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
        1.0,
        1.0,
    ):
        value = multiply_add(builder, value, rest, _constant(factor))
    integer = ir.VectorType(INT32, LANES)
    exponent = builder.add(builder.fptosi(power, integer), ir.Constant(integer, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(integer, [23] * LANES)), VECTOR)
    is_least = builder.fcmp_ordered("<", x, _constant(-87.0))
    return builder.select(is_least, _constant(0.0), builder.fmul(value, scale))


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


@ir_statement()
def _soften(builder: Any, vectors: Any, count: Any, first_key: Any, tile: Any) -> None:
    """Turn the scores of a block [count, queries] into weights, add these, and say how a new
    maximum shrinks sums.

    first_key: number of the block's first key; -1 if each query sees all of them.
    """
    kept = [cgutils.alloca_once(builder, kind) for kind in (VECTOR, _WIDE)]
    with cgutils.for_range(builder, vectors) as column:
        offset = builder.mul(column.index, INT64(4 * LANES))
        at = {
            row: builder.add(tile, builder.add(offset, INT64(row * _ROW_BYTES)))
            for row in range(_ADDRESSES)
        }
        scores = builder.add(tile, builder.add(offset, INT64(_SCORES * _ROW_BYTES)))
        with builder.if_then(builder.icmp_signed(">=", first_key, INT64(0))):
            low, high = (load(builder, at[row], VECTOR, 4) for row in (_LOW, _HIGH))
            with _rows(builder, scores, count) as (score_at, key):
                number = spread(builder, builder.sitofp(builder.add(first_key, key), FLOAT))
                sees = builder.and_(
                    builder.fcmp_ordered(">=", number, low), builder.fcmp_ordered("<", number, high)
                )
                score = builder.select(
                    sees, load(builder, score_at, VECTOR, 4), _constant(float("-inf"))
                )
                store(builder, score, score_at, 4)
        before = load(builder, at[_MAXIMUM], VECTOR, 4)
        builder.store(before, kept[0])
        with _rows(builder, scores, count) as (score_at, _):
            score, largest = load(builder, score_at, VECTOR, 4), builder.load(kept[0])
            builder.store(
                builder.select(builder.fcmp_ordered(">", score, largest), score, largest), kept[0]
            )
        largest = builder.load(kept[0])
        shrinking = _exponential(builder, builder.fsub(before, largest))
        sum_at = builder.add(at[_SUM], offset)  # twice as far
        builder.store(
            builder.fmul(load(builder, sum_at, _WIDE, 8), _wide(builder, shrinking)), kept[1]
        )
        with _rows(builder, scores, count) as (score_at, _):
            weight = _exponential(
                builder, builder.fsub(load(builder, score_at, VECTOR, 4), largest)
            )
            store(builder, weight, score_at, 4)
            builder.store(builder.fadd(builder.load(kept[1]), _wide(builder, weight)), kept[1])
        store(builder, largest, at[_MAXIMUM], 4)
        store(builder, shrinking, at[_SHRINKING], 4)
        store(builder, builder.load(kept[1]), sum_at, 8)


@contextmanager
def _rows(builder: Any, first: Any, count: Any) -> Iterator[tuple[Any, Any]]:
    """Emit a loop over rows of a tile: the address of a vector in a row, and the row's number."""
    with cgutils.for_range(builder, count) as row:
        yield builder.add(first, builder.mul(row.index, INT64(_ROW_BYTES))), row.index


@ir_statement()
def _turn_in(builder: Any, addresses: Any, offset: Any, factor: Any, target: Any) -> None:
    """Load a vector at `offset` of the rows at the addresses; store the elements, times a factor,
    as rows of a tile.
    """
    scale = spread(builder, load(builder, factor, FLOAT, 4))
    at = [load(builder, builder.add(addresses, INT64(8 * i)), INT64, 8) for i in range(LANES)]
    rows = [load(builder, builder.add(row, offset), VECTOR, 4) for row in at]
    for i, column in enumerate(transposed(builder, rows)):
        store(builder, builder.fmul(column, scale), builder.add(target, INT64(_ROW_BYTES * i)), 4)


@ir_statement()
def _turn_out(builder: Any, source: Any, sums: Any, addresses: Any, offset: Any) -> None:
    """Store rows of 64 bits, over the sum of each column, at `offset` of the rows at the addresses,
    in 32 bits.
    """
    factor = builder.fdiv(ir.Constant(_WIDE, [1.0] * LANES), load(builder, sums, _WIDE, 8))
    at = [builder.add(source, INT64(2 * _ROW_BYTES * i)) for i in range(LANES)]
    rows = [
        builder.fptrunc(builder.fmul(load(builder, row, _WIDE, 8), factor), VECTOR) for row in at
    ]
    for i, column in enumerate(transposed(builder, rows)):
        row = load(builder, builder.add(addresses, INT64(8 * i)), INT64, 8)
        store(builder, column, builder.add(row, offset), 4)


@njit
def _as_float32(kind: Any, rows: Any, row_bytes: Any, target: Any) -> tuple[Any, Any]:
    """Return where rows are in float32, and the bytes of a row; those of 16 bits are written to
    target [rows, size].
    """
    if kind == FLOAT32:
        return rows, row_bytes
    for number in range(len(target)):
        bits = numba.carray(pointer(rows + number * row_bytes), target.shape[1], np.uint16)
        wide = target[number]
        if CONVERTS_HALVES and kind == FLOAT16:
            for i in range(len(wide)):
                wide[i] = half_to_float(bits[i])
        else:
            for i in range(len(wide)):
                wide[i] = np.int32(np.int32(bits[i]) << np.int32(16)).view(np.float32)
    return np.int64(target.ctypes.data), 4 * target.shape[1]


@njit
def _multiply(given: Any) -> None:
    """Compute a product of any number of rows."""
    at = 0
    while at < given.rows:
        _step(
            _Product(
                rows=_STEP_ROWS if at + _STEP_ROWS <= given.rows else 1,
                vectors=given.vectors,
                a=given.a + at * given.a_row,
                a_row=given.a_row,
                a_column=given.a_column,
                b=given.b,
                count=given.count,
                c=given.c + at * _ROW_BYTES,
                adds=given.adds,
                totals=given.totals + 2 * at * _ROW_BYTES if given.totals else 0,
                shrinking=given.shrinking,
            )
        )
        at += _STEP_ROWS if at + _STEP_ROWS <= given.rows else 1


# A score that a query starts with: less than any, and its difference from minus infinity is no NaN.
_LEAST = np.float32(-3e38)


@njit
def _oldest(position: Any, window: Any, is_chunked: Any) -> Any:
    """The first position that a token sees (`models.config.Window.oldest`)."""
    if window == 0:
        return np.int64(0)
    return position // window * window if is_chunked else position + 1 - window


# Some of a job's (token, query head) pairs of one key head, and addresses in a thread's memory.
_Tile = namedtuple(
    "_Tile", "head first_row rows vectors memory queries of_block totals wide lanes turned"
)


@njit
def _tile_at(given: Any, job: Any, head: Any, first_row: Any, memory: Any) -> Any:
    rows = min(TILE_QUERIES, job.count * given.group - first_row)
    vectors, size = (rows + LANES - 1) // LANES, given.dim
    of_block = memory + (_QUERIES + size) * _ROW_BYTES
    totals = of_block + size * _ROW_BYTES
    return _Tile(
        head=head,
        first_row=first_row,
        rows=rows,
        vectors=vectors,
        memory=memory,
        queries=memory + _QUERIES * _ROW_BYTES,
        of_block=of_block,
        totals=totals,
        wide=totals + 2 * size * _ROW_BYTES,
        lanes=vectors * LANES,
        turned=size // LANES * LANES,
    )


@njit
def _numbers(given: Any, tile: Any) -> tuple[Any, Any, Any, Any]:
    """View a tile's rows and queries, its sums, its outputs in 64 bits, and its addresses."""
    size, memory = given.dim, tile.memory
    return (
        numba.carray(pointer(memory), (_QUERIES + size, TILE_QUERIES), np.float32),
        numba.carray(pointer(memory + _SUM * _ROW_BYTES), TILE_QUERIES, np.float64),
        numba.carray(pointer(tile.totals), (size, TILE_QUERIES), np.float64),
        integers(memory + _ADDRESSES * _ROW_BYTES, TILE_QUERIES),
    )


@njit
def _token_and_head(given: Any, job: Any, tile: Any, lane: Any) -> tuple[Any, Any]:
    """Return whose query a lane is; those behind the last row repeat it."""
    row = tile.first_row + min(lane, tile.rows - 1)
    return job.token + row // given.group, tile.head * given.group + row % given.group


@njit
def _kept(given: Any, token: Any, head: Any) -> tuple[Any, Any]:
    """View what a query's next job goes on from, and its log-sum-exp."""
    number, size = token * given.key_heads * given.group + head, given.dim + 1
    state = numba.carray(pointer(given.state + 8 * size * number), size, np.float64)
    return state, floats(given.lse + 4 * number, 1)


@njit
def _begin_tile(given: Any, job: Any, tile: Any) -> None:
    """Load queries, times the scale, and what the jobs before have left; say what each sees."""
    numbers, sums, outputs, addresses = _numbers(given, tile)
    size, scale = given.dim, floats(given.factors, 1)[0]
    positions = integers(given.positions, job.token + job.count)
    numbers[_SLOPE], sums[:], outputs[:, : tile.lanes] = 0, 0, 0
    for lane in range(tile.lanes):
        token, head = _token_and_head(given, job, tile, lane)
        addresses[lane] = given.q + token * given.q_row + head * given.q_head
        query = floats(addresses[lane], size)
        for element in range(tile.turned, size):
            numbers[_QUERIES + element, lane] = query[element] * scale
        numbers[_MAXIMUM, lane] = _LEAST
        if job.begin > 0:
            before, lse = _kept(given, token, head)
            for element in range(size):
                outputs[element, lane] = before[element]
            numbers[_MAXIMUM, lane], sums[lane] = lse[0], before[size]
        if given.slopes:
            numbers[_SLOPE, lane] = floats(given.slopes + 4 * head, 1)[0]
        at = positions[token]
        numbers[_LOW, lane] = _oldest(at, given.window, given.is_chunked)
        numbers[_HIGH, lane], numbers[_DISTANCE, lane] = at + 1, -at
    for lane in range(0, tile.lanes, LANES):
        at = np.int64(addresses.ctypes.data) + 8 * lane
        for element in range(0, tile.turned, LANES):
            target = tile.queries + element * _ROW_BYTES + 4 * lane
            _turn_in((at, 4 * element, given.factors, target))


@njit
def _multiply_block(given: Any, job: Any, tile: Any, keys: tuple[Any, Any], is_values: Any) -> None:
    """Score a block's keys, or add its values times their weights, piece by piece of its segments.

    keys: the first position, and the one behind the last.
    """
    block_begin, block_end = keys
    size, segments = given.dim, records(given.segments, job.last_segment, SEGMENT)
    for number in range(job.segment, job.last_segment):
        segment = segments[number]
        start, row_bytes = segment.position, segment.row_bytes[is_values]
        key, end_key = max(start, block_begin), min(start + segment.length, block_end)
        count = end_key - key
        if count <= 0:
            continue
        of_keys = tile.memory + (_SCORES + key - block_begin) * _ROW_BYTES
        first = segment.address[is_values] + tile.head * segment.head_bytes[is_values]
        converted = numba.carray(pointer(tile.wide), (count, size), np.float32)
        piece, row_bytes = _as_float32(
            given.kind, first + (key - start) * row_bytes, row_bytes, converted
        )
        if is_values:
            adds, totals = np.int64(key > block_begin), tile.totals if end_key == block_end else 0
            shrinking, outputs = tile.memory + _SHRINKING * _ROW_BYTES, tile.of_block
            _multiply(
                _Product(
                    size, tile.vectors, piece, 4, row_bytes, of_keys, count, outputs, adds, totals,
                    shrinking,
                )
            )  # fmt: skip
        else:
            _multiply(
                _Product(
                    count, tile.vectors, piece, row_bytes, 4, tile.queries, size, of_keys, 0, 0, 0
                )
            )


@njit
def _attend_blocks(given: Any, job: Any, tile: Any) -> tuple[Any, Any]:
    """Add up the blocks of keys that a tile sees; return the first position, and the one behind
    the last.

    Products have keys or elements of a head for rows, and queries for columns, so keys and values
    are read as they are, and a query's maximum is that of a column. Blocks lie at multiples of
    their size, so a query's sums depend neither on segments nor on others of its tile.
    """
    numbers, window, is_chunked = _numbers(given, tile)[0], given.window, given.is_chunked
    positions = integers(given.positions + 8 * job.token, job.count)
    last_row = tile.first_row + tile.rows - 1
    seen_by = positions[tile.first_row // given.group : last_row // given.group + 1]
    earliest, latest = seen_by.min(), seen_by.max()
    segments = records(given.segments, job.last_segment, SEGMENT)
    first, last = segments[job.segment].position, segments[job.last_segment - 1]
    end = min(latest + 1, last.length + last.position)
    end = min(end, job.end) if job.end else end
    all_see_from, cap = _oldest(latest, window, is_chunked), floats(given.factors + 4, 1)[0]
    oldest = _oldest(earliest, window, is_chunked) // BLOCK_KEYS * BLOCK_KEYS
    oldest = max(job.begin, first, oldest) // BLOCK_KEYS * BLOCK_KEYS
    for block in range(oldest, end, BLOCK_KEYS):
        keys = max(block, first), min(block + BLOCK_KEYS, end)
        count = keys[1] - keys[0]
        _multiply_block(given, job, tile, keys, 0)
        if cap != 0.0 or given.slopes != 0:
            _bend(numbers, tile.lanes, count, keys[0], cap)
        is_masked = keys[0] < all_see_from or keys[1] > earliest + 1
        _soften((tile.vectors, count, keys[0] if is_masked else -1, tile.memory))
        _multiply_block(given, job, tile, keys, 1)
    return first, end


@njit
def _end_tile(given: Any, job: Any, tile: Any, keys: tuple[Any, Any]) -> None:
    """Write results, or leave sums for the next job of the tokens.

    keys: as `_attend_blocks` returns them.
    """
    numbers, sums, outputs, addresses = _numbers(given, tile)
    for lane in range(tile.lanes):
        token, head = _token_and_head(given, job, tile, lane)
        state, lse = _kept(given, token, head)
        if job.end:
            for element in range(given.dim):
                state[element] = outputs[element, lane]
            state[given.dim], lse[0] = sums[lane], numbers[_MAXIMUM, lane]
            continue
        addresses[lane] = given.out + token * given.out_row + head * given.out_head
        weight = numbers[_MAXIMUM, lane]
        # all scores are minus infinity: no number, as elsewhere; or no key is seen
        if sums[lane] == 0:
            low = max(numbers[_LOW, lane], np.float32(keys[0]))
            sees = low < min(numbers[_HIGH, lane], np.float32(keys[1]))
            sums[lane] = np.nan if sees else 1
            weight = np.float32(-np.inf)
        lse[0] = np.float32(math.log(sums[lane]) + weight)
        result = floats(addresses[lane], given.dim)
        for element in range(tile.turned, given.dim):
            result[element] = outputs[element, lane] / sums[lane]
    for lane in range(0, 0 if job.end else tile.lanes, LANES):
        at = np.int64(addresses.ctypes.data) + 8 * lane
        of_sums = np.int64(sums.ctypes.data) + 8 * lane
        for element in range(0, tile.turned, LANES):
            source = tile.totals + 2 * (element * _ROW_BYTES + 4 * lane)
            _turn_out((source, of_sums, at, 4 * element))


@partial(Loop, Call)
def attend(given: Any, part: Any, parts: Any) -> None:
    """Attention of tokens to the segments of keys that each sees, up to its position.

    Numbers of `Call`: the addresses of jobs and segments (`JOB`, `SEGMENT`), of tensors, of scale
    and soft cap (0: none), of each head's slope (0: none), and of scratch memory; bytes of rows and
    heads, and of a thread's memory; query heads of a key head, elements of a head.
    The next job of some tokens goes on from what the one before has left in 64 bits in `state`:
    outputs [D] before the division and the sum; maxima in place of the log-sum-exps.
    """
    jobs, number = records(given.jobs, given.num_jobs, JOB), 0
    memory = given.scratch + part * given.scratch_bytes
    for index in range(len(jobs)):
        job = jobs[index]
        for head in range(given.key_heads):
            for first_row in range(0, job.count * given.group, TILE_QUERIES):
                if number % parts == part:
                    tile = _tile_at(given, job, head, first_row, memory)
                    _begin_tile(given, job, tile)
                    keys = _attend_blocks(given, job, tile)
                    _end_tile(given, job, tile, keys)
                number += 1
