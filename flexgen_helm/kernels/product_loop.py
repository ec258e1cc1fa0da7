"""The product of a few rows with a matrix in 16 bits, compiled (`few_rows`)."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from flexgen_helm.kernels.emit import (
    INT64,
    VECTOR,
    done,
    emitted,
    int64,
    load,
    multiply_add,
    part_of_thread,
    prefetch,
    store,
    summed,
    widen,
)
from flexgen_helm.kernels.processor import CONVERTS_HALVES, HAS_AVX512, LANES

# Rows of x and of the weight in one tile of `few_rows`: its sums, and what they are made of, stay in registers.
TILE_ROWS, TILE_OUTPUTS = (4, 4) if HAS_AVX512 else (2, 4)


def _tile(builder: Any, rows: int, outputs: int, is_bfloat16: bool, arguments: Any) -> None:
    """Emit the product of some rows of x with some rows of a 16-bit matrix: y[i, j] = x[i] · w[j]."""
    x, x_row, w, w_row, width, y, y_row = arguments
    x_rows = [builder.add(x, builder.mul(x_row, INT64(i))) for i in range(rows)]
    w_rows = [builder.add(w, builder.mul(w_row, INT64(j))) for j in range(outputs)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    column = builder.phi(INT64)
    column.add_incoming(INT64(0), before)
    sums = [[builder.phi(VECTOR) for _ in range(outputs)] for _ in range(rows)]
    in_16_bits, in_32_bits = builder.mul(column, INT64(2)), builder.mul(column, INT64(4))
    weights = [widen(builder, builder.add(row, in_16_bits), is_bfloat16) for row in w_rows]
    # The rows of the next tile: the processor's own prefetcher stops at the end of a page.
    ahead = builder.add(in_16_bits, builder.mul(w_row, INT64(outputs)))
    for row in w_rows:
        prefetch(builder, builder.add(row, ahead))
    values = [load(builder, builder.add(row, in_32_bits), VECTOR, 4) for row in x_rows]
    results = [[multiply_add(builder, value, weight, one) for weight, one in zip(weights, own)]
               for value, own in zip(values, sums)]  # fmt: skip
    for one, result in zip(chain(*sums), chain(*results)):
        one.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
        one.add_incoming(result, loop)
    following = builder.add(column, INT64(LANES))
    column.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, width), loop, behind)
    builder.position_at_end(behind)
    for i, own in enumerate(results):
        row = builder.add(y, builder.mul(y_row, INT64(i)))
        for j, result in enumerate(own):
            store(builder, summed(builder, result), builder.add(row, INT64(4 * j)), 4)


@emitted
def _product(
    typing: Any, kind: Any, rows: Any, outputs: Any, x: Any, x_row: Any, w: Any, w_row: Any, width: Any, y: Any, to: Any
) -> Any:  # fmt: skip
    """A tile of up to `TILE_ROWS` rows and 1 or `TILE_OUTPUTS` outputs; kind: 1 for bfloat16, 0 for float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, operands = arguments[:3], arguments[3:]
        kinds = (0, 1) if CONVERTS_HALVES else (1,)
        for case in product(kinds, range(1, TILE_ROWS + 1), (1, TILE_OUTPUTS)):
            equal = [builder.icmp_signed("==", own, INT64(number)) for own, number in zip(given, case)]
            with builder.if_then(builder.and_(builder.and_(*equal[:2]), equal[2])):
                _tile(builder, case[1], case[2], bool(case[0]), operands)

    return types.void(*[int64] * 10), generate


def few_rows(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width] in 16 bits.

    Arguments: kind of w (`_product`), x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs,
    width (whole vectors).
    """
    data = numba.carray(address, 14, np.int64)
    kind, x, x_row, w, w_row = data[4], data[5], data[6], data[7], data[8]
    y, y_row, count, outputs, width = data[9], data[10], data[11], data[12], data[13]
    part, parts = part_of_thread(address)
    tiles = (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    first, last = tiles * part // parts, tiles * (part + 1) // parts
    for output in range(first * TILE_OUTPUTS, min(last * TILE_OUTPUTS, outputs), TILE_OUTPUTS):
        step = TILE_OUTPUTS if output + TILE_OUTPUTS <= outputs else 1
        for row in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - row)
            for own in range(output, min(output + TILE_OUTPUTS, outputs), step):
                target = y + row * y_row + 4 * own
                x_at, w_at = x + row * x_row, w + own * w_row
                _product(kind, rows, step, x_at, x_row, w_at, w_row, width, target, y_row)
    done(address, part)
