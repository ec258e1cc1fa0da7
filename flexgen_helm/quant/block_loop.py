"""Loops of `product_loop` for rows of blocks: writes the code that decodes a block, in LLVM's
intermediate representation (IR), from the `BlockFormat`.
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
    call_llvm,
    load,
    vector_of,
)
from flexgen_helm.kernels.product_loop import REGISTER_ROWS, MatrixLoops, RowLayout
from flexgen_helm.quant.formats import BlockFormat, Numbers

_INT8 = ir.IntType(8)


@cache
def loops_for(fmt: BlockFormat) -> MatrixLoops:
    """Return the loops that multiply with a format's rows, and decode them.

    Raises `NotImplementedError` for FP16 numbers where the processor does not convert them.
    """
    if not CONVERTS_HALVES and any(
        n.floating in ("F16", "F8_E5M2") for n in (fmt.codes, *fmt.scales, *fmt.offsets)
    ):
        raise NotImplementedError("this processor does not convert 16-bit numbers")
    # the loops' name must change with this file, whose code numba does not see
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(fmt).encode()).hexdigest()[:16]
    # codes whose decoding costs more than the sums of twice the rows would save
    is_slow = len(fmt.codes.parts) > 1 or fmt.codes.floating or not HAS_AVX512
    few_rows = REGISTER_ROWS if is_slow else 2 * REGISTER_ROWS
    name, weights = f"{fmt.name}_{digest}", partial(_block_values, fmt)
    stored = RowLayout(name, fmt.block_values, fmt.block_bytes, weights, few_rows)
    return product_loop.loops_for(stored)


def _block_values(fmt: BlockFormat, builder: Any, block: Any) -> Iterator[Any]:
    """Write the IR that decodes the block at an address; yield its values, a vector at a time."""
    scales, offsets, zeros = (
        _products(builder, fmt, block, factors) for factors in (fmt.scales, fmt.offsets, fmt.zeros)
    )
    code_bits = sum(part.width for part in fmt.codes.parts)
    codes = fmt.codes.table or tuple(float(code - fmt.codes.zero) for code in range(1 << code_bits))
    by_table = fmt.codes.table is not None or HAS_AVX512 and code_bits <= 4
    # `group`: the values that share a scale, of `LANES` at least
    group, table = -1, None

    def scaled(values: Any) -> Any:
        if zeros is not None:
            values = builder.fsub(values, _broadcast(builder, zeros, group))
        values = builder.fmul(values, _broadcast(builder, scales, group))
        if fmt.factor != 1:
            values = builder.fmul(values, vector_of(fmt.factor))
        if offsets is None:
            return values
        return (builder.fsub if fmt.subtracts else builder.fadd)(
            values, _broadcast(builder, offsets, group)
        )

    for first in range(0, fmt.block_values, LANES):
        integers = _integers(builder, block, fmt.codes, first, LANES)
        if first * scales.type.count // fmt.block_values > group:
            group += 1
            # The 16 values that codes of this group can have, scaled. The integers' lowest 4 bits
            # permute them.
            if HAS_AVX512 and by_table:
                table = scaled(ir.Constant(VECTOR, list(codes) * (16 // len(codes))))
        if table is not None:
            yield call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, table, integers)
        elif by_table:
            yield scaled(_looked_up(builder, codes, integers))
        else:
            yield scaled(_as_floats(builder, fmt.codes, integers))


def _products(builder: Any, fmt: BlockFormat, block: Any, factors: tuple[Numbers, ...]) -> Any:
    """Return a vector of scales, offsets or zero points, which are products of factors; None where
    there are none.
    """
    product = None
    for numbers in factors:
        factor = _numbers(builder, fmt, block, numbers)
        if product is None:
            product = factor
        elif fmt.divides:  # the first factor divides the second
            product = builder.fdiv(factor, _broadcast(builder, product, 0, numbers.count))
        else:
            product = builder.fmul(_broadcast(builder, product, 0, numbers.count), factor)
    return product


def _numbers(builder: Any, fmt: BlockFormat, block: Any, numbers: Numbers) -> Any:
    """Return all numbers of an array in the block at an address, as a vector of float32."""
    if numbers.floating == "F16" and numbers.count == 1:
        # Loaded with its neighbours, four in a vector: one alone would be inserted in a register,
        # and wait for the register's previous value.
        first_byte = numbers.parts[0].bytes[0]
        loaded_from = min(first_byte, fmt.block_bytes - 8)
        bits = load(builder, builder.add(block, INT64(loaded_from)), ir.VectorType(INT16, 4), 1)
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), 4))
        return _broadcast(
            builder,
            builder.fpext(halves, ir.VectorType(FLOAT, 4)),
            (first_byte - loaded_from) // 2,
            1,
        )
    integers = _integers(builder, block, numbers, 0, numbers.count)
    if numbers.table is not None:
        return _looked_up(builder, numbers.table, integers)
    return _as_floats(builder, numbers, integers)


def _integers(builder: Any, block: Any, numbers: Numbers, first: int, count: int) -> Any:
    """Return the numbers first … first + count - 1 of a block as a vector of integers, before any
    conversion.
    """
    vector_type, num_bits = ir.VectorType(INT32, count), 0
    result = ir.Constant(vector_type, [0] * count)
    for part in numbers.parts:
        byte_numbers, shifts = part.bytes[first : first + count], part.shifts[first : first + count]
        first_byte = min(byte_numbers)
        loaded = load(
            builder,
            builder.add(block, INT64(first_byte)),
            ir.VectorType(_INT8, max(byte_numbers) - first_byte + 1),
            1,
        )
        lanes = [byte - first_byte for byte in byte_numbers]
        if lanes != list(range(loaded.type.count)):
            loaded = builder.shuffle_vector(
                loaded, loaded, ir.Constant(ir.VectorType(INT32, count), lanes)
            )
        bits = builder.lshr(
            builder.zext(loaded, vector_type), ir.Constant(vector_type, list(shifts))
        )
        bits = builder.and_(bits, ir.Constant(vector_type, [(1 << part.width) - 1] * count))
        result = builder.or_(
            result, builder.shl(bits, ir.Constant(vector_type, [num_bits] * count))
        )
        num_bits += part.width
    return result


def _as_floats(builder: Any, numbers: Numbers, integers: Any) -> Any:
    """Return integers as float32, or the floating-point numbers whose bits they are."""
    vector_type = integers.type
    if numbers.floating:
        return _floats(builder, numbers.floating, integers)
    if numbers.signed:
        shift = ir.Constant(
            vector_type, [32 - sum(part.width for part in numbers.parts)] * vector_type.count
        )
        integers = builder.ashr(builder.shl(integers, shift), shift)
    integers = builder.sub(integers, ir.Constant(vector_type, [numbers.zero] * vector_type.count))
    return builder.sitofp(integers, ir.VectorType(FLOAT, vector_type.count))


def _floats(builder: Any, dtype: str, bits: Any) -> Any:
    """Return floating-point numbers as float32; dtype: what safetensors calls it."""
    vector_type, result = bits.type, ir.VectorType(FLOAT, bits.type.count)

    def shifted(value: Any, mask: int, shift: int) -> Any:
        value = builder.and_(value, ir.Constant(vector_type, [mask] * vector_type.count))
        return builder.shl(value, ir.Constant(vector_type, [shift] * vector_type.count))

    if dtype in ("F16", "F8_E5M2"):  # the second is the upper half of the first
        halves = builder.trunc(
            shifted(bits, 0xFFFF, 8 if dtype == "F8_E5M2" else 0),
            ir.VectorType(INT16, vector_type.count),
        )
        return builder.fpext(
            builder.bitcast(halves, ir.VectorType(ir.HalfType(), vector_type.count)), result
        )
    if dtype == "F8_E4M3":  # its exponent begins at 2^-7, that of float32 at 2^-127
        bits = builder.or_(shifted(bits, 0x80, 24), shifted(bits, 0x7F, 20))
        return builder.fmul(
            builder.bitcast(bits, result), ir.Constant(result, [2.0**120] * vector_type.count)
        )
    return builder.bitcast(shifted(bits, 0xFFFF, 16) if dtype == "BF16" else bits, result)


def _looked_up(builder: Any, table: tuple[float, ...], integers: Any) -> Any:
    """Return the numbers of a table that integers are the indices of."""
    if HAS_AVX2 and LANES == 8 and (len(table), integers.type.count) == (16, 8):
        halves = (ir.Constant(VECTOR, table[first : first + 8]) for first in (0, 8))
        low, high = (
            call_llvm(builder, "llvm.x86.avx2.permps", VECTOR, half, integers) for half in halves
        )
        return builder.select(
            builder.icmp_signed("<", integers, ir.Constant(integers.type, [8] * 8)), low, high
        )
    array_type = ir.ArrayType(FLOAT, len(table))
    name = f"table_{hashlib.sha256(repr(table).encode()).hexdigest()[:16]}"
    constant = builder.module.globals.get(name)
    if constant is None:
        constant = ir.GlobalVariable(builder.module, array_type, name)
        constant.linkage = "internal"
        constant.global_constant = True
        constant.initializer = ir.Constant(array_type, table)
    result = ir.Constant(ir.VectorType(FLOAT, integers.type.count), ir.Undefined)
    for lane in range(integers.type.count):
        number = builder.extract_element(integers, INT32(lane))
        value = builder.load(builder.gep(constant, [INT32(0), number], inbounds=True))
        result = builder.insert_element(result, value, INT32(lane))
    return result


def _broadcast(builder: Any, vector: Any, lane: int, count: int = LANES) -> Any:
    """Return a vector whose `count` elements are all one element of a vector."""
    return builder.shuffle_vector(
        vector, vector, ir.Constant(ir.VectorType(INT32, count), [lane] * count)
    )
