"""Building blocks of the compiled loops, with code in LLVM's language (IR) for what Python cannot
say.

`Loop` compiles one, which begins with `part_of_thread` and `operands`, and ends with `done`.
`floats` and `integers` view memory. `ir_statement` and `ir_expression` make functions that loops
call, of functions that write IR. The others write such IR.

numba compiles them for the processor at hand, or for the one that NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES name.
Addresses and distances between rows are in bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, cached_property, reduce
from itertools import product
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from flexgen_helm.kernels.team import BEGUN, DONE
from flexgen_helm.progress import Message, report


def _has(feature: str) -> bool:
    """Return whether numba compiles for an extension of the processor, by LLVM's name."""
    chosen: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


HAS_AVX2, HAS_AVX512 = _has("avx2"), _has("avx512f")
# Tile registers and products of bfloat16 tiles, beside vectors of 16 numbers.
HAS_AMX = HAS_AVX512 and _has("amx-tile") and _has("amx-bf16")
# Numbers of a vector register.
LANES = 16 if HAS_AVX512 else 8
# Whether the processor itself converts IEEE's 16-bit numbers. Else LLVM calls a function that may
# not exist.
CONVERTS_HALVES = _has("f16c") or _has("neon")

INT64, INT32, INT16, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
int64 = types.int64
# Divisions are IEEE's: numba's default raises where a number is divided by zero, and a loop that C
# calls cannot.
njit: Callable[[Callable[..., Any]], Any] = numba.njit(error_model="numpy")


class Loop:
    """A function that OpenMP's threads call with one address, of its header
    (`team.run_on_threads`).
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        """Compile it for this processor, or take what an earlier process compiled."""
        # numba keeps what it compiled by name, until the function's file changes. It calls some of
        # other files: with the digest of all sources in its name, a change anywhere compiles it
        # again.
        self._function.__qualname__ = f"{self._function.__name__}_{_digest()}"
        try:
            return self._compile(cache=True)
        except (RuntimeError, OSError):  # numba may write nowhere, or what it writes has no room
            return self._compile(cache=False)
        except Exception as error:
            if type(error).__name__ not in ("EOFError", "UnpicklingError"):
                raise
            folder = Path(FunctionCache(self._function).cache_path)
            for path in folder.glob("*.nb[ic]"):
                path.unlink(missing_ok=True)
            report(
                Message(
                    f"what numba kept in {folder} was damaged ({type(error).__name__}); it "
                    "compiles again"
                )
            )
            return self._compile(cache=True)

    def _compile(self, cache: bool) -> int:
        compiled: Any = numba.cfunc(types.void(int64), cache=cache, error_model="numpy")(
            self._function
        )
        return int(compiled.address)


@cache
def _digest() -> str:
    """Return the digest of the sources of all loops."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def ir_statement(*choices: tuple[int, ...]) -> Callable[[Callable[..., None]], Any]:
    """Let loops call a function that writes IR; they pass a tuple of integers.

        @ir_statement((1, 2))
        def _add(builder, count, target): …    a loop calls _add((count, target)); count is 1 or 2

    choices: what the first integers may be. There is code for each combination, for which the
        function gets Python's numbers; of the integers behind them it gets values of the IR.
    """

    def decorate(emit: Callable[..., None]) -> Any:
        def call(typing: Any, integers: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
                given = [
                    context.cast(builder, value, kind, int64)
                    for value, kind in zip(cgutils.unpack_tuple(builder, arguments[0]), integers)
                ]
                for case in product(*choices):
                    equal = [
                        builder.icmp_signed("==", value, INT64(number))
                        for value, number in zip(given, case)
                    ]
                    with builder.if_then(reduce(builder.and_, equal, cgutils.true_bit)):
                        emit(builder, *case, *given[len(case) :])

            return types.void(integers), generate

        return intrinsic(call)

    return decorate


def ir_expression(function: Callable[..., Any], signature: Any) -> Any:
    """Let loops call function(builder, argument), which writes IR for a value."""

    def call(typing: Any, argument: Any) -> Any:
        return signature, lambda context, builder, _, arguments: function(builder, *arguments)

    return intrinsic(call)


pointer = ir_expression(
    lambda builder, address: builder.inttoptr(address, ir.IntType(8).as_pointer()),
    types.voidptr(int64),
)
# Call the function without arguments at an address; it returns 32 bits.
_call = ir_expression(
    lambda builder, address: builder.call(
        builder.inttoptr(address, ir.FunctionType(INT32, []).as_pointer()), []
    ),
    types.int32(int64),
)

# A 16-bit number of IEEE as float32, where the processor converts it.
half_to_float = ir_expression(
    lambda builder, bits: builder.fpext(builder.bitcast(bits, ir.HalfType()), FLOAT),
    types.float32(types.uint16),
)


@njit
def floats(address: Any, count: Any) -> Any:
    """View neighbouring float32 numbers."""
    return numba.carray(pointer(address), count, np.float32)


@njit
def integers(address: Any, count: Any) -> Any:
    """View neighbouring 64-bit integers."""
    return numba.carray(pointer(address), count, np.int64)


_HEADER_BYTES = 16  # of two numbers (`team.run_on_threads`)


def _operands(typing: Any, address: Any, count: Any) -> Any:
    """Return the arguments of a loop, behind its header, as a tuple of so many integers."""
    result = types.UniTuple(int64, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses = [
            builder.add(arguments[0], INT64(_HEADER_BYTES + 8 * number))
            for number in range(len(result))
        ]
        return context.make_tuple(
            builder, result, [load(builder, address, INT64, 8) for address in addresses]
        )

    return result(int64, count), generate


operands: Any = intrinsic(prefer_literal=True)(_operands)


@njit
def _state(address: Any, part: Any) -> Any:
    """View the word of a part, before the header."""
    return integers(address - 8 - 8 * part, 1)


@njit
def part_of_thread(address: Any) -> tuple[Any, Any]:
    """Return this thread's part of the work, and how many parts there are; a loop calls it
    first.
    """
    header = integers(address, 2)
    part, parts = np.int64(0), np.int64(1)
    if header[0] != 0:
        part, parts = np.int64(_call(header[0])), np.int64(_call(header[1]))
    _state(address, part)[0] = BEGUN
    return part, parts


@njit
def done(address: Any, part: Any) -> None:
    """Say that this thread's part is done; a loop calls it last, so one that raised is seen."""
    _state(address, part)[0] = DONE


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, in one instruction where the processor has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = alignment
    return value


def store(builder: Any, value: Any, address: Any, alignment: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = alignment


def spread(builder: Any, value: Any) -> Any:
    """A vector whose elements are all one value."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, INT32(0)), undefined, zeros
    )


def widen(builder: Any, address: Any, is_bfloat16: bool | int) -> Any:
    """Load a vector of 16-bit numbers as float32."""
    bits = load(builder, address, ir.VectorType(INT16, LANES), 2)
    if not is_bfloat16:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    wide = ir.VectorType(INT32, LANES)
    return builder.bitcast(
        builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * LANES)), VECTOR
    )


def call_llvm(builder: Any, name: str, result: Any, *given: Any) -> Any:
    """Call one of LLVM's intrinsic functions."""
    kind = ir.FunctionType(result, [value.type for value in given])
    return builder.call(
        builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name), given
    )


def prefetch(builder: Any, address: Any, locality: int = 3) -> None:
    """Ask for the line of the cache at an address, which may be none of ours; locality: 3 for the
    nearest cache.
    """
    line = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), line, INT32(0), INT32(locality), INT32(1))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose as many vectors as one has elements: each step exchanges halves of groups between
    two vectors.
    """
    size = 1
    while size < LANES:
        # Groups of `size` elements change places between vectors that are `size` apart.
        low = [lane - size + LANES if lane & size else lane for lane in range(LANES)]
        high = [lane + LANES if lane & size else lane + size for lane in range(LANES)]
        masks = [ir.Constant(ir.VectorType(INT32, LANES), lanes) for lanes in (low, high)]
        rows = list(rows)
        for first in (row for row in range(LANES) if not row & size):
            pair = rows[first], rows[first + size]
            rows[first], rows[first + size] = (
                builder.shuffle_vector(*pair, mask) for mask in masks
            )
        size *= 2
    return rows
