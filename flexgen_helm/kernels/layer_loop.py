"""What a layer computes between its products, compiled: norms, rotations, gates, and the storing of new tokens.

Each number is computed by the same operations wherever it is among the others, so rows do not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    INT64,
    VECTOR,
    constant,
    done,
    emitted,
    exponential,
    get_float,
    get_integer,
    int64,
    load,
    part_of_thread,
    put_float,
    spread,
    store,
    summed,
)
from flexgen_helm.kernels.processor import LANES

SILU, GELU_TANH, ADD, COPY = range(4)
# Vectors of sums that grow side by side, so that none waits for the one before it.
_SUMS = 4
_STEP = LANES * _SUMS


def _at(builder: Any, address: Any, element: Any) -> Any:
    return builder.add(address, builder.mul(element, INT64(4)))


def _each_vector(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """Emit `body` for the first element of each vector; count: whole vectors."""
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(LANES)) as (first, _):
        body(first)


def _summing(term: Callable[[Any, Any], Any]) -> Any:
    """Return a function of a row's address and a count, whole groups of `_SUMS` vectors, that adds terms of them."""

    @emitted
    def total(typing: Any, row: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, count = arguments
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(_SUMS)]
            for one in sums:
                builder.store(constant(0.0), one)
            with cgutils.for_range_slice(builder, INT64(0), count, INT64(_STEP)) as (first, _):
                for number, one in enumerate(sums):
                    value = load(builder, _at(builder, row, builder.add(first, INT64(LANES * number))), VECTOR, 4)
                    builder.store(builder.fadd(builder.load(one), term(builder, value)), one)
            left, *others = (builder.load(one) for one in sums)
            for other in others:
                left = builder.fadd(left, other)
            return summed(builder, left)

        return types.float32(int64, int64), generate

    return total


_sum_of_squares = _summing(lambda builder, x: builder.fmul(x, x))


@emitted
def _scaled(typing: Any, x: Any, y: Any, weight: Any, count: Any, scale: Any, more: Any) -> Any:
    """y = (x scale) (weight + more); count: whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        x, y, weight, count = arguments[:4]
        scale, more = (spread(builder, one) for one in arguments[4:])

        def body(first: Any) -> None:
            value, own = (load(builder, _at(builder, one, first), VECTOR, 4) for one in (x, weight))
            value = builder.fmul(builder.fmul(value, scale), builder.fadd(own, more))
            store(builder, value, _at(builder, y, first), 4)

        _each_vector(builder, count, body)

    return types.void(int64, int64, int64, int64, types.float32, types.float32), generate


def norm_rows(address: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) (weight + more), by rows.

    Arguments: x, bytes of its rows, y without gaps, weight, rows, width, and the address of eps and more in float32.
    """
    data = numba.carray(address, 11, np.int64)
    x, x_row, y, weight, count, width = data[4], data[5], data[6], data[7], data[8], data[9]
    eps, more = get_float(data[10]), get_float(data[10] + 4)
    part, parts = part_of_thread(address)
    groups, whole = width // _STEP * _STEP, width // LANES * LANES
    for number in range(count * part // parts, count * (part + 1) // parts):
        row, out = x + number * x_row, y + number * width * 4
        total = _sum_of_squares(row, groups)
        for column in range(groups, width):
            value = get_float(row + 4 * column)
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        _scaled(row, out, weight, whole, scale, more)
        for column in range(whole, width):
            put_float(out + 4 * column, get_float(row + 4 * column) * scale * (get_float(weight + 4 * column) + more))
    done(address, part)


@emitted
def _rotated(typing: Any, x: Any, y: Any, cosines: Any, sines: Any, half: Any, count: Any) -> Any:
    """Rotate elements i and i + half against each other, for i up to count, which are whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        x, y, cosines, sines, half, count = arguments

        def body(first: Any) -> None:
            second = builder.add(first, half)
            (a, b), (cos_a, cos_b), (sin_a, sin_b) = (
                [load(builder, _at(builder, one, place), VECTOR, 4) for place in (first, second)]
                for one in (x, cosines, sines)
            )
            low = builder.fsub(builder.fmul(a, cos_a), builder.fmul(b, sin_a))
            high = builder.fadd(builder.fmul(b, cos_b), builder.fmul(a, sin_b))
            store(builder, low, _at(builder, y, first), 4)
            store(builder, high, _at(builder, y, second), 4)

        _each_vector(builder, count, body)

    return types.void(*[int64] * 6), generate


def rotate_rows(address: Any) -> None:
    """Rotate the halves of the first `size` elements of each head against each other; the others are copied.

    Arguments: x, bytes of its tokens and heads, y without gaps, cosines and sines [tokens, size], tokens, heads,
    elements of a head, size.
    """
    data = numba.carray(address, 14, np.int64)
    x, x_row, x_head, y, cosines, sines = data[4], data[5], data[6], data[7], data[8], data[9]
    tokens, heads, width, size = data[10], data[11], data[12], data[13]
    part, parts = part_of_thread(address)
    half = size // 2
    whole = half // LANES * LANES
    for token in range(tokens * part // parts, tokens * (part + 1) // parts):
        cos, sin = cosines + token * size * 4, sines + token * size * 4
        for head in range(heads):
            row, out = x + token * x_row + head * x_head, y + (token * heads + head) * width * 4
            _rotated(row, out, cos, sin, half, whole)
            for i in range(4 * whole, 4 * half, 4):
                j = i + 4 * half
                a, b = get_float(row + i), get_float(row + j)
                put_float(out + i, a * get_float(cos + i) - b * get_float(sin + i))
                put_float(out + j, b * get_float(cos + j) + a * get_float(sin + j))
            for i in range(4 * size, 4 * width, 4):
                put_float(out + i, get_float(row + i))
    done(address, part)


def _times_sigmoid(builder: Any, x: Any, z: Any) -> Any:
    """x / (1 + e^-z), by an exponent of a number that is not positive."""
    is_negative = builder.fcmp_ordered("<", z, constant(0.0))
    power = exponential(builder, builder.select(is_negative, z, builder.fneg(z)))
    upper = builder.select(is_negative, builder.fmul(x, power), x)
    return builder.fdiv(upper, builder.fadd(constant(1.0), power))


def _silu(builder: Any, x: Any) -> Any:
    return _times_sigmoid(builder, x, x)


def _gelu_tanh(builder: Any, x: Any) -> Any:
    """x (1 + tanh(z / 2)) / 2 = x sigmoid(z), with z = sqrt(8 / pi) (x + 0.044715 x^3)."""
    cube = builder.fmul(builder.fmul(builder.fmul(x, x), x), constant(0.044715))
    return _times_sigmoid(builder, x, builder.fmul(builder.fadd(x, cube), constant(1.5957691216057308)))


# What becomes of an element of x and one of y.
_COMBINATIONS: dict[int, Callable[[Any, Any, Any], Any]] = {
    SILU: lambda builder, x, y: builder.fmul(_silu(builder, x), y),
    GELU_TANH: lambda builder, x, y: builder.fmul(_gelu_tanh(builder, x), y),
    ADD: lambda builder, x, y: builder.fadd(x, y),
    COPY: lambda builder, x, y: y,
}


@emitted
def _combined(typing: Any, kind: Any, x: Any, y: Any, count: Any) -> Any:
    """x = what becomes of x and y; count: whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        kind, x, y, count = arguments
        for number, combine in _COMBINATIONS.items():

            def body(first: Any, combine: Callable[[Any, Any, Any], Any] = combine) -> None:
                own, other = (load(builder, _at(builder, one, first), VECTOR, 4) for one in (x, y))
                store(builder, combine(builder, own, other), _at(builder, x, first), 4)

            with builder.if_then(builder.icmp_signed("==", kind, INT64(number))):
                _each_vector(builder, count, body)

    return types.void(*[int64] * 4), generate


def combine_rows(address: Any) -> None:
    """x = activation(x) y, x + y, or y. Arguments: which one, x and y without gaps, whole vectors."""
    data = numba.carray(address, 8, np.int64)
    kind, x, y, vectors = data[4], data[5], data[6], data[7]
    part, parts = part_of_thread(address)
    first, last = vectors * part // parts, vectors * (part + 1) // parts
    place = first * LANES * 4
    _combined(kind, x + place, y + place, (last - first) * LANES)
    done(address, part)


def bias_rows(address: Any) -> None:
    """Add a bias to each row. Arguments: rows without gaps, the bias, rows, width."""
    data = numba.carray(address, 8, np.int64)
    rows, bias, count, width = data[4], data[5], data[6], data[7]
    part, parts = part_of_thread(address)
    whole = width // LANES * LANES
    for number in range(count * part // parts, count * (part + 1) // parts):
        row = rows + number * width * 4
        _combined(ADD, row, bias, whole)
        for column in range(4 * whole, 4 * width, 4):
            put_float(row + column, get_float(row + column) + get_float(bias + column))
    done(address, part)


def put_rows(address: Any) -> None:
    """Copy n rows of heads to where a unit of a slot is.

    Arguments: rows, bytes of one and of its heads, target, bytes of its slots, units and heads, slots and units (n
    numbers of 64 bits each), n, heads, elements of a head, which have 32 bits.
    """
    data = numba.carray(address, 16, np.int64)
    rows, row_bytes, head_bytes, target, slot_bytes, unit_bytes = data[4], data[5], data[6], data[7], data[8], data[9]
    target_head_bytes, slots, units, count, heads, width = data[10], data[11], data[12], data[13], data[14], data[15]
    part, parts = part_of_thread(address)
    whole = width // LANES * LANES
    for number in range(count * part // parts, count * (part + 1) // parts):
        place = target + get_integer(slots + 8 * number) * slot_bytes + get_integer(units + 8 * number) * unit_bytes
        for head in range(heads):
            source, to = rows + number * row_bytes + head * head_bytes, place + head * target_head_bytes
            _combined(COPY, to, source, whole)
            for i in range(4 * whole, 4 * width, 4):
                put_float(to + i, get_float(source + i))
    done(address, part)
