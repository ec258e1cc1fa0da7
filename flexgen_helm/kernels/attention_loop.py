"""The compiled loop of `attention`: tokens attend to all segments of keys that they see.

tile     queries of one key head, side by side: each is a column, or lane, of vectors
block    `BLOCK_KEYS` keys, for which a tile has its scores, their weights, and the output, before
         the next block

"""

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

from flexgen_helm.kernels.attention import BLOCK_KEYS, JOB, SEGMENT, AttendArgs
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
    vector_of,
)
from flexgen_helm.kernels.team import FLOAT16, FLOAT32

# Vectors of a tile's queries, and the rows of a product (keys of the scores, elements of the
# output) that are computed at once: their sums stay in registers.
_TILE_VECTORS = 3
_STEP_ROWS = 8 if HAS_AVX512 else 4
TILE_QUERIES = _TILE_VECTORS * LANES
_ROW_BYTES = 4 * TILE_QUERIES
# The memory of a tile: rows of TILE_QUERIES float32 numbers, one for each query. By number of the
# first row:
_MAXIMUM = 0  # of the scores so far
_RESCALE = 1  # factor of the sums so far, when a block has a new maximum
_FIRST_KEY = 2  # position of the first key that the query sees
_END_KEY = 3  # and the position behind the last
_SLOPE = 4  # of ALiBi
_DISTANCE = 5  # from the query to key 0: minus its position
_SUM = 6  # of the weights so far, in float64, so two rows
_ADDRESSES = 8  # of each query's row in q or in the output, 64-bit integers, so two rows
_SCORES = 10  # [BLOCK_KEYS], and then their weights
_QUERIES = _SCORES + BLOCK_KEYS  # [D]
# Behind the queries: the output of a block [D], and that of all blocks so far [D] in float64.


def scratch_floats(head_dim: int) -> int:
    """Return the float32 numbers of a thread's memory: a tile, and a block of keys or values that
    are converted from 16 bits.
    """
    return TILE_QUERIES * (_QUERIES + 4 * head_dim) + BLOCK_KEYS * head_dim


# Sums over all blocks are in float64: float32 would lose what a block adds to a sum of a hundred
# thousand keys.
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


def _to_float64(builder: Any, vector: Any) -> Any:
    return builder.fpext(vector, _DOUBLES)


# A product of some rows with a tile: c [rows, vectors] = a [rows, count] b [count, vectors]. a has
# any strides; b and c are rows of a tile. adds: c is added to. totals: 0, or the address of rows in
# float64, to which the product is added instead: totals = totals rescale + product.
_Product = namedtuple(
    "_Product", "rows vectors a a_row_stride a_column_stride b count c adds totals rescale"
)


@ir_statement((1, _STEP_ROWS), tuple(range(1, _TILE_VECTORS + 1)))
def _multiply_few_rows(builder: Any, args: Any) -> None:
    """Write the IR of a `_Product` of 1 or `_STEP_ROWS` rows, whose sums stay in registers."""
    rows, vectors = range(args.rows), range(args.vectors)
    targets = _tile_vectors(builder, args.c, args)
    adds = builder.icmp_signed("!=", args.adds, INT64(0))
    starts = [builder.select(adds, load(builder, at, VECTOR, 4), vector_of(0.0)) for at in targets]
    a_rows = [builder.add(args.a, builder.mul(args.a_row_stride, INT64(i))) for i in rows]
    before, loop, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
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
    next_number = builder.add(number, INT64(1))
    for phi, start, result in (
        *zip(sums, starts, results),
        (number, INT64(0), next_number),
        (b_at, args.b, builder.add(b_at, INT64(_ROW_BYTES))),
        (a_at, INT64(0), builder.add(a_at, args.a_column_stride)),
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", next_number, args.count), loop, done)
    builder.position_at_end(done)
    with builder.if_else(builder.icmp_signed("==", args.totals, INT64(0))) as (in_c, in_totals):
        with in_c:
            for at, result in zip(targets, results):
                store(builder, result, at, 4)
        with in_totals:
            _add_to_totals(builder, args, results)


def _tile_vectors(builder: Any, first: Any, args: Any, size: int = 4) -> list[Any]:
    """Return the addresses of the vectors of a product's rows in a tile, row by row.

    first: address of the first row; size: bytes of an element.
    """
    return [
        builder.add(first, INT64(size * (i * TILE_QUERIES + LANES * j)))
        for i, j in product(range(args.rows), range(args.vectors))
    ]


def _add_to_totals(builder: Any, args: Any, results: list[Any]) -> None:
    """Write the IR of totals = totals rescale + results, of a `_Product` with totals."""
    starts = [builder.add(args.rescale, INT64(4 * LANES * j)) for j in range(args.vectors)]
    factors = [_to_float64(builder, load(builder, at, VECTOR, 4)) for at in starts]
    targets = _tile_vectors(builder, args.totals, args, size=8)
    for at, factor, result in zip(targets, cycle(factors), results):
        total = load(builder, at, _DOUBLES, 8)
        store(builder, multiply_add(builder, total, factor, _to_float64(builder, result)), at, 8)


# The compiler may contract a multiplication and an addition to one instruction, as `multiply_add`.
_contracted: Any = numba.njit(error_model="numpy", fastmath={"contract"})


@_contracted
def _tanh(x: Any) -> Any:
    """Return tanh(x) to a few units in the last place (Eigen's rational approximation)."""
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
def _cap_and_bias_scores(tile: Any, lanes: Any, count: Any, first_key: Any, cap: Any) -> None:
    """Apply the soft cap, if it is not 0, to a block's scores [count, queries], and add ALiBi's
    slope times distance.

    lanes: queries; first_key: position of the block's first key.
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
    """Return e^x for x <= 0 to about one unit in the last place; 0 below -87 (Moshier, Cephes:
    `expf`).
    """
    nearest = multiply_add(builder, x, vector_of(1.4426950408889634), vector_of(0.5))
    power = call_llvm(builder, f"llvm.floor.v{LANES}f32", VECTOR, nearest)
    rest = multiply_add(builder, power, vector_of(-0.693359375), x)
    rest = multiply_add(builder, power, vector_of(2.12194440e-4), rest)
    value = vector_of(1.9875691500e-4)
    for factor in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
        1.0,
        1.0,
    ):
        value = multiply_add(builder, value, rest, vector_of(factor))
    integer = ir.VectorType(INT32, LANES)
    exponent = builder.add(builder.fptosi(power, integer), ir.Constant(integer, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(integer, [23] * LANES)), VECTOR)
    is_least = builder.fcmp_ordered("<", x, vector_of(-87.0))
    return builder.select(is_least, vector_of(0.0), builder.fmul(value, scale))


@ir_statement()
def _exponentiate_scores(builder: Any, vectors: Any, count: Any, first_key: Any, tile: Any) -> None:
    """Write the IR of the softmax of a block: turn its scores [count, queries] into weights
    e^(score - maximum), with the maximum so far; add them to the sums of weights, and set the
    factor `_RESCALE` of earlier sums, which had the maximum before.

    vectors: of the queries; tile: the address of its memory.
    first_key: position of the block's first key; -1 if each query sees all keys of the block.
    """
    maximum_slot, sum_slot = (cgutils.alloca_once(builder, type_) for type_ in (VECTOR, _DOUBLES))
    with cgutils.for_range(builder, vectors) as column:
        offset = builder.mul(column.index, INT64(4 * LANES))
        row_at = {
            row: builder.add(tile, builder.add(offset, INT64(row * _ROW_BYTES)))
            for row in range(_ADDRESSES)
        }
        scores = builder.add(tile, builder.add(offset, INT64(_SCORES * _ROW_BYTES)))
        with builder.if_then(builder.icmp_signed(">=", first_key, INT64(0))):
            first_keys, end_keys = (
                load(builder, row_at[row], VECTOR, 4) for row in (_FIRST_KEY, _END_KEY)
            )
            with _each_row(builder, scores, count) as (score_at, key):
                position = spread(builder, builder.sitofp(builder.add(first_key, key), FLOAT))
                sees = builder.and_(
                    builder.fcmp_ordered(">=", position, first_keys),
                    builder.fcmp_ordered("<", position, end_keys),
                )
                score = builder.select(
                    sees, load(builder, score_at, VECTOR, 4), vector_of(float("-inf"))
                )
                store(builder, score, score_at, 4)
        old_maximum = load(builder, row_at[_MAXIMUM], VECTOR, 4)
        builder.store(old_maximum, maximum_slot)
        with _each_row(builder, scores, count) as (score_at, _):
            score, maximum = load(builder, score_at, VECTOR, 4), builder.load(maximum_slot)
            builder.store(
                builder.select(builder.fcmp_ordered(">", score, maximum), score, maximum),
                maximum_slot,
            )
        maximum = builder.load(maximum_slot)
        rescale = _exponential(builder, builder.fsub(old_maximum, maximum))
        sum_at = builder.add(row_at[_SUM], offset)  # in float64, so twice as far
        builder.store(
            builder.fmul(load(builder, sum_at, _DOUBLES, 8), _to_float64(builder, rescale)),
            sum_slot,
        )
        with _each_row(builder, scores, count) as (score_at, _):
            weight = _exponential(
                builder, builder.fsub(load(builder, score_at, VECTOR, 4), maximum)
            )
            store(builder, weight, score_at, 4)
            builder.store(
                builder.fadd(builder.load(sum_slot), _to_float64(builder, weight)), sum_slot
            )
        store(builder, maximum, row_at[_MAXIMUM], 4)
        store(builder, rescale, row_at[_RESCALE], 4)
        store(builder, builder.load(sum_slot), sum_at, 8)


@contextmanager
def _each_row(builder: Any, first: Any, count: Any) -> Iterator[tuple[Any, Any]]:
    """Write the IR of a loop over rows of a tile, whose body is that of the `with` statement; yield
    the address of a vector in the row, and the row's number.
    """
    with cgutils.for_range(builder, count) as row:
        yield builder.add(first, builder.mul(row.index, INT64(_ROW_BYTES))), row.index


@ir_statement()
def _load_transposed(builder: Any, addresses: Any, offset: Any, factor: Any, target: Any) -> None:
    """Write the IR that loads a vector at `offset` of each row at the addresses [LANES], and stores
    their transpose, times the number at `factor`, as rows of a tile.
    """
    scale = spread(builder, load(builder, factor, FLOAT, 4))
    at = [load(builder, builder.add(addresses, INT64(8 * i)), INT64, 8) for i in range(LANES)]
    rows = [load(builder, builder.add(row, offset), VECTOR, 4) for row in at]
    for i, column in enumerate(transposed(builder, rows)):
        store(builder, builder.fmul(column, scale), builder.add(target, INT64(_ROW_BYTES * i)), 4)


@ir_statement()
def _store_transposed(builder: Any, source: Any, sums: Any, addresses: Any, offset: Any) -> None:
    """Write the IR that divides LANES rows of a tile in float64 by `sums`, and stores their
    transpose in float32, at `offset` of each row at the addresses [LANES].
    """
    factor = builder.fdiv(ir.Constant(_DOUBLES, [1.0] * LANES), load(builder, sums, _DOUBLES, 8))
    at = [builder.add(source, INT64(2 * _ROW_BYTES * i)) for i in range(LANES)]
    rows = [
        builder.fptrunc(builder.fmul(load(builder, row, _DOUBLES, 8), factor), VECTOR) for row in at
    ]
    for i, column in enumerate(transposed(builder, rows)):
        row = load(builder, builder.add(addresses, INT64(8 * i)), INT64, 8)
        store(builder, column, builder.add(row, offset), 4)


@njit
def _as_float32(dtype: Any, rows: Any, row_stride: Any, target: Any) -> tuple[Any, Any]:
    """Return the address of rows in float32, and their stride; rows of 16 bits are converted into
    `target` [rows, D].
    """
    if dtype == FLOAT32:
        return rows, row_stride
    for number in range(len(target)):
        bits = numba.carray(pointer(rows + number * row_stride), target.shape[1], np.uint16)
        converted = target[number]
        if CONVERTS_HALVES and dtype == FLOAT16:
            for i in range(len(converted)):
                converted[i] = half_to_float(bits[i])
        else:
            for i in range(len(converted)):
                converted[i] = np.int32(np.int32(bits[i]) << np.int32(16)).view(np.float32)
    return np.int64(target.ctypes.data), 4 * target.shape[1]


@njit
def _multiply_rows(args: Any) -> None:
    """Compute a `_Product` of any number of rows."""
    at = 0
    while at < args.rows:
        _multiply_few_rows(
            _Product(
                rows=_STEP_ROWS if at + _STEP_ROWS <= args.rows else 1,
                vectors=args.vectors,
                a=args.a + at * args.a_row_stride,
                a_row_stride=args.a_row_stride,
                a_column_stride=args.a_column_stride,
                b=args.b,
                count=args.count,
                c=args.c + at * _ROW_BYTES,
                adds=args.adds,
                totals=args.totals + 2 * at * _ROW_BYTES if args.totals else 0,
                rescale=args.rescale,
            )
        )
        at += _STEP_ROWS if at + _STEP_ROWS <= args.rows else 1


# The maximum that a query starts with: less than any score, and not minus infinity, whose
# difference from minus infinity, the score of a hidden key, is NaN.
_LEAST = np.float32(-3e38)


@njit
def _first_visible(position: Any, window: Any, is_chunked: Any) -> Any:
    """Return the first position that a token sees (as `models.config.Window.oldest`)."""
    if window == 0:
        return np.int64(0)
    return position // window * window if is_chunked else position + 1 - window


# Some of a job's queries, which are its (token, query head) pairs of one key head:
#
#     head               the key head
#     first_row, rows    the first pair, counted from the job's first token, and how many
#     vectors, lanes     of the tile that they fill; lanes behind the last row repeat it
#     memory             address of the tile's memory, and there of the queries, a block's output,
#                        the output of all blocks so far (totals), and keys or values that are
#                        converted to float32
#     vector_dim         elements of a head that fill whole vectors
_Tile = namedtuple(
    "_Tile",
    "head first_row rows vectors memory queries block_output totals converted lanes vector_dim",
)


@njit
def _make_tile(args: Any, job: Any, head: Any, first_row: Any, memory: Any) -> Any:
    """Return the `_Tile` of a job's rows from `first_row` on."""
    rows = min(TILE_QUERIES, job.num_tokens * args.group_size - first_row)
    vectors, head_dim = (rows + LANES - 1) // LANES, args.head_dim
    block_output = memory + (_QUERIES + head_dim) * _ROW_BYTES
    totals = block_output + head_dim * _ROW_BYTES
    return _Tile(
        head=head,
        first_row=first_row,
        rows=rows,
        vectors=vectors,
        memory=memory,
        queries=memory + _QUERIES * _ROW_BYTES,
        block_output=block_output,
        totals=totals,
        converted=totals + 2 * head_dim * _ROW_BYTES,
        lanes=vectors * LANES,
        vector_dim=head_dim // LANES * LANES,
    )


@njit
def _tile_views(args: Any, tile: Any) -> tuple[Any, Any, Any, Any]:
    """View a tile's rows up to its queries [_QUERIES + D, TILE_QUERIES], the sums of weights, the
    outputs of all blocks so far [D, TILE_QUERIES], and the addresses.
    """
    head_dim, memory = args.head_dim, tile.memory
    return (
        numba.carray(pointer(memory), (_QUERIES + head_dim, TILE_QUERIES), np.float32),
        numba.carray(pointer(memory + _SUM * _ROW_BYTES), TILE_QUERIES, np.float64),
        numba.carray(pointer(tile.totals), (head_dim, TILE_QUERIES), np.float64),
        integers(memory + _ADDRESSES * _ROW_BYTES, TILE_QUERIES),
    )


@njit
def _token_and_head(args: Any, job: Any, tile: Any, lane: Any) -> tuple[Any, Any]:
    """Return the token and the query head of a lane."""
    row = tile.first_row + min(lane, tile.rows - 1)
    return (
        job.first_token + row // args.group_size,
        tile.head * args.group_size + row % args.group_size,
    )


@njit
def _state_of(args: Any, token: Any, head: Any) -> tuple[Any, Any]:
    """View the sums [D + 1] and the log-sum-exp [1] of a query (`attention.AttentionState`)."""
    index, size = token * args.key_heads * args.group_size + head, args.head_dim + 1
    state = numba.carray(pointer(args.sums + 8 * size * index), size, np.float64)
    return state, floats(args.lse + 4 * index, 1)


@njit
def _begin_tile(args: Any, job: Any, tile: Any) -> None:
    """Load a tile's queries, times the scale, and the state that an earlier call has left; set
    which keys each query sees.
    """
    tile_rows, sums, outputs, addresses = _tile_views(args, tile)
    head_dim, scale = args.head_dim, floats(args.scale_and_cap, 1)[0]
    positions = integers(args.positions, job.first_token + job.num_tokens)
    tile_rows[_SLOPE], sums[:], outputs[:, : tile.lanes] = 0, 0, 0
    for lane in range(tile.lanes):
        token, head = _token_and_head(args, job, tile, lane)
        addresses[lane] = args.q + token * args.q_row_stride + head * args.q_head_stride
        query = floats(addresses[lane], head_dim)
        for element in range(tile.vector_dim, head_dim):
            tile_rows[_QUERIES + element, lane] = query[element] * scale
        tile_rows[_MAXIMUM, lane] = _LEAST
        if job.begin > 0:
            before, lse = _state_of(args, token, head)
            for element in range(head_dim):
                outputs[element, lane] = before[element]
            tile_rows[_MAXIMUM, lane], sums[lane] = lse[0], before[head_dim]
        if args.slopes:
            tile_rows[_SLOPE, lane] = floats(args.slopes + 4 * head, 1)[0]
        position = positions[token]
        tile_rows[_FIRST_KEY, lane] = _first_visible(position, args.window, args.is_chunked)
        tile_rows[_END_KEY, lane], tile_rows[_DISTANCE, lane] = position + 1, -position
    for lane in range(0, tile.lanes, LANES):
        row_addresses = np.int64(addresses.ctypes.data) + 8 * lane
        for element in range(0, tile.vector_dim, LANES):
            target = tile.queries + element * _ROW_BYTES + 4 * lane
            _load_transposed((row_addresses, 4 * element, args.scale_and_cap, target))


@njit
def _multiply_block(args: Any, job: Any, tile: Any, keys: tuple[Any, Any], is_values: Any) -> None:
    """Multiply a tile's queries with the keys of a block, for their scores, or the weights with its
    values, for the output; one segment after the other.

    keys: positions of the block's first key, and of the one behind its last.
    is_values: 0 for keys, 1 for values.
    """
    block_begin, block_end = keys
    head_dim, segments = args.head_dim, records(args.segments, job.end_segment, SEGMENT)
    for number in range(job.first_segment, job.end_segment):
        segment = segments[number]
        start, row_stride = segment.position, segment.row_stride[is_values]
        key, end_key = max(start, block_begin), min(start + segment.length, block_end)
        count = end_key - key
        if count <= 0:
            continue
        key_rows = tile.memory + (_SCORES + key - block_begin) * _ROW_BYTES
        first = segment.address[is_values] + tile.head * segment.head_stride[is_values]
        converted = numba.carray(pointer(tile.converted), (count, head_dim), np.float32)
        rows_address, row_stride = _as_float32(
            args.dtype, first + (key - start) * row_stride, row_stride, converted
        )
        if is_values:
            adds, totals = np.int64(key > block_begin), tile.totals if end_key == block_end else 0
            rescale, outputs = tile.memory + _RESCALE * _ROW_BYTES, tile.block_output
            _multiply_rows(
                _Product(
                    head_dim, tile.vectors,
                    rows_address, 4, row_stride,  # a: values, transposed
                    key_rows, count,  # b: weights
                    outputs, adds, totals, rescale,  # c
                )
            )  # fmt: skip
        else:
            _multiply_rows(
                _Product(
                    count, tile.vectors,
                    rows_address, row_stride, 4,  # a: keys
                    tile.queries, head_dim,  # b
                    key_rows, 0, 0, 0,  # c: scores
                )
            )  # fmt: skip


@njit
def _attend_blocks(args: Any, job: Any, tile: Any) -> tuple[Any, Any]:
    """Attend with a tile to all blocks of keys that its queries see, and sum up the outputs; return
    the position of the first key of the segments, and of the one behind the last that is taken.

    Products have keys or elements of a head for rows, and queries for columns: so keys and values
    are read as they rest, and a query's maximum is that of a column. Blocks begin at multiples of
    their size: so a query's sums depend neither on segments nor on other queries of its tile.
    """
    tile_rows, window, is_chunked = _tile_views(args, tile)[0], args.window, args.is_chunked
    positions = integers(args.positions + 8 * job.first_token, job.num_tokens)
    last_row = tile.first_row + tile.rows - 1
    tile_positions = positions[tile.first_row // args.group_size : last_row // args.group_size + 1]
    earliest, latest = tile_positions.min(), tile_positions.max()
    segments = records(args.segments, job.end_segment, SEGMENT)
    first, last = segments[job.first_segment].position, segments[job.end_segment - 1]
    end = min(latest + 1, last.length + last.position)
    end = min(end, job.end) if job.end else end
    seen_by_all = _first_visible(latest, window, is_chunked)
    cap = floats(args.scale_and_cap + 4, 1)[0]
    first_block = _first_visible(earliest, window, is_chunked) // BLOCK_KEYS * BLOCK_KEYS
    first_block = max(job.begin, first, first_block) // BLOCK_KEYS * BLOCK_KEYS
    for block in range(first_block, end, BLOCK_KEYS):
        keys = max(block, first), min(block + BLOCK_KEYS, end)
        count = keys[1] - keys[0]
        _multiply_block(args, job, tile, keys, 0)
        if cap != 0.0 or args.slopes != 0:
            _cap_and_bias_scores(tile_rows, tile.lanes, count, keys[0], cap)
        is_masked = keys[0] < seen_by_all or keys[1] > earliest + 1
        _exponentiate_scores((tile.vectors, count, keys[0] if is_masked else -1, tile.memory))
        _multiply_block(args, job, tile, keys, 1)
    return first, end


@njit
def _end_tile(args: Any, job: Any, tile: Any, keys: tuple[Any, Any]) -> None:
    """Write the results of a tile, or, for a job with an `end`, the state for a later call.

    keys: as `_attend_blocks` returns them.
    """
    tile_rows, sums, outputs, addresses = _tile_views(args, tile)
    for lane in range(tile.lanes):
        token, head = _token_and_head(args, job, tile, lane)
        state, lse = _state_of(args, token, head)
        if job.end:
            for element in range(args.head_dim):
                state[element] = outputs[element, lane]
            state[args.head_dim], lse[0] = sums[lane], tile_rows[_MAXIMUM, lane]
            continue
        addresses[lane] = args.out + token * args.out_row_stride + head * args.out_head_stride
        maximum = tile_rows[_MAXIMUM, lane]
        if sums[lane] == 0:  # all scores are minus infinity: NaN, as in PyTorch; or no key is seen
            first_seen = max(tile_rows[_FIRST_KEY, lane], np.float32(keys[0]))
            sees = first_seen < min(tile_rows[_END_KEY, lane], np.float32(keys[1]))
            sums[lane] = np.nan if sees else 1
            maximum = np.float32(-np.inf)
        lse[0] = np.float32(math.log(sums[lane]) + maximum)
        result = floats(addresses[lane], args.head_dim)
        for element in range(tile.vector_dim, args.head_dim):
            result[element] = outputs[element, lane] / sums[lane]
    for lane in range(0, 0 if job.end else tile.lanes, LANES):
        row_addresses = np.int64(addresses.ctypes.data) + 8 * lane
        lane_sums = np.int64(sums.ctypes.data) + 8 * lane
        for element in range(0, tile.vector_dim, LANES):
            source = tile.totals + 2 * (element * _ROW_BYTES + 4 * lane)
            _store_transposed((source, lane_sums, row_addresses, 4 * element))


@partial(Loop, AttendArgs)
def attend(args: Any, thread: Any, threads: Any) -> None:
    """Attend with all tokens of the jobs to the segments of keys that each sees, up to its
    position.

    Threads take the tiles in turn. A job with an `end` leaves its state, from which a job of the
    same tokens with that `begin` goes on: in `sums` the outputs [D] before the division and the sum
    of the weights, in `lse` the maximum of the scores.
    """
    jobs, number = records(args.jobs, args.num_jobs, JOB), 0
    memory = args.scratch + thread * args.scratch_bytes
    for index in range(len(jobs)):
        job = jobs[index]
        for head in range(args.key_heads):
            for first_row in range(0, job.num_tokens * args.group_size, TILE_QUERIES):
                if number % threads == thread:
                    tile = _make_tile(args, job, head, first_row, memory)
                    _begin_tile(args, job, tile)
                    keys = _attend_blocks(args, job, tile)
                    _end_tile(args, job, tile, keys)
                number += 1
