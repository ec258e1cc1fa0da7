"""Attention of tokens to all segments that they see, compiled (`attention`)."""

from __future__ import annotations

import math
from itertools import chain, product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    FLOAT,
    INT32,
    INT64,
    VECTOR,
    constant,
    done,
    emitted,
    exponential,
    get_float,
    get_integer,
    int64,
    load,
    masked_halves,
    multiply_add,
    njit,
    part_of_thread,
    put_address,
    put_float,
    put_integer,
    spread,
    store,
    tanh,
)
from flexgen_helm.kernels.processor import CONVERTS_HALVES, HAS_AVX512, LANES
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32

# Queries of a tile, in vectors, and keys (of the scores) or elements (of the output) of one step of a product: the sums
# stay in registers. Keys of a block: its scores stay in the first cache.
_QUERY_VECTORS, _STEP_ROWS = (3, 8) if HAS_AVX512 else (3, 4)
TILE_QUERIES, BLOCK_KEYS = _QUERY_VECTORS * LANES, 64
# Rows of a tile besides queries, outputs and scores: maxima, sums, first and last visible keys, slopes, distances, and
# two for addresses, which have 64 bits.
_TILE_ROWS_BESIDE = 8


def scratch_floats(head_dim: int) -> int:
    """Numbers of 32 bits that a thread needs: of a tile, and of a block of keys or values that has 16 bits."""
    return TILE_QUERIES * (2 * head_dim + BLOCK_KEYS + _TILE_ROWS_BESIDE) + BLOCK_KEYS * head_dim + LANES


def _emit_step(builder: Any, rows: int, vectors: int, arguments: Any) -> None:
    """Emit c [rows, vectors] = or += a [rows, count] b [count, vectors]; a has any distances, b and c whole tiles."""
    a, a_row, a_column, b, count, c, adds = arguments
    tile_bytes = 4 * TILE_QUERIES
    targets = [[builder.add(c, INT64(i * tile_bytes + 4 * LANES * j)) for j in range(vectors)] for i in range(rows)]
    zero, keeps = ir.Constant(VECTOR, [0.0] * LANES), builder.icmp_signed("!=", adds, INT64(0))
    starts = [[builder.select(keeps, load(builder, at, VECTOR, 4), zero) for at in own] for own in targets]
    a_rows = [builder.add(a, builder.mul(a_row, INT64(i))) for i in range(rows)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, b_at, a_at = builder.phi(INT64), builder.phi(INT64), builder.phi(INT64)
    sums = [[builder.phi(VECTOR) for _ in range(vectors)] for _ in range(rows)]
    values = [load(builder, builder.add(b_at, INT64(4 * LANES * j)), VECTOR, 4) for j in range(vectors)]
    results = []
    for row, own in zip(a_rows, sums):
        factor = spread(builder, load(builder, builder.add(row, a_at), FLOAT, 4))
        results.append([multiply_add(builder, factor, value, one) for value, one in zip(values, own)])
    for one, start, result in zip(chain(*sums), chain(*starts), chain(*results)):
        one.add_incoming(start, before)
        one.add_incoming(result, loop)
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
    for at, result in zip(chain(*targets), chain(*results)):
        store(builder, result, at, 4)


@emitted
def _step(
    typing: Any, rows: Any, vectors: Any, a: Any, a_row: Any, a_column: Any, b: Any, count: Any, c: Any, adds: Any
) -> Any:
    """A product of 1 or `_STEP_ROWS` rows with up to `_QUERY_VECTORS` vectors of queries."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, operands = arguments[:2], arguments[2:]
        for case in product((1, _STEP_ROWS), range(1, _QUERY_VECTORS + 1)):
            equal = [builder.icmp_signed("==", own, INT64(number)) for own, number in zip(given, case)]
            with builder.if_then(builder.and_(*equal)):
                _emit_step(builder, *case, operands)

    return types.void(*[int64] * 9), generate


@emitted
def _softmax(
    typing: Any, vectors: Any, scores: Any, count: Any, first: Any, bounds: Any, maximum: Any, outputs: Any, size: Any
) -> Any:
    """Turn the scores of a block [count, queries] into weights, and scale what was summed before to the new maximum.

    first: number of the block's first key; bounds: addresses of the first key that each query sees, and of the one
    behind the last, or 0 where all are seen. maximum: address of the maxima, followed by the sums. outputs [size,
    queries].
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        vectors, scores, count, first, bounds, maximum, outputs, size = arguments
        tile_bytes = INT64(4 * TILE_QUERIES)
        integers = ir.VectorType(INT32, LANES)
        kept = [cgutils.alloca_once(builder, VECTOR) for _ in range(2)]
        is_masked = builder.icmp_signed("!=", bounds, INT64(0))
        with cgutils.for_range(builder, vectors) as column:
            offset = builder.mul(column.index, INT64(4 * LANES))
            at_maximum, own = builder.add(maximum, offset), builder.add(scores, offset)
            at_sum = builder.add(at_maximum, tile_bytes)
            with builder.if_then(is_masked):
                low = load(builder, builder.add(bounds, offset), integers, 4)
                high = load(builder, builder.add(builder.add(bounds, offset), tile_bytes), integers, 4)
                with cgutils.for_range(builder, count) as key:
                    at = builder.add(own, builder.mul(key.index, tile_bytes))
                    numbers = spread(builder, builder.trunc(builder.add(first, key.index), INT32))
                    sees = builder.and_(
                        builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<", numbers, high)
                    )
                    score = builder.select(sees, load(builder, at, VECTOR, 4), constant(float("-inf")))
                    store(builder, score, at, 4)
            before = load(builder, at_maximum, VECTOR, 4)
            builder.store(before, kept[0])
            with cgutils.for_range(builder, count) as key:
                score = load(builder, builder.add(own, builder.mul(key.index, tile_bytes)), VECTOR, 4)
                largest = builder.load(kept[0])
                builder.store(builder.select(builder.fcmp_ordered(">", score, largest), score, largest), kept[0])
            largest = builder.load(kept[0])
            shrinking = exponential(builder, builder.fsub(before, largest))
            builder.store(builder.fmul(load(builder, at_sum, VECTOR, 4), shrinking), kept[1])
            with cgutils.for_range(builder, count) as key:
                at = builder.add(own, builder.mul(key.index, tile_bytes))
                weight = exponential(builder, builder.fsub(load(builder, at, VECTOR, 4), largest))
                store(builder, weight, at, 4)
                builder.store(builder.fadd(builder.load(kept[1]), weight), kept[1])
            store(builder, largest, at_maximum, 4)
            store(builder, builder.load(kept[1]), at_sum, 4)
            with cgutils.for_range(builder, size) as element:
                at = builder.add(builder.add(outputs, offset), builder.mul(element.index, tile_bytes))
                store(builder, builder.fmul(load(builder, at, VECTOR, 4), shrinking), at, 4)

    return types.void(*[int64] * 8), generate


@emitted
def _bend(typing: Any, vectors: Any, scores: Any, count: Any, first: Any, cap: Any, slopes: Any, distances: Any) -> Any:
    """Give the scores of a block [count, queries] a soft cap, if it is not 0, and ALiBi's slope times distance.

    first: number of the block's first key; slopes, distances: addresses of each query's slope, and of the distance
    from it to key 0 of the segment.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        vectors, scores, count, first, cap, slopes, distances = arguments
        cap = spread(builder, cap)
        is_capped = builder.extract_element(builder.fcmp_ordered("!=", cap, constant(0.0)), INT32(0))
        with cgutils.for_range(builder, vectors) as column:
            offset = builder.mul(column.index, INT64(4 * LANES))
            slope = load(builder, builder.add(slopes, offset), VECTOR, 4)
            distance = load(builder, builder.add(distances, offset), VECTOR, 4)
            own = builder.add(scores, offset)
            with cgutils.for_range(builder, count) as key:
                at = builder.add(own, builder.mul(key.index, INT64(4 * TILE_QUERIES)))
                with builder.if_then(is_capped):
                    score = tanh(builder, builder.fdiv(load(builder, at, VECTOR, 4), cap))
                    store(builder, builder.fmul(cap, score), at, 4)
                number = spread(builder, builder.sitofp(builder.add(first, key.index), FLOAT))
                number = builder.fadd(number, distance)
                store(builder, multiply_add(builder, slope, number, load(builder, at, VECTOR, 4)), at, 4)

    return types.void(int64, int64, int64, int64, types.float32, int64, int64), generate


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose vectors: the columns of as many rows as a vector has elements."""
    step = 1
    while step < LANES:
        from_first = [j - step + LANES if j & step else j for j in range(LANES)]
        from_second = [j + LANES if j & step else j + step for j in range(LANES)]
        masks = [ir.Constant(ir.VectorType(INT32, LANES), mask) for mask in (from_first, from_second)]
        for i in range(LANES):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        step *= 2
    return rows


@emitted
def _turn_in(typing: Any, addresses: Any, offset: Any, scale: Any, target: Any) -> Any:
    """Load a vector at `offset` of each row, and store the elements, times a scale, as rows of a tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        addresses, offset, scale, target = arguments
        at = [load(builder, builder.add(addresses, INT64(8 * i)), INT64, 8) for i in range(LANES)]
        rows = [load(builder, builder.add(row, offset), VECTOR, 4) for row in at]
        factor = spread(builder, scale)
        for i, column in enumerate(_turned(builder, rows)):
            store(builder, builder.fmul(column, factor), builder.add(target, INT64(4 * TILE_QUERIES * i)), 4)

    return types.void(int64, int64, types.float32, int64), generate


@emitted
def _turn_out(typing: Any, source: Any, factors: Any, addresses: Any, offset: Any) -> Any:
    """Store rows of a tile, times a factor for each column, at `offset` of the rows at the addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        source, factors, addresses, offset = arguments
        factor = load(builder, factors, VECTOR, 4)
        at = [builder.add(source, INT64(4 * TILE_QUERIES * i)) for i in range(LANES)]
        rows = [builder.fmul(load(builder, row, VECTOR, 4), factor) for row in at]
        for i, column in enumerate(_turned(builder, rows)):
            row = load(builder, builder.add(addresses, INT64(8 * i)), INT64, 8)
            store(builder, column, builder.add(row, offset), 4)

    return types.void(*[int64] * 4), generate


@emitted
def _widen_vector(typing: Any, kind: Any, source: Any, width: Any, target: Any) -> Any:
    """Store the first `width` elements of 16 bits at `source`, and zeros, as a vector of float32 at `target`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        kind, source, width, target = arguments
        for case in (BFLOAT16, FLOAT16) if CONVERTS_HALVES else (BFLOAT16,):
            with builder.if_then(builder.icmp_signed("==", kind, INT64(case))):
                store(builder, masked_halves(builder, source, case == BFLOAT16, width), target, 4)

    return types.void(*[int64] * 4), generate


@njit
def _as_float32(kind: Any, rows: Any, row_bytes: Any, count: Any, size: Any, target: Any) -> tuple[Any, Any]:
    """Return where `count` rows of `size` elements are in float32, and the bytes of a row.

    Those of 16 bits are written to `target` without gaps, and up to a vector of zeros behind.
    """
    if kind == FLOAT32:
        return rows, row_bytes
    for number in range(count):
        for element in range(0, size, LANES):
            source = rows + number * row_bytes + 2 * element
            _widen_vector(kind, source, size - element, target + 4 * (number * size + element))
    return target, 4 * size


# A score that a query starts with: less than any, and its difference from minus infinity is no NaN.
_LEAST = np.float32(-3e38)


@njit
def _oldest(position: Any, window: Any, is_chunked: Any) -> Any:
    """The first position that a token sees (`models.config.Window.oldest`)."""
    if window == 0:
        return np.int64(0)
    return position // window * window if is_chunked else position + 1 - window


@njit
def _attend_tile(data: Any, scratch: Any, job: Any, head: Any, first_row: Any, rows: Any) -> None:
    """Attention of a tile: rows `first_row` … of a job's (token, query head) pairs of one key head, over its segments.

    Products have keys or elements of a head for rows, and queries for columns, so keys and values are read as they
    are, and a query's maximum is that of a column.
    """
    segments, q, q_row, q_head = data[6], data[7], data[8], data[9]
    out, out_row, out_head = data[10], data[11], data[12]
    lse, lse_row, group, size, window = data[13], data[14], data[16], data[17], data[18]
    scale, cap, slopes = get_float(data[19]), get_float(data[19] + 4), data[23]
    bends, is_chunked = cap != 0.0 or slopes != 0, data[24]
    token, positions = get_integer(job), data[22] + 8 * get_integer(job)
    width = 4 * TILE_QUERIES
    queries, outputs = scratch, scratch + size * width
    scores = outputs + size * width
    maximum = scores + BLOCK_KEYS * width
    sums, low, high, addresses = maximum + width, maximum + 2 * width, maximum + 3 * width, maximum + 4 * width
    own_slopes, distances = maximum + 6 * width, maximum + 7 * width
    kind, follows, wide = data[25], data[26] * get_integer(job + 32), maximum + 8 * width
    vectors, turned = (rows + LANES - 1) // LANES, size // LANES * LANES
    # Columns behind the last row repeat it.
    for lane in range(vectors * LANES):
        row = first_row + min(lane, rows - 1)
        source = q + (token + row // group) * q_row + (head * group + row % group) * q_head
        put_address(addresses + 8 * lane, source)
        for element in range(turned, size):
            put_float(queries + element * width + 4 * lane, get_float(source + 4 * element) * scale)
        if follows:  # the result over earlier keys is that of one key with this score
            result = out + (token + row // group) * out_row + (head * group + row % group) * out_head
            for element in range(size):
                put_float(outputs + element * width + 4 * lane, get_float(result + 4 * element))
            score = get_float(lse + (token + row // group) * lse_row + 4 * (head * group + row % group))
            put_float(maximum + 4 * lane, max(_LEAST, score))
            put_float(sums + 4 * lane, np.float32(1.0) if score > _LEAST else np.float32(0.0))
        else:
            put_float(maximum + 4 * lane, _LEAST)
            put_float(sums + 4 * lane, np.float32(0.0))
        if bends:
            slope = get_float(slopes + 4 * (head * group + row % group)) if slopes else np.float32(0.0)
            put_float(own_slopes + 4 * lane, slope)
    for vector in range(vectors):
        for element in range(0, turned, LANES):
            target = queries + element * width + 4 * LANES * vector
            _turn_in(addresses + 8 * LANES * vector, 4 * element, scale, target)
    first_position = last_position = get_integer(positions + 8 * (first_row // group))
    for one in range(first_row // group + 1, (first_row + rows - 1) // group + 1):
        own = get_integer(positions + 8 * one)
        first_position, last_position = min(first_position, own), max(last_position, own)
    adds = 1 if follows else 0  # what the memory holds before the first block is no number
    for number in range(get_integer(job + 16), get_integer(job + 24)):
        segment = segments + 64 * number
        keys, values = get_integer(segment), get_integer(segment + 8)
        key_row, value_row = get_integer(segment + 16), get_integer(segment + 24)
        keys += head * get_integer(segment + 32)
        values += head * get_integer(segment + 40)
        length, start = get_integer(segment + 48), get_integer(segment + 56)
        for lane in range(vectors * LANES):
            own = get_integer(positions + 8 * ((first_row + min(lane, rows - 1)) // group)) - start
            put_integer(low + 4 * lane, max(0, _oldest(own + start, window, is_chunked) - start))
            put_integer(high + 4 * lane, min(length, own + 1))
            put_float(distances + 4 * lane, np.float32(-own))
        end = min(length, last_position + 1 - start)
        all_see_to = min(length, first_position + 1 - start)
        all_see_from = max(0, _oldest(last_position, window, is_chunked) - start)
        # From a whole block on, so that a query's sums do not depend on the others of its tile.
        begin = max(0, _oldest(first_position, window, is_chunked) - start) // BLOCK_KEYS * BLOCK_KEYS
        for key in range(begin, end, BLOCK_KEYS):
            count = min(BLOCK_KEYS, end - key)
            block, block_row = _as_float32(kind, keys + key * key_row, key_row, count, size, wide)
            at = 0
            while at < count:
                step = _STEP_ROWS if at + _STEP_ROWS <= count else 1
                _step(step, vectors, block + at * block_row, block_row, 4, queries, size, scores + at * width, 0)
                at += step
            if bends:
                _bend(vectors, scores, count, key, cap, own_slopes, distances)
            is_masked = key < all_see_from or key + count > all_see_to
            _softmax(vectors, scores, count, key, low if is_masked else 0, maximum, outputs, size if adds else 0)
            block, block_row = _as_float32(kind, values + key * value_row, value_row, count, size, wide)
            at = 0
            while at < size:
                step = _STEP_ROWS if at + _STEP_ROWS <= size else 1
                _step(step, vectors, block + 4 * at, 4, block_row, scores, count, outputs + at * width, adds)
                at += step
            adds = 1
    if not adds:  # no key is seen
        for element in range(size):
            for lane in range(vectors * LANES):
                put_float(outputs + element * width + 4 * lane, np.float32(0.0))
    for lane in range(vectors * LANES):
        row = first_row + min(lane, rows - 1)
        own_token, own_head = token + row // group, head * group + row % group
        target, total = out + own_token * out_row + own_head * out_head, get_float(sums + 4 * lane)
        factor = np.float32(1.0) / total if total > 0 else np.float32(0.0)
        put_float(sums + 4 * lane, factor)
        put_address(addresses + 8 * lane, target)
        for element in range(turned, size):
            put_float(target + 4 * element, get_float(outputs + element * width + 4 * lane) * factor)
        weight = np.float32(math.log(total)) + get_float(maximum + 4 * lane) if total > 0 else np.float32(-np.inf)
        put_float(lse + own_token * lse_row + 4 * own_head, weight)
    for vector in range(vectors):
        for element in range(0, turned, LANES):
            source = outputs + element * width + 4 * LANES * vector
            _turn_out(source, sums + 4 * LANES * vector, addresses + 8 * LANES * vector, 4 * element)


def attend(address: Any) -> None:
    """Attention of tokens to the segments of keys that each sees, up to its own position.

    Arguments: jobs and their number, segments, q, bytes of its rows and heads, out, bytes of its rows and heads, the
    log-sum-exps, bytes of their rows, key heads, query heads of each, elements of a head, window (0: none), address of
    scale and soft cap (0: none), scratch memory, its bytes for a thread, the positions of all tokens, each head's slope
    (0: none), whether positions are divided into chunks of the window, the kind of keys' and values' elements,
    whether jobs may follow.
    A job has 5 integers: first token, tokens, its first segment, the one behind its last, and whether it follows on
    what `out` and the log-sum-exps have for its tokens.
    A segment has 8: addresses of keys and values, bytes of their rows, bytes of their heads, length, first position.
    """
    data = numba.carray(address, 27, np.int64)
    jobs, count, heads, group = data[4], data[5], data[15], data[16]
    part, parts = part_of_thread(address)
    scratch = data[20] + part * data[21]
    number = 0
    for index in range(count):
        job = jobs + 40 * index
        rows = get_integer(job + 8) * group
        for head in range(heads):
            for first in range(0, rows, TILE_QUERIES):
                if number % parts == part:
                    _attend_tile(data, scratch, job, head, first, min(TILE_QUERIES, rows - first))
                number += 1
    done(address, part)
