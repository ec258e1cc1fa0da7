"""The largest element of rows, and the sum of their exponents, compiled (`scan_rows`)."""

from __future__ import annotations

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
    emitted,
    exponential,
    get_bits,
    get_float,
    int64,
    load,
    part_of_thread,
    put_address,
    put_float,
    spread,
    store,
    summed,
)
from flexgen_helm.kernels.processor import LANES

# Vectors of sums that grow side by side, so that none waits for the one before it, and numbers that each lane adds up
# in float32: their rounding would count for all of a vocabulary.
_SUMS, _LANE_NUMBERS = 4, 32
_CHUNK = LANES * _SUMS * _LANE_NUMBERS
_INTEGERS = ir.VectorType(INT32, LANES)


@emitted
def _largest_of_lanes(typing: Any, row: Any, count: Any, state: Any) -> Any:
    """Store each lane's largest number, its place, and whether all were numbers; count: whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        row, count, state = arguments
        largest, places, strange = (cgutils.alloca_once(builder, kind) for kind in (VECTOR, _INTEGERS, _INTEGERS))
        builder.store(constant(float("-inf")), largest)
        for one in (places, strange):
            builder.store(ir.Constant(_INTEGERS, [0] * LANES), one)
        lanes = ir.Constant(_INTEGERS, list(range(LANES)))
        with cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES)) as (first, _):
            value = load(builder, builder.add(row, builder.mul(first, INT64(4))), VECTOR, 4)
            known = builder.load(largest)
            is_larger = builder.fcmp_ordered(">", value, known)
            builder.store(builder.select(is_larger, value, known), largest)
            own = builder.add(spread(builder, builder.trunc(first, INT32)), lanes)
            builder.store(builder.select(is_larger, own, builder.load(places)), places)
            is_strange = builder.sext(builder.fcmp_unordered("uno", value, value), _INTEGERS)
            builder.store(builder.or_(builder.load(strange), is_strange), strange)
        for number, one in enumerate((largest, places, strange)):
            store(builder, builder.load(one), builder.add(state, INT64(4 * LANES * number)), 4)

    return types.void(int64, int64, int64), generate


@emitted
def _sum_of_exponents(typing: Any, row: Any, count: Any, largest: Any) -> Any:
    """Sum e^(x - largest) over a chunk; count: whole groups of `_SUMS` vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, count, largest = arguments
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(_SUMS)]
        for one in sums:
            builder.store(constant(0.0), one)
        largest = spread(builder, largest)
        with cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES * _SUMS)) as (first, _):
            at = builder.add(row, builder.mul(first, INT64(4)))
            for number, one in enumerate(sums):
                value = load(builder, builder.add(at, INT64(4 * LANES * number)), VECTOR, 4)
                weight = exponential(builder, builder.fsub(value, largest))
                builder.store(builder.fadd(builder.load(one), weight), one)
        left, *others = (builder.load(one) for one in sums)
        for other in others:
            left = builder.fadd(left, other)
        return summed(builder, left)

    return types.float32(int64, int64, types.float32), generate


@numba.njit
def _lane(state: Any, kind: Any, lane: Any) -> Any:
    return state + 4 * (kind * LANES + lane)


def scan_rows(address: Any) -> None:
    """Find each row's largest number and its first place, and sum e^(x - largest).

    The place is -1 for a row with something that is no number. The sum is 1 for one whose largest number is infinite.
    The order of a sum depends on the width alone.

    Arguments: the rows, bytes of a row, rows, width, whether sums are wanted, places (64 bits), largest numbers, sums,
    memory (256 bytes a thread).
    """
    data = numba.carray(address, 13, np.int64)
    rows, row_bytes, count, width, with_sums = data[4], data[5], data[6], data[7], data[8]
    part, parts = part_of_thread(data)
    state = data[12] + part * 256
    whole, groups = width // LANES * LANES, width // (LANES * _SUMS) * LANES * _SUMS
    for number in range(count * part // parts, count * (part + 1) // parts):
        row = rows + number * row_bytes
        _largest_of_lanes(row, whole, state)
        largest, place, is_strange = np.float32(-np.inf), np.int64(0), False
        for lane in range(LANES):
            own = get_float(_lane(state, 0, lane))
            own_place = np.int64(get_bits(_lane(state, 1, lane)))
            is_strange |= get_bits(_lane(state, 2, lane)) != 0
            if own > largest or (own == largest and own_place < place):
                largest, place = own, own_place
        for column in range(whole, width):
            own = get_float(row + 4 * column)
            is_strange |= own != own
            if own > largest:
                largest, place = own, np.int64(column)
        put_address(data[9] + 8 * number, np.int64(-1) if is_strange else place)
        put_float(data[10] + 4 * number, largest)
        if with_sums:
            total = np.float64(1)
            if abs(largest) != np.inf:
                total = np.float64(0)
                for column in range(0, groups, _CHUNK):
                    total += _sum_of_exponents(row + 4 * column, min(_CHUNK, groups - column), largest)
                for column in range(groups, width):
                    total += np.exp(get_float(row + 4 * column) - largest)
            put_float(data[11] + 4 * number, np.float32(total))
