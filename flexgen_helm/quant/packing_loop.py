"""The loop that packs matrices on CPUs, compiled by numba: axis 'out' with scales as words (layout:
`quant.packing`).

It repeats `quant.arithmetic` operation by operation, so the bytes are the same.
"""

from __future__ import annotations

import math
from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    INT64,
    LANES,
    VECTOR,
    Loop,
    call_llvm,
    floats,
    ir_statement,
    load,
    njit,
    store,
    vector_of,
)
from flexgen_helm.quant.arithmetic import (
    LAST_ZERO_POINT,
    LOWEST_EXPONENT,
    NUM_SCALES,
    PARTIAL_SUMS,
    SCALES_PER_OCTAVE,
)
from flexgen_helm.quant.dequantization_loop import packed_bytes
from flexgen_helm.quant.packing import PackedArgs

# Columns of a block, which are packed side by side; behind the matrix's last column they are zeros.
_BLOCK_COLUMNS = 64
# Numbers of `arithmetic.word_table`: scales, then zero points.
_TABLE_SIZE = NUM_SCALES + LAST_ZERO_POINT + 1
_LAST_ZERO_POINT = np.float32(LAST_ZERO_POINT)
# A word is the number of a scale, and in these lowest bits a zero point.
_ZERO_POINT_BITS = LAST_ZERO_POINT.bit_length()
_SMALLEST_SCALE = 2.0**LOWEST_EXPONENT
# Added to a number below 2^22 and subtracted again, it rounds to the nearest integer, half to even.
_ROUNDER = np.float32(1.5 * 2**23)
_ZERO = np.float32(0)


@njit
def _clamp_and_round(value: Any, top: Any) -> Any:
    """Clamp to 0 … top and round to the nearest integer."""
    value = value if value > _ZERO else _ZERO
    return ((value if value < top else top) + _ROUNDER) - _ROUNDER


# Addresses of values [group_size, _BLOCK_COLUMNS], of their columns' scale, 1 / scale and offset
# [3, _BLOCK_COLUMNS], and of the sums [_BLOCK_COLUMNS].
_RemainderSums = namedtuple("_RemainderSums", "is_squared bits values group_size scales sums")


def _write_remainder_sums(builder: Any, args: Any) -> None:
    """Write the IR of `_RemainderSums`: for each column, quantize its values and sum the remainders
    value - code scale, or, if `is_squared`, the squared errors (value - code scale - offset)^2.

    The order of a sum is that of `PARTIAL_SUMS`.
    """
    row_bytes, zero, top = (
        4 * _BLOCK_COLUMNS,
        vector_of(0.0),
        vector_of(float((1 << args.bits) - 1)),
    )
    with cgutils.for_range(builder, INT64(_BLOCK_COLUMNS // LANES)) as lanes:
        lane_bytes = builder.mul(lanes.index, INT64(4 * LANES))
        scales = builder.add(args.scales, lane_bytes)
        scale, inverse, offset = (
            load(builder, builder.add(scales, INT64(number * row_bytes)), VECTOR, 4)
            for number in range(3)
        )
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(PARTIAL_SUMS)]
        with cgutils.for_range(builder, builder.udiv(args.group_size, INT64(PARTIAL_SUMS))) as rows:
            rows_address = builder.add(
                builder.add(args.values, lane_bytes),
                builder.mul(rows.index, INT64(PARTIAL_SUMS * row_bytes)),
            )
            for number, total in enumerate(totals):
                value = load(
                    builder, builder.add(rows_address, INT64(number * row_bytes)), VECTOR, 4
                )
                code = builder.fmul(builder.fsub(value, offset), inverse)
                code = builder.select(builder.fcmp_ordered(">", code, zero), code, zero)
                code = builder.select(builder.fcmp_ordered("<", code, top), code, top)
                code = call_llvm(builder, f"llvm.rint.v{LANES}f32", VECTOR, code)
                remainder = builder.fsub(value, builder.fmul(code, scale))
                if args.is_squared:
                    remainder = builder.fsub(remainder, offset)
                    remainder = builder.fmul(remainder, remainder)
                builder.store(builder.fadd(builder.load(total), remainder), total)
        sums = [builder.load(total) for total in totals]
        while half := len(sums) // 2:
            sums = [builder.fadd(*pair) for pair in zip(sums[:half], sums[half:])]
        store(builder, sums[0], builder.add(args.sums, lane_bytes), 4)


# code for these values of `is_squared` and `bits`
_sum_remainders = ir_statement((0, 1), (4, 8))(_write_remainder_sums)


@njit
def _fit_words(args: Any, values: Any, span: tuple[Any, Any], words: Any) -> None:
    """Replace words [_BLOCK_COLUMNS], which cover the range of the values, by those of the least
    squared error (`arithmetic._fit`).

    values: [group_size, _BLOCK_COLUMNS].
    span: each column's minimum and maximum, with zero.
    """
    (minimum, maximum), bits, table = span, args.bits, floats(args.table, _TABLE_SIZE)
    group_size, top = len(values), np.float32((1 << bits) - 1)
    zero_points, indices_per_code = table[NUM_SCALES:], _LAST_ZERO_POINT / top
    # the first three rows are the scales of `_RemainderSums`
    columns = np.empty((6, _BLOCK_COLUMNS), np.float32)
    scale, inverse, offset, sums, zero_point, least_error = columns
    first_index, index, candidate = np.empty((3, _BLOCK_COLUMNS), np.int32)
    values_address, scales_address = np.int64(values.ctypes.data), np.int64(columns.ctypes.data)
    sums_address = np.int64(sums.ctypes.data)
    for c in range(_BLOCK_COLUMNS):
        first_index[c], scale[c] = words[c] >> _ZERO_POINT_BITS, table[words[c] >> _ZERO_POINT_BITS]
        inverse[c] = np.float32(1) / scale[c]
        offset[c] = -(zero_points[words[c] & LAST_ZERO_POINT] * scale[c])
    _sum_remainders(
        _RemainderSums(1, bits, values_address, group_size, scales_address, sums_address)
    )
    least_error[:] = sums
    for step in range(args.tried_scales):
        for c in range(_BLOCK_COLUMNS):
            index[c] = max(first_index[c] - step, 0)
            scale[c] = table[index[c] & (NUM_SCALES - 1)]  # numba checks no sign of a masked index
            inverse[c] = np.float32(1) / scale[c]
        for clipping in range(3):  # below, on both sides, above
            for c in range(_BLOCK_COLUMNS):
                lowest, highest = -minimum[c] / scale[c], top - maximum[c] / scale[c]
                middle = (lowest + highest) / np.float32(2)
                zero_point[c] = lowest if clipping == 0 else (middle if clipping == 1 else highest)
            # the sums of the remainders give a better zero point, whose squared error counts
            for is_squared in range(2):
                for c in range(_BLOCK_COLUMNS):
                    candidate[c] = np.int32(
                        _clamp_and_round(zero_point[c] * indices_per_code, _LAST_ZERO_POINT)
                    )
                for c in range(_BLOCK_COLUMNS):
                    offset[c] = -(zero_points[candidate[c] & LAST_ZERO_POINT] * scale[c])
                _sum_remainders(
                    _RemainderSums(
                        is_squared, bits, values_address, group_size, scales_address, sums_address
                    )
                )
                for c in range(_BLOCK_COLUMNS):
                    zero_point[c] = -(sums[c] / np.float32(group_size)) / scale[c]
            for c in range(_BLOCK_COLUMNS):
                better = sums[c] < least_error[c]
                words[c] = index[c] << _ZERO_POINT_BITS | candidate[c] if better else words[c]
                least_error[c] = sums[c] if better else least_error[c]


@partial(Loop, PackedArgs)
def pack_columns(args: Any, thread: Any, threads: Any) -> None:
    """Pack a matrix [rows, width] into [stripes, stripe_bytes]. Threads divide the blocks of all
    stripes among them.
    """
    stripes, group_size, bits, width = args.stripes, args.group_size, args.bits, args.width
    table, top = floats(args.table, _TABLE_SIZE), np.float32((1 << bits) - 1)
    code_bytes = group_size * bits // 8
    blocks = (width + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS
    for block in range(
        stripes * blocks * thread // threads, stripes * blocks * (thread + 1) // threads
    ):
        stripe, first = block // blocks, block % blocks * _BLOCK_COLUMNS
        columns = min(_BLOCK_COLUMNS, width - first)
        values = np.zeros((group_size, _BLOCK_COLUMNS), np.float32)
        minimum, maximum = np.zeros((2, _BLOCK_COLUMNS), np.float32)
        words = np.zeros(_BLOCK_COLUMNS, np.int32)
        for number in range(group_size):
            row = min(stripe * group_size + number, args.rows - 1)  # the last row pads its group
            source, value = floats(args.matrix + (row * width + first) * 4, columns), values[number]
            for c in range(columns):
                value[c] = source[c]
                minimum[c] = value[c] if value[c] < minimum[c] else minimum[c]
                maximum[c] = value[c] if value[c] > maximum[c] else maximum[c]
        for c in range(columns):  # the smallest scale that covers the range
            exact = max(np.float64(maximum[c] - minimum[c]) / top, _SMALLEST_SCALE)
            step = (math.log2(exact) - LOWEST_EXPONENT) * SCALES_PER_OCTAVE
            index = np.int32(min(max(math.ceil(step - 1e-9), 0), NUM_SCALES - 1))
            zero_point = -minimum[c] / table[index] * (_LAST_ZERO_POINT / top)
            words[c] = index << _ZERO_POINT_BITS | np.int32(
                _clamp_and_round(zero_point, _LAST_ZERO_POINT)
            )
        if args.tried_scales:
            _fit_words(args, values, (minimum, maximum), words)
        data = packed_bytes(args.packed + stripe * args.stripe_bytes, args.stripe_bytes)
        scale, offset = minimum, maximum  # reuse the memory of the ranges
        for c in range(columns):
            word_byte = code_bytes * width + 2 * (first + c)
            data[word_byte], data[word_byte + 1] = words[c] & 255, words[c] >> 8
            scale[c] = table[words[c] >> _ZERO_POINT_BITS]
            offset[c] = -(table[NUM_SCALES + (words[c] & LAST_ZERO_POINT)] * scale[c])
        for number in range(code_bytes):
            target = data[number * width + first :]
            value = values[number]
            upper = values[number + group_size - code_bytes]
            for c in range(columns):
                code = np.uint8(_clamp_and_round((value[c] - offset[c]) / scale[c], top))
                if bits == 4:
                    code |= np.uint8(_clamp_and_round((upper[c] - offset[c]) / scale[c], top)) << 4
                target[c] = code
