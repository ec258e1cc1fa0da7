"""What a layer computes between its products, compiled: norms, rotations, gates, and the storing of
new tokens.

Each number is computed by the same operations wherever it is, so rows do not depend on their
number.

Each thread of a team calls a loop with the address of the call's 64-bit numbers: a header, and what
`operands` returns in the order of "Arguments". Tensors are given by their addresses.
`part_of_thread` says which share of the rows is this thread's, and `done` reports that it is
computed (`kernels.emit`, `kernels.team`).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from flexgen_helm.kernels.emit import Loop, done, floats, integers, njit, operands, part_of_thread

SILU, GELU_TANH, ADD = range(3)
_ONE = np.float32(1)
_SUMMED_AT_ONCE = 512


# The compiler may add squares in any order, which is the same one for all rows of a width.
@numba.njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _squares_of_block(x: Any, width: Any) -> Any:
    total = np.float32(0)
    for i in range(width):
        total += x[i] * x[i]
    return total


@njit
def _sum_of_squares(address: Any, width: Any) -> Any:
    """Add up blocks in 64 bits: one element may outweigh all others together."""
    total = np.float64(0)
    for first in range(0, width, _SUMMED_AT_ONCE):
        count = min(_SUMMED_AT_ONCE, width - first)
        total += _squares_of_block(floats(address + 4 * first, count), count)
    return np.float32(total)


@Loop
def norm_rows(address: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) (weight + more), by rows.

    Arguments: x, bytes of its rows, y without gaps, weight, rows, width, address of eps and more in
        float32.
    """
    part, parts = part_of_thread(address)
    source, row_bytes, target, weights, count, width, numbers = operands(address, 7)
    constants, weight = floats(numbers, 2), floats(weights, width)
    for number in range(count * part // parts, count * (part + 1) // parts):
        row = source + number * row_bytes
        x, y = floats(row, width), floats(target + number * width * 4, width)
        scale = _ONE / np.sqrt(_sum_of_squares(row, width) / np.float32(width) + constants[0])
        for i in range(width):
            y[i] = x[i] * scale * (weight[i] + constants[1])
    done(address, part)


@Loop
def rotate_rows(address: Any) -> None:
    """Rotate the halves of the first `size` elements of each head against each other; the others
    are copied.

    Arguments: x, bytes of its tokens and heads, y without gaps, cosines and sines [tokens, size],
    tokens, heads, elements of a head, size.
    """
    part, parts = part_of_thread(address)
    source, token_bytes, head_bytes, target, cosines, sines, tokens, heads, width, size = operands(
        address, 10
    )
    half = size // 2
    for token in range(tokens * part // parts, tokens * (part + 1) // parts):
        cos, sin = floats(cosines + token * size * 4, size), floats(sines + token * size * 4, size)
        for head in range(heads):
            x = floats(source + token * token_bytes + head * head_bytes, width)
            y = floats(target + (token * heads + head) * width * 4, width)
            for i in range(half):
                a, b = x[i], x[i + half]
                y[i] = a * cos[i] - b * sin[i]
                y[i + half] = b * cos[i + half] + a * sin[i + half]
            for i in range(size, width):
                y[i] = x[i]
    done(address, part)


@njit
def _exponential(x: Any) -> Any:
    """e^x for x <= 0 to about one unit in the last place; 0 below -87 (Moshier, Cephes: `expf`)."""
    power = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = x + power * np.float32(-0.693359375) + power * np.float32(2.12194440e-4)
    value = np.float32(1.9875691500e-4)
    value = value * rest + np.float32(1.3981999507e-3)
    value = value * rest + np.float32(8.3334519073e-3)
    value = value * rest + np.float32(4.1665795894e-2)
    value = value * rest + np.float32(1.6666665459e-1)
    value = value * rest + np.float32(5.0000001201e-1)
    value = (value * rest + np.float32(1)) * rest + np.float32(1)
    scale = np.int32(np.int32(np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else value * scale


@njit
def _times_sigmoid(x: Any, z: Any) -> Any:
    """x / (1 + e^-z), by an exponent of a number that is not positive."""
    power = _exponential(z if z < np.float32(0) else -z)
    return (x * power if z < np.float32(0) else x) / (_ONE + power)


@Loop
def combine_rows(address: Any) -> None:
    """x = activation(x) y, or x + y. Arguments: which one, x and y without gaps (no y, 0: it is 1),
    their elements.

    GELU by tanh: x (1 + tanh(z / 2)) / 2 = x sigmoid(z), with z = sqrt(8 / pi) (x + 0.044715 x^3).
    """
    part, parts = part_of_thread(address)
    kind, target, source, elements = operands(address, 4)
    first = elements * part // parts
    count = elements * (part + 1) // parts - first
    x, y = (
        floats(target + 4 * first, count),
        floats((source if source else target) + 4 * first, count),
    )
    if kind == SILU:
        for i in range(count):
            x[i] = _times_sigmoid(x[i], x[i]) * (y[i] if source else _ONE)
    elif kind == GELU_TANH:
        for i in range(count):
            cube = x[i] * x[i] * x[i] * np.float32(0.044715)
            x[i] = _times_sigmoid(x[i], (x[i] + cube) * np.float32(1.5957691216057308)) * (
                y[i] if source else _ONE
            )
    else:
        for i in range(count):
            x[i] += y[i]
    done(address, part)


@Loop
def bias_rows(address: Any) -> None:
    """Add a bias to each row. Arguments: rows without gaps, the bias, rows, width."""
    part, parts = part_of_thread(address)
    rows, biases, count, width = operands(address, 4)
    bias = floats(biases, width)
    for number in range(count * part // parts, count * (part + 1) // parts):
        row = floats(rows + number * width * 4, width)
        for i in range(width):
            row[i] += bias[i]
    done(address, part)


@Loop
def put_rows(address: Any) -> None:
    """Copy row i, of several heads in float32, to target[slots[i], units[i]].

    Arguments, strides in bytes: rows, stride of a row, of a head; target, stride of a slot, of a
    unit, of a head; slots and units (64-bit numbers), how many rows, heads, elements of a head.
    """
    part, parts = part_of_thread(address)
    given = operands(address, 12)
    rows, row_bytes, head_bytes, target, slot_bytes, unit_bytes, to_head_bytes = given[:7]
    slots, units, count, heads, width = given[7:]
    slot, unit = integers(slots, count), integers(units, count)
    for number in range(count * part // parts, count * (part + 1) // parts):
        for head in range(heads):
            source = floats(rows + number * row_bytes + head * head_bytes, width)
            to = floats(
                target
                + slot[number] * slot_bytes
                + unit[number] * unit_bytes
                + head * to_head_bytes,
                width,
            )
            for i in range(width):
                to[i] = source[i]
    done(address, part)
