"""The product of rows with a matrix as it rests, compiled (`multiply`).

A result depends on its row of x and its row of the matrix alone, whatever rows there are and however many threads: its
sums are those of each lane of a vector over the width, then of the lanes, then of the columns that fill no vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numba
import numpy as np
from llvmlite import ir

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
    njit,
    operands,
    part_of_thread,
    pointer,
    prefetch,
    store,
    widen,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32

# Rows of x and of the matrix in one tile: its sums, and what they are made of, stay in registers.
TILE_ROWS, TILE_OUTPUTS = (4, 4) if HAS_AVX512 else (2, 4)
# Bytes of the rows of x that are multiplied before the matrix is read again: they stay in a cache.
_PASS_BYTES = 1 << 19
_KINDS = (BFLOAT16, FLOAT16, FLOAT32) if CONVERTS_HALVES else (BFLOAT16, FLOAT32)


@ir_statement(_KINDS, tuple(range(1, TILE_ROWS + 1)), (1, TILE_OUTPUTS))
def _product(builder: Any, kind: int, rows: int, outputs: int, *operands: Any) -> None:
    """The product of some rows of x with some rows of a matrix over whole vectors: y[i, j] = x[i] · w[j]."""
    x, x_row, w, w_row, width, y, y_row = operands
    x_rows = [builder.add(x, builder.mul(x_row, INT64(i))) for i in range(rows)]
    w_rows = [builder.add(w, builder.mul(w_row, INT64(j))) for j in range(outputs)]
    num_bytes = LANES * (4 if kind == FLOAT32 else 2)

    def weights(at: list[Any]) -> Iterator[list[Any]]:
        yield [load(builder, w, VECTOR, 4) if kind == FLOAT32 else widen(builder, w, kind == BFLOAT16) for w in at]
        # The rows of the next tile: the processor's own prefetcher stops at the end of a page.
        for row in at:
            prefetch(builder, builder.add(row, builder.mul(w_row, INT64(outputs))))

    zero = ir.Constant(VECTOR, [0.0] * LANES)
    steps = builder.sdiv(width, INT64(LANES))
    sums = accumulate(builder, [[zero] * outputs] * rows, x_rows, w_rows, steps, (LANES, num_bytes), weights)
    vector, numbers = totals(builder, list(chain(*sums)))
    for i in range(rows):
        lanes = ir.Constant(ir.VectorType(INT32, outputs), [numbers.index(i * outputs + j) for j in range(outputs)])
        row = builder.shuffle_vector(vector, vector, lanes)
        store(builder, row, builder.add(y, builder.mul(y_row, INT64(i))), 4)


def accumulate(
    builder: Any,
    sums: list[list[Any]],
    x_rows: list[Any],
    w_rows: list[Any],
    steps: Any,
    step: tuple[int, int],
    weights: Callable[[list[Any]], Iterable[list[Any]]],
) -> list[list[Any]]:
    """Add the products of x_rows[i] and w_rows[j] to the vector sums[i][j], lane by lane; there is a step at least.

    step: values, and bytes of a row of the matrix.
    weights: of addresses in its rows, the vectors of a step, one of all rows after the other.
    """
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(INT64)
    number.add_incoming(INT64(0), before)
    begun = [[builder.phi(VECTOR) for _ in row_sums] for row_sums in sums]
    in_x, in_matrix = (builder.mul(number, INT64(size)) for size in (4 * step[0], step[1]))
    results = begun
    for vector, tile in enumerate(weights([builder.add(row, in_matrix) for row in w_rows])):
        at = builder.add(in_x, INT64(4 * LANES * vector))
        values = [load(builder, builder.add(row, at), VECTOR, 4) for row in x_rows]
        results = [
            [multiply_add(builder, value, weight, total) for weight, total in zip(tile, row_sums)]
            for value, row_sums in zip(values, results)
        ]
    for phi, total, result in zip(chain(*begun), chain(*sums), chain(*results)):
        phi.add_incoming(total, before)
        phi.add_incoming(result, loop)
    following = builder.add(number, INT64(1))
    number.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)
    builder.position_at_end(behind)
    return results


def totals(builder: Any, vectors: list[Any]) -> tuple[Any, list[int]]:
    """Return a vector with the sum of each of some vectors, and which one's sum a lane has.

    Each step adds the halves of groups of lanes, and keeps the results of two vectors in one.
    """
    numbers, size = [[number] for number in range(len(vectors))], LANES
    while size > 1:
        size //= 2
        low = [lane for lane in range(2 * LANES) if not lane & size]
        masks = [ir.Constant(ir.VectorType(INT32, LANES), [lane + add for lane in low]) for add in (0, size)]
        firsts = range(0, len(vectors), 2)
        pairs = [(vectors[i], vectors[min(i + 1, len(vectors) - 1)]) for i in firsts]
        numbers = [numbers[i] + numbers[min(i + 1, len(vectors) - 1)] for i in firsts]
        vectors = [builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs]
    return vectors[0], numbers[0]


@njit
def _add_rest(kind: Any, x: Any, w: Any, whole: Any, width: Any, y: Any) -> None:
    """y += x · w over the columns behind the whole vectors; y = x · w where there is none."""
    values, total = floats(x, width), floats(y, 1)
    if whole == 0:
        total[0] = 0
    for column in range(whole, width):
        if kind == FLOAT32:
            weight = floats(w, width)[column]
        else:
            bits = numba.carray(pointer(w), width, np.uint16)[column]
            if CONVERTS_HALVES and kind == FLOAT16:
                weight = half_to_float(bits)
            else:
                weight = np.int32(np.int32(bits) << np.int32(16)).view(np.float32)
        total[0] += values[column] * weight


@Loop
def multiply(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width].

    Arguments: kind of w, x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs, width.
    """
    part, parts = part_of_thread(address)
    kind, x, x_row, w, w_row, y, y_row, count, outputs, width = operands(address, 10)
    whole, pass_rows = width // LANES * LANES, max(16, _PASS_BYTES // (16 * width) * 4)
    tiles = (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    begin, end = tiles * part // parts * TILE_OUTPUTS, min(tiles * (part + 1) // parts * TILE_OUTPUTS, outputs)
    for first_row in range(0, count, pass_rows):
        last_row = min(count, first_row + pass_rows)
        for tile in range(begin, end, TILE_OUTPUTS):
            step = TILE_OUTPUTS if tile + TILE_OUTPUTS <= outputs else 1
            for row in range(first_row, last_row, TILE_ROWS):
                rows = min(TILE_ROWS, last_row - row)
                for output in range(tile, min(tile + TILE_OUTPUTS, end), step):
                    at, matrix, target = x + row * x_row, w + output * w_row, y + row * y_row + 4 * output
                    if whole:
                        _product((kind, rows, step, at, x_row, matrix, w_row, whole, target, y_row))
                    if whole < width:
                        for i in range(rows):
                            for j in range(step):
                                to = target + i * y_row + 4 * j
                                _add_rest(kind, at + i * x_row, matrix + j * w_row, whole, width, to)
    done(address, part)
