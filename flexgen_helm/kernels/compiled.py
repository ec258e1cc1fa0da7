"""The compiled functions themselves, by numba and parts of LLVM's language that Python cannot say.

All are in this file, because numba keeps what it compiled until the file of the function changes.

A function gets one address: of 64-bit numbers that `team.run_on_threads` writes, its header and then the arguments.
Addresses and distances between rows are in bytes.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, product
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_INT64, _INT32, _INT16, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_int64 = types.int64


@cache
def _has(feature: str) -> bool:
    """Return whether the processor has an extension, by LLVM's name."""
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


# Numbers of a vector register; there are 32 registers with AVX-512 and on ARM, else 16.
LANES = 16 if _has("avx512f") else 8
# Whether the processor itself converts IEEE's 16-bit numbers. Else LLVM calls a function that may not exist.
CONVERTS_HALVES = _has("f16c") or _has("neon")
# Rows of x and of the weight in one tile of `few_rows`: its sums, and what they are made of, stay in registers.
TILE_ROWS, TILE_OUTPUTS = (4, 4) if _has("avx512f") else (2, 4)

_VECTOR = ir.VectorType(_FLOAT, LANES)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, in one instruction where the processor has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = alignment
    return value


def _store(builder: Any, value: Any, address: Any, alignment: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = alignment


def _widen(builder: Any, address: Any, is_bfloat16: bool) -> Any:
    """Load a vector of 16-bit numbers as float32."""
    if not is_bfloat16:
        return builder.fpext(_load(builder, address, ir.VectorType(ir.HalfType(), LANES), 2), _VECTOR)
    wide = ir.VectorType(_INT32, LANES)
    bits = builder.zext(_load(builder, address, ir.VectorType(_INT16, LANES), 2), wide)
    return builder.bitcast(builder.shl(bits, ir.Constant(wide, [16] * LANES)), _VECTOR)


def _total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's elements, in any order."""
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    return builder.call(function, [ir.Constant(_FLOAT, 0.0), vector], fastmath=("reassoc",))


@intrinsic
def _call(typing_context: Any, address: Any) -> Any:
    """Call the function without arguments at an address; it returns 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], ir.FunctionType(_INT32, []).as_pointer()), [])

    return types.int32(_int64), generate


@numba.njit
def _share(data: Any, count: int) -> tuple[int, int]:
    """First and last of `count` equal pieces of work that are this thread's."""
    if data[0] == 0:
        part, parts = data[2], data[3]
    else:
        part, parts = np.int64(_call(data[0])), np.int64(_call(data[1]))  # type: ignore[call-arg]
    return count * part // parts, count * (part + 1) // parts


def _tile(builder: Any, rows: int, outputs: int, is_bfloat16: bool, arguments: Any) -> None:
    """Emit the product of some rows of x with some rows of a 16-bit matrix: y[i, j] = x[i] · w[j]."""
    x, x_row, w, w_row, width, y, y_row = arguments
    x_rows = [builder.add(x, builder.mul(x_row, _INT64(i))) for i in range(rows)]
    w_rows = [builder.add(w, builder.mul(w_row, _INT64(j))) for j in range(outputs)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    column = builder.phi(_INT64)
    column.add_incoming(_INT64(0), before)
    sums = [[builder.phi(_VECTOR) for _ in range(outputs)] for _ in range(rows)]
    in_16_bits, in_32_bits = builder.mul(column, _INT64(2)), builder.mul(column, _INT64(4))
    weights = [_widen(builder, builder.add(row, in_16_bits), is_bfloat16) for row in w_rows]
    values = [_load(builder, builder.add(row, in_32_bits), _VECTOR, 4) for row in x_rows]
    results = [[_multiply_add(builder, value, weight, one) for weight, one in zip(weights, own)]
               for value, own in zip(values, sums)]  # fmt: skip
    for one, result in zip(chain(*sums), chain(*results)):
        one.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
        one.add_incoming(result, loop)
    following = builder.add(column, _INT64(LANES))
    column.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, width), loop, behind)
    builder.position_at_end(behind)
    for i, own in enumerate(results):
        row = builder.add(y, builder.mul(y_row, _INT64(i)))
        for j, result in enumerate(own):
            _store(builder, _total(builder, result), builder.add(row, _INT64(4 * j)), 4)


@intrinsic
def _product(  # numba passes the first argument
    typing: Any, kind: Any, rows: Any, outputs: Any, x: Any, x_row: Any, w: Any, w_row: Any, width: Any, y: Any, to: Any
) -> Any:  # fmt: skip
    """A tile of up to `TILE_ROWS` rows and 1 or `TILE_OUTPUTS` outputs; kind: 1 for bfloat16, 0 for float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, operands = arguments[:3], arguments[3:]
        kinds = (0, 1) if CONVERTS_HALVES else (1,)
        for case in product(kinds, range(1, TILE_ROWS + 1), (1, TILE_OUTPUTS)):
            equal = [builder.icmp_signed("==", own, _INT64(number)) for own, number in zip(given, case)]
            with builder.if_then(builder.and_(builder.and_(*equal[:2]), equal[2])):
                _tile(builder, case[1], case[2], bool(case[0]), operands)

    return types.void(*[_int64] * 10), generate


def few_rows(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width] in 16 bits.

    Arguments: kind of w (`_product`), x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs,
    width (whole vectors).
    """
    data = numba.carray(address, 14, np.int64)
    kind, x, x_row, w, w_row = data[4], data[5], data[6], data[7], data[8]
    y, y_row, count, outputs, width = data[9], data[10], data[11], data[12], data[13]
    first, last = _share(data, (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS)
    for output in range(first * TILE_OUTPUTS, min(last * TILE_OUTPUTS, outputs), TILE_OUTPUTS):
        step = TILE_OUTPUTS if output + TILE_OUTPUTS <= outputs else 1
        for row in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - row)
            for own in range(output, min(output + TILE_OUTPUTS, outputs), step):
                target = y + row * y_row + 4 * own
                x_at, w_at = x + row * x_row, w + own * w_row
                _product(kind, rows, step, x_at, x_row, w_at, w_row, width, target, y_row)  # type: ignore[call-arg]


@cache
def address_of(function: Any) -> int:
    """Compile a function for this processor, or take what an earlier process compiled; return its address."""
    compiled: Any = numba.cfunc(types.void(types.CPointer(_int64)), cache=True)(function)
    return int(compiled.address)
