"""What all compiled loops are made of: loads, stores and arithmetic of vectors, in LLVM's language.

numba compiles the loops. Python cannot say how a vector is loaded, so intrinsics of numba emit it.
Addresses and distances between rows are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexgen_helm.kernels.processor import LANES
from flexgen_helm.kernels.team import BEGUN, DONE

INT64, INT32, INT16, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
int64 = types.int64
# numba passes the first argument of an intrinsic, its typing context, itself.
emitted: Callable[[Callable[..., Any]], Any] = intrinsic

VECTOR = ir.VectorType(FLOAT, LANES)
# Divisions are IEEE's: numba's default raises where a number is divided by zero, and a loop that C calls cannot.
njit: Callable[[Callable[..., Any]], Any] = numba.njit(error_model="numpy")


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, in one instruction where the processor has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = alignment
    return value


def store(builder: Any, value: Any, address: Any, alignment: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = alignment


def widen(builder: Any, address: Any, is_bfloat16: bool) -> Any:
    """Load a vector of 16-bit numbers as float32."""
    return _as_float32(builder, load(builder, address, ir.VectorType(INT16, LANES), 2), is_bfloat16)


def _as_float32(builder: Any, bits: Any, is_bfloat16: bool | int) -> Any:
    """The bits of a vector of 16-bit numbers as float32."""
    if not is_bfloat16:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    wide = ir.VectorType(INT32, LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * LANES)), VECTOR)


def prefetch(builder: Any, address: Any, locality: int = 3) -> None:
    """Ask for the line of the cache at an address, which may be none of ours; locality: 3 for the nearest cache."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT32, INT32, INT32])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    place = builder.inttoptr(address, ir.IntType(8).as_pointer())
    builder.call(function, [place, INT32(0), INT32(locality), INT32(1)])


def summed(builder: Any, vector: Any) -> Any:
    """The sum of a vector's elements, in any order."""
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    kind = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    return builder.call(function, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))


@emitted
def _call(typing_context: Any, address: Any) -> Any:
    """Call the function without arguments at an address; it returns 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], ir.FunctionType(INT32, []).as_pointer()), [])

    return types.int32(int64), generate


@emitted
def _mark(typing_context: Any, address: Any, part: Any, state: Any) -> Any:
    """Say in the words before the header how far this thread is (`team.run_on_threads`)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        address, part, state = arguments
        builder.store(state, builder.gep(address, [builder.sub(INT64(-1), part)]))

    return types.void(types.CPointer(int64), int64, int64), generate


@njit
def part_of_thread(address: Any) -> tuple[Any, Any]:
    """Return this thread's part of the work, and how many parts there are; a loop calls it first."""
    header = numba.carray(address, 4, np.int64)
    part, parts = header[2], header[3]
    if header[0] != 0:
        part, parts = np.int64(_call(header[0])), np.int64(_call(header[1]))
    _mark(address, part, BEGUN)
    return part, parts


@njit
def done(address: Any, part: Any) -> None:
    """Say that this thread's part is done; a loop calls it last, so one that raised is seen."""
    _mark(address, part, DONE)


def spread(builder: Any, value: Any) -> Any:
    """A vector whose elements are all one value."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, value, INT32(0)), undefined, zeros)


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def exponential(builder: Any, x: Any) -> Any:
    """e^x for x <= 0 to about one unit in the last place; 0 below -87 (Moshier, Cephes: `expf`)."""
    name = f"llvm.floor.v{LANES}f32"
    kind = ir.FunctionType(VECTOR, [VECTOR])
    floor = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    power = builder.call(floor, [multiply_add(builder, x, constant(1.4426950408889634), constant(0.5))])
    rest = multiply_add(builder, power, constant(-0.693359375), x)
    rest = multiply_add(builder, power, constant(2.12194440e-4), rest)
    value = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        value = multiply_add(builder, value, rest, constant(factor))
    integers = ir.VectorType(INT32, LANES)
    exponent = builder.add(builder.fptosi(power, integers), ir.Constant(integers, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * LANES)), VECTOR)
    is_least = builder.fcmp_ordered("<", x, constant(-87.0))
    return builder.select(is_least, constant(0.0), builder.fmul(value, scale))


def masked_halves(builder: Any, address: Any, is_bfloat16: bool, width: Any) -> Any:
    """Load the first `width` elements of a vector of 16-bit numbers, and zeros, as float32."""
    lanes = ir.Constant(ir.VectorType(INT32, LANES), list(range(LANES)))
    seen = builder.icmp_signed("<", lanes, spread(builder, builder.trunc(width, INT32)))
    vector, flags = ir.VectorType(INT16, LANES), ir.VectorType(ir.IntType(1), LANES)
    name = f"llvm.masked.load.v{LANES}i16.p0"
    signature = ir.FunctionType(vector, [vector.as_pointer(), INT32, flags, vector])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name=name)
    zeros = ir.Constant(vector, [0] * LANES)
    pointer = builder.inttoptr(address, vector.as_pointer())
    return _as_float32(builder, builder.call(function, [pointer, INT32(2), seen, zeros]), is_bfloat16)


def tanh(builder: Any, x: Any) -> Any:
    """The hyperbolic tangent to a few units in the last place (Eigen's rational approximation)."""
    bound = constant(7.90531110763549805)
    below = constant(-7.90531110763549805)
    x = builder.select(builder.fcmp_ordered(">", x, bound), bound, x)
    x = builder.select(builder.fcmp_ordered("<", x, below), below, x)
    square = builder.fmul(x, x)
    upper, lower = constant(-2.76076847742355e-16), constant(1.19825839466702e-06)
    for factor in (2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
                   6.37261928875436e-04, 4.89352455891786e-03):  # fmt: skip
        upper = multiply_add(builder, upper, square, constant(factor))
    for factor in (1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03):
        lower = multiply_add(builder, lower, square, constant(factor))
    return builder.fdiv(builder.fmul(x, upper), lower)


@emitted
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(int64), generate


@njit
def floats(address: Any, count: Any) -> Any:
    """View `count` neighbouring float32 numbers at an address."""
    return numba.carray(_pointer(address), count)


def _reader(kind: Any, result: Any) -> Any:
    @emitted
    def get(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return load(builder, arguments[0], kind, kind_bytes)

        return result(int64), generate

    kind_bytes = 8 if kind is INT64 else 4
    return get


def _writer(kind: Any, given: Any) -> Any:
    @emitted
    def put(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            stored = builder.trunc(arguments[1], kind) if kind is INT32 else arguments[1]
            store(builder, stored, arguments[0], 8 if kind is INT64 else 4)

        return types.void(int64, given), generate

    return put


# Of the number at an address; `put_integer` stores the lower 32 bits.
get_float, get_integer = _reader(FLOAT, types.float32), _reader(INT64, int64)
put_float, put_integer, put_address = _writer(FLOAT, types.float32), _writer(INT32, int64), _writer(INT64, int64)
