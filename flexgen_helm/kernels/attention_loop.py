"""Attention of tokens to all segments that they see, compiled (`attention`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.attention import BLOCK_KEYS
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
    done,
    floats,
    half_to_float,
    integers,
    ir_statement,
    load,
    multiply_add,
    njit,
    operands,
    part_of_thread,
    pointer,
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


@ir_statement((1, _STEP_ROWS), tuple(range(1, _QUERY_VECTORS + 1)))
def _step(builder: Any, rows: int, vectors: int, *operands: Any) -> None:
    """c [rows, vectors] = or += a [rows, count] b [count, vectors]; a has any distances, b and c
    whole tiles.

    totals: 0, or rows of 64 bits which have the result instead: totals = totals shrinking + c,
        where c is not written.
    """
    a, a_row, a_column, b, count, c, adds, totals, shrinking = operands
    tile_bytes = 4 * TILE_QUERIES
    targets = [
        [builder.add(c, INT64(i * tile_bytes + 4 * LANES * j)) for j in range(vectors)]
        for i in range(rows)
    ]
    zero, keeps = ir.Constant(VECTOR, [0.0] * LANES), builder.icmp_signed("!=", adds, INT64(0))
    starts = [
        [builder.select(keeps, load(builder, at, VECTOR, 4), zero) for at in row] for row in targets
    ]
    a_rows = [builder.add(a, builder.mul(a_row, INT64(i))) for i in range(rows)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, b_at, a_at = builder.phi(INT64), builder.phi(INT64), builder.phi(INT64)
    sums = [[builder.phi(VECTOR) for _ in range(vectors)] for _ in range(rows)]
    values = [
        load(builder, builder.add(b_at, INT64(4 * LANES * j)), VECTOR, 4) for j in range(vectors)
    ]
    results = []
    for row, row_sums in zip(a_rows, sums):
        factor = spread(builder, load(builder, builder.add(row, a_at), FLOAT, 4))
        results.append(
            [multiply_add(builder, factor, value, total) for value, total in zip(values, row_sums)]
        )
    for total, start, result in zip(chain(*sums), chain(*starts), chain(*results)):
        total.add_incoming(start, before)
        total.add_incoming(result, loop)
    following = builder.add(number, INT64(1))
    for phi, start, result in (
        (number, INT64(0), following),
        (b_at, b, builder.add(b_at, INT64(tile_bytes))),
        (a_at, INT64(0), builder.add(a_at, a_column)),
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, behind)
    builder.position_at_end(behind)
    with builder.if_else(builder.icmp_signed("==", totals, INT64(0))) as (is_part, is_whole):
        with is_part:
            for at, result in zip(chain(*targets), chain(*results)):
                store(builder, result, at, 4)
        with is_whole:
            starts = [builder.add(shrinking, INT64(4 * LANES * j)) for j in range(vectors)]
            factors = [_wide(builder, load(builder, at, VECTOR, 4)) for at in starts]
            for i, row in enumerate(results):
                for j, result in enumerate(row):
                    at = builder.add(totals, INT64(2 * (i * tile_bytes + 4 * LANES * j)))
                    total = load(builder, at, _WIDE, 8)
                    store(
                        builder,
                        multiply_add(builder, total, factors[j], _wide(builder, result)),
                        at,
                        8,
                    )


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
def _score_keys(
    keys: Any, row_bytes: Any, queries: Any, size: Any, scores: Any, count: Any, vectors: Any
) -> None:
    """Scores [count, queries] of keys [count, size]."""
    at = 0
    while at < count:
        step = _STEP_ROWS if at + _STEP_ROWS <= count else 1
        _step(
            (
                step,
                vectors,
                keys + at * row_bytes,
                row_bytes,
                4,
                queries,
                size,
                scores + at * _ROW_BYTES,
                0,
                0,
                0,
            )
        )
        at += step


@njit
def _add_values(
    values: Any, row_bytes: Any, weights: Any, count: Any, outputs: Any, size: Any, vectors: Any,
    adds: Any, totals: Any, shrinking: Any,
) -> None:  # fmt: skip
    """Add values [count, size] times weights [count, queries] to a block's outputs [size, queries];
    adds: 0 begins.

    totals: of all blocks, to which the block's outputs are added with their last values; 0 before.
    """
    at = 0
    while at < size:
        step = _STEP_ROWS if at + _STEP_ROWS <= size else 1
        whole = totals + 2 * at * _ROW_BYTES if totals else 0
        part = outputs + at * _ROW_BYTES
        _step(
            (
                step,
                vectors,
                values + 4 * at,
                4,
                row_bytes,
                weights,
                count,
                part,
                adds,
                whole,
                shrinking,
            )
        )
        at += step


# A score that a query starts with: less than any, and its difference from minus infinity is no NaN.
_LEAST = np.float32(-3e38)


@njit
def _oldest(position: Any, window: Any, is_chunked: Any) -> Any:
    """The first position that a token sees (`models.config.Window.oldest`)."""
    if window == 0:
        return np.int64(0)
    return position // window * window if is_chunked else position + 1 - window


@njit
def _attend_tile(given: Any, scratch: Any, job: Any, head: Any, first_row: Any) -> None:
    """Attention of a tile: some of a job's (token, query head) pairs of one key head, over its
    segments.

    Products have keys or elements of a head for rows, and queries for columns, so keys and values
    are read as they are, and a query's maximum is that of a column.
    """
    segments, q, q_row, q_head, out, out_row, out_head, lse, state, heads = given[2:12]
    group, size, window, factors, positions, all_slopes, is_chunked, kind = given[12:20]
    scale, cap = floats(factors, 1)[0], floats(factors + 4, 1)[0]
    bends, token = cap != 0.0 or all_slopes != 0, job[0]
    begin, is_whole, follows, all_heads = job[4], job[5] == 0, job[4] > 0, heads * group
    position = integers(positions + 8 * token, job[1])
    rows = min(TILE_QUERIES, job[1] * group - first_row)
    tile = numba.carray(pointer(scratch), (_QUERIES + size, TILE_QUERIES), np.float32)
    queries, of_block = scratch + _QUERIES * _ROW_BYTES, scratch + (_QUERIES + size) * _ROW_BYTES
    scores, totals = scratch + _SCORES * _ROW_BYTES, of_block + size * _ROW_BYTES
    wide, outputs = (
        totals + 2 * size * _ROW_BYTES,
        numba.carray(pointer(totals), (size, TILE_QUERIES), np.float64),
    )
    sums = numba.carray(pointer(scratch + _SUM * _ROW_BYTES), TILE_QUERIES, np.float64)
    addresses = integers(scratch + _ADDRESSES * _ROW_BYTES, TILE_QUERIES)
    vectors, turned = (rows + LANES - 1) // LANES, size // LANES * LANES
    lanes = vectors * LANES
    tile[_SLOPE], sums[:], outputs[:, :lanes] = 0, 0, 0
    for lane in range(lanes):  # those behind the last row repeat it
        row = first_row + min(lane, rows - 1)
        row_token, row_head = token + row // group, head * group + row % group
        addresses[lane] = q + row_token * q_row + row_head * q_head
        query = floats(addresses[lane], size)
        for element in range(turned, size):
            tile[_QUERIES + element, lane] = query[element] * scale
        tile[_MAXIMUM, lane] = _LEAST
        if follows:
            number = row_token * all_heads + row_head
            before = numba.carray(pointer(state + 8 * (size + 1) * number), size + 1, np.float64)
            for element in range(size):
                outputs[element, lane] = before[element]
            tile[_MAXIMUM, lane], sums[lane] = floats(lse + 4 * number, 1)[0], before[size]
        if all_slopes:
            tile[_SLOPE, lane] = floats(all_slopes + 4 * row_head, 1)[0]
        at = position[row // group]
        tile[_LOW, lane], tile[_HIGH, lane], tile[_DISTANCE, lane] = (
            _oldest(at, window, is_chunked),
            at + 1,
            -at,
        )
    for lane in range(0, lanes, LANES):
        for element in range(0, turned, LANES):
            at = scratch + _ADDRESSES * _ROW_BYTES + 8 * lane
            _turn_in((at, 4 * element, factors, queries + element * _ROW_BYTES + 4 * lane))
    seen_by = position[first_row // group : (first_row + rows - 1) // group + 1]
    first_position, last_position = seen_by.min(), seen_by.max()
    first_segment, last_segment = (
        integers(segments + 64 * job[2], 8),
        integers(segments + 64 * (job[3] - 1), 8),
    )
    end = min(last_position + 1, last_segment[6] + last_segment[7])
    end = end if is_whole else min(end, job[5])
    all_see_to, all_see_from = first_position + 1, _oldest(last_position, window, is_chunked)
    # Blocks lie at multiples of their size, so a query's sums depend neither on segments nor on
    # others of its tile.
    oldest = max(
        begin,
        first_segment[7],
        _oldest(first_position, window, is_chunked) // BLOCK_KEYS * BLOCK_KEYS,
    )
    for block in range(oldest // BLOCK_KEYS * BLOCK_KEYS, end, BLOCK_KEYS):
        block_begin, block_end = max(block, first_segment[7]), min(block + BLOCK_KEYS, end)
        # scores of all pieces, their weights, and the values of all pieces
        for is_value in range(2):
            for number in range(job[2], job[3]):
                segment = integers(segments + 64 * number, 8)
                start, row_bytes = segment[7], segment[2 + is_value]
                key, end_key = max(start, block_begin), min(start + segment[6], block_end)
                count, of_keys = end_key - key, scores + (key - block_begin) * _ROW_BYTES
                if count <= 0:
                    continue
                piece = segment[is_value] + head * segment[4 + is_value] + (key - start) * row_bytes
                converted = numba.carray(pointer(wide), (count, size), np.float32)
                piece, row_bytes = _as_float32(kind, piece, row_bytes, converted)
                if is_value:
                    to, adds = totals if end_key == block_end else 0, 1 if key > block_begin else 0
                    shrinking = scratch + _SHRINKING * _ROW_BYTES
                    _add_values(
                        piece,
                        row_bytes,
                        of_keys,
                        count,
                        of_block,
                        size,
                        vectors,
                        adds,
                        to,
                        shrinking,
                    )
                else:
                    _score_keys(piece, row_bytes, queries, size, of_keys, count, vectors)
            if not is_value:
                count = block_end - block_begin
                if bends:
                    _bend(tile, lanes, count, block_begin, cap)
                is_masked = block_begin < all_see_from or block_end > all_see_to
                _soften((vectors, count, block_begin if is_masked else -1, scratch))
    for lane in range(lanes):
        row = first_row + min(lane, rows - 1)
        row_token, row_head = token + row // group, head * group + row % group
        number, weight = row_token * all_heads + row_head, tile[_MAXIMUM, lane]
        addresses[lane] = out + row_token * out_row + row_head * out_head
        if not is_whole:
            floats(lse + 4 * number, 1)[0] = weight
            after = numba.carray(pointer(state + 8 * (size + 1) * number), size + 1, np.float64)
            for element in range(size):
                after[element] = outputs[element, lane]
            after[size] = sums[lane]
            continue
        # all scores are minus infinity: no number, as elsewhere; or no key is seen
        if sums[lane] == 0:
            sees = max(tile[_LOW, lane], np.float32(first_segment[7])) < min(
                tile[_HIGH, lane], np.float32(end)
            )
            sums[lane] = np.nan if sees else 1
            weight = np.float32(-np.inf)
        floats(lse + 4 * number, 1)[0] = np.float32(math.log(sums[lane]) + weight)
        result = floats(addresses[lane], size)
        for element in range(turned, size):
            result[element] = outputs[element, lane] / sums[lane]
    for lane in range(0, lanes if is_whole else 0, LANES):
        at = scratch + _ADDRESSES * _ROW_BYTES + 8 * lane
        for element in range(0, turned, LANES):
            source = totals + 2 * (element * _ROW_BYTES + 4 * lane)
            _turn_out((source, scratch + _SUM * _ROW_BYTES + 8 * lane, at, 4 * element))


@Loop
def attend(address: Any) -> None:
    """Attention of tokens to the segments of keys that each sees, up to its position.

    Arguments: jobs and their number, segments, q, bytes of its rows and heads, out, bytes of its
    rows and heads, the log-sum-exps, what later jobs go on from, key heads, query heads of one,
    elements of a head, window (0: none), address of scale and soft cap (0: none), positions of all
    tokens, each head's slope (0: none), whether positions are divided into chunks of the window,
    the kind of keys' and values' elements, scratch memory, its bytes for a thread.
    A job has 6 integers: first token, tokens, its first segment, the one behind its last, the first
    key position that it takes, and the one behind the last (0: all). The next job of its tokens,
    which begins where it ends, goes on from what it leaves in 64 bits: outputs [D] before the
    division and the sum; maxima in place of the log-sum-exps.
    A segment has 8: addresses of keys and values, bytes of their rows, bytes of their heads,
    length, first position.
    Each of a job begins where the one before it ends.
    """
    part, parts = part_of_thread(address)
    given = operands(address, 22)
    jobs, group, number = integers(given[0], 6 * given[1]).reshape((given[1], 6)), given[12], 0
    for index in range(len(jobs)):
        for head in range(given[11]):
            for first_row in range(0, jobs[index, 1] * group, TILE_QUERIES):
                if number % parts == part:
                    _attend_tile(given, given[20] + part * given[21], jobs[index], head, first_row)
                number += 1
    done(address, part)
