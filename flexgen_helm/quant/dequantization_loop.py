"""Loops that read packed bytes on CPUs, compiled by numba: they dequantize a matrix, or multiply
with it. 4 or 8 bits, any axis and scales (layout: `quant.packing`).

The codes of a group's second half are in the upper 4 bits of the bytes of its first half; with 8
bits in bytes of their own, which lie `apart` bytes further on.
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
from flexgen_helm.kernels.product_loop import (
    REGISTER_OUTPUTS,
    REGISTER_ROWS,
    RegisterTile,
    RowLayout,
    write_product,
)
from flexgen_helm.quant.arithmetic import LAST_ZERO_POINT, NUM_SCALES
from flexgen_helm.quant.packing import PackedArgs


@njit
def packed_bytes(address: Any, count: Any) -> Any:
    """View neighbouring bytes."""
    return numba.carray(pointer(address), count, np.uint8)


@njit
def _scale_and_offset(args: Any, table: Any, data: Any, first: Any, apart: Any) -> Any:
    """Return the scale and the offset of one group.

    first: byte of the group's word, or of its scale in FP16, whose offset is `apart` bytes further.
    table: see `packing.PackedArgs`.
    """
    number = np.int32(data[first]) | np.int32(data[first + 1]) << np.int32(8)
    if args.has_words:
        scale = table[number >> 7]
        return scale, -(table[NUM_SCALES + (number & LAST_ZERO_POINT)] * scale)
    second = np.int32(data[first + apart]) | np.int32(data[first + apart + 1]) << np.int32(8)
    return table[number], table[second]


@njit
def _read_column_scales(args: Any, stripe: Any, scale: Any, offset: Any) -> Any:
    """Axis 'out': write the scales and offsets [width] of a stripe's columns; return its bytes."""
    width, code_bytes = args.width, args.group_size * args.bits // 8
    table, address = floats(args.table, 1 << 16), args.packed + stripe * args.stripe_bytes
    data = packed_bytes(address, (code_bytes + (2 if args.has_words else 4)) * width)
    for column in range(width):
        first = code_bytes * width + 2 * column
        scale[column], offset[column] = _scale_and_offset(args, table, data, first, 2 * width)
    return data


@njit
def _lower_half(bits: Any) -> Any:
    """Return the mask of the bits that a code of a group's first half has in its byte, and by what
    its scale is multiplied.
    """
    return np.uint8((1 << bits) - 1), np.float32(1)


@njit
def _upper_half(bits: Any) -> Any:
    """Return mask and factor of the second half. Codes of 4 bits are not shifted down, so they are
    16 times as large: a power of two, which changes no bit of the product with the scale.
    """
    return np.uint8(255 << (8 - bits)), np.float32(1) / np.float32(1 << (8 - bits))


@partial(Loop, PackedArgs)
def dequantize_rows(args: Any, thread: Any, threads: Any) -> None:
    """Axis 'in', a stripe is a row: packed -> matrix [rows, width]."""
    group_size, bits, width = args.group_size, args.bits, args.width
    table, half, code_bytes = floats(args.table, 1 << 16), group_size // 2, group_size * bits // 8
    apart, groups = code_bytes - half, (width + group_size - 1) // group_size
    scale_bytes, stripes = 2 if args.has_words else 4, min(args.stripes, args.rows)
    for row in range(stripes * thread // threads, stripes * (thread + 1) // threads):
        address = args.packed + row * args.stripe_bytes
        data = packed_bytes(address, groups * (code_bytes + scale_bytes))
        row_values = floats(args.matrix + row * width * 4, width)
        for group in range(groups):
            scale, offset = _scale_and_offset(
                args, table, data, groups * code_bytes + group * scale_bytes, 2
            )
            for upper in range(2):
                first, start = group * group_size + upper * half, group * code_bytes + upper * apart
                mask, factor = _upper_half(bits) if upper else _lower_half(bits)
                values = row_values[first : min(first + half, width)]
                codes = data[start : start + half]
                for j in range(len(values)):
                    values[j] = np.float32(np.uint8(codes[j] & mask)) * (scale * factor) + offset


@partial(Loop, PackedArgs)
def dequantize_columns(args: Any, thread: Any, threads: Any) -> None:
    """Axis 'out', a stripe is `group_size` rows: packed -> matrix [rows, width], where the last
    stripe may have fewer.
    """
    stripes, group_size, bits, width = args.stripes, args.group_size, args.bits, args.width
    half = group_size // 2
    apart = group_size * bits // 8 - half
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range(stripes * thread // threads, stripes * (thread + 1) // threads):
        data = _read_column_scales(args, stripe, scale, offset)
        for upper in range(2):
            first, start = stripe * group_size + upper * half, upper * apart * width
            mask, factor = _upper_half(bits) if upper else _lower_half(bits)
            scale *= factor
            for number in range(min(half, args.rows - first)):
                values = floats(args.matrix + (first + number) * width * 4, width)
                source = data[start + number * width :]
                for column in range(width):
                    values[column] = (
                        np.float32(np.uint8(source[column] & mask)) * scale[column] + offset[column]
                    )


# ---- products of few rows of x ----


def _code_product(bits: int, shift: int) -> Any:
    """Return a statement that multiplies rows of x with rows of codes: those of `bits` bits that
    each byte has from bit `shift` on. It takes a `RegisterTile`.
    """

    def weights(builder: Any, step: Any) -> Iterator[Any]:
        kind = ir.VectorType(INT32, LANES)
        codes = builder.zext(load(builder, step, ir.VectorType(ir.IntType(8), LANES), 1), kind)
        codes = builder.and_(
            builder.lshr(codes, ir.Constant(kind, [shift] * LANES)),
            ir.Constant(kind, [(1 << bits) - 1] * LANES),
        )
        yield builder.uitofp(codes, VECTOR)

    return ir_statement((1, REGISTER_ROWS), (1,), (1,))(
        partial(write_product, RowLayout("codes", LANES, LANES, weights, 0))
    )


_multiply_low, _multiply_high, _multiply_bytes = (
    _code_product(4, 0),
    _code_product(4, 4),
    _code_product(8, 0),
)


# Which bits of a byte are a code.
_LOW_BITS, _HIGH_BITS, _ALL_BITS = range(3)
# x [x_rows, width] and rows of codes [rows, width], in bytes from `data` on, with which it is
# multiplied.
_CodeRows = namedtuple("_CodeRows", "byte_bits x x_rows data rows width y y_stride")


@njit
def _multiply_codes(codes: Any) -> None:
    """Compute y [x_rows, rows] = x times the codes transposed."""
    steps, width = codes.width // LANES, codes.width
    for output in range(0, codes.rows if steps > 0 else 0, REGISTER_OUTPUTS):
        for row in range(0, codes.x_rows, REGISTER_ROWS):
            tile = RegisterTile(
                rows=1 if row == codes.x_rows - 1 else REGISTER_ROWS,
                is_first=1,
                is_last=1,
                x=codes.x + row * width * 4,
                x_stride=width * 4,
                last_row=codes.x_rows - 1 - row,
                w=codes.data + output * width,
                w_stride=width,
                last_output=min(output + REGISTER_OUTPUTS, codes.rows) - 1 - output,
                steps=steps,
                sums=0,
                y=codes.y + row * codes.y_stride + 4 * output,
                y_stride=codes.y_stride,
            )
            if codes.byte_bits == _LOW_BITS:
                _multiply_low(tile)
            elif codes.byte_bits == _HIGH_BITS:
                _multiply_high(tile)
            else:
                _multiply_bytes(tile)
    if steps * LANES < width:
        _multiply_rest(codes)


@njit
def _multiply_rest(codes: Any) -> None:
    """Add products over the columns that fill no vector."""
    width, first = codes.width, codes.width // LANES * LANES
    mask = np.uint8(255 if codes.byte_bits == _ALL_BITS else 15)
    shift = np.uint8(4 if codes.byte_bits == _HIGH_BITS else 0)
    for row in range(codes.x_rows):
        values = floats(codes.x + row * width * 4, width)
        target = floats(codes.y + row * codes.y_stride, codes.rows)
        for output in range(codes.rows):
            total = target[output] if first > 0 else np.float32(0)
            row_codes = packed_bytes(codes.data + output * width, width)
            for column in range(first, width):
                total += values[column] * np.float32((row_codes[column] >> shift) & mask)
            target[output] = total


@numba.njit(error_model="numpy", fastmath=True)
def _scale_row(x: Any, scale: Any, offset: Any, scaled_x: Any) -> Any:
    """Write scale x to `scaled_x`; return the sum of offset x, in any order."""
    total = np.float32(0.0)
    for column in range(len(x)):
        scaled_x[column] = scale[column] * x[column]
        total += offset[column] * x[column]
    return total


@partial(Loop, PackedArgs)
def matmul_columns(args: Any, thread: Any, threads: Any) -> None:
    """Axis 'out': y [T, rows] = x [T, width] times the packed matrix [rows, width] transposed; x is
    the `matrix` of `PackedArgs`. Threads divide the stripes among them.

        y[t, r] = sum over c of (code[r, c] scale[c] + offset[c]) x[t, c]
                = code[r] · (scale x[t]) + offset · x[t]

    All rows of a stripe have the same scales and offsets, so x is scaled once for all of them.
    """
    x_rows, group_size, width, y_stride = args.x_rows, args.group_size, args.width, args.rows * 4
    half, stripes = group_size // 2, args.stripes
    scale, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    constants, scaled_x = np.empty(x_rows, np.float32), np.empty((x_rows, width), np.float32)
    for stripe in range(stripes * thread // threads, stripes * (thread + 1) // threads):
        codes, first = args.packed + stripe * args.stripe_bytes, stripe * group_size
        rows = min(group_size, args.rows - first)
        _read_column_scales(args, stripe, scale, offset)
        for x_row in range(x_rows):
            values = floats(args.matrix + x_row * width * 4, width)
            constants[x_row] = _scale_row(values, scale, offset, scaled_x[x_row])
        x, y = np.int64(scaled_x.ctypes.data), args.y + first * 4
        if args.bits == 8:
            _multiply_codes(_CodeRows(_ALL_BITS, x, x_rows, codes, rows, width, y, y_stride))
        else:
            lower_rows, upper_y = min(half, rows), y + half * 4
            _multiply_codes(_CodeRows(_LOW_BITS, x, x_rows, codes, lower_rows, width, y, y_stride))
            _multiply_codes(
                _CodeRows(_HIGH_BITS, x, x_rows, codes, rows - half, width, upper_y, y_stride)
            )
        for x_row in range(x_rows):
            floats(y + x_row * y_stride, rows)[:] += constants[x_row]
