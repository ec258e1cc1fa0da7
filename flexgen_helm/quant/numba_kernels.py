"""Loops that read packed bytes on CPUs, compiled by numba: 4 or 8 bits, any axis and scales
(layout: `quant.packing`).

The table of `Packed` has the float32 of every FP16 for pairs; for words their scales [512] and zero
points [128] (`quant.arithmetic`).

A group's second half has its codes in the upper bits of the same bytes, or in `apart` further ones.
"""

from __future__ import annotations

from collections import namedtuple
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
    floats,
    ir_statement,
    load,
    njit,
    pointer,
)
from flexgen_helm.kernels.product_loop import OUTPUTS, ROWS, Part, Stored, write_product
from flexgen_helm.quant.packing import Packed


@njit
def packed_bytes(address: Any, count: Any) -> Any:
    return numba.carray(pointer(address), count, np.uint8)


@njit
def _scale_and_offset(given: Any, table: Any, data: Any, first: Any, apart: Any) -> Any:
    """Scale and offset of one group: the word at byte `first`, or the pair there and `apart` bytes
    on.
    """
    number = np.int32(data[first]) | np.int32(data[first + 1]) << np.int32(8)
    if given.words:
        scale = table[number >> 7]
        return scale, -(table[512 + (number & 127)] * scale)
    second = np.int32(data[first + apart]) | np.int32(data[first + apart + 1]) << np.int32(8)
    return table[number], table[second]


@njit
def _columns(given: Any, stripe: Any, scale: Any, offset: Any) -> Any:
    """Fill scale and offset [width] of a stripe's columns; return its bytes."""
    width, code_bytes = given.width, given.group * given.bits // 8
    table, at = floats(given.table, 1 << 16), given.packed + stripe * given.stripe_bytes
    data = packed_bytes(at, (code_bytes + (2 if given.words else 4)) * width)
    for column in range(width):
        first = code_bytes * width + 2 * column
        scale[column], offset[column] = _scale_and_offset(given, table, data, first, 2 * width)
    return data


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


@partial(Loop, Packed)
def dequantize_rows(given: Any, part: Any, parts: Any) -> None:
    """Axis 'in': packed -> matrix [stripes, width]."""
    group, bits, width = given.group, given.bits, given.width
    table, half, code_bytes = floats(given.table, 1 << 16), group // 2, group * bits // 8
    apart, groups = code_bytes - half, (width + group - 1) // group
    scale_bytes, stripes = 2 if given.words else 4, min(given.stripes, given.rows)
    for row in range(stripes * part // parts, stripes * (part + 1) // parts):
        at = given.packed + row * given.stripe_bytes
        data = packed_bytes(at, groups * (code_bytes + scale_bytes))
        line = floats(given.matrix + row * width * 4, width)
        for number in range(groups):
            scale, offset = _scale_and_offset(
                given, table, data, groups * code_bytes + number * scale_bytes, 2
            )
            for upper in range(2):
                first, at = number * group + upper * half, number * code_bytes + upper * apart
                mask, factor = _upper_mask(bits) if upper else _lower_mask(bits)
                target, source = line[first : min(first + half, width)], data[at : at + half]
                for j in range(len(target)):
                    target[j] = np.float32(np.uint8(source[j] & mask)) * (scale * factor) + offset


@partial(Loop, Packed)
def dequantize_columns(given: Any, part: Any, parts: Any) -> None:
    """Axis 'out': packed -> matrix [rows, width], at most `stripes group` rows."""
    stripes, group, bits, width = given.stripes, given.group, given.bits, given.width
    half = group // 2
    apart = group * bits // 8 - half
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        data = _columns(given, stripe, scale, offset)
        for upper in range(2):
            first, at = stripe * group + upper * half, upper * apart * width
            mask, factor = _upper_mask(bits) if upper else _lower_mask(bits)
            scale *= factor
            for j in range(min(half, given.rows - first)):
                line = floats(given.matrix + (first + j) * width * 4, width)
                source = data[at + j * width :]
                for column in range(width):
                    line[column] = (
                        np.float32(np.uint8(source[column] & mask)) * scale[column] + offset[column]
                    )


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


# x [count, width] and rows of codes that it is multiplied with; kind: 0 and 1 for halves of bytes,
# 2 for whole ones.
_Codes = namedtuple("_Codes", "kind x count data rows width y y_row")


@njit
def _multiply_codes(codes: Any) -> None:
    """y [count, rows] = x times the codes."""
    steps, width = codes.width // LANES, codes.width
    for output in range(0, codes.rows if steps > 0 else 0, OUTPUTS):
        for row in range(0, codes.count, ROWS):
            part = Part(
                rows=1 if row == codes.count - 1 else ROWS,
                is_first=1,
                is_last=1,
                x=codes.x + row * width * 4,
                x_row=width * 4,
                last=codes.count - 1 - row,
                w=codes.data + output * width,
                w_row=width,
                last_output=min(output + OUTPUTS, codes.rows) - 1 - output,
                steps=steps,
                at=0,
                y=codes.y + row * codes.y_row + 4 * output,
                y_row=codes.y_row,
            )
            if codes.kind == 0:
                _multiply_low(part)
            elif codes.kind == 1:
                _multiply_high(part)
            else:
                _multiply_bytes(part)
    if steps * LANES < width:
        _multiply_rest(codes)


@njit
def _multiply_rest(codes: Any) -> None:
    """Add products over the columns that fill no vector."""
    width, first = codes.width, codes.width // LANES * LANES
    mask, shift = np.uint8(15 if codes.kind < 2 else 255), np.uint8(4 if codes.kind == 1 else 0)
    for row in range(codes.count):
        values = floats(codes.x + row * width * 4, width)
        target = floats(codes.y + row * codes.y_row, codes.rows)
        for output in range(codes.rows):
            total = target[output] if first > 0 else np.float32(0)
            data = packed_bytes(codes.data + output * width, width)
            for column in range(first, width):
                total += values[column] * np.float32((data[column] >> shift) & mask)
            target[output] = total


@numba.njit(error_model="numpy", fastmath=True)
def _scale_row(x: Any, scale: Any, offset: Any, scaled: Any) -> Any:
    """Fill scaled with scale x; return the sum of offset x, in any order."""
    total = np.float32(0.0)
    for c in range(len(x)):
        scaled[c] = scale[c] * x[c]
        total += offset[c] * x[c]
    return total


@partial(Loop, Packed)
def matmul_columns(given: Any, part: Any, parts: Any) -> None:
    """Axis 'out': y [T, rows] = x [T, width], the matrix, times the packed matrix transposed, one
    stripe after the other.

    y[t, r] = sum over c of (code[r, c] scale[c] + offset[c]) x[t, c] = code[r] (scale x[t]) +
    offset x[t]
    """
    count, group, width, y_row = given.count, given.group, given.width, given.rows * 4
    half, stripes = group // 2, given.stripes
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    constants, scaled = np.empty(count, np.float32), np.empty((count, width), np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        at, first = given.packed + stripe * given.stripe_bytes, stripe * group
        rows = min(group, given.rows - first)
        _columns(given, stripe, scale, offset)
        for t in range(count):
            row = floats(given.matrix + t * width * 4, width)
            constants[t] = _scale_row(row, scale, offset, scaled[t])
        x, y = np.int64(scaled.ctypes.data), given.y + first * 4
        if given.bits == 8:
            _multiply_codes(_Codes(2, x, count, at, rows, width, y, y_row))
        else:
            _multiply_codes(_Codes(0, x, count, at, min(half, rows), width, y, y_row))
            _multiply_codes(_Codes(1, x, count, at, rows - half, width, y + half * 4, y_row))
        for t in range(count):
            floats(y + t * y_row, rows)[:] += constants[t]
