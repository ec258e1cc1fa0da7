"""Building blocks of the compiled loops, with code in LLVM's language (IR) for what Python cannot
say.

`Loop` compiles one. `floats`, `integers` and `records` view memory. `ir_statement` and
`ir_expression` make functions that loops call, of functions that write IR. The others write such
IR.

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
from types import FunctionType
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

        @partial(Loop, namedtuple("Row", "x width"))
        def double(given, part, parts): …           given.x and given.width are integers

    arguments: names what it is given behind the header.
    body: also gets the number of this thread's part of the work, and of parts.
    """

    def __init__(self, arguments: Any, body: Any) -> None:
        self._arguments, self.body = arguments, body

    @cached_property
    def address(self) -> int:
        """Compile it for this processor, or take what an earlier process compiled."""
        # numba keeps what it compiled by name, until this file changes. With the digest of all
        # sources in its name, a change anywhere compiles it again. What it kept of two functions
        # of one name, and loads into one process, calls one of them.
        source = Path(self.body.__code__.co_filename)
        name = f"{source.stem}_{self.body.__name__}_{_digest(source.parent)}"
        self.body.__qualname__ = name
        names = {"_body": njit(self.body), "_arguments": _reader_of(self._arguments)}
        entry = FunctionType(_entry.__code__, {**globals(), **names}, name)
        entry.__qualname__ = name
        try:
            return self._compile(entry, cache=True)
        except (RuntimeError, OSError):  # numba may write nowhere, or what it writes has no room
            return self._compile(entry, cache=False)
        except Exception as error:
            if type(error).__name__ not in ("EOFError", "UnpicklingError"):
                raise
            folder = Path(FunctionCache(entry).cache_path)
            for path in folder.glob("*.nb[ic]"):
                path.unlink(missing_ok=True)
            report(
                Message(
                    f"what numba kept in {folder} was damaged ({type(error).__name__}); it "
                    "compiles again"
                )
            )
            return self._compile(entry, cache=True)

    def _compile(self, entry: Any, cache: bool) -> int:
        compiled: Any = numba.cfunc(types.void(int64), cache=cache, error_model="numpy")(entry)
        return int(compiled.address)


@cache
def _digest(folder: Path) -> str:
    """Return the digest of the sources that loops in a folder call."""
    sources = sorted({*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")})
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


# What `Loop` sets for a loop.
_body: Any = None
_arguments: Any = None


def _entry(address: Any) -> None:
    """What C calls. A part that is not done in the end has raised."""
    header = integers(address, 2)
    part, parts = np.int64(0), np.int64(1)
    if header[0] != 0:
        part, parts = np.int64(_call(header[0])), np.int64(_call(header[1]))
    # the word of a part, before the header
    state = integers(address - 8 - 8 * part, 1)
    state[0] = BEGUN
    _body(_arguments(address), part, parts)
    state[0] = DONE


def ir_statement(*choices: tuple[int, ...]) -> Callable[[Callable[..., None]], Any]:
    """Let loops call a function that writes IR; they pass a tuple of integers, or a named one.

        @ir_statement((1, 2))
        def _add(builder, count, target): …    a loop calls _add((count, target)); count is 1 or 2

    choices: what the first integers may be. There is code for each combination, for which the
        function gets Python's numbers; of the integers behind them it gets values of the IR.
    A named tuple is given as one, others as arguments.
    """

    def decorate(emit: Callable[..., None]) -> Any:
        def call(typing: Any, integers: Any) -> Any:
            named = getattr(integers, "instance_class", None)

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
                        values = *case, *given[len(case) :]
                        emit(builder, *(values if named is None else [named(*values)]))

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


@njit
def records(address: Any, count: Any, kind: Any) -> Any:
    """View neighbouring records of a structured dtype."""
    return numba.carray(pointer(address), count, kind)


_HEADER_BYTES = 16  # of two numbers (`team.run_on_threads`)


def _reader_of(arguments: Any) -> Any:
    """Return a function that reads the arguments of a loop, behind its header."""
    result = types.NamedUniTuple(int64, len(arguments._fields), arguments)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        first = builder.add(given[0], INT64(_HEADER_BYTES))
        values = [
            load(builder, builder.add(first, INT64(8 * number)), INT64, 8)
            for number in range(len(result))
        ]
        return context.make_tuple(builder, result, values)

    return intrinsic(lambda typing, address: (result(int64), generate))


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
