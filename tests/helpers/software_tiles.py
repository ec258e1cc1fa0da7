"""The matrix unit (AMX) in software: its instructions as plain code, so that its loop runs on any
AVX-512 processor.

A tile register is 16 rows of 64 bytes on the stack of the function that uses it: no tile lives
longer. Products are those of `tdpbf16ps`.
"""

from contextlib import contextmanager

import pytest
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels import amx, amx_loop
from flexgen_helm.kernels.emit import INT32, INT64, LANES, Loop

_BYTE, _FLOATS, _PAIRS = ir.IntType(8), ir.VectorType(ir.FloatType(), 16), ir.VectorType(INT32, 16)


def _row(builder, tile, row, kind):
    """Point to a row of a tile."""
    address = builder.gep(_tiles(builder), [INT64(0), INT64(tile.constant * 1024)])
    return builder.bitcast(builder.gep(address, [builder.mul(row, INT64(64))]), kind.as_pointer())


def _tiles(builder):
    """Return this function's eight registers; its first use makes them."""
    name = "software_tiles"
    for instruction in builder.function.entry_basic_block.instructions:
        if instruction.name == name:
            return instruction
    with builder.goto_entry_block():
        return builder.alloca(ir.ArrayType(_BYTE, 8 * 1024), name=name)


def _load(builder, value):
    loaded = builder.load(value)
    loaded.align = 4
    return loaded


def _store(builder, value, address):
    builder.store(value, address).align = 4


def _copy_rows(builder, tile, pointer, row_bytes, to_tile):
    with cgutils.for_range_slice(builder, INT64(0), INT64(16), INT64(1)) as (row, _):
        memory = builder.bitcast(
            builder.gep(pointer, [builder.mul(row, row_bytes)]), _PAIRS.as_pointer()
        )
        register = _row(builder, tile, row, _PAIRS)
        source, target = (memory, register) if to_tile else (register, memory)
        _store(builder, _load(builder, source), target)


def _floats(builder, pairs, first):
    """The first or second number of each pair as float32."""
    bits = ir.Constant(_PAIRS, [16 if first else 0xFFFF0000] * 16)
    return builder.bitcast(
        builder.shl(pairs, bits) if first else builder.and_(pairs, bits), _FLOATS
    )


def _multiply_tiles(builder, sums, a, b):
    """Add the products of 32 columns: first numbers of pairs and second ones have a sum each
    (Intel's manual).
    """
    zeros, nothing = ir.Constant(_PAIRS, [0] * 16), ir.Constant(_FLOATS, [0.0] * 16)
    parts = [cgutils.alloca_once(builder, _FLOATS) for _ in range(2)]
    with cgutils.for_range_slice(builder, INT64(0), INT64(16), INT64(1)) as (row, _):
        for part in parts:
            builder.store(nothing, part)
        with cgutils.for_range_slice(builder, INT64(0), INT64(16), INT64(1)) as (k, _):
            pair = builder.gep(
                builder.bitcast(_row(builder, a, row, _PAIRS), INT32.as_pointer()), [k]
            )
            single = builder.insert_element(
                ir.Constant(_PAIRS, ir.Undefined), builder.load(pair), INT32(0)
            )
            left, right = (
                builder.shuffle_vector(single, single, zeros),
                _load(builder, _row(builder, b, k, _PAIRS)),
            )
            for part, first in zip(parts, (True, False)):
                product = builder.fmul(
                    _floats(builder, left, first), _floats(builder, right, first)
                )
                builder.store(builder.fadd(builder.load(part), product), part)
        target, (even, odd) = _row(builder, sums, row, _FLOATS), map(builder.load, parts)
        _store(builder, builder.fadd(_load(builder, target), builder.fadd(even, odd)), target)


def _call(builder, name, *arguments):
    """Take the place of `amx_loop._call`."""
    match name:
        case "tileloadd64":
            _copy_rows(builder, *arguments, to_tile=True)
        case "tilestored64":
            _copy_rows(builder, *arguments, to_tile=False)
        case "tilezero":
            with cgutils.for_range_slice(builder, INT64(0), INT64(16), INT64(1)) as (row, _):
                _store(
                    builder, ir.Constant(_PAIRS, [0] * 16), _row(builder, arguments[0], row, _PAIRS)
                )
        case "tdpbf16ps":
            _multiply_tiles(builder, *arguments)
        case "ldtilecfg" | "tilerelease":
            pass
        case _:
            raise NotImplementedError(name)


class _Uncached(Loop):
    """Compiled without numba's cache, which would hand the software's code to a processor that has
    the unit.
    """

    def _compile(self, entry, cache):
        return super()._compile(entry, cache=False)


_multiply_in_software = _Uncached(amx.AmxArgs, amx_loop.multiply.body)


@contextmanager
def software_tiles():
    """Let `kernels.amx` take a processor without the unit for one that has it; skip where vectors
    are narrower.
    """
    if LANES < 16:
        pytest.skip("the loop of the matrix unit has vectors of 16 numbers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx_loop, "_call", _call)
        patch.setattr(amx, "_has_unit", lambda: True)
        patch.setattr(amx_loop, "multiply", _multiply_in_software)
        amx.loops.forget()
        yield
    amx.loops.forget()
