"""Loops over packed bytes for CPUs, compiled by numba: 4 or 8 bits, any axis and scales (layout: `quant.packing`).

Arguments of all: packed [stripes, …], bytes from a stripe to the next, stripes, group size, bits of a code, whether
scales are words, table, matrix, its rows and width. The table has the float32 of every FP16 for pairs; for words their
scales [512] and zero points [128] (`quant.arithmetic`). The matrix is dequantized to, or x.

A group's second half has its codes in the upper bits of the same bytes, or in `apart` further ones.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from flexgen_helm.kernels.emit import Loop, done, floats, njit, operands, part_of_thread, pointer


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


# Sums may be taken in any order: there is no unpacked product whose bits they would have to match.
_with_any_order: Any = numba.njit(error_model="numpy", fastmath=True)


@_with_any_order
def _multiply_by_four(low: Any, high: Any, mask: Any, shift: Any, x: Any) -> Any:
    """Sums of low and of high codes times four rows of x, so that a code is converted once for four."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    for c in range(x.shape[1]):
        first, second = np.float32(low[c] & mask), np.float32(high[c] >> shift)
        a0 += first * x0[c]
        a1 += first * x1[c]
        a2 += first * x2[c]
        a3 += first * x3[c]
        b0 += second * x0[c]
        b1 += second * x1[c]
        b2 += second * x2[c]
        b3 += second * x3[c]
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@_with_any_order
def _multiply_by_one(low: Any, high: Any, mask: Any, shift: Any, x: Any) -> Any:
    a = b = np.float32(0.0)
    for c in range(x.shape[1]):
        a += np.float32(low[c] & mask) * x[0, c]
        b += np.float32(high[c] >> shift) * x[0, c]
    return (a,), (b,)


@_with_any_order
def _scale_row(x: Any, scale: Any, offset: Any, scaled: Any) -> Any:
    """Fill scaled with scale x; return offset x."""
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
    apart, mask, shift = group * bits // 8 - half, np.uint8((1 << bits) - 1), np.uint8(8 - bits)
    scale, offset, constants = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(count, np.float32)
    scaled = np.empty((count, width), np.float32)
    for stripe in range(stripes * part // parts, stripes * (part + 1) // parts):
        data = _bytes(packed + stripe * stripe_bytes, (group * bits // 8 + (2 if words else 4)) * width)
        first = stripe * group
        _column_scales(data, group * bits // 8 * width, words, table, scale, offset)
        for t in range(count):
            constants[t] = _scale_row(floats(given + t * width * 4, width), scale, offset, scaled[t])
        for j in range(min(half, rows - first)):
            low, high = data[j * width : (j + 1) * width], data[(apart + j) * width : (apart + j + 1) * width]
            has_high = first + half + j < rows
            for t in range(0, count // 4 * 4, 4):
                sums, high_sums = _multiply_by_four(low, high, mask, shift, scaled[t : t + 4])
                for i in range(4):
                    y = floats(result + (t + i) * rows * 4, rows)
                    y[first + j] = sums[i] + constants[t + i]
                    if has_high:
                        y[first + half + j] = high_sums[i] + constants[t + i]
            for t in range(count // 4 * 4, count):
                sums, high_sums = _multiply_by_one(low, high, mask, shift, scaled[t : t + 1])
                y = floats(result + t * rows * 4, rows)
                y[first + j] = sums[0] + constants[t]
                if has_high:
                    y[first + half + j] = high_sums[0] + constants[t]
    done(address, part)
