"""The product of rows with a matrix as it rests, compiled for how its rows are stored (`loops`).

    few rows of x     vectors of weights are made in registers, and multiplied with several rows
    more              a tile of the matrix is brought to the cache in float32, column by column

A result depends on its row of x and its row of the matrix alone, whatever rows there are and
however many threads: both ways add up each lane of a vector over the width, then the lanes. Columns
that fill no vector come last (`add_rest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    CONVERTS_HALVES,
    HAS_AVX512,
    INT32,
    INT64,
    LANES,
    VECTOR,
    Loop,
    done,
    floats,
    half_to_float,
    ir_statement,
    load,
    multiply_add,
    operands,
    part_of_thread,
    pointer,
    prefetch,
    store,
    widen,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32

# Rows of x and of the matrix whose sums, and what they are made of, stay in registers.
ROWS, OUTPUTS = (4, 4) if HAS_AVX512 else (2, 4)
# Rows and values of a tile of the matrix, and rows of x that it is multiplied with before the next:
# it stays in the first cache beside some rows of x, and sums in the second.
_TILE_OUTPUTS, _TILE_VALUES, _TILE_ROWS = 16, 256, 128


@dataclass(frozen=True)
class Stored:
    """How rows of a matrix are stored: in steps of equally many values.

    values, bytes: of a step; a tile has whole steps.
    weights: writes IR for the vectors of the step at an address.
    few_rows: of x, up to which weights are made in registers.
    """

    name: str
    values: int
    bytes: int
    weights: Callable[[Any, Any], Iterator[Any]]
    few_rows: int


@cache
def of_kind(kind: int) -> Stored:
    """Return how rows of 16 or 32 bits are stored."""

    def weights(builder: Any, at: Any) -> Iterator[Any]:
        yield (
            load(builder, at, VECTOR, 4)
            if kind == FLOAT32
            else widen(builder, at, kind == BFLOAT16)
        )

    return Stored(f"kind_{kind}", LANES, LANES * (4 if kind == FLOAT32 else 2), weights, 16)


# What `loops` sets for a matrix.
_VALUES, _BYTES, _FEW_ROWS = 0, 0, 0
_multiply_stored: Any = None
_decode_stored: Any = None


@cache
def loops(stored: Stored) -> tuple[Loop, Loop]:
    """Return the loops `_multiply` and `_decode` for rows that are stored so."""
    # numba compiles what a function's globals are, and keeps it by the function's name.
    names = {
        **globals(),
        "_VALUES": stored.values,
        "_BYTES": stored.bytes,
        "_FEW_ROWS": stored.few_rows,
        "_multiply_stored": ir_statement((1, ROWS), (1,), (1,))(partial(write_product, stored)),
        "_decode_stored": ir_statement()(partial(_write_floats, stored)),
    }
    multiply, decode = (
        Loop(FunctionType(function.__code__, names, f"{function.__name__}_{stored.name}"))
        for function in (_multiply, _decode)
    )
    return multiply, decode


def _decode(address: Any) -> None:
    """Fill rows with float32 values.

    Arguments: stored rows, bytes of one, rows to fill, bytes of one, rows, steps of one.
    """
    part, parts = part_of_thread(address)
    w, w_row, target, target_row, rows, steps = operands(address, 6)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        _decode_stored((w + row * w_row, steps, target + row * target_row, w_row))
    done(address, part)


def _multiply(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width], over whole steps; there is one
    at least.

    Arguments: x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs, steps.
    """
    part, parts = part_of_thread(address)
    x, x_row, w, w_row, y, y_row, count, outputs, steps = operands(address, 9)
    groups = (outputs + OUTPUTS - 1) // OUTPUTS
    begin, end = (
        groups * part // parts * OUTPUTS,
        min(groups * (part + 1) // parts * OUTPUTS, outputs),
    )
    if count <= _FEW_ROWS:
        for output in range(begin, end, OUTPUTS):
            last = min(output + OUTPUTS, end) - 1
            for row in range(0, count, ROWS):
                rows, to = 1 if row == count - 1 else ROWS, y + row * y_row + 4 * output
                from_x, from_w = (
                    (x + row * x_row, x_row, count - 1 - row),
                    (w + output * w_row, w_row, last - output),
                )
                _multiply_stored((rows, 1, 1, *from_x, *from_w, steps, 0, to, y_row))
        done(address, part)
        return
    # A tile in float32, and sums of all rows with it, from the beginning of a line of the cache on.
    memory = np.empty(_TILE_OUTPUTS * (_TILE_VALUES + _TILE_ROWS * LANES) + 16, np.float32)
    tile = (np.int64(memory.ctypes.data) + 63) // 64 * 64
    tile_row, size = 4 * _TILE_VALUES, 4 * ROWS * OUTPUTS * LANES
    most = _TILE_VALUES // _VALUES
    for first_row in range(0, count, _TILE_ROWS):
        last_row = min(count, first_row + _TILE_ROWS) - 1
        for first in range(begin, end, _TILE_OUTPUTS):
            last = min(first + _TILE_OUTPUTS, end) - 1
            for step in range(0, steps, most):
                number, at = min(most, steps - step), w + step * _BYTES
                ahead = (
                    most * _BYTES if step + most < steps else _TILE_OUTPUTS * w_row - step * _BYTES
                )
                for output in range(first, last + 1):
                    _decode_stored(
                        (at + output * w_row, number, tile + (output - first) * tile_row, ahead)
                    )
                sums = tile + _TILE_OUTPUTS * tile_row
                for row in range(first_row, last_row + 1, ROWS):
                    from_x = x + row * x_row + step * _VALUES * 4, x_row, last_row - row
                    for output in range(first, last + 1, OUTPUTS):
                        from_w = tile + (output - first) * tile_row, tile_row, last - output
                        flags, to = (
                            (int(step == 0), int(step + most >= steps)),
                            y + row * y_row + 4 * output,
                        )
                        _multiply_floats(
                            (
                                ROWS,
                                *flags,
                                *from_x,
                                *from_w,
                                number * _VALUES // LANES,
                                sums,
                                to,
                                y_row,
                            )
                        )
                        sums += size
    memory[0] = 0  # it is in use until here
    done(address, part)


@Loop
def add_rest(address: Any) -> None:
    """y += x w^T over the columns that fill no vector.

    Arguments: kind of w, x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T,
        outputs, width.
    """
    part, parts = part_of_thread(address)
    kind, x, x_row, w, w_row, y, y_row, count, outputs, width = operands(address, 10)
    for row in range(count * part // parts, count * (part + 1) // parts):
        values, results = floats(x + row * x_row, width), floats(y + row * y_row, outputs)
        for output in range(outputs):
            at = w + output * w_row
            for column in range(width // LANES * LANES, width):
                if kind == FLOAT32:
                    weight = floats(at, width)[column]
                else:
                    bits = numba.carray(pointer(at), width, np.uint16)[column]
                    if CONVERTS_HALVES and kind == FLOAT16:
                        weight = half_to_float(bits)
                    else:
                        weight = np.int32(np.int32(bits) << np.int32(16)).view(np.float32)
                results[output] += values[column] * weight
    done(address, part)


# ---- in LLVM's language ----


def write_product(
    stored: Stored, builder: Any, rows: int, is_first: int, is_last: int, *given: Any
) -> None:
    """Add x[i] · w[j] to the sums of some rows of x and of the matrix, or store the totals in y[i,
    j].

    is_first: sums begin with zero. is_last: the totals are stored, not the sums.
    """
    x, x_row, last, w, w_row, last_output, steps, at, y, y_row = given
    x_rows, w_rows = (
        _rows(builder, x, x_row, last, rows),
        _rows(builder, w, w_row, last_output, OUTPUTS),
    )
    addresses = [builder.add(at, INT64(4 * LANES * number)) for number in range(rows * OUTPUTS)]
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    begun = [zero if is_first else load(builder, address, VECTOR, 4) for address in addresses]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(INT64)
    step.add_incoming(INT64(0), before)
    phis = [builder.phi(VECTOR) for _ in begun]
    in_x, in_matrix = (builder.mul(step, INT64(size)) for size in (4 * stored.values, stored.bytes))
    blocks, sums = [builder.add(row, in_matrix) for row in w_rows], phis
    for vector, weights in enumerate(zip(*(stored.weights(builder, block) for block in blocks))):
        column = builder.add(in_x, INT64(4 * LANES * vector))
        values = [load(builder, builder.add(row, column), VECTOR, 4) for row in x_rows]
        pairs = ((value, weight) for value in values for weight in weights)
        sums = [multiply_add(builder, *pair, total) for pair, total in zip(pairs, sums)]
    # the rows of the next tile: the processor's own prefetcher stops at the end of a page
    for block in blocks:
        _prefetch(builder, stored, builder.add(block, builder.mul(w_row, INT64(OUTPUTS))))
    for phi, start, total in zip(phis, begun, sums):
        phi.add_incoming(start, before)
        phi.add_incoming(total, loop)
    following = builder.add(step, INT64(1))
    step.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)
    builder.position_at_end(behind)
    if not is_last:
        for address, total in zip(addresses, sums):
            store(builder, total, address, 4)
        return
    totals, numbers = _totals(builder, sums)
    results = (
        _rows(builder, row, INT64(4), last_output, OUTPUTS)
        for row in _rows(builder, y, y_row, last, rows)
    )
    for number, address in enumerate(chain(*results)):
        store(builder, builder.extract_element(totals, INT32(numbers.index(number))), address, 4)


_multiply_floats = ir_statement((ROWS,), (0, 1), (0, 1))(partial(write_product, of_kind(FLOAT32)))


def _rows(builder: Any, first: Any, distance: Any, last: Any, count: int) -> list[Any]:
    """Addresses of `count` rows; the last one again, where there are fewer."""
    numbers = (INT64(i) for i in range(count))
    numbers = (builder.select(builder.icmp_signed("<", i, last), i, last) for i in numbers)
    return [builder.add(first, builder.mul(distance, number)) for number in numbers]


def _write_floats(
    stored: Stored, builder: Any, packed: Any, steps: Any, target: Any, ahead: Any
) -> None:
    """Bring steps of a row to float32. ahead: bytes to those that come after them."""
    with cgutils.for_range(builder, steps) as loop:
        at = builder.add(packed, builder.mul(loop.index, INT64(stored.bytes)))
        to = builder.add(target, builder.mul(loop.index, INT64(4 * stored.values)))
        _prefetch(builder, stored, builder.add(at, ahead))
        for vector, weights in enumerate(stored.weights(builder, at)):
            store(builder, weights, builder.add(to, INT64(4 * LANES * vector)), 4)


def _prefetch(builder: Any, stored: Stored, at: Any) -> None:
    for line in range(0, stored.bytes, 64):
        prefetch(builder, builder.add(at, INT64(line)))


def _totals(builder: Any, vectors: list[Any]) -> tuple[Any, list[int]]:
    """Return a vector with the sum of each of some vectors, and which one's sum a lane has.

    Each step adds the halves of groups of lanes, and keeps the results of two vectors in one.
    """
    numbers, size = [[number] for number in range(len(vectors))], LANES
    while size > 1:
        size //= 2
        low = [lane for lane in range(2 * LANES) if not lane & size]
        masks = [
            ir.Constant(ir.VectorType(INT32, LANES), [lane + add for lane in low])
            for add in (0, size)
        ]
        firsts = range(0, len(vectors), 2)
        pairs = [(vectors[i], vectors[min(i + 1, len(vectors) - 1)]) for i in firsts]
        numbers = [numbers[i] + numbers[min(i + 1, len(vectors) - 1)] for i in firsts]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs
        ]
    return vectors[0], numbers[0]
