"""Loops over packed bytes for CPUs, compiled by numba: 4 or 8 bits, any axis and scales (layout: `quant.packing`).

Arguments of all: packed [stripes, …], bytes from a stripe to the next, stripes, group size, bits of a code, whether
scales are words, table, matrix, its rows and width. The table has the float32 of every FP16 for pairs; for words their
scales [512] and zero points [128] (`quant.arithmetic`). The matrix is dequantized to, or packed, or x.

A group's second half has its codes in the upper bits of the same bytes, or in `apart` further ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    INT32,
    INT64,
    LANES,
    VECTOR,
    Loop,
    call_llvm,
    done,
    floats,
    ir_statement,
    load,
    njit,
    operands,
    part_of_thread,
    pointer,
    store,
)
from flexgen_helm.kernels.product_loop import OUTPUTS, ROWS, Stored, write_product
from flexgen_helm.quant.arithmetic import PARTIAL_SUMS


@njit
def _bytes(address: Any, count: Any) -> Any:
    return numba.carray(pointer(address), count, np.uint8)


@njit
def _scale_and_offset(data: Any, first: Any, apart: Any, words: Any, table: Any) -> Any:
    """Scale and offset of one group: the word at byte `first`, or the pair there and `apart` bytes on."""
    number = np.int32(data[first]) | np.int32(data[first + 1]) << np.int32(8)
    if words:
        scale = table[number >> 7]
        return scale, -(table[512 + (number & 127)] * scale)
    second = np.int32(data[first + apart]) | np.int32(data[first + apart + 1]) << np.int32(8)
    return table[number], table[second]


@njit
def _column_scales(data: Any, first: Any, words: Any, table: Any, scale: Any, offset: Any) -> None:
    """Fill scale and offset [width] of a stripe's columns, which are at byte `first`."""
    width = len(scale)
    for column in range(width):
        scale[column], offset[column] = _scale_and_offset(data, first + 2 * column, 2 * width, words, table)


@njit
def _lower_mask(bits: Any) -> Any:
    """Bits of a byte that are a code of a group's first half, and the scale's factor."""
    return np.uint8((1 << bits) - 1), np.float32(1)


@njit
def _upper_mask(bits: Any) -> Any:
    """The same of its second half: codes of 4 bits are 16 times as large there, which changes no bit of a product."""
    return np.uint8(255 << (8 - bits)), np.float32(1) / np.float32(1 << (8 - bits))


@Loop
def dequantize_rows(address: Any) -> None:
    """Axis 'in': packed -> matrix [stripes, width]."""
    part, parts = part_of_thread(address)
    packed, stripe_bytes, stripes, group, bits, words, numbers, matrix, rows, width = operands(address, 10)
    table, half, code_bytes = floats(numbers, 1 << 16), group // 2, group * bits // 8
    apart, groups, scale_bytes = code_bytes - half, (width + group - 1) // group, 2 if words else 4
    stripes = min(stripes, rows)
    for row in range(stripes * part // parts, stripes * (part + 1) // parts):
        data = _bytes(packed + row * stripe_bytes, groups * (code_bytes + scale_bytes))
        line = floats(matrix + row * width * 4, width)
        for number in range(groups):
            scale, offset = _scale_and_offset(data, groups * code_bytes + number * scale_bytes, 2, words, table)
            for upper in range(2):
                first, at = number * group + upper * half, number * code_bytes + upper * apart
                mask, factor = _upper_mask(bits) if upper else _lower_mask(bits)
                target, source = line[first : min(first + half, width)], data[at : at + half]
                for j in range(len(target)):
                    target[j] = np.float32(np.uint8(source[j] & mask)) * (scale * factor) + offset
    done(address, part)


@Loop
def dequantize_columns(address: Any) -> None:
    """Axis 'out': packed -> matrix [rows, width], at most `stripes group` rows."""
    part, parts = part_of_thread(address)
    packed, stripe_bytes, stripes, group, bits, words, numbers, matrix, rows, width = operands(address, 10)
    table, half = floats(numbers, 1 << 16), group // 2
    apart = group * bits // 8 - half
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        data = _bytes(packed + stripe * stripe_bytes, (group * bits // 8 + (2 if words else 4)) * width)
        _column_scales(data, group * bits // 8 * width, words, table, scale, offset)
        for upper in range(2):
            first, at = stripe * group + upper * half, upper * apart * width
            mask, factor = _upper_mask(bits) if upper else _lower_mask(bits)
            scale *= factor
            for j in range(min(half, rows - first)):
                line, source = floats(matrix + (first + j) * width * 4, width), data[at + j * width :]
                for column in range(width):
                    line[column] = np.float32(np.uint8(source[column] & mask)) * scale[column] + offset[column]
    done(address, part)


# ---- products of few rows: codes are numbers, whose scales multiply x once for all rows of a stripe ----


def _codes(bits: int, shift: int) -> Any:
    """Make a statement that multiplies rows of x with rows of codes: 4 bits of each byte from `shift` on, or all 8."""

    def weights(builder: Any, at: Any) -> Iterator[Any]:
        kind = ir.VectorType(INT32, LANES)
        codes = builder.zext(load(builder, at, ir.VectorType(ir.IntType(8), LANES), 1), kind)
        codes = builder.and_(
            builder.lshr(codes, ir.Constant(kind, [shift] * LANES)), ir.Constant(kind, [(1 << bits) - 1] * LANES)
        )
        yield builder.uitofp(codes, VECTOR)

    return ir_statement((1, ROWS), (1,), (1,))(partial(write_product, Stored("codes", LANES, LANES, weights, 0)))


_multiply_low, _multiply_high, _multiply_bytes = _codes(4, 0), _codes(4, 4), _codes(8, 0)


@njit
def _multiply_part(kind: Any, x: Any, count: Any, data: Any, number: Any, width: Any, y: Any, y_row: Any) -> None:
    """y [count, number] = x [count, width] times rows of codes; kind: 0 and 1 for halves of bytes, 2 for whole ones."""
    steps = width // LANES
    for output in range(0, number, OUTPUTS):
        last = min(output + OUTPUTS, number) - 1
        for row in range(0, count, ROWS):
            rows, to = 1 if row == count - 1 else ROWS, y + row * y_row + 4 * output
            from_x = x + row * width * 4, width * 4, count - 1 - row
            given = (rows, 1, 1, *from_x, data + output * width, width, last - output, steps, 0, to, y_row)
            if steps > 0:
                if kind == 0:
                    _multiply_low(given)
                elif kind == 1:
                    _multiply_high(given)
                else:
                    _multiply_bytes(given)
    mask, shift = np.uint8(15 if kind < 2 else 255), np.uint8(4 if kind == 1 else 0)
    for row in range(count if steps * LANES < width else 0):
        values, target = floats(x + row * width * 4, width), floats(y + row * y_row, number)
        for output in range(number):
            total, codes = target[output] if steps > 0 else np.float32(0), _bytes(data + output * width, width)
            for column in range(steps * LANES, width):
                total += values[column] * np.float32((codes[column] >> shift) & mask)
            target[output] = total


@numba.njit(error_model="numpy", fastmath=True)
def _scale_row(x: Any, scale: Any, offset: Any, scaled: Any) -> Any:
    """Fill scaled with scale x; return the sum of offset x, in any order."""
    total = np.float32(0.0)
    for c in range(len(x)):
        scaled[c] = scale[c] * x[c]
        total += offset[c] * x[c]
    return total


@Loop
def matmul_columns(address: Any) -> None:
    """Axis 'out': y [T, rows] = x [T, width] times the packed matrix transposed, one stripe after the other.

    y[t, r] = sum over c of (code[r, c] scale[c] + offset[c]) x[t, c] = code[r] (scale x[t]) + offset x[t]

    More arguments: y, T.
    """
    part, parts = part_of_thread(address)
    packed, stripe_bytes, stripes, group, bits, words, numbers, given, rows, width, result, count = operands(
        address, 12
    )
    table, half = floats(numbers, 1 << 16), group // 2
    scale, offset, constants = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(count, np.float32)
    scaled = np.empty((count, width), np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        at, first = packed + stripe * stripe_bytes, stripe * group
        data = _bytes(at, (group * bits // 8 + (2 if words else 4)) * width)
        _column_scales(data, group * bits // 8 * width, words, table, scale, offset)
        for t in range(count):
            constants[t] = _scale_row(floats(given + t * width * 4, width), scale, offset, scaled[t])
        x, y = np.int64(scaled.ctypes.data), result + first * 4
        if bits == 8:
            _multiply_part(2, x, count, at, min(group, rows - first), width, y, rows * 4)
        else:
            _multiply_part(0, x, count, at, min(half, rows - first), width, y, rows * 4)
            _multiply_part(1, x, count, at, min(half, rows - first - half), width, y + half * 4, rows * 4)
        for t in range(count):
            floats(y + t * rows * 4, min(group, rows - first))[:] += constants[t]
    done(address, part)


# ---- packing of axis 'out' with words: operation by operation as `arithmetic` does it, so to the same bytes ----

# That are packed side by side; past the matrix's last one they are zeros.
_COLUMNS = 64
# Added to a number below 2^22 and subtracted again, it rounds to the nearest integer, half to even.
_ROUNDER = np.float32(1.5 * 2**23)
_ZERO = np.float32(0)


@njit
def _rounded(value: Any, top: Any) -> Any:
    """Clamp to 0 … top and round."""
    value = value if value > _ZERO else _ZERO
    return ((value if value < top else top) + _ROUNDER) - _ROUNDER


def _write_sums(builder: Any, squares: int, bits: int, values: Any, group: Any, given: Any, sums: Any) -> None:
    """Fill sums with what codes leave of values [group, columns], or its squares, in the order of `arithmetic`.

    given: scale, 1 / scale and offset of columns.
    """
    row_bytes, zero, top = 4 * _COLUMNS, _constant(0.0), _constant(float((1 << bits) - 1))
    with cgutils.for_range(builder, INT64(_COLUMNS // LANES)) as lanes:
        at = builder.mul(lanes.index, INT64(4 * LANES))
        first = builder.add(given, at)
        scale, inverse, offset = (
            load(builder, builder.add(first, INT64(number * row_bytes)), VECTOR, 4) for number in range(3)
        )
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(PARTIAL_SUMS)]
        with cgutils.for_range(builder, builder.udiv(group, INT64(PARTIAL_SUMS))) as rows:
            row = builder.add(builder.add(values, at), builder.mul(rows.index, INT64(PARTIAL_SUMS * row_bytes)))
            for number, total in enumerate(totals):
                value = load(builder, builder.add(row, INT64(number * row_bytes)), VECTOR, 4)
                code = builder.fmul(builder.fsub(value, offset), inverse)
                code = builder.select(builder.fcmp_ordered(">", code, zero), code, zero)
                code = builder.select(builder.fcmp_ordered("<", code, top), code, top)
                code = call_llvm(builder, f"llvm.rint.v{LANES}f32", VECTOR, code)
                rest = builder.fsub(value, builder.fmul(code, scale))
                if squares:
                    rest = builder.fsub(rest, offset)
                    rest = builder.fmul(rest, rest)
                builder.store(builder.fadd(builder.load(total), rest), total)
        parts = [builder.load(total) for total in totals]
        while half := len(parts) // 2:
            parts = [builder.fadd(*pair) for pair in zip(parts[:half], parts[half:])]
        store(builder, parts[0], builder.add(sums, at), 4)


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


_fill_sums = ir_statement((0, 1), (4, 8))(_write_sums)


@njit
def _search(values: Any, below: Any, above: Any, words: Any, table: Any, bits: Any, tried: Any) -> None:
    """Replace words [columns], which cover the range, by those of least error (`arithmetic._fit`)."""
    group, top = len(values), np.float32((1 << bits) - 1)
    zero_points, grid = table[512:], np.float32(127) / top
    numbers = np.empty((6, _COLUMNS), np.float32)
    scale, inverse, offset, sums, zero_point, least = numbers
    first_index, index, candidate = np.empty((3, _COLUMNS), np.int32)
    at = np.int64(values.ctypes.data), group, np.int64(numbers.ctypes.data), np.int64(sums.ctypes.data)
    for c in range(_COLUMNS):
        first_index[c], scale[c] = words[c] >> 7, table[words[c] >> 7]
        inverse[c], offset[c] = np.float32(1) / scale[c], -(zero_points[words[c] & 127] * scale[c])
    _fill_sums((1, bits, *at))
    least[:] = sums
    for smaller in range(tried):
        for c in range(_COLUMNS):
            index[c] = max(first_index[c] - smaller, 0)
            scale[c] = table[index[c] & 511]
            inverse[c] = np.float32(1) / scale[c]
        for clipped in range(3):
            for c in range(_COLUMNS):
                lowest, highest = -below[c] / scale[c], top - above[c] / scale[c]
                middle = (lowest + highest) / np.float32(2)
                zero_point[c] = lowest if clipped == 0 else (middle if clipped == 1 else highest)
            for squares in range(2):  # the first sums refit the zero point, the second are the error
                for c in range(_COLUMNS):
                    candidate[c] = np.int32(_rounded(zero_point[c] * grid, np.float32(127)))
                for c in range(_COLUMNS):
                    offset[c] = -(zero_points[candidate[c] & 127] * scale[c])
                _fill_sums((squares, bits, *at))
                for c in range(_COLUMNS):
                    zero_point[c] = -(sums[c] / np.float32(group)) / scale[c]
            for c in range(_COLUMNS):
                better = sums[c] < least[c]
                words[c] = index[c] << 7 | candidate[c] if better else words[c]
                least[c] = sums[c] if better else least[c]


@Loop
def pack_columns(address: Any) -> None:
    """Axis 'out', words: matrix [rows, width] -> packed [stripes, stripe_bytes].

    One more argument: how many scales are tried for the least error.
    """
    part, parts = part_of_thread(address)
    packed, stripe_bytes, stripes, group, bits, _, numbers, matrix, rows, width, tried = operands(address, 11)
    table, top, code_bytes = floats(numbers, 640), np.float32((1 << bits) - 1), group * bits // 8
    pieces = (width + _COLUMNS - 1) // _COLUMNS
    for piece in range(stripes * pieces * part // parts, stripes * pieces * (part + 1) // parts):
        stripe, first = piece // pieces, piece % pieces * _COLUMNS
        columns = min(_COLUMNS, width - first)
        values, (below, above) = np.zeros((group, _COLUMNS), np.float32), np.zeros((2, _COLUMNS), np.float32)
        words = np.zeros(_COLUMNS, np.int32)
        for j in range(group):
            row = min(stripe * group + j, rows - 1)  # the last one pads
            line, value = floats(matrix + (row * width + first) * 4, columns), values[j]
            for c in range(columns):
                value[c] = line[c]
                below[c] = value[c] if value[c] < below[c] else below[c]
                above[c] = value[c] if value[c] > above[c] else above[c]
        for c in range(columns):
            exact = max(np.float64(above[c] - below[c]) / top, 2.0**-24)
            index = np.int32(min(max(math.ceil((math.log2(exact) + 24) * 16 - 1e-9), 0), 511))
            zero_point = -below[c] / table[index] * (np.float32(127) / top)
            words[c] = index << 7 | np.int32(_rounded(zero_point, np.float32(127)))
        if tried:
            _search(values, below, above, words, table, bits, tried)
        data = _bytes(packed + stripe * stripe_bytes, stripe_bytes)
        for c in range(columns):
            at = code_bytes * width + 2 * (first + c)
            data[at], data[at + 1] = words[c] & 255, words[c] >> 8
            below[c] = table[words[c] >> 7]
            above[c] = -(table[512 + (words[c] & 127)] * below[c])
        for j in range(code_bytes):
            target, value, upper = data[j * width + first :], values[j], values[j + group - code_bytes]
            for c in range(columns):
                code = np.uint8(_rounded((value[c] - above[c]) / below[c], top))
                if bits == 4:
                    code |= np.uint8(_rounded((upper[c] - above[c]) / below[c], top)) << 4
                target[c] = code
    done(address, part)
