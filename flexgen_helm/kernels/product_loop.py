"""The product of a few rows with a matrix in 16 bits, compiled (`few_rows`)."""

from __future__ import annotations

from itertools import chain
from typing import Any

from llvmlite import ir

from flexgen_helm.kernels.emit import (
    CONVERTS_HALVES,
    FLOAT,
    HAS_AVX512,
    INT64,
    LANES,
    VECTOR,
    Loop,
    call_llvm,
    done,
    ir_statement,
    load,
    multiply_add,
    operands,
    part_of_thread,
    prefetch,
    store,
    widen,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16

# Rows of x and of the weight in one tile of `few_rows`: its sums, and what they are made of, stay in registers.
TILE_ROWS, TILE_OUTPUTS = (4, 4) if HAS_AVX512 else (2, 4)


@ir_statement(
    (BFLOAT16, FLOAT16) if CONVERTS_HALVES else (BFLOAT16,), tuple(range(1, TILE_ROWS + 1)), (1, TILE_OUTPUTS)
)
def _product(builder: Any, kind: int, rows: int, outputs: int, *operands: Any) -> None:
    """The product of some rows of x with some rows of a 16-bit matrix: y[i, j] = x[i] · w[j]."""
    x, x_row, w, w_row, width, y, y_row = operands
    x_rows = [builder.add(x, builder.mul(x_row, INT64(i))) for i in range(rows)]
    w_rows = [builder.add(w, builder.mul(w_row, INT64(j))) for j in range(outputs)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    column = builder.phi(INT64)
    column.add_incoming(INT64(0), before)
    sums = [[builder.phi(VECTOR) for _ in range(outputs)] for _ in range(rows)]
    in_16_bits, in_32_bits = builder.mul(column, INT64(2)), builder.mul(column, INT64(4))
    weights = [widen(builder, builder.add(row, in_16_bits), kind == BFLOAT16) for row in w_rows]
    # The rows of the next tile: the processor's own prefetcher stops at the end of a page.
    ahead = builder.add(in_16_bits, builder.mul(w_row, INT64(outputs)))
    for row in w_rows:
        prefetch(builder, builder.add(row, ahead))
    values = [load(builder, builder.add(row, in_32_bits), VECTOR, 4) for row in x_rows]
    results = [
        [multiply_add(builder, value, weight, total) for weight, total in zip(weights, row_sums)]
        for value, row_sums in zip(values, sums)
    ]
    for total, result in zip(chain(*sums), chain(*results)):
        total.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
        total.add_incoming(result, loop)
    following = builder.add(column, INT64(LANES))
    column.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, width), loop, behind)
    builder.position_at_end(behind)
    for i, j in ((i, j) for i in range(rows) for j in range(outputs)):
        zero = ir.Constant(FLOAT, 0.0)
        total = call_llvm(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, zero, results[i][j])
        total.fastmath.add("reassoc")
        target = builder.add(builder.add(y, builder.mul(y_row, INT64(i))), INT64(4 * j))
        store(builder, total, target, 4)


@Loop
def few_rows(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width] in 16 bits.

    Arguments: kind of w, x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs, width (whole
    vectors).
    """
    part, parts = part_of_thread(address)
    kind, x, x_row, w, w_row, y, y_row, count, outputs, width = operands(address, 10)
    tiles = (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    first, last = tiles * part // parts, tiles * (part + 1) // parts
    for tile in range(first * TILE_OUTPUTS, min(last * TILE_OUTPUTS, outputs), TILE_OUTPUTS):
        step = TILE_OUTPUTS if tile + TILE_OUTPUTS <= outputs else 1
        for row in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - row)
            for output in range(tile, min(tile + TILE_OUTPUTS, outputs), step):
                target = y + row * y_row + 4 * output
                _product((kind, rows, step, x + row * x_row, x_row, w + output * w_row, w_row, width, target, y_row))
    done(address, part)
