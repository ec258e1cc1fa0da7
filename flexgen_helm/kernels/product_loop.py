"""The product of rows with a matrix as it rests, compiled for how its rows are stored (`loops`).

    few rows of x     vectors of weights are made in registers, and multiplied with several rows
    more              a tile of the matrix is brought to the cache in float32, column by column

A result depends on its row of x and its row of the matrix alone, whatever rows there are and
however many threads: both ways add up each lane of a vector over the width, then the lanes. Columns
that fill no vector come last (`vector_matmul`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType
from typing import Any

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
    ir_statement,
    load,
    multiply_add,
    njit,
    prefetch,
    store,
    widen,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32
from flexgen_helm.kernels.vector_products import DecodeRows, Product

# Rows of x and of the matrix whose sums, and what they are made of, stay in registers.
ROWS, OUTPUTS = (4, 4) if HAS_AVX512 else (2, 4)
# Types of elements that loops read.
READ_KINDS = (BFLOAT16, FLOAT32, FLOAT16) if CONVERTS_HALVES else (BFLOAT16, FLOAT32)
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


# A product of some rows of x and of the matrix, whose last ones are `last` and `last_output`. It is
# added to sums, which begin with zero where it is the first; where it is the last, the totals are
# stored in y instead.
Part = namedtuple("Part", "rows is_first is_last x x_row last w w_row last_output steps at y y_row")

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
    for helper in (_decode_tile, _multiply_tile):
        compiled = FunctionType(helper.__code__, names, f"{helper.__name__}_{stored.name}")
        compiled.__qualname__ = compiled.__name__  # see `Loop.address`
        names[helper.__name__] = njit(compiled)
    multiply, decode = (
        Loop(given, FunctionType(function.__code__, names, f"{function.__name__}_{stored.name}"))
        for given, function in ((Product, _multiply), (DecodeRows, _decode))
    )
    return multiply, decode


def _decode(given: Any, part: Any, parts: Any) -> None:
    """Fill rows with float32 values."""
    for row in range(given.rows * part // parts, given.rows * (part + 1) // parts):
        source, target = given.w + row * given.w_row, given.target + row * given.target_row
        _decode_stored(_Steps(source, given.steps, target, given.w_row))


def _multiply(given: Any, part: Any, parts: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width], over whole steps; there is one
    at least.
    """
    groups = (given.outputs + OUTPUTS - 1) // OUTPUTS
    begin = groups * part // parts * OUTPUTS
    end = min(groups * (part + 1) // parts * OUTPUTS, given.outputs)
    if given.count <= _FEW_ROWS:
        for output in range(begin, end, OUTPUTS):
            for row in range(0, given.count, ROWS):
                _multiply_stored(
                    Part(
                        rows=1 if row == given.count - 1 else ROWS,
                        is_first=1,
                        is_last=1,
                        x=given.x + row * given.x_row,
                        x_row=given.x_row,
                        last=given.count - 1 - row,
                        w=given.w + output * given.w_row,
                        w_row=given.w_row,
                        last_output=min(output + OUTPUTS, end) - 1 - output,
                        steps=given.steps,
                        at=0,
                        y=given.y + row * given.y_row + 4 * output,
                        y_row=given.y_row,
                    )
                )
        return
    # A tile in float32, and sums of all rows with it, from the beginning of a line of the cache on.
    memory = np.empty(_TILE_OUTPUTS * (_TILE_VALUES + _TILE_ROWS * LANES) + 16, np.float32)
    tile = (np.int64(memory.ctypes.data) + 63) // 64 * 64
    most = _TILE_VALUES // _VALUES
    for first_row in range(0, given.count, _TILE_ROWS):
        last_row = min(given.count, first_row + _TILE_ROWS) - 1
        for first in range(begin, end, _TILE_OUTPUTS):
            last = min(first + _TILE_OUTPUTS, end) - 1
            for step in range(0, given.steps, most):
                _decode_tile(given, tile, step, first, last)
                _multiply_tile(given, tile, step, (first_row, last_row), (first, last))
    memory[0] = 0  # it is in use until here


def _decode_tile(given: Any, tile: Any, step: Any, first: Any, last: Any) -> None:
    """Bring some columns of rows first … last of the matrix to float32."""
    most = _TILE_VALUES // _VALUES
    at = given.w + step * _BYTES
    more = step + most < given.steps
    ahead = most * _BYTES if more else _TILE_OUTPUTS * given.w_row - step * _BYTES
    for output in range(first, last + 1):
        target = tile + (output - first) * 4 * _TILE_VALUES
        source, count = at + output * given.w_row, min(most, given.steps - step)
        _decode_stored(_Steps(source, count, target, ahead))


def _multiply_tile(given: Any, tile: Any, step: Any, rows: Any, outputs: Any) -> None:
    """Add products of a tile and some rows of x, of which rows and outputs are the first and the
    last.
    """
    most = _TILE_VALUES // _VALUES
    sums = tile + _TILE_OUTPUTS * 4 * _TILE_VALUES
    for row in range(rows[0], rows[1] + 1, ROWS):
        for output in range(outputs[0], outputs[1] + 1, OUTPUTS):
            _multiply_floats(
                Part(
                    rows=ROWS,
                    is_first=np.int64(step == 0),
                    is_last=np.int64(step + most >= given.steps),
                    x=given.x + row * given.x_row + step * _VALUES * 4,
                    x_row=given.x_row,
                    last=rows[1] - row,
                    w=tile + (output - outputs[0]) * 4 * _TILE_VALUES,
                    w_row=4 * _TILE_VALUES,
                    last_output=outputs[1] - output,
                    steps=min(most, given.steps - step) * _VALUES // LANES,
                    at=sums,
                    y=given.y + row * given.y_row + 4 * output,
                    y_row=given.y_row,
                )
            )
            sums += 4 * ROWS * OUTPUTS * LANES


# ---- in LLVM's language ----


def write_product(stored: Stored, builder: Any, part: Any) -> None:
    """Add x[i] · w[j] to the sums of some rows of x and of the matrix, or store the totals in y[i,
    j].
    """
    rows, w_row, last_output = part.rows, part.w_row, part.last_output
    x_rows = _rows(builder, part.x, part.x_row, part.last, rows)
    w_rows = _rows(builder, part.w, w_row, last_output, OUTPUTS)
    numbers = range(rows * OUTPUTS)
    addresses = [builder.add(part.at, INT64(4 * LANES * number)) for number in numbers]
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    begun = [zero if part.is_first else load(builder, address, VECTOR, 4) for address in addresses]
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
    builder.cbranch(builder.icmp_signed("<", following, part.steps), loop, behind)
    builder.position_at_end(behind)
    if not part.is_last:
        for address, total in zip(addresses, sums):
            store(builder, total, address, 4)
        return
    totals, lanes = _totals(builder, sums)
    results = (
        _rows(builder, row, INT64(4), last_output, OUTPUTS)
        for row in _rows(builder, part.y, part.y_row, part.last, rows)
    )
    for number, address in enumerate(chain(*results)):
        store(builder, builder.extract_element(totals, INT32(lanes.index(number))), address, 4)


_multiply_floats = ir_statement((ROWS,), (0, 1), (0, 1))(partial(write_product, of_kind(FLOAT32)))


def _rows(builder: Any, first: Any, distance: Any, last: Any, count: int) -> list[Any]:
    """Addresses of `count` rows; the last one again, where there are fewer."""
    numbers = (INT64(i) for i in range(count))
    numbers = (builder.select(builder.icmp_signed("<", i, last), i, last) for i in numbers)
    return [builder.add(first, builder.mul(distance, number)) for number in numbers]


# Steps of a row, and bytes to those that come after them.
_Steps = namedtuple("_Steps", "packed count target ahead")


def _write_floats(stored: Stored, builder: Any, steps: Any) -> None:
    """Bring steps of a row to float32."""
    with cgutils.for_range(builder, steps.count) as loop:
        at = builder.add(steps.packed, builder.mul(loop.index, INT64(stored.bytes)))
        to = builder.add(steps.target, builder.mul(loop.index, INT64(4 * stored.values)))
        _prefetch(builder, stored, builder.add(at, steps.ahead))
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
