"""Attention of single queries to the keys that each sees in its own part of a cache, compiled (`attend_rows`).

Keys and values are read once for all query heads that share them, as they rest: 16 bits are widened in registers. A
context is divided into pieces of `PIECE_KEYS`, counted from its first key, whose partial results are merged in their
order. So the numbers depend neither on the number of threads nor on other queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
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
    larger,
    load,
    masked,
    multiply_add,
    njit,
    part_of_thread,
    prefetch,
    put_address,
    put_float,
    spread,
    store,
    summed,
    summed_together,
    tanh,
    widen,
)  # fmt: skip
from flexgen_helm.kernels.processor import CONVERTS_HALVES, HAS_AVX512, LANES

# Query heads that are taken together, and vectors of a value that are summed together: both stay in registers.
TILE_HEADS, _STRIP = (4, 4) if HAS_AVX512 else (2, 4)
PIECE_KEYS = 256
# Keys of one step of a product, and scores of a row: a step and a vector may end behind the last key.
_STEP_KEYS = 4
_ROW_SCORES = PIECE_KEYS + LANES
# Kinds of elements: float16, bfloat16, float32.
_KINDS = (0, 1, 2) if CONVERTS_HALVES else (1, 2)
# Bytes between a load and what is prefetched beside it: the processor's own prefetcher stops at the end of a page.
_AHEAD_BYTES = 4096


def scratch_floats(head_dim: int) -> int:
    """Numbers of 32 bits that a thread needs: queries, outputs and scores of a tile."""
    return TILE_HEADS * (2 * _padded(head_dim) + _ROW_SCORES + 2)


@njit
def _padded(size: Any) -> Any:
    """Whole vectors of so many elements."""
    return (size + LANES - 1) // LANES * LANES


def _cases(builder: Any, given: Any, *choices: Any) -> Iterator[Any]:
    """Emit a branch for each combination of what some arguments may be."""
    for case in product(*choices):
        equal = [builder.icmp_signed("==", own, INT64(number)) for own, number in zip(given, case)]
        chosen = equal[0]
        for one in equal[1:]:
            chosen = builder.and_(chosen, one)
        with builder.if_then(chosen):
            yield case


def _zeroed(builder: Any, rows: int, columns: int) -> list[list[Any]]:
    """Vectors for sums."""
    places = [[cgutils.alloca_once(builder, VECTOR) for _ in range(columns)] for _ in range(rows)]
    for place in (place for own in places for place in own):
        builder.store(constant(0.0), place)
    return places


def _score_step(
    builder: Any, kind: int, q_at: list[Any], key_at: list[Any], column: Any, width: Any, sums: list[list[Any]]
) -> None:
    """Add the products of a vector, or of the first `width` elements, of each query with one of each key."""
    key_offset, q_offset = builder.mul(column, INT64(_size_of(kind))), builder.mul(column, INT64(4))
    keys = [_elements(builder, kind, builder.add(at, key_offset), width) for at in key_at]
    for at in key_at:
        prefetch(builder, builder.add(builder.add(at, key_offset), INT64(_AHEAD_BYTES)))
    for at, own in zip(q_at, sums):
        query = load(builder, builder.add(at, q_offset), VECTOR, 4)
        for key, one in zip(keys, own):
            builder.store(multiply_add(builder, query, key, builder.load(one)), one)


@emitted
def _score(
    typing: Any, kind: Any, rows: Any, q: Any, q_row: Any, keys: Any, key_row: Any, last: Any, size: Any, scores: Any,
    score_row: Any,
) -> Any:  # fmt: skip
    """scores[i, j] = q[i] · keys[j] for a step of keys; keys behind the last are the last again.

    q has whole vectors, with zeros behind the last element.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, (q, q_row, keys, key_row, last, size, scores, score_row) = arguments[:2], arguments[2:]
        whole = builder.and_(size, INT64(-LANES))
        has_rest = builder.icmp_signed("<", whole, size)
        numbers = [builder.select(builder.icmp_signed("<", INT64(j), last), INT64(j), last) for j in range(_STEP_KEYS)]
        key_at = [builder.add(keys, builder.mul(key_row, number)) for number in numbers]
        for kind, rows in _cases(builder, given, _KINDS, range(1, TILE_HEADS + 1)):
            q_at = [builder.add(q, builder.mul(q_row, INT64(i))) for i in range(rows)]
            sums = _zeroed(builder, rows, _STEP_KEYS)

            with cgutils.for_range_slice(builder, INT64(0), whole, INT64(LANES)) as (column, _):
                _score_step(builder, kind, q_at, key_at, column, None, sums)
            with builder.if_then(has_rest):
                _score_step(builder, kind, q_at, key_at, whole, builder.sub(size, whole), sums)
            for i, own in enumerate(sums):
                row = builder.add(scores, builder.mul(score_row, INT64(i)))
                store(builder, summed_together(builder, [builder.load(one) for one in own]), row, 4)

    return types.void(*[int64] * 10), generate


@emitted
def _weigh(
    typing: Any, kind: Any, rows: Any, vectors: Any, weights: Any, weight_row: Any, values: Any, value_row: Any,
    count: Any, out: Any, out_row: Any, width: Any,
) -> Any:  # fmt: skip
    """out[i] = sum over j of weights[i, j] values[j], for `_STRIP` vectors, or for one that has up to `width` elements.

    vectors: `_STRIP`, or 0 for that one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, (weights, weight_row, values, value_row, count, out, out_row, width) = arguments[:3], arguments[3:]
        for kind, rows, vectors in _cases(builder, given, _KINDS, range(1, TILE_HEADS + 1), (0, _STRIP)):
            weights_at = [builder.add(weights, builder.mul(weight_row, INT64(i))) for i in range(rows)]
            columns = max(1, vectors)
            sums = _zeroed(builder, rows, columns)
            with cgutils.for_range(builder, count) as key:
                value = builder.add(values, builder.mul(value_row, key.index))
                offset = builder.mul(key.index, INT64(4))
                parts = [
                    _elements(builder, kind, builder.add(value, INT64(LANES * _size_of(kind) * j)),
                              None if vectors else width)
                    for j in range(columns)
                ]  # fmt: skip
                for j in range(columns):
                    prefetch(builder, builder.add(value, INT64(_AHEAD_BYTES + LANES * _size_of(kind) * j)))
                for at, own in zip(weights_at, sums):
                    weight = spread(builder, load(builder, builder.add(at, offset), ir.FloatType(), 4))
                    for part, one in zip(parts, own):
                        builder.store(multiply_add(builder, weight, part, builder.load(one)), one)
            for i, own in enumerate(sums):
                row = builder.add(out, builder.mul(out_row, INT64(i)))
                for j, one in enumerate(own):
                    store(builder, builder.load(one), builder.add(row, INT64(4 * LANES * j)), 4)

    return types.void(*[int64] * 11), generate


def _size_of(kind: int) -> int:
    return 4 if kind == 2 else 2


def _elements(builder: Any, kind: int, address: Any, width: Any) -> Any:
    """Load a vector as float32, or its first `width` elements and zeros."""
    if width is not None:
        return masked(builder, address, kind, width)
    return load(builder, address, VECTOR, 4) if kind == 2 else widen(builder, address, kind == 1)


@emitted
def _bend(typing: Any, scores: Any, count: Any, cap: Any, slope: Any, distance: Any) -> Any:
    """Give scores [count] a soft cap, if it is not 0, and add slope times distance, which grows by 1 a key."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        scores, count, cap, slope, distance = arguments
        cap, slope = spread(builder, cap), spread(builder, slope)
        is_capped = builder.extract_element(builder.fcmp_ordered("!=", cap, constant(0.0)), INT32(0))
        lanes = ir.Constant(VECTOR, [float(lane) for lane in range(LANES)])
        with cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES)) as (key, _):
            at = builder.add(scores, builder.mul(key, INT64(4)))
            with builder.if_then(is_capped):
                score = builder.fdiv(load(builder, at, VECTOR, 4), cap)
                store(builder, builder.fmul(cap, tanh(builder, score)), at, 4)
            numbers = spread(builder, builder.sitofp(builder.add(key, distance), ir.FloatType()))
            numbers = builder.fadd(numbers, lanes)
            store(builder, multiply_add(builder, slope, numbers, load(builder, at, VECTOR, 4)), at, 4)

    return types.void(int64, int64, types.float32, types.float32, int64), generate


@emitted
def _softmax(typing: Any, scores: Any, count: Any, state: Any) -> Any:
    """Turn scores [count] into weights, and store their maximum and the sum of the weights; count: whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        scores, count, state = arguments
        kept = cgutils.alloca_once(builder, VECTOR)

        def each_vector() -> Any:
            return cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES))

        builder.store(constant(float("-inf")), kept)
        with each_vector() as (key, _):
            score = load(builder, builder.add(scores, builder.mul(key, INT64(4))), VECTOR, 4)
            largest = builder.load(kept)
            builder.store(builder.select(builder.fcmp_ordered(">", score, largest), score, largest), kept)
        most = larger(builder, builder.load(kept))
        store(builder, most, state, 4)
        most = spread(builder, most)
        builder.store(constant(0.0), kept)
        with each_vector() as (key, _):
            at = builder.add(scores, builder.mul(key, INT64(4)))
            weight = exponential(builder, builder.fsub(load(builder, at, VECTOR, 4), most))
            store(builder, weight, at, 4)
            builder.store(builder.fadd(builder.load(kept), weight), kept)
        store(builder, summed(builder, builder.load(kept)), builder.add(state, INT64(4)), 4)

    return types.void(int64, int64, int64), generate


@emitted
def _count_up(typing: Any, address: Any) -> Any:
    """Add 1 to the number at an address, which several threads count with; return what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, INT64(1), "seq_cst")

    return int64(int64), generate


@njit
def _attend_piece(
    data: Any, scratch: Any, row: Any, head: Any, first: Any, last: Any, position: Any, out: Any, out_head: Any,
    lse: Any, lse_head: Any,
) -> None:  # fmt: skip
    """Attention of a row's query heads of one key head to keys first … last - 1 -> out and log-sum-exp of each."""
    q, q_row, q_head = data[6], data[7], data[8]
    group, size, kind, factors, slopes = data[15], data[16], data[17], data[18], data[19]
    key_row, value_row = data[29], data[32]
    keys = data[25] + row * data[27] + head * data[28] + first * key_row
    values = data[26] + row * data[30] + head * data[31] + first * value_row
    scale, cap = get_float(factors), get_float(factors + 4)
    count, width, score_row = last - first, 4 * _padded(size), 4 * _ROW_SCORES
    queries = scratch
    outputs = queries + TILE_HEADS * width
    scores = outputs + TILE_HEADS * width
    state = scores + TILE_HEADS * score_row
    element_bytes = 4 if kind == 2 else 2
    for number in range(0, group, TILE_HEADS):
        heads, first_head = min(TILE_HEADS, group - number), head * group + number
        for one in range(heads):
            query = q + row * q_row + (first_head + one) * q_head
            for element in range(size):
                put_float(queries + one * width + 4 * element, get_float(query + 4 * element) * scale)
            for element in range(size, width // 4):
                put_float(queries + one * width + 4 * element, np.float32(0.0))
        for key in range(0, count, _STEP_KEYS):
            _score(kind, heads, queries, width, keys + key * key_row, key_row, count - 1 - key, size, scores + 4 * key,
                   score_row)  # fmt: skip
        for one in range(heads):
            own, padded = scores + one * score_row, _padded(count)
            if cap != 0.0 or slopes:
                slope = get_float(slopes + 4 * (first_head + one)) if slopes else np.float32(0.0)
                _bend(own, count, cap, slope, first - position)
            for key in range(count, padded):
                put_float(own + 4 * key, np.float32(-np.inf))
            _softmax(own, padded, state + 8 * one)
        at = 0
        while at < size:
            vectors = _STRIP if at + _STRIP * LANES <= size else 0
            _weigh(kind, heads, vectors, scores, score_row, values + at * element_bytes, value_row, count,
                   outputs + 4 * at, width, size - at)  # fmt: skip
            at += LANES * max(1, vectors)
        for one in range(heads):
            most, total = get_float(state + 8 * one), get_float(state + 8 * one + 4)
            target, factor = out + (number + one) * out_head, np.float32(1.0) / total
            for element in range(size):
                put_float(target + 4 * element, get_float(outputs + one * width + 4 * element) * factor)
            put_float(lse + (number + one) * lse_head, np.float32(math.log(total)) + most)


@njit
def _merge(parts: Any, part_row: Any, count: Any, size: Any, out: Any, lse: Any, follows: Any) -> None:
    """Merge partial results in their order; of each its elements and behind them its log-sum-exp.

    follows: out and lse hold another one, which is the first.
    """
    before = get_float(lse) if follows else np.float32(-np.inf)
    most = before
    for number in range(count):
        most = max(most, get_float(parts + number * part_row + 4 * size))
    total = np.float32(math.exp(before - most))
    for element in range(size):
        put_float(out + 4 * element, get_float(out + 4 * element) * total if follows else np.float32(0.0))
    for number in range(count):
        part = parts + number * part_row
        weight = np.float32(math.exp(get_float(part + 4 * size) - most))
        total += weight
        for element in range(size):
            put_float(out + 4 * element, get_float(out + 4 * element) + weight * get_float(part + 4 * element))
    for element in range(size):
        put_float(out + 4 * element, get_float(out + 4 * element) / total)
    put_float(lse, np.float32(math.log(total)) + most)


def attend_rows(address: Any) -> None:
    """Attention of single queries, row by row, to keys and values of a cache.

    Arguments: rows and their number, q, bytes of its rows and heads, out, bytes of its rows and heads, the
    log-sum-exps, bytes of their rows, key heads, query heads of each, elements of a head, kind of the elements of the
    cache (`_KINDS`), addresses of scale and soft cap (0: none), and of each head's slope (0: none), partial results,
    counters, which are 0 before and after, scratch memory, its bytes for a thread, whether there are results of
    earlier keys, keys, values, the bytes of a row's keys, of a head and of a key, and of values.
    A row has 4 integers: the first key that it sees, the one behind its last, which is its own, the number of its
    first piece among those of all rows, and whether out and log-sum-exp hold the result of earlier keys, if any do.
    """
    data = numba.carray(address, 33, np.int64)
    rows, count, out, out_row, out_head = data[4], data[5], data[9], data[10], data[11]
    lse, lse_row, heads, group, size = data[12], data[13], data[14], data[15], data[16]
    partial, counters = data[20], data[21]
    part, parts = part_of_thread(address)
    scratch = data[22] + part * data[23]
    part_row, number = 4 * (size + 1), 0
    piece_row = heads * group * part_row
    for row in range(count):
        job = rows + 32 * row
        low, end, first_piece = get_integer(job), get_integer(job + 8), get_integer(job + 16)
        follows = data[24] * get_integer(job + 24)
        pieces = (end - 1) // PIECE_KEYS - low // PIECE_KEYS + 1
        for head in range(heads):
            own_out, own_lse = out + row * out_row + head * group * out_head, lse + row * lse_row + 4 * head * group
            results = partial + first_piece * piece_row + head * group * part_row
            for piece in range(pieces):
                number += 1
                if number % parts != part:
                    continue
                begin = (low // PIECE_KEYS + piece) * PIECE_KEYS
                first, last = max(low, begin), min(end, begin + PIECE_KEYS)
                target, target_head, target_lse, lse_head = own_out, out_head, own_lse, 4
                if pieces > 1 or follows:
                    target, target_head, lse_head = results + piece * piece_row, part_row, part_row
                    target_lse = target + 4 * size
                _attend_piece(data, scratch, row, head, first, last, end - 1, target, target_head, target_lse,
                              lse_head)  # fmt: skip
                if not (pieces > 1 or follows):
                    continue
                counter = counters + 8 * (first_piece * heads + head)
                if _count_up(counter) == pieces - 1:
                    put_address(counter, 0)
                    for one in range(group):
                        _merge(results + one * part_row, piece_row, pieces, size, own_out + one * out_head,
                               own_lse + 4 * one, follows)  # fmt: skip
    done(address, part)
