"""Rows of blocks (`BlockFormat`), decoded and multiplied by loops that are compiled for the format at hand (`loops`).

    few rows of x     a vector of weights is decoded in registers, and multiplied with several rows
    more              a tile of the matrix is decoded into the cache, some columns after the others

Both multiply the same float32 weights, in the order of sums that `product_loop` has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir

from flexgen_helm.kernels.emit import (
    CONVERTS_HALVES,
    FLOAT,
    HAS_AVX512,
    INT16,
    INT32,
    INT64,
    LANES,
    VECTOR,
    Loop,
    call_llvm,
    done,
    ir_statement,
    load,
    operands,
    part_of_thread,
    prefetch,
    store,
)
from flexgen_helm.kernels.product_loop import TILE_OUTPUTS, TILE_ROWS, accumulate, totals
from flexgen_helm.quant import formats
from flexgen_helm.quant.formats import BlockFormat, Numbers

# Rows of x up to which weights are decoded in registers.
_FEW_ROWS = 2 * TILE_ROWS
# Rows and values of a tile of the matrix, and rows of x that it is multiplied with before the next: it stays in the
# first cache beside some rows of x, and sums in the second.
_OUTPUTS, _VALUES, _ROWS = 16, 256, 128
_INT8 = ir.IntType(8)

# Statements of the loops that `loops` makes for a format.
_add_blocks: Any = None
_decode_blocks: Any = None


@cache
def loops(fmt: BlockFormat) -> tuple[Loop, Loop]:
    """Return `multiply` and `decode` for a format; raises `NotImplementedError` where the processor has no halves."""
    if not CONVERTS_HALVES and any(numbers.is_half for numbers in (*fmt.scales, *fmt.offsets)):
        raise NotImplementedError("this processor does not convert 16-bit numbers")
    sources = b"".join(Path(path).read_bytes() for path in (__file__, formats.__file__))
    digest = hashlib.sha256(sources + repr(fmt).encode()).hexdigest()[:16]
    # numba compiles what a function's globals are, and keeps it by the function's name.
    names = {
        **globals(),
        "_add_blocks": ir_statement((1, TILE_ROWS))(partial(_add, fmt)),
        "_decode_blocks": ir_statement()(partial(_decode, fmt)),
    }
    multiply, decode = (
        Loop(FunctionType(function.__code__, names, f"{function.__name__}_{fmt.name}_{digest}"))
        for function in (_multiply, _decode_rows)
    )
    return multiply, decode


def _decode_rows(address: Any) -> None:
    """Arguments: packed rows, bytes from one to the next, target rows in float32, bytes of them, rows, blocks of one."""
    part, parts = part_of_thread(address)
    w, w_row, target, target_row, rows, blocks = operands(address, 6)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        _decode_blocks((w + row * w_row, blocks, target + row * target_row))
    done(address, part)


def _multiply(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and packed w [outputs, width].

    Arguments: x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs, blocks of a row, values and
    bytes of a block.
    """
    part, parts = part_of_thread(address)
    x, x_row, w, w_row, y, y_row, count, outputs, blocks, block_values, block_bytes = operands(address, 11)
    tiles = (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    begin, end = tiles * part // parts * TILE_OUTPUTS, min(tiles * (part + 1) // parts * TILE_OUTPUTS, outputs)
    sums = np.empty(_ROWS * _OUTPUTS * LANES, np.float32)
    tile_sums, group_bytes = np.int64(sums.ctypes.data), TILE_ROWS * TILE_OUTPUTS * LANES * 4
    if count <= _FEW_ROWS:
        for output in range(begin, end, TILE_OUTPUTS):
            last = min(output + TILE_OUTPUTS, end) - 1
            for row in range(0, count, TILE_ROWS):
                rows = 1 if row == count - 1 else TILE_ROWS
                sums[: TILE_ROWS * TILE_OUTPUTS * LANES] = 0
                given = x + row * x_row, x_row, count - 1 - row, w + output * w_row, w_row, last - output
                _add_blocks((rows, *given, blocks, tile_sums))
                _finish((rows, tile_sums, y + row * y_row + 4 * output, y_row, count - 1 - row, last - output))
        done(address, part)
        return
    step = max(1, _VALUES // block_values)
    tile_values = step * block_values
    tile = np.empty(_OUTPUTS * tile_values, np.float32)
    at_tile = np.int64(tile.ctypes.data)
    for first_row in range(0, count, _ROWS):
        last_row = min(count, first_row + _ROWS) - 1
        for first in range(begin, end, _OUTPUTS):
            last = min(first + _OUTPUTS, end) - 1
            sums[:] = 0
            for block in range(0, blocks, step):
                number = min(step, blocks - block)
                for output in range(first, last + 1):
                    at = w + output * w_row + block * block_bytes
                    _decode_blocks((at, number, at_tile + (output - first) * tile_values * 4))
                group = tile_sums
                for row in range(first_row, last_row + 1, TILE_ROWS):
                    from_x = x + row * x_row + block * block_values * 4
                    for output in range(first, last + 1, TILE_OUTPUTS):
                        from_tile = at_tile + (output - first) * tile_values * 4
                        given = from_x, x_row, last_row - row, from_tile, tile_values * 4, last - output
                        _add_floats((*given, number * block_values // LANES, group))
                        group += group_bytes
            group = tile_sums
            for row in range(first_row, last_row + 1, TILE_ROWS):
                for output in range(first, last + 1, TILE_OUTPUTS):
                    to = y + row * y_row + 4 * output
                    _finish((TILE_ROWS, group, to, y_row, last_row - row, last - output))
                    group += group_bytes
    done(address, part)


# ---- in LLVM's language ----


def _rows(builder: Any, first: Any, distance: Any, last: Any, count: int) -> list[Any]:
    """Addresses of `count` rows; the last one again, where there are fewer."""
    numbers = (INT64(i) for i in range(count))
    numbers = (builder.select(builder.icmp_signed("<", i, last), i, last) for i in numbers)
    return [builder.add(first, builder.mul(distance, number)) for number in numbers]


def _sums(builder: Any, rows: int, at: Any) -> list[list[Any]]:
    """Addresses of a tile's sums."""
    return [
        [builder.add(at, INT64(4 * LANES * (i * TILE_OUTPUTS + j))) for j in range(TILE_OUTPUTS)] for i in range(rows)
    ]


def _add_rows(builder: Any, rows: int, x: Any, w: Any, steps: Any, step: Any, weights: Any, sums: Any) -> None:
    places = _sums(builder, rows, sums)
    begun = [[load(builder, at, VECTOR, 4) for at in line] for line in places]
    results = accumulate(builder, begun, x, w, steps, step, weights)
    for at, result in zip(chain(*places), chain(*results)):
        store(builder, result, at, 4)


def _add(fmt: BlockFormat, builder: Any, rows: int, *given: Any) -> None:
    """Add x[i] · w[j] over whole blocks to the sums of some rows of x and of the matrix."""
    x, x_row, x_last, w, w_row, w_last, blocks, sums = given

    def weights(at: list[Any]) -> Iterator[list[Any]]:
        for row in at:  # of the next tile
            for line in range(0, fmt.block_bytes, 64):
                prefetch(builder, builder.add(row, builder.add(builder.mul(w_row, INT64(TILE_OUTPUTS)), INT64(line))))
        yield from zip(*(_weights(builder, fmt, block) for block in at))

    x_rows, w_rows = _rows(builder, x, x_row, x_last, rows), _rows(builder, w, w_row, w_last, TILE_OUTPUTS)
    _add_rows(builder, rows, x_rows, w_rows, blocks, (fmt.block_values, fmt.block_bytes), weights, sums)


@ir_statement()
def _add_floats(builder: Any, *given: Any) -> None:
    """The same for float32 weights, over whole vectors."""
    x, x_row, x_last, w, w_row, w_last, steps, sums = given

    def weights(at: list[Any]) -> Iterator[list[Any]]:
        yield [load(builder, row, VECTOR, 4) for row in at]

    x_rows, w_rows = _rows(builder, x, x_row, x_last, TILE_ROWS), _rows(builder, w, w_row, w_last, TILE_OUTPUTS)
    _add_rows(builder, TILE_ROWS, x_rows, w_rows, steps, (LANES, 4 * LANES), weights, sums)


@ir_statement((1, TILE_ROWS))
def _finish(builder: Any, rows: int, *given: Any) -> None:
    """Store the totals of a tile's sums in some rows of y; what is beyond the last ones is equal to them."""
    sums, y, y_row, y_last, w_last = given
    vectors = [load(builder, at, VECTOR, 4) for at in chain(*_sums(builder, rows, sums))]
    vector, numbers = totals(builder, vectors)
    for i, row in enumerate(_rows(builder, y, y_row, y_last, rows)):
        for j, at in enumerate(_rows(builder, row, INT64(4), w_last, TILE_OUTPUTS)):
            lane = numbers.index(i * TILE_OUTPUTS + j)
            store(builder, builder.extract_element(vector, INT32(lane)), at, 4)


def _decode(fmt: BlockFormat, builder: Any, packed: Any, blocks: Any, target: Any) -> None:
    """Decode blocks of a row; there is one at least."""
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(INT64)
    number.add_incoming(INT64(0), before)
    block = builder.add(packed, builder.mul(number, INT64(fmt.block_bytes)))
    to = builder.add(target, builder.mul(number, INT64(4 * fmt.block_values)))
    for vector, weights in enumerate(_weights(builder, fmt, block)):
        store(builder, weights, builder.add(to, INT64(4 * LANES * vector)), 4)
    following = builder.add(number, INT64(1))
    number.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, blocks), loop, behind)
    builder.position_at_end(behind)


def _weights(builder: Any, fmt: BlockFormat, block: Any) -> Iterator[Any]:
    """Vectors of a block's values, one after the other."""
    scales, offsets = (_product(builder, block, factors) for factors in (fmt.scales, fmt.offsets))
    bits = sum(part.width for part in fmt.codes.parts)
    codes = fmt.codes.table or tuple(float(code - fmt.codes.zero) for code in range(1 << bits))
    by_table = fmt.codes.table is not None or HAS_AVX512 and bits <= 4
    group, table = -1, None

    def scaled(values: Any) -> Any:
        values = builder.fmul(values, _lane(builder, scales, group))
        if offsets is None:
            return values
        return (builder.fsub if fmt.subtracts else builder.fadd)(values, _lane(builder, offsets, group))

    for first in range(0, fmt.block_values, LANES):
        integers = _integers(builder, block, fmt.codes, first, LANES)
        if first * scales.type.count // fmt.block_values > group:
            group += 1
            if HAS_AVX512 and by_table:  # a permutation of 16 scaled numbers by the lowest 4 bits
                table = scaled(ir.Constant(VECTOR, list(codes) * (16 // len(codes))))
        if table is not None:
            yield call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, table, integers)
        elif by_table:
            yield scaled(_looked_up(builder, codes, integers))
        else:
            yield scaled(_converted(builder, fmt.codes, integers))


def _product(builder: Any, block: Any, factors: tuple[Numbers, ...]) -> Any:
    """A vector of the products of factors; None where there are none."""
    product = None
    for numbers in factors:
        factor = _factor(builder, block, numbers)
        if product is not None:
            product = builder.fmul(_lane(builder, product, 0, numbers.count), factor)
        else:
            product = factor
    return product


def _factor(builder: Any, block: Any, numbers: Numbers) -> Any:
    if numbers.is_half:
        bits = load(builder, builder.add(block, INT64(numbers.parts[0].bytes[0])), INT16, 1)
        number = builder.fpext(builder.bitcast(bits, ir.HalfType()), FLOAT)
        return builder.insert_element(ir.Constant(ir.VectorType(FLOAT, 1), ir.Undefined), number, INT32(0))
    integers = _integers(builder, block, numbers, 0, numbers.count)
    if numbers.table is not None:
        return _looked_up(builder, numbers.table, integers)
    return _converted(builder, numbers, integers)


def _integers(builder: Any, block: Any, numbers: Numbers, first: int, count: int) -> Any:
    """A vector of neighbouring numbers of a block, as bits say; those that are above all of a number's are undefined."""
    kind, result, width = ir.VectorType(INT32, count), None, 0
    for part in numbers.parts:
        given, shifts = part.bytes[first : first + count], part.shifts[first : first + count]
        low = min(given)
        data = load(builder, builder.add(block, INT64(low)), ir.VectorType(_INT8, max(given) - low + 1), 1)
        lanes = [byte - low for byte in given]
        if lanes != list(range(data.type.count)):
            data = builder.shuffle_vector(data, data, ir.Constant(ir.VectorType(INT32, count), lanes))
        found = builder.lshr(builder.zext(data, kind), ir.Constant(kind, list(shifts)))
        found = builder.and_(found, ir.Constant(kind, [(1 << part.width) - 1] * count))
        result = (
            found if result is None else builder.or_(result, builder.shl(found, ir.Constant(kind, [width] * count)))
        )
        width += part.width
    return result


def _converted(builder: Any, numbers: Numbers, integers: Any) -> Any:
    """Integers as float32."""
    kind = integers.type
    if numbers.signed:
        shift = ir.Constant(kind, [32 - sum(part.width for part in numbers.parts)] * kind.count)
        integers = builder.ashr(builder.shl(integers, shift), shift)
    integers = builder.sub(integers, ir.Constant(kind, [numbers.zero] * kind.count))
    return builder.sitofp(integers, ir.VectorType(FLOAT, kind.count))


def _looked_up(builder: Any, table: tuple[float, ...], integers: Any) -> Any:
    """What integers name in a table."""
    kind = ir.ArrayType(FLOAT, len(table))
    name = f"table_{hashlib.sha256(repr(table).encode()).hexdigest()[:16]}"
    constant = builder.module.globals.get(name)
    if constant is None:
        constant = ir.GlobalVariable(builder.module, kind, name)
        constant.linkage, constant.global_constant, constant.initializer = "internal", True, ir.Constant(kind, table)
    result = ir.Constant(ir.VectorType(FLOAT, integers.type.count), ir.Undefined)
    for lane in range(integers.type.count):
        number = builder.extract_element(integers, INT32(lane))
        value = builder.load(builder.gep(constant, [INT32(0), number], inbounds=True))
        result = builder.insert_element(result, value, INT32(lane))
    return result


def _lane(builder: Any, vector: Any, lane: int, count: int = LANES) -> Any:
    """A vector whose elements are all one of another's."""
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, count), [lane] * count))
