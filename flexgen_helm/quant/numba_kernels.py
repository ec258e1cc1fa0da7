"""Loops over packed bytes for CPUs, compiled by numba: 4 or 8 bits, any axis and scales (layout: `quant.packing`).

Every kernel takes `packed` [stripes, stripe_bytes], the group size, the bits of a code, whether scales are words, and
two tables: the float32 of every FP16 twice for pairs; for words their scales [512] and zero points [128]
(`quant.arithmetic`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np


def _compiled(function: Any, **options: Any) -> Any:
    """Compile a function at its first call, and keep the result on disk where numba can write."""
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


# Sums may be taken in any order: there is no unpacked product whose bits they would have to match.
_compiled_sums = partial(_compiled, fastmath=True)


@_compiled
def _read_uint16(data: Any, at: int) -> Any:
    """The 16 bits at byte `at`, which may be odd."""
    return np.int32(data[at]) | np.int32(data[at + 1]) << np.int32(8)


@_compiled
def _scale_and_offset(data: Any, first: int, second: int, words: bool, table: Any, zero_points: Any) -> Any:
    """Scale and offset of one group: the word at byte `first`, or the pair at bytes `first` and `second`."""
    number = _read_uint16(data, first)
    if words:
        scale = table[number >> 7]
        return scale, -(zero_points[number & 127] * scale)
    return table[number], table[_read_uint16(data, second)]


@_compiled
def _dequantize_rows_of_bytes(packed: Any, out: Any, group: int, words: bool, table: Any, zero_points: Any) -> None:
    """8 bits; a branch in the loop of 4 bits would make it slower by a third."""
    width = out.shape[1]
    groups = (width + group - 1) // group
    for row in range(out.shape[0]):
        data, line = packed[row], out[row]
        for number in range(groups):
            at, first = groups * group + (2 if words else 4) * number, number * group
            scale, offset = _scale_and_offset(data, at, at + 2, words, table, zero_points)
            for column in range(first, min(first + group, width)):
                line[column] = np.float32(data[column]) * scale + offset


@_compiled
def dequantize_rows(packed: Any, out: Any, group: int, bits: int, words: bool, table: Any, zero_points: Any) -> None:
    """Axis 'in': packed -> out [stripes, width]."""
    half, width = group // 2, out.shape[1]
    groups = (width + group - 1) // group
    if bits == 8:
        return _dequantize_rows_of_bytes(packed, out, group, words, table, zero_points)
    for row in range(out.shape[0]):
        data, line = packed[row], out[row]
        for number in range(groups):
            at = groups * half + (2 if words else 4) * number
            scale, offset = _scale_and_offset(data, at, at + 2, words, table, zero_points)
            source, target = number * half, number * group
            if target + group <= width:
                for j in range(half):
                    line[target + j] = np.float32(data[source + j] & 15) * scale + offset
                for j in range(half):
                    line[target + half + j] = np.float32(data[source + j] >> 4) * scale + offset
            else:
                for j in range(width - target):
                    code = data[source + j] & 15 if j < half else data[source + j - half] >> 4
                    line[target + j] = np.float32(code) * scale + offset


@_compiled
def _column_scales(data: Any, first: int, words: bool, table: Any, zero_points: Any, scale: Any, offset: Any) -> None:
    """Fill scale and offset [width] of a stripe's columns, whose bytes begin at `first`."""
    width = scale.shape[0]
    for column in range(width):
        at = first + 2 * column
        scale[column], offset[column] = _scale_and_offset(data, at, at + 2 * width, words, table, zero_points)


@_compiled
def dequantize_columns(packed: Any, out: Any, group: int, bits: int, words: bool, table: Any, zero_points: Any) -> None:
    """Axis 'out': packed -> out [rows, width], at most `stripes group` rows."""
    rows, width = out.shape
    half, code_bytes = group // 2, group * bits // 8
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range((rows + group - 1) // group):
        data, first = packed[stripe], stripe * group
        _column_scales(data, code_bytes * width, words, table, zero_points, scale, offset)
        if bits == 8:
            for j in range(min(group, rows - first)):
                line, source = out[first + j], data[j * width : (j + 1) * width]
                for column in range(width):
                    line[column] = np.float32(source[column]) * scale[column] + offset[column]
            continue
        for j in range(min(half, rows - first)):
            line, source = out[first + j], data[j * width : (j + 1) * width]
            for column in range(width):
                line[column] = np.float32(source[column] & 15) * scale[column] + offset[column]
        for j in range(min(half, rows - first - half)):
            line, source = out[first + half + j], data[j * width : (j + 1) * width]
            for column in range(width):
                line[column] = np.float32(source[column] >> 4) * scale[column] + offset[column]


@_compiled_sums
def matmul_columns(
    packed: Any, x: Any, y: Any, group: int, bits: int, words: bool, table: Any, zero_points: Any
) -> None:
    """Axis 'out': y [T, rows] = x [T, width] times the packed matrix transposed, one stripe after the other.

    y[t, r] = sum over c of (code[r, c] scale[c] + offset[c]) x[t, c] = code[r] (scale x[t]) + offset x[t]
    """
    count, width = x.shape
    code_bytes = group * bits // 8
    scale, offset, scaled = np.empty(width, np.float32), np.empty(width, np.float32), np.empty_like(x)
    for stripe in range(packed.shape[0]):
        data = packed[stripe]
        _column_scales(data, code_bytes * width, words, table, zero_points, scale, offset)
        for t in range(count):
            scaled[t] = x[t] * scale
        _matmul_stripe(data, x, y, stripe * group, group, bits, scaled, offset)


@_compiled_sums
def _matmul_stripe(data: Any, x: Any, y: Any, first: int, group: int, bits: int, scaled: Any, offset: Any) -> None:
    """Columns `first` … `first + group` of y, or as many as there are; scaled [T, width] = scale x.

    Rows of x are taken in fours, so that a code is converted once for four.
    """
    count, width = x.shape
    half, stop = group // 2, min(first + group, y.shape[1])
    # Codes of the group's second half are in the same bytes, or in `apart` further ones.
    apart, mask, shift = group * bits // 8 - half, np.uint8((1 << bits) - 1), np.uint8(8 - bits)
    t = 0
    while t < count:
        four = t + 4 <= count
        for j in range(half):
            source = data[j * width : (j + 1) * width]
            upper = data[(apart + j) * width : (apart + j + 1) * width]
            low_row, high_row = first + j, first + half + j
            if four:
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
                x0, x1, x2, x3 = scaled[t], scaled[t + 1], scaled[t + 2], scaled[t + 3]
                for c in range(width):
                    low, high = np.float32(source[c] & mask), np.float32(upper[c] >> shift)
                    a0 += low * x0[c]
                    a1 += low * x1[c]
                    a2 += low * x2[c]
                    a3 += low * x3[c]
                    b0 += high * x0[c]
                    b1 += high * x1[c]
                    b2 += high * x2[c]
                    b3 += high * x3[c]
                if low_row < stop:
                    y[t, low_row], y[t + 1, low_row], y[t + 2, low_row], y[t + 3, low_row] = a0, a1, a2, a3
                if high_row < stop:
                    y[t, high_row], y[t + 1, high_row], y[t + 2, high_row], y[t + 3, high_row] = b0, b1, b2, b3
            else:
                a, b, own = np.float32(0.0), np.float32(0.0), scaled[t]
                for c in range(width):
                    a += np.float32(source[c] & mask) * own[c]
                    b += np.float32(upper[c] >> shift) * own[c]
                if low_row < stop:
                    y[t, low_row] = a
                if high_row < stop:
                    y[t, high_row] = b
        t += 4 if four else 1
    for t in range(count):
        constant, own = np.float32(0.0), x[t]
        for c in range(width):
            constant += offset[c] * own[c]
        for row in range(first, stop):
            y[t, row] += constant
