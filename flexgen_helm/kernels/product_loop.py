"""The product y = x w^T with a matrix w in its stored format, compiled for that format
(`loops_for`).

    few rows of x     weights are decoded into registers, and multiplied with several rows at once
    more              a tile of the matrix is decoded to float32 in the cache, by some columns

y[i, j] depends on row i of x and row j of w alone, not on the number of rows or threads: both ways
sum each lane of a vector over the width, and then the lanes. The caller adds the columns that fill
no vector (`vector_matmul`).

Names: `outputs` counts rows of w, a stride is the number of bytes from one row to the next.
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
    vector_of,
    widen,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32
from flexgen_helm.kernels.vector_products import DecodeArgs, ProductArgs

# Rows of x, and rows of w, whose products are summed in registers at once: few enough that the sums
# and their factors stay there.
REGISTER_ROWS = 4 if HAS_AVX512 else 2
REGISTER_OUTPUTS = 4
# Codes of the dtypes (`team.DTYPE_CODES`) that the loops read.
READ_DTYPES = (BFLOAT16, FLOAT32, FLOAT16) if CONVERTS_HALVES else (BFLOAT16, FLOAT32)
# A decoded tile is [_TILE_OUTPUTS, _TILE_VALUES]: it fits the L1 cache beside some rows of x.
_TILE_OUTPUTS = 16
_TILE_VALUES = 256
# Rows of x that a tile is multiplied with before the next is decoded: their sums fit the L2 cache.
_TILE_ROWS = 128


@dataclass(frozen=True)
class RowLayout:
    """How rows of a matrix are stored: as a sequence of steps, each of equally many values.

    values, bytes: of a step; `_TILE_VALUES` is a multiple of the values.
    write_weights: (builder, address of a step) -> the IR of the step's values, as float32 vectors.
    few_rows: largest number of rows of x for which weights are decoded into registers.
    """

    name: str
    values: int
    bytes: int
    write_weights: Callable[[Any, Any], Iterator[Any]]
    few_rows: int


@cache
def rows_of(dtype: int) -> RowLayout:
    """Return how rows of one of `READ_DTYPES` are stored; a step is one vector."""

    def weights(builder: Any, step: Any) -> Iterator[Any]:
        yield (
            load(builder, step, VECTOR, 4)
            if dtype == FLOAT32
            else widen(builder, step, dtype == BFLOAT16)
        )

    return RowLayout(f"dtype_{dtype}", LANES, LANES * (4 if dtype == FLOAT32 else 2), weights, 16)


# A product of `rows` rows of x with REGISTER_OUTPUTS rows of w over some steps, added to `sums`:
#
#     rows                    REGISTER_ROWS, or 1
#     is_first                the sums begin with zero; else they are loaded from `sums`
#     is_last                 the totals are stored in y; else the sums are stored in `sums`
#     x, w, y, sums           addresses of the first element
#     last_row, last_output   number of the last row of x and of w that exists; it stands in for
#                             those behind it
RegisterTile = namedtuple(
    "RegisterTile",
    "rows is_first is_last x x_stride last_row w w_stride last_output steps sums y y_stride",
)

# Globals of the loops' code, which `loops_for` replaces by those of one format:
# `RowLayout.values`, `bytes` and `few_rows`, and statements that run `write_product` and
# `_write_floats`.
_STEP_VALUES = 0
_STEP_BYTES = 0
_MAX_FEW_ROWS = 0
_multiply_stored: Any = None
_decode_stored: Any = None

MatrixLoops = namedtuple("MatrixLoops", "multiply decode")


@cache
def loops_for(stored: RowLayout) -> MatrixLoops:
    """Return the loops `_multiply` (of `ProductArgs`) and `_decode` (`DecodeArgs`) for a format."""
    # numba takes a function's globals for constants, and caches its code by the function's name. So
    # each format has functions of its own, with its globals and its name.
    names = {
        **globals(),
        "_STEP_VALUES": stored.values,
        "_STEP_BYTES": stored.bytes,
        "_MAX_FEW_ROWS": stored.few_rows,
        # code for these values of `rows`, `is_first` and `is_last`
        "_multiply_stored": ir_statement((1, REGISTER_ROWS), (1,), (1,))(
            partial(write_product, stored)
        ),
        "_decode_stored": ir_statement()(partial(_write_floats, stored)),
    }
    for helper in (_decode_tile, _multiply_tile):
        copy = FunctionType(helper.__code__, names, f"{helper.__name__}_{stored.name}")
        copy.__qualname__ = copy.__name__  # see `Loop.address`
        names[helper.__name__] = njit(copy)
    return MatrixLoops(
        *(
            Loop(args, FunctionType(function.__code__, names, f"{function.__name__}_{stored.name}"))
            for args, function in ((ProductArgs, _multiply), (DecodeArgs, _decode))
        )
    )


def _decode(args: Any, thread: Any, threads: Any) -> None:
    """Decode w [rows, steps] to float32 at `target`."""
    for row in range(args.rows * thread // threads, args.rows * (thread + 1) // threads):
        source, target = args.w + row * args.w_stride, args.target + row * args.target_stride
        _decode_stored(_StoredSteps(source, args.steps, target, args.w_stride))


def _multiply(args: Any, thread: Any, threads: Any) -> None:
    """Compute y [rows, outputs] = x [rows, width] w^T, in float32, over the columns of whole steps,
    at least one. Threads divide the outputs among them.
    """
    groups = (args.outputs + REGISTER_OUTPUTS - 1) // REGISTER_OUTPUTS
    begin = groups * thread // threads * REGISTER_OUTPUTS
    end = min(groups * (thread + 1) // threads * REGISTER_OUTPUTS, args.outputs)
    if args.rows <= _MAX_FEW_ROWS:
        for output in range(begin, end, REGISTER_OUTPUTS):
            for row in range(0, args.rows, REGISTER_ROWS):
                _multiply_stored(
                    RegisterTile(
                        rows=1 if row == args.rows - 1 else REGISTER_ROWS,
                        is_first=1,
                        is_last=1,
                        x=args.x + row * args.x_stride,
                        x_stride=args.x_stride,
                        last_row=args.rows - 1 - row,
                        w=args.w + output * args.w_stride,
                        w_stride=args.w_stride,
                        last_output=min(output + REGISTER_OUTPUTS, end) - 1 - output,
                        steps=args.steps,
                        sums=0,
                        y=args.y + row * args.y_stride + 4 * output,
                        y_stride=args.y_stride,
                    )
                )
        return
    # The decoded tile, and behind it its sums with all rows; they begin at a cache line.
    memory = np.empty(_TILE_OUTPUTS * (_TILE_VALUES + _TILE_ROWS * LANES) + 16, np.float32)
    tile = (np.int64(memory.ctypes.data) + 63) // 64 * 64
    tile_steps = _TILE_VALUES // _STEP_VALUES
    for first_row in range(0, args.rows, _TILE_ROWS):
        last_row = min(args.rows, first_row + _TILE_ROWS) - 1
        for first in range(begin, end, _TILE_OUTPUTS):
            last = min(first + _TILE_OUTPUTS, end) - 1
            for step in range(0, args.steps, tile_steps):
                _decode_tile(args, tile, step, first, last)
                _multiply_tile(args, tile, step, (first_row, last_row), (first, last))
    memory[0] = 0  # a use, so that numba does not free it before: the loop has its address only


def _decode_tile(args: Any, tile: Any, step: Any, first: Any, last: Any) -> None:
    """Decode the rows first … last of w, from a step on, to float32 in the tile."""
    tile_steps = _TILE_VALUES // _STEP_VALUES
    w = args.w + step * _STEP_BYTES
    more = step + tile_steps < args.steps
    # The next tile has the next columns of these rows; at their end, the next rows.
    ahead = tile_steps * _STEP_BYTES if more else _TILE_OUTPUTS * args.w_stride - step * _STEP_BYTES
    for output in range(first, last + 1):
        target = tile + (output - first) * 4 * _TILE_VALUES
        source, count = w + output * args.w_stride, min(tile_steps, args.steps - step)
        _decode_stored(_StoredSteps(source, count, target, ahead))


def _multiply_tile(args: Any, tile: Any, step: Any, rows: Any, outputs: Any) -> None:
    """Add the products of a decoded tile, whose first column is that of a step, to the sums.

    rows, outputs: the first and the last row of x, and of w in the tile.
    """
    tile_steps = _TILE_VALUES // _STEP_VALUES
    sums = tile + _TILE_OUTPUTS * 4 * _TILE_VALUES
    for row in range(rows[0], rows[1] + 1, REGISTER_ROWS):
        for output in range(outputs[0], outputs[1] + 1, REGISTER_OUTPUTS):
            _multiply_floats(
                RegisterTile(
                    rows=REGISTER_ROWS,
                    is_first=np.int64(step == 0),
                    is_last=np.int64(step + tile_steps >= args.steps),
                    x=args.x + row * args.x_stride + step * _STEP_VALUES * 4,
                    x_stride=args.x_stride,
                    last_row=rows[1] - row,
                    w=tile + (output - outputs[0]) * 4 * _TILE_VALUES,
                    w_stride=4 * _TILE_VALUES,
                    last_output=outputs[1] - output,
                    steps=min(tile_steps, args.steps - step) * _STEP_VALUES // LANES,
                    sums=sums,
                    y=args.y + row * args.y_stride + 4 * output,
                    y_stride=args.y_stride,
                )
            )
            sums += 4 * REGISTER_ROWS * REGISTER_OUTPUTS * LANES


# ---- in LLVM's language ----


def write_product(stored: RowLayout, builder: Any, tile: Any) -> None:
    """Write the IR of a `RegisterTile`: add x[i] · w[j] to the sums, or store totals in y[i, j].

    A sum is a vector, whose lanes are added up in the end; sum number i REGISTER_OUTPUTS + j is
    that of y[i, j].
    """
    rows, w_stride, last_output = tile.rows, tile.w_stride, tile.last_output
    x_rows = _rows(builder, tile.x, tile.x_stride, tile.last_row, rows)
    w_rows = _rows(builder, tile.w, w_stride, last_output, REGISTER_OUTPUTS)
    positions = range(rows * REGISTER_OUTPUTS)
    addresses = [builder.add(tile.sums, INT64(4 * LANES * number)) for number in positions]
    starts = [
        vector_of(0.0) if tile.is_first else load(builder, address, VECTOR, 4)
        for address in addresses
    ]
    before, loop, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(INT64)
    step.add_incoming(INT64(0), before)
    phis = [builder.phi(VECTOR) for _ in starts]
    in_x, in_matrix = (builder.mul(step, INT64(size)) for size in (4 * stored.values, stored.bytes))
    w_steps, sums = [builder.add(row, in_matrix) for row in w_rows], phis
    for vector, weights in enumerate(
        zip(*(stored.write_weights(builder, w_step) for w_step in w_steps))
    ):
        column = builder.add(in_x, INT64(4 * LANES * vector))
        values = [load(builder, builder.add(row, column), VECTOR, 4) for row in x_rows]
        pairs = ((value, weight) for value in values for weight in weights)
        sums = [multiply_add(builder, *pair, total) for pair, total in zip(pairs, sums)]
    # the next tile's rows of w: the processor's own prefetcher stops at the end of a page
    for w_step in w_steps:
        _prefetch(
            builder, stored, builder.add(w_step, builder.mul(w_stride, INT64(REGISTER_OUTPUTS)))
        )
    for phi, start, total in zip(phis, starts, sums):
        phi.add_incoming(start, before)
        phi.add_incoming(total, loop)
    next_step = builder.add(step, INT64(1))
    step.add_incoming(next_step, loop)
    builder.cbranch(builder.icmp_signed("<", next_step, tile.steps), loop, done)
    builder.position_at_end(done)
    if not tile.is_last:
        for address, total in zip(addresses, sums):
            store(builder, total, address, 4)
        return
    totals, lanes = _totals(builder, sums)
    results = (
        _rows(builder, row, INT64(4), last_output, REGISTER_OUTPUTS)
        for row in _rows(builder, tile.y, tile.y_stride, tile.last_row, rows)
    )
    for number, address in enumerate(chain(*results)):
        store(builder, builder.extract_element(totals, INT32(lanes.index(number))), address, 4)


_multiply_floats = ir_statement((REGISTER_ROWS,), (0, 1), (0, 1))(
    partial(write_product, rows_of(FLOAT32))
)


def _rows(builder: Any, first: Any, stride: Any, last_row: Any, count: int) -> list[Any]:
    """Return the addresses of `count` rows; of the last row again for those that do not exist."""
    numbers = (INT64(i) for i in range(count))
    numbers = (builder.select(builder.icmp_signed("<", i, last_row), i, last_row) for i in numbers)
    return [builder.add(first, builder.mul(stride, number)) for number in numbers]


# Steps of a stored row: address of the first, how many, address of the float32 values, and how many
# bytes ahead of each step are prefetched.
_StoredSteps = namedtuple("_StoredSteps", "source count target ahead")


def _write_floats(stored: RowLayout, builder: Any, steps: Any) -> None:
    """Write the IR that decodes `_StoredSteps` to float32."""
    with cgutils.for_range(builder, steps.count) as loop:
        source = builder.add(steps.source, builder.mul(loop.index, INT64(stored.bytes)))
        target = builder.add(steps.target, builder.mul(loop.index, INT64(4 * stored.values)))
        _prefetch(builder, stored, builder.add(source, steps.ahead))
        for vector, weights in enumerate(stored.write_weights(builder, source)):
            store(builder, weights, builder.add(target, INT64(4 * LANES * vector)), 4)


def _prefetch(builder: Any, stored: RowLayout, step: Any) -> None:
    """Prefetch the cache lines of the step at an address."""
    for line in range(0, stored.bytes, 64):
        prefetch(builder, builder.add(step, INT64(line)))


def _totals(builder: Any, vectors: list[Any]) -> tuple[Any, list[int]]:
    """Add up the lanes of each vector; return the sums in one vector, and for each of its lanes the
    number of the vector whose sum it has.

    Each round adds the halves of groups of lanes, and puts the results of two vectors into one.
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
