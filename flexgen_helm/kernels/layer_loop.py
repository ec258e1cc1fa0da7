"""What a layer computes between its products, compiled: norms, rotations, gates, and the storing of
new tokens.

Each number is computed by the same operations wherever it is, so rows do not depend on their
number.

Arguments are those of `layer_rows`; tensors are given by their addresses, distances in bytes. Each
thread computes its share of the rows (`emit.Loop`, `team`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np

from flexgen_helm.kernels.emit import Loop, floats, integers, njit
from flexgen_helm.kernels.layer_rows import GateRows, NormRows, PutRows, RotateRows

ACTIVATIONS = ("silu", "gelu_tanh")
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


@partial(Loop, NormRows)
def norm_rows(given: Any, part: Any, parts: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) (weight + more), by rows; y without gaps.

    constants: the address of eps and more in float32.
    """
    width, constants = given.width, floats(given.constants, 2)
    weight = floats(given.weight, width)
    for number in range(given.rows * part // parts, given.rows * (part + 1) // parts):
        row = given.x + number * given.x_row
        x, y = floats(row, width), floats(given.y + number * width * 4, width)
        scale = _ONE / np.sqrt(_sum_of_squares(row, width) / np.float32(width) + constants[0])
        for i in range(width):
            y[i] = x[i] * scale * (weight[i] + constants[1])


@partial(Loop, RotateRows)
def rotate_rows(given: Any, part: Any, parts: Any) -> None:
    """Rotate the halves of the first `size` elements of each head against each other; the others
    are copied. y without gaps; cosines and sines: [tokens, size].
    """
    size, width = given.size, given.width
    half = size // 2
    for token in range(given.tokens * part // parts, given.tokens * (part + 1) // parts):
        cos = floats(given.cos + token * size * 4, size)
        sin = floats(given.sin + token * size * 4, size)
        for head in range(given.heads):
            x = floats(given.x + token * given.x_token + head * given.x_head, width)
            y = floats(given.y + (token * given.heads + head) * width * 4, width)
            for i in range(half):
                a, b = x[i], x[i + half]
                y[i] = a * cos[i] - b * sin[i]
                y[i + half] = b * cos[i + half] + a * sin[i + half]
            for i in range(size, width):
                y[i] = x[i]


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


@partial(Loop, GateRows)
def gate_rows(given: Any, part: Any, parts: Any) -> None:
    """x = activation(x) up, without gaps; no up, 0: it is 1. activation: in `ACTIVATIONS`.

    GELU by tanh: x (1 + tanh(z / 2)) / 2 = x sigmoid(z), with z = sqrt(8 / pi) (x + 0.044715 x^3).
    """
    first, has_up = given.elements * part // parts, given.up != 0
    count = given.elements * (part + 1) // parts - first
    x = floats(given.x + 4 * first, count)
    up = floats((given.up if has_up else given.x) + 4 * first, count)
    if given.activation == 0:
        for i in range(count):
            x[i] = _times_sigmoid(x[i], x[i]) * (up[i] if has_up else _ONE)
    else:
        for i in range(count):
            cube = x[i] * x[i] * x[i] * np.float32(0.044715)
            x[i] = _times_sigmoid(x[i], (x[i] + cube) * np.float32(1.5957691216057308)) * (
                up[i] if has_up else _ONE
            )


@partial(Loop, PutRows)
def put_rows(given: Any, part: Any, parts: Any) -> None:
    """Copy row i, of several heads in float32, to target[slots[i], units[i]]; slots and units are
    64-bit numbers.
    """
    width = given.width
    slots, units = integers(given.slots, given.count), integers(given.units, given.count)
    for number in range(given.count * part // parts, given.count * (part + 1) // parts):
        target = given.target + slots[number] * given.to_slot + units[number] * given.to_unit
        for head in range(given.heads):
            source = floats(given.rows + number * given.row + head * given.row_head, width)
            to = floats(target + head * given.to_head, width)
            for i in range(width):
                to[i] = source[i]
