"""Loops of `product_loop` for rows of blocks (`BlockFormat`): the code that decodes a block, in
LLVM's language (IR), written from the format's record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from llvmlite import ir

from flexgen_helm.kernels import product_loop
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
    load,
)
from flexgen_helm.kernels.product_loop import ROWS, Stored
from flexgen_helm.quant.formats import BlockFormat, Numbers

_INT8 = ir.IntType(8)


@cache
def loops(fmt: BlockFormat) -> tuple[Loop, Loop]:
    """Return loops that multiply and decode; raises `NotImplementedError` where the processor lacks
    16-bit numbers.
    """
    if not CONVERTS_HALVES and any(
        n.floating in ("F16", "F8_E5M2") for n in (fmt.codes, *fmt.scales, *fmt.offsets)
    ):
        raise NotImplementedError("this processor does not convert 16-bit numbers")
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(fmt).encode()).hexdigest()[:16]
    takes_long = len(fmt.codes.parts) > 1 or fmt.codes.floating or not HAS_AVX512
    few_rows = ROWS if takes_long else 2 * ROWS
    name, weights = f"{fmt.name}_{digest}", partial(_weights, fmt)
    return product_loop.loops(Stored(name, fmt.block_values, fmt.block_bytes, weights, few_rows))


def _weights(fmt: BlockFormat, builder: Any, block: Any) -> Iterator[Any]:
    """Vectors of a block's values, one after the other."""
    scales, offsets, zeros = (
        _factors(builder, fmt, block, factors) for factors in (fmt.scales, fmt.offsets, fmt.zeros)
    )
    bits = sum(part.width for part in fmt.codes.parts)
    codes = fmt.codes.table or tuple(float(code - fmt.codes.zero) for code in range(1 << bits))
    by_table = fmt.codes.table is not None or HAS_AVX512 and bits <= 4
    group, table = -1, None

    def scaled(values: Any) -> Any:
        if zeros is not None:
            values = builder.fsub(values, _lane(builder, zeros, group))
        values = builder.fmul(values, _lane(builder, scales, group))
        if fmt.factor != 1:
            values = builder.fmul(values, ir.Constant(VECTOR, [fmt.factor] * LANES))
        if offsets is None:
            return values
        return (builder.fsub if fmt.subtracts else builder.fadd)(
            values, _lane(builder, offsets, group)
        )

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
        if product is None:
            product = factor
        elif fmt.divides:
            product = builder.fdiv(factor, _lane(builder, product, 0, numbers.count))
        else:
            product = builder.fmul(_lane(builder, product, 0, numbers.count), factor)
    return product


def _factor(builder: Any, fmt: BlockFormat, block: Any, numbers: Numbers) -> Any:
    if numbers.floating == "F16" and numbers.count == 1:
        # Among its neighbours: one alone would be inserted in a register, and wait for what was in
        # it.
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
        data = load(
            builder, builder.add(block, INT64(low)), ir.VectorType(_INT8, max(given) - low + 1), 1
        )
        lanes = [byte - low for byte in given]
        if lanes != list(range(data.type.count)):
            data = builder.shuffle_vector(
                data, data, ir.Constant(ir.VectorType(INT32, count), lanes)
            )
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
        halves = builder.trunc(
            shifted(bits, 0xFFFF, 8 if name == "F8_E5M2" else 0), ir.VectorType(INT16, kind.count)
        )
        return builder.fpext(
            builder.bitcast(halves, ir.VectorType(ir.HalfType(), kind.count)), result
        )
    if name == "F8_E4M3":  # its exponent begins at 2^-7, that of float32 at 2^-127
        bits = builder.or_(shifted(bits, 0x80, 24), shifted(bits, 0x7F, 20))
        return builder.fmul(
            builder.bitcast(bits, result), ir.Constant(result, [2.0**120] * kind.count)
        )
    return builder.bitcast(shifted(bits, 0xFFFF, 16) if name == "BF16" else bits, result)


def _looked_up(builder: Any, table: tuple[float, ...], integers: Any) -> Any:
    """What integers name in a table."""
    if HAS_AVX2 and LANES == 8 and (len(table), integers.type.count) == (16, 8):
        halves = (ir.Constant(VECTOR, table[first : first + 8]) for first in (0, 8))
        low, high = (
            call_llvm(builder, "llvm.x86.avx2.permps", VECTOR, half, integers) for half in halves
        )
        return builder.select(
            builder.icmp_signed("<", integers, ir.Constant(integers.type, [8] * 8)), low, high
        )
    kind = ir.ArrayType(FLOAT, len(table))
    name = f"table_{hashlib.sha256(repr(table).encode()).hexdigest()[:16]}"
    constant = builder.module.globals.get(name)
    if constant is None:
        constant = ir.GlobalVariable(builder.module, kind, name)
        constant.linkage = "internal"
        constant.global_constant = True
        constant.initializer = ir.Constant(kind, table)
    result = ir.Constant(ir.VectorType(FLOAT, integers.type.count), ir.Undefined)
    for lane in range(integers.type.count):
        number = builder.extract_element(integers, INT32(lane))
        value = builder.load(builder.gep(constant, [INT32(0), number], inbounds=True))
        result = builder.insert_element(result, value, INT32(lane))
    return result


def _lane(builder: Any, vector: Any, lane: int, count: int = LANES) -> Any:
    """A vector whose elements are all one of another's."""
    return builder.shuffle_vector(
        vector, vector, ir.Constant(ir.VectorType(INT32, count), [lane] * count)
    )
