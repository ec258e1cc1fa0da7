"""Rows of blocks (`BlockFormat`), decoded and multiplied by loops that are compiled for the format at hand (`loops`).

    few rows of x     a vector of weights is decoded in registers, and multiplied with several rows
    more              a tile of the matrix is decoded into the cache, some columns after the others

Both multiply the same float32 weights, in the order of sums that `product_loop` has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    CONVERTS_HALVES,
    FLOAT,
    HAS_AVX2,
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
from flexgen_helm.quant.formats import BlockFormat, Numbers

# Rows and values of a tile of the matrix, and rows of x that it is multiplied with before the next: it stays in the
# first cache beside some rows of x, and sums in the second.
_OUTPUTS, _VALUES, _ROWS = 16, 256, 128
_INT8 = ir.IntType(8)

# Statements of the loops that `loops` makes for a format.
_multiply_blocks: Any = None
_decode_blocks: Any = None


@cache
def loops(fmt: BlockFormat) -> tuple[Loop, Loop]:
    """Return `multiply` and `decode` for a format; raises `NotImplementedError` where the processor has no halves."""
    if not CONVERTS_HALVES and any(n.floating in ("F16", "F8_E5M2") for n in (fmt.codes, *fmt.scales, *fmt.offsets)):
        raise NotImplementedError("this processor does not convert 16-bit numbers")
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(fmt).encode()).hexdigest()[:16]
    # numba compiles what a function's globals are, and keeps it by the function's name.
    names = {
        **globals(),
        "_multiply_blocks": ir_statement((1, TILE_ROWS))(partial(_product, fmt)),
        "_decode_blocks": ir_statement()(partial(_decode, fmt)),
    }
    multiply, decode = (
        Loop(FunctionType(function.__code__, names, f"{function.__name__}_{fmt.name}_{digest}"))
        for function in (_multiply, _decode_rows)
    )
    return multiply, decode


def few_rows(fmt: BlockFormat) -> int:
    """Return up to how many rows of x weights are decoded in registers: what has several parts takes longer."""
    return 2 * TILE_ROWS if HAS_AVX512 and len(fmt.codes.parts) == 1 and not fmt.codes.floating else TILE_ROWS


def _decode_rows(address: Any) -> None:
    """Fill rows with float32 values.

    Arguments: packed rows, bytes of one, rows to fill, bytes of one, rows, blocks of one.
    """
    part, parts = part_of_thread(address)
    w, w_row, target, target_row, rows, blocks = operands(address, 6)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        _decode_blocks((w + row * w_row, blocks, target + row * target_row, w_row))
    done(address, part)


def _multiply(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and packed w [outputs, width].

    Arguments: x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs, blocks of a row, values and
    bytes of a block, rows of x up to which weights are decoded in registers.
    """
    part, parts = part_of_thread(address)
    x, x_row, w, w_row, y, y_row, count, outputs, blocks, block_values, block_bytes, few = operands(address, 12)
    tiles = (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    begin, end = tiles * part // parts * TILE_OUTPUTS, min(tiles * (part + 1) // parts * TILE_OUTPUTS, outputs)
    if count <= few:
        for output in range(begin, end, TILE_OUTPUTS):
            last = min(output + TILE_OUTPUTS, end) - 1
            for row in range(0, count, TILE_ROWS):
                rows = 1 if row == count - 1 else TILE_ROWS
                given = x + row * x_row, x_row, w + output * w_row, w_row, y + row * y_row + 4 * output, y_row
                _multiply_blocks((rows, *given, count - 1 - row, last - output, blocks))
        done(address, part)
        return
    step = _VALUES // block_values
    # Sums of all tiles of x and of the matrix, and the decoded rows, from the beginning of a line of the cache on.
    memory = np.empty(_OUTPUTS * (_ROWS * LANES + _VALUES) + 16, np.float32)
    sums = memory[-(memory.ctypes.data // 4) % 16 :]
    at_sums, tile_bytes, row_bytes = np.int64(sums.ctypes.data), 4 * TILE_ROWS * TILE_OUTPUTS * LANES, 4 * _VALUES
    decoded = at_sums + 4 * _OUTPUTS * _ROWS * LANES
    for first_row in range(0, count, _ROWS):
        last_row = min(count, first_row + _ROWS) - 1
        for first in range(begin, end, _OUTPUTS):
            last = min(first + _OUTPUTS, end) - 1
            sums[: (last_row - first_row + TILE_ROWS) * _OUTPUTS * LANES] = 0
            for block in range(0, blocks, step):
                number = min(step, blocks - block)
                ahead = step * block_bytes if block + step < blocks else _OUTPUTS * w_row - block * block_bytes
                for output in range(first, last + 1):
                    at = w + output * w_row + block * block_bytes
                    _decode_blocks((at, number, decoded + (output - first) * row_bytes, ahead))
                tile = at_sums
                for row in range(first_row, last_row + 1, TILE_ROWS):
                    from_x = x + row * x_row + block * block_values * 4
                    for output in range(first, last + 1, TILE_OUTPUTS):
                        from_tile = decoded + (output - first) * row_bytes, row_bytes, last - output
                        _add_floats((from_x, x_row, last_row - row, *from_tile, number * block_values // LANES, tile))
                        tile += tile_bytes
            tile = at_sums
            for row in range(first_row, last_row + 1, TILE_ROWS):
                for output in range(first, last + 1, TILE_OUTPUTS):
                    _finish((tile, y + row * y_row + 4 * output, y_row, last_row - row, last - output))
                    tile += tile_bytes
    done(address, part)


# ---- in LLVM's language ----


def _rows(builder: Any, first: Any, distance: Any, last: Any, count: int) -> list[Any]:
    """Addresses of `count` rows; the last one again, where there are fewer."""
    numbers = (INT64(i) for i in range(count))
    numbers = (builder.select(builder.icmp_signed("<", i, last), i, last) for i in numbers)
    return [builder.add(first, builder.mul(distance, number)) for number in numbers]


def _sums(builder: Any, rows: int, at: Any) -> list[list[Any]]:
    """Addresses of a tile's sums."""
    addresses = [builder.add(at, INT64(4 * LANES * number)) for number in range(rows * TILE_OUTPUTS)]
    return [addresses[i * TILE_OUTPUTS : (i + 1) * TILE_OUTPUTS] for i in range(rows)]


def _product(fmt: BlockFormat, builder: Any, rows: int, *given: Any) -> None:
    """The product of some rows of x with some rows of blocks: y[i, j] = x[i] · w[j]."""
    x, x_row, w, w_row, y, y_row, last, w_last, blocks = given

    def weights(at: list[Any]) -> Iterator[list[Any]]:
        for row in at:  # of the next tile
            _prefetch(builder, fmt, builder.add(row, builder.mul(w_row, INT64(TILE_OUTPUTS))))
        yield from zip(*(_weights(builder, fmt, block) for block in at))

    x_rows, w_rows = _rows(builder, x, x_row, last, rows), _rows(builder, w, w_row, w_last, TILE_OUTPUTS)
    zeros = [[ir.Constant(VECTOR, [0.0] * LANES)] * TILE_OUTPUTS] * rows
    sums = accumulate(builder, zeros, x_rows, w_rows, blocks, (fmt.block_values, fmt.block_bytes), weights)
    _store_totals(builder, sums, y, y_row, last, w_last)


@ir_statement()
def _add_floats(builder: Any, *given: Any) -> None:
    """Add products of some rows of x with some of a decoded tile to their sums."""
    x, x_row, last, w, w_row, w_last, steps, at = given

    def weights(at: list[Any]) -> Iterator[list[Any]]:
        yield [load(builder, row, VECTOR, 4) for row in at]

    x_rows, w_rows = _rows(builder, x, x_row, last, TILE_ROWS), _rows(builder, w, w_row, w_last, TILE_OUTPUTS)
    addresses = _sums(builder, TILE_ROWS, at)
    begun = [[load(builder, address, VECTOR, 4) for address in row] for row in addresses]
    results = accumulate(builder, begun, x_rows, w_rows, steps, (LANES, 4 * LANES), weights)
    for address, result in zip(chain(*addresses), chain(*results)):
        store(builder, result, address, 4)


@ir_statement()
def _finish(builder: Any, *given: Any) -> None:
    """Store the totals of a tile's sums."""
    at, y, y_row, last, w_last = given
    sums = [[load(builder, address, VECTOR, 4) for address in row] for row in _sums(builder, TILE_ROWS, at)]
    _store_totals(builder, sums, y, y_row, last, w_last)


def _store_totals(builder: Any, sums: list[list[Any]], y: Any, y_row: Any, last: Any, w_last: Any) -> None:
    vector, numbers = totals(builder, list(chain(*sums)))
    for i, row in enumerate(_rows(builder, y, y_row, last, len(sums))):
        for j, at in enumerate(_rows(builder, row, INT64(4), w_last, TILE_OUTPUTS)):
            lane = INT32(numbers.index(i * TILE_OUTPUTS + j))
            store(builder, builder.extract_element(vector, lane), at, 4)


def _decode(fmt: BlockFormat, builder: Any, packed: Any, blocks: Any, target: Any, ahead: Any) -> None:
    """Decode blocks of a row. ahead: bytes to those that come after them."""
    with cgutils.for_range(builder, blocks) as loop:
        block = builder.add(packed, builder.mul(loop.index, INT64(fmt.block_bytes)))
        to = builder.add(target, builder.mul(loop.index, INT64(4 * fmt.block_values)))
        _prefetch(builder, fmt, builder.add(block, ahead))
        for vector, weights in enumerate(_weights(builder, fmt, block)):
            store(builder, weights, builder.add(to, INT64(4 * LANES * vector)), 4)


def _prefetch(builder: Any, fmt: BlockFormat, block: Any) -> None:
    for line in range(0, fmt.block_bytes, 64):
        prefetch(builder, builder.add(block, INT64(line)))


def _weights(builder: Any, fmt: BlockFormat, block: Any) -> Iterator[Any]:
    """Vectors of a block's values, one after the other."""
    scales, offsets = (_factors(builder, fmt, block, factors) for factors in (fmt.scales, fmt.offsets))
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


def _factors(builder: Any, fmt: BlockFormat, block: Any, factors: tuple[Numbers, ...]) -> Any:
    """A vector of the products of factors; None where there are none."""
    product = None
    for numbers in factors:
        factor = _factor(builder, fmt, block, numbers)
        product = factor if product is None else builder.fmul(_lane(builder, product, 0, numbers.count), factor)
    return product


def _factor(builder: Any, fmt: BlockFormat, block: Any, numbers: Numbers) -> Any:
    if numbers.is_half:
        # Among its neighbours: one alone would be inserted in a register, and wait for what was in it.
        at = numbers.parts[0].bytes[0]
        first = min(at, fmt.block_bytes - 8)
        bits = load(builder, builder.add(block, INT64(first)), ir.VectorType(INT16, 4), 1)
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), 4))
        return _lane(builder, builder.fpext(halves, ir.VectorType(FLOAT, 4)), (at - first) // 2, 1)
    integers = _integers(builder, block, numbers, 0, numbers.count)
    if numbers.table is not None:
        return _looked_up(builder, numbers.table, integers)
    return _converted(builder, numbers, integers)


def _integers(builder: Any, block: Any, numbers: Numbers, first: int, count: int) -> Any:
    """A vector of some neighbouring numbers of a block, as their bits are."""
    kind, width = ir.VectorType(INT32, count), 0
    result = ir.Constant(kind, [0] * count)
    for part in numbers.parts:
        given, shifts = part.bytes[first : first + count], part.shifts[first : first + count]
        low = min(given)
        data = load(builder, builder.add(block, INT64(low)), ir.VectorType(_INT8, max(given) - low + 1), 1)
        lanes = [byte - low for byte in given]
        if lanes != list(range(data.type.count)):
            data = builder.shuffle_vector(data, data, ir.Constant(ir.VectorType(INT32, count), lanes))
        found = builder.lshr(builder.zext(data, kind), ir.Constant(kind, list(shifts)))
        found = builder.and_(found, ir.Constant(kind, [(1 << part.width) - 1] * count))
        result = builder.or_(result, builder.shl(found, ir.Constant(kind, [width] * count)))
        width += part.width
    return result


def _converted(builder: Any, numbers: Numbers, integers: Any) -> Any:
    """Integers as float32, or the numbers whose bits they are."""
    kind = integers.type
    if numbers.floating:
        return _floats(builder, numbers.floating, integers)
    if numbers.signed:
        shift = ir.Constant(kind, [32 - sum(part.width for part in numbers.parts)] * kind.count)
        integers = builder.ashr(builder.shl(integers, shift), shift)
    integers = builder.sub(integers, ir.Constant(kind, [numbers.zero] * kind.count))
    return builder.sitofp(integers, ir.VectorType(FLOAT, kind.count))


def _floats(builder: Any, name: str, bits: Any) -> Any:
    """Floating-point numbers in float32, by safetensors' name of their type."""
    kind, result = bits.type, ir.VectorType(FLOAT, bits.type.count)

    def shifted(value: Any, mask: int, shift: int) -> Any:
        value = builder.and_(value, ir.Constant(kind, [mask] * kind.count))
        return builder.shl(value, ir.Constant(kind, [shift] * kind.count))

    if name in ("F16", "F8_E5M2"):  # the second is the upper half of the first
        halves = builder.trunc(shifted(bits, 0xFFFF, 8 if name == "F8_E5M2" else 0), ir.VectorType(INT16, kind.count))
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), kind.count)), result)
    if name == "F8_E4M3":  # its exponent begins at 2^-7, that of float32 at 2^-127
        bits = builder.or_(shifted(bits, 0x80, 24), shifted(bits, 0x7F, 20))
        return builder.fmul(builder.bitcast(bits, result), ir.Constant(result, [2.0**120] * kind.count))
    return builder.bitcast(shifted(bits, 0xFFFF, 16) if name == "BF16" else bits, result)


def _looked_up(builder: Any, table: tuple[float, ...], integers: Any) -> Any:
    """What integers name in a table."""
    if HAS_AVX2 and LANES == 8 and (len(table), integers.type.count) == (16, 8):
        halves = (ir.Constant(VECTOR, table[first : first + 8]) for first in (0, 8))
        low, high = (call_llvm(builder, "llvm.x86.avx2.permps", VECTOR, half, integers) for half in halves)
        return builder.select(builder.icmp_signed("<", integers, ir.Constant(integers.type, [8] * 8)), low, high)
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
