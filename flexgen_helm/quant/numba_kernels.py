"""Loops that read packed bytes on CPUs, compiled by numba: 4 or 8 bits, any axis and scales
(layout: `quant.packing`).

Arguments of all: packed [stripes, …], bytes from a stripe to the next, stripes, group size, bits of
a code, whether scales are words, table, matrix, its rows and width. The table has the float32 of
every FP16 for pairs; for words their scales [512] and zero points [128] (`quant.arithmetic`). The
matrix is dequantized to, or x.

A group's second half has its codes in the upper bits of the same bytes, or in `apart` further ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir

from flexgen_helm.kernels.emit import (
    INT32,
    LANES,
    VECTOR,
    Loop,
    done,
    floats,
    ir_statement,
    load,
    njit,
    operands,
    part_of_thread,
    pointer,
)
from flexgen_helm.kernels.product_loop import OUTPUTS, ROWS, Stored, write_product


@njit
def packed_bytes(address: Any, count: Any) -> Any:
    return numba.carray(pointer(address), count, np.uint8)


@njit
def _scale_and_offset(data: Any, first: Any, apart: Any, words: Any, table: Any) -> Any:
    """Scale and offset of one group: the word at byte `first`, or the pair there and `apart` bytes
    on.
    """
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
        scale[column], offset[column] = _scale_and_offset(
            data, first + 2 * column, 2 * width, words, table
        )


@njit
def _lower_mask(bits: Any) -> Any:
    """Bits of a byte that are a code of a group's first half, and the scale's factor."""
    return np.uint8((1 << bits) - 1), np.float32(1)


@njit
def _upper_mask(bits: Any) -> Any:
    """The same of its second half: codes of 4 bits are 16 times as large there, which changes no
    bit of a product.
    """
    return np.uint8(255 << (8 - bits)), np.float32(1) / np.float32(1 << (8 - bits))


@Loop
def dequantize_rows(address: Any) -> None:
    """Axis 'in': packed -> matrix [stripes, width]."""
    part, parts = part_of_thread(address)
    packed, stripe_bytes, stripes, group, bits, words, numbers, matrix, rows, width = operands(
        address, 10
    )
    table, half, code_bytes = floats(numbers, 1 << 16), group // 2, group * bits // 8
    apart, groups, scale_bytes = code_bytes - half, (width + group - 1) // group, 2 if words else 4
    stripes = min(stripes, rows)
    for row in range(stripes * part // parts, stripes * (part + 1) // parts):
        data = packed_bytes(packed + row * stripe_bytes, groups * (code_bytes + scale_bytes))
        line = floats(matrix + row * width * 4, width)
        for number in range(groups):
            scale, offset = _scale_and_offset(
                data, groups * code_bytes + number * scale_bytes, 2, words, table
            )
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
    packed, stripe_bytes, stripes, group, bits, words, numbers, matrix, rows, width = operands(
        address, 10
    )
    table, half = floats(numbers, 1 << 16), group // 2
    apart = group * bits // 8 - half
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        data = packed_bytes(
            packed + stripe * stripe_bytes, (group * bits // 8 + (2 if words else 4)) * width
        )
        _column_scales(data, group * bits // 8 * width, words, table, scale, offset)
        for upper in range(2):
            first, at = stripe * group + upper * half, upper * apart * width
            mask, factor = _upper_mask(bits) if upper else _lower_mask(bits)
            scale *= factor
            for j in range(min(half, rows - first)):
                line, source = (
                    floats(matrix + (first + j) * width * 4, width),
                    data[at + j * width :],
                )
                for column in range(width):
                    line[column] = (
                        np.float32(np.uint8(source[column] & mask)) * scale[column] + offset[column]
                    )
    done(address, part)


# ---- products of few rows: codes are numbers, whose scales multiply x once for all rows of a
# stripe ----


def _codes(bits: int, shift: int) -> Any:
    """Make a statement that multiplies rows of x with rows of codes: 4 bits of each byte from
    `shift` on, or all 8.
    """

    def weights(builder: Any, at: Any) -> Iterator[Any]:
        kind = ir.VectorType(INT32, LANES)
        codes = builder.zext(load(builder, at, ir.VectorType(ir.IntType(8), LANES), 1), kind)
        codes = builder.and_(
            builder.lshr(codes, ir.Constant(kind, [shift] * LANES)),
            ir.Constant(kind, [(1 << bits) - 1] * LANES),
        )
        yield builder.uitofp(codes, VECTOR)

    return ir_statement((1, ROWS), (1,), (1,))(
        partial(write_product, Stored("codes", LANES, LANES, weights, 0))
    )


_multiply_low, _multiply_high, _multiply_bytes = _codes(4, 0), _codes(4, 4), _codes(8, 0)


@njit
def _multiply_part(
    kind: Any, x: Any, count: Any, data: Any, number: Any, width: Any, y: Any, y_row: Any
) -> None:
    """y [count, number] = x [count, width] times rows of codes; kind: 0 and 1 for halves of bytes,
    2 for whole ones.
    """
    steps = width // LANES
    for output in range(0, number, OUTPUTS):
        last = min(output + OUTPUTS, number) - 1
        for row in range(0, count, ROWS):
            rows, to = 1 if row == count - 1 else ROWS, y + row * y_row + 4 * output
            from_x = x + row * width * 4, width * 4, count - 1 - row
            given = (
                rows,
                1,
                1,
                *from_x,
                data + output * width,
                width,
                last - output,
                steps,
                0,
                to,
                y_row,
            )
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
            total, codes = (
                target[output] if steps > 0 else np.float32(0),
                packed_bytes(data + output * width, width),
            )
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
    """Axis 'out': y [T, rows] = x [T, width] times the packed matrix transposed, one stripe after
    the other.

    y[t, r] = sum over c of (code[r, c] scale[c] + offset[c]) x[t, c] = code[r] (scale x[t]) +
    offset x[t]

    More arguments: y, T.
    """
    part, parts = part_of_thread(address)
    (
        packed,
        stripe_bytes,
        stripes,
        group,
        bits,
        words,
        numbers,
        given,
        rows,
        width,
        result,
        count,
    ) = operands(address, 12)
    table, half = floats(numbers, 1 << 16), group // 2
    scale, offset, constants = (
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(count, np.float32),
    )
    scaled = np.empty((count, width), np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        at, first = packed + stripe * stripe_bytes, stripe * group
        data = packed_bytes(at, (group * bits // 8 + (2 if words else 4)) * width)
        _column_scales(data, group * bits // 8 * width, words, table, scale, offset)
        for t in range(count):
            constants[t] = _scale_row(
                floats(given + t * width * 4, width), scale, offset, scaled[t]
            )
        x, y = np.int64(scaled.ctypes.data), result + first * 4
        if bits == 8:
            _multiply_part(2, x, count, at, min(group, rows - first), width, y, rows * 4)
        else:
            _multiply_part(0, x, count, at, min(half, rows - first), width, y, rows * 4)
            _multiply_part(
                1, x, count, at, min(half, rows - first - half), width, y + half * 4, rows * 4
            )
        for t in range(count):
            floats(y + t * rows * 4, min(group, rows - first))[:] += constants[t]
    done(address, part)
