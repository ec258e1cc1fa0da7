"""Building blocks of the compiled loops: Python that numba compiles, with code in LLVM's
intermediate representation (IR) for what Python cannot say, such as vectors.

    Loop                            a compiled loop, which threads call
    floats, integers, records       called in a loop: view memory as an array
    ir_statement, ir_expression     turn a function that writes IR into one that a loop can call
    the others                      write IR at a builder's position, and return its value

numba compiles for the processor at hand, or for the one that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
name. Addresses and strides are in bytes.
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
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is not None:
        return f"+{feature}" in features.split(",")
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
    """A function that each thread of OpenMP's team calls, with the address of a header and the
    arguments behind it (`team.run_on_threads`).

        @partial(Loop, namedtuple("RowArgs", "x width"))
        def double(args, thread, threads): …        args.x and args.width are integers

    arguments: a named tuple's class; all its fields are 64-bit integers.
    body: the function, of the arguments, the number of the calling thread, and that of all threads,
        by which it chooses its part of the work.
    """

    def __init__(self, arguments: Any, body: Any) -> None:
        self._arguments, self.body = arguments, body

    @cached_property
    def address(self) -> int:
        """Compile it for this processor, or load what an earlier process compiled."""
        # numba caches code on disk by the function's name, until its file changes. The digest of
        # all sources in the name compiles it again when another file changes. Names must differ: of
        # two cached functions of one name, loaded into one process, one would be called for both.
        source = Path(self.body.__code__.co_filename)
        name = f"{source.stem}_{self.body.__name__}_{_digest(source.parent)}"
        self.body.__qualname__ = name
        names = {"_body": njit(self.body), "_arguments": _reader_of(self._arguments)}
        entry = FunctionType(_entry.__code__, {**globals(), **names}, name)
        entry.__qualname__ = name
        try:
            return self._compile(entry, cache=True)
        except (RuntimeError, OSError):  # numba finds no folder to write to, or the disk is full
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


# Globals of `_entry`, which `Loop` replaces by those of one loop.
_body: Any = None
_arguments: Any = None


def _entry(address: Any) -> None:
    """Run a loop's body on the calling thread; the address is that of the header. A status that is
    not `DONE` in the end says that the body has raised.
    """
    header = integers(address, 2)
    thread, threads = np.int64(0), np.int64(1)
    if header[0] != 0:
        thread, threads = np.int64(_call(header[0])), np.int64(_call(header[1]))
    # the statuses lie before the header, thread 0 last
    status = integers(address - 8 - 8 * thread, 1)
    status[0] = BEGUN
    _body(_arguments(address), thread, threads)
    status[0] = DONE


def ir_statement(*choices: tuple[int, ...]) -> Callable[[Callable[..., None]], Any]:
    """Let loops call a function that writes IR. A loop passes one tuple of integers.

        @ir_statement((1, 2))
        def _add(builder, count, target): …    a loop calls _add((count, target)); count is 1 or 2

    choices: the values that each of the first integers may have. The function is called for each
        combination and gets these as Python integers, the other integers as values of the IR; the
        loop runs the code of the combination that it passes.
    The function gets a named tuple as one argument, the elements of a plain one as several.
    """

    def decorate(write: Callable[..., None]) -> Any:
        def typer(typing: Any, element_types: Any) -> Any:
            named_tuple = getattr(element_types, "instance_class", None)

            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
                values = [
                    context.cast(builder, value, type_, int64)
                    for value, type_ in zip(
                        cgutils.unpack_tuple(builder, arguments[0]), element_types
                    )
                ]
                for choice in product(*choices):
                    equal = [
                        builder.icmp_signed("==", value, INT64(number))
                        for value, number in zip(values, choice)
                    ]
                    with builder.if_then(reduce(builder.and_, equal, cgutils.true_bit)):
                        given = *choice, *values[len(choice) :]
                        write(builder, *(given if named_tuple is None else [named_tuple(*given)]))

            return types.void(element_types), generate

        return intrinsic(typer)

    return decorate


def ir_expression(function: Callable[..., Any], signature: Any) -> Any:
    """Let loops call function(builder, argument), which writes the IR of a value and returns it.

    signature: the types of the value and the argument, for numba.
    """

    def typer(typing: Any, argument: Any) -> Any:
        return signature, lambda context, builder, _, arguments: function(builder, *arguments)

    return intrinsic(typer)


pointer = ir_expression(
    lambda builder, address: builder.inttoptr(address, ir.IntType(8).as_pointer()),
    types.voidptr(int64),
)
# Call the C function at an address: int32_t f(void).
_call = ir_expression(
    lambda builder, address: builder.call(
        builder.inttoptr(address, ir.FunctionType(INT32, []).as_pointer()), []
    ),
    types.int32(int64),
)

# The bits of an FP16 number -> float32; only if `CONVERTS_HALVES`.
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
def records(address: Any, count: Any, dtype: Any) -> Any:
    """View neighbouring records of a structured dtype."""
    return numba.carray(pointer(address), count, dtype)


_HEADER_BYTES = 16  # of two integers (`team.run_on_threads`)


def _reader_of(arguments: Any) -> Any:
    """Return a function for loops: the address of a header -> the arguments behind it, in the named
    tuple's class `arguments`.
    """
    result_type = types.NamedUniTuple(int64, len(arguments._fields), arguments)

    def generate(context: Any, builder: Any, signature: Any, arguments_: Any) -> Any:
        first = builder.add(arguments_[0], INT64(_HEADER_BYTES))
        values = [
            load(builder, builder.add(first, INT64(8 * number)), INT64, 8)
            for number in range(len(result_type))
        ]
        return context.make_tuple(builder, result_type, values)

    return intrinsic(lambda typing, address: (result_type(int64), generate))


def vector_of(value: float) -> Any:
    """Return a constant vector whose elements are all one value."""
    return ir.Constant(VECTOR, [value] * LANES)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, in one instruction where the processor has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def load(builder: Any, address: Any, type_: Any, alignment: int) -> Any:
    value = builder.load(builder.inttoptr(address, type_.as_pointer()))
    value.align = alignment
    return value


def store(builder: Any, value: Any, address: Any, alignment: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = alignment


def spread(builder: Any, value: Any) -> Any:
    """Return a vector whose elements are all one value."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, INT32(0)), undefined, zeros
    )


def widen(builder: Any, address: Any, is_bfloat16: bool | int) -> Any:
    """Load a vector of numbers in bfloat16 or FP16 as float32."""
    bits = load(builder, address, ir.VectorType(INT16, LANES), 2)
    if not is_bfloat16:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    int_vector = ir.VectorType(INT32, LANES)
    return builder.bitcast(
        builder.shl(builder.zext(bits, int_vector), ir.Constant(int_vector, [16] * LANES)), VECTOR
    )


def call_llvm(builder: Any, name: str, result_type: Any, *arguments: Any) -> Any:
    """Call one of LLVM's intrinsic functions."""
    type_ = ir.FunctionType(result_type, [value.type for value in arguments])
    return builder.call(
        builder.module.globals.get(name) or ir.Function(builder.module, type_, name=name), arguments
    )


def prefetch(builder: Any, address: Any, locality: int = 3) -> None:
    """Prefetch the cache line at an address, which need not be valid; locality: 3 for the L1 cache
    … 1 for the farthest.
    """
    line = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), line, INT32(0), INT32(locality), INT32(1))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose LANES vectors [LANES, LANES]: each round exchanges groups of `size` elements
    between vectors that are `size` apart, and `size` doubles.
    """
    size = 1
    while size < LANES:
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
