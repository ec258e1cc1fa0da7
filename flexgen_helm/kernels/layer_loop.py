"""The compiled loops of `layer_rows`: norms, rotations, gates, and the storing of new tokens.

Each row is computed by the same operations, so a result does not depend on the number of rows.
Tensors are given by their addresses, strides in bytes; a tensor without a stride is contiguous.
Threads divide the rows among them (`emit.Loop`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np

from flexgen_helm.kernels.emit import Loop, floats, integers, njit
from flexgen_helm.kernels.layer_rows import GateArgs, NormArgs, PutArgs, RotateArgs

ACTIVATIONS = ("silu", "gelu_tanh")
_ONE = np.float32(1)
_SUM_BLOCK = 512


# The compiler may add squares in any order, but in the same one for all rows of a width.
@numba.njit(error_model="numpy", fastmath={"reassoc", "contract"})
def _sum_squares(x: Any, width: Any) -> Any:
    total = np.float32(0)
    for i in range(width):
        total += x[i] * x[i]
    return total


@njit
def _sum_squares_in_blocks(address: Any, width: Any) -> Any:
    """Add up the sums of blocks in float64: one element may outweigh all others together."""
    total = np.float64(0)
    for first in range(0, width, _SUM_BLOCK):
        count = min(_SUM_BLOCK, width - first)
        total += _sum_squares(floats(address + 4 * first, count), count)
    return np.float32(total)


@partial(Loop, NormArgs)
def norm_rows(args: Any, thread: Any, threads: Any) -> None:
    """Compute y = x / sqrt(mean(x^2) + eps) (weight + added), row by row.

    constants: the address of eps and added (1 or 0), in float32.
    """
    width, constants = args.width, floats(args.constants, 2)
    weight = floats(args.weight, width)
    for index in range(args.rows * thread // threads, args.rows * (thread + 1) // threads):
        row_address = args.x + index * args.x_stride
        x, y = floats(row_address, width), floats(args.y + index * width * 4, width)
        scale = _ONE / np.sqrt(
            _sum_squares_in_blocks(row_address, width) / np.float32(width) + constants[0]
        )
        for i in range(width):
            y[i] = x[i] * scale * (weight[i] + constants[1])


@partial(Loop, RotateArgs)
def rotate_rows(args: Any, thread: Any, threads: Any) -> None:
    """Rotate the halves of the first `size` elements of each head against each other, and copy the
    others: x [tokens, heads, width] -> y.

    cos, sin: [tokens, size].
    """
    size, width = args.rotated, args.width
    half = size // 2
    for token in range(args.tokens * thread // threads, args.tokens * (thread + 1) // threads):
        cos = floats(args.cos + token * size * 4, size)
        sin = floats(args.sin + token * size * 4, size)
        for head in range(args.heads):
            x = floats(args.x + token * args.x_token_stride + head * args.x_head_stride, width)
            y = floats(args.y + (token * args.heads + head) * width * 4, width)
            for i in range(half):
                a, b = x[i], x[i + half]
                y[i] = a * cos[i] - b * sin[i]
                y[i + half] = b * cos[i + half] + a * sin[i + half]
            for i in range(size, width):
                y[i] = x[i]


@njit
def _exponential(x: Any) -> Any:
    """Return e^x for x <= 0 to about one unit in the last place; 0 below -87 (Moshier, Cephes:
    `expf`).
    """
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
    """Return x / (1 + e^-z), computed with e^-|z|, which cannot overflow."""
    power = _exponential(z if z < np.float32(0) else -z)
    return (x * power if z < np.float32(0) else x) / (_ONE + power)


@partial(Loop, GateArgs)
def gate_rows(args: Any, thread: Any, threads: Any) -> None:
    """Compute x = activation(x) up, in place; up: 0 for none.

    activation: its index in `ACTIVATIONS`.
    GELU by tanh: x (1 + tanh(z / 2)) / 2 = x sigmoid(z), with z = sqrt(8 / pi) (x + 0.044715 x^3).
    """
    first, has_up = args.elements * thread // threads, args.up != 0
    count = args.elements * (thread + 1) // threads - first
    x = floats(args.x + 4 * first, count)
    up = floats((args.up if has_up else args.x) + 4 * first, count)
    if args.activation == 0:
        for i in range(count):
            x[i] = _times_sigmoid(x[i], x[i]) * (up[i] if has_up else _ONE)
    else:
        for i in range(count):
            cube = x[i] * x[i] * x[i] * np.float32(0.044715)
            x[i] = _times_sigmoid(x[i], (x[i] + cube) * np.float32(1.5957691216057308)) * (
                up[i] if has_up else _ONE
            )


@partial(Loop, PutArgs)
def put_rows(args: Any, thread: Any, threads: Any) -> None:
    """Copy rows[i], [heads, width] in float32, to target[slots[i], units[i]]; slots and units are
    64-bit integers.
    """
    width = args.width
    slots, units = integers(args.slots, args.count), integers(args.units, args.count)
    for index in range(args.count * thread // threads, args.count * (thread + 1) // threads):
        target = args.target + slots[index] * args.slot_stride + units[index] * args.unit_stride
        for head in range(args.heads):
            row = floats(args.rows + index * args.row_stride + head * args.head_stride, width)
            target_row = floats(target + head * args.target_head_stride, width)
            for i in range(width):
                target_row[i] = row[i]
