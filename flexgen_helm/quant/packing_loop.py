"""The loop that packs matrices on CPUs, compiled by numba: axis 'out' with words (layout:
`quant.packing`).

Operation by operation as `quant.arithmetic` does it, so to the same bytes.
"""

from __future__ import annotations

import math
from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    INT64,
    LANES,
    VECTOR,
    Loop,
    call_llvm,
    floats,
    ir_statement,
    load,
    njit,
    store,
)
from flexgen_helm.quant.arithmetic import PARTIAL_SUMS
from flexgen_helm.quant.numba_kernels import packed_bytes
from flexgen_helm.quant.packing import Packed

# That are packed side by side; past the matrix's last one they are zeros.
_COLUMNS = 64
# Added to a number below 2^22 and subtracted again, it rounds to the nearest integer, half to even.
_ROUNDER = np.float32(1.5 * 2**23)
_ZERO = np.float32(0)


@njit
def _rounded(value: Any, top: Any) -> Any:
    """Clamp to 0 … top and round."""
    value = value if value > _ZERO else _ZERO
    return ((value if value < top else top) + _ROUNDER) - _ROUNDER


# Of `columns`: scale, 1 / scale and offset of columns.
_Sums = namedtuple("_Sums", "squares bits values group columns sums")


def _write_sums(builder: Any, given: Any) -> None:
    """Fill sums with what codes leave of values [group, columns], or its squares, in the order of
    `arithmetic`.
    """
    row_bytes, zero, top = 4 * _COLUMNS, _constant(0.0), _constant(float((1 << given.bits) - 1))
    with cgutils.for_range(builder, INT64(_COLUMNS // LANES)) as lanes:
        at = builder.mul(lanes.index, INT64(4 * LANES))
        first = builder.add(given.columns, at)
        scale, inverse, offset = (
            load(builder, builder.add(first, INT64(number * row_bytes)), VECTOR, 4)
            for number in range(3)
        )
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(PARTIAL_SUMS)]
        with cgutils.for_range(builder, builder.udiv(given.group, INT64(PARTIAL_SUMS))) as rows:
            row = builder.add(
                builder.add(given.values, at),
                builder.mul(rows.index, INT64(PARTIAL_SUMS * row_bytes)),
            )
            for number, total in enumerate(totals):
                value = load(builder, builder.add(row, INT64(number * row_bytes)), VECTOR, 4)
                code = builder.fmul(builder.fsub(value, offset), inverse)
                code = builder.select(builder.fcmp_ordered(">", code, zero), code, zero)
                code = builder.select(builder.fcmp_ordered("<", code, top), code, top)
                code = call_llvm(builder, f"llvm.rint.v{LANES}f32", VECTOR, code)
                rest = builder.fsub(value, builder.fmul(code, scale))
                if given.squares:
                    rest = builder.fsub(rest, offset)
                    rest = builder.fmul(rest, rest)
                builder.store(builder.fadd(builder.load(total), rest), total)
        parts = [builder.load(total) for total in totals]
        while half := len(parts) // 2:
            parts = [builder.fadd(*pair) for pair in zip(parts[:half], parts[half:])]
        store(builder, parts[0], builder.add(given.sums, at), 4)


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


_fill_sums = ir_statement((0, 1), (4, 8))(_write_sums)


@njit
def _search(given: Any, values: Any, span: tuple[Any, Any], words: Any) -> None:
    """Replace words [columns], which cover the range, by those of least error
    (`arithmetic._fit`).

    span: how far each column's values are below and above zero.
    """
    (below, above), bits, table = span, given.bits, floats(given.table, 640)
    group, top = len(values), np.float32((1 << bits) - 1)
    zero_points, grid = table[512:], np.float32(127) / top
    numbers = np.empty((6, _COLUMNS), np.float32)
    scale, inverse, offset, sums, zero_point, least = numbers
    first_index, index, candidate = np.empty((3, _COLUMNS), np.int32)
    at, columns = np.int64(values.ctypes.data), np.int64(numbers.ctypes.data)
    totals = np.int64(sums.ctypes.data)
    for c in range(_COLUMNS):
        first_index[c], scale[c] = words[c] >> 7, table[words[c] >> 7]
        inverse[c], offset[c] = np.float32(1) / scale[c], -(zero_points[words[c] & 127] * scale[c])
    _fill_sums(_Sums(1, bits, at, group, columns, totals))
    least[:] = sums
    for smaller in range(given.tried):
        for c in range(_COLUMNS):
            index[c] = max(first_index[c] - smaller, 0)
            scale[c] = table[index[c] & 511]
            inverse[c] = np.float32(1) / scale[c]
        for clipped in range(3):
            for c in range(_COLUMNS):
                lowest, highest = -below[c] / scale[c], top - above[c] / scale[c]
                middle = (lowest + highest) / np.float32(2)
                zero_point[c] = lowest if clipped == 0 else (middle if clipped == 1 else highest)
            # the first sums refit the zero point, the second are the error
            for squares in range(2):
                for c in range(_COLUMNS):
                    candidate[c] = np.int32(_rounded(zero_point[c] * grid, np.float32(127)))
                for c in range(_COLUMNS):
                    offset[c] = -(zero_points[candidate[c] & 127] * scale[c])
                _fill_sums(_Sums(squares, bits, at, group, columns, totals))
                for c in range(_COLUMNS):
                    zero_point[c] = -(sums[c] / np.float32(group)) / scale[c]
            for c in range(_COLUMNS):
                better = sums[c] < least[c]
                words[c] = index[c] << 7 | candidate[c] if better else words[c]
                least[c] = sums[c] if better else least[c]


@partial(Loop, Packed)
def pack_columns(given: Any, part: Any, parts: Any) -> None:
    """Matrix [rows, width] -> packed [stripes, stripe_bytes]."""
    stripes, group, bits, width = given.stripes, given.group, given.bits, given.width
    table, top = floats(given.table, 640), np.float32((1 << bits) - 1)
    code_bytes = group * bits // 8
    pieces = (width + _COLUMNS - 1) // _COLUMNS
    for piece in range(stripes * pieces * part // parts, stripes * pieces * (part + 1) // parts):
        stripe, first = piece // pieces, piece % pieces * _COLUMNS
        columns = min(_COLUMNS, width - first)
        values, (below, above) = (
            np.zeros((group, _COLUMNS), np.float32),
            np.zeros((2, _COLUMNS), np.float32),
        )
        words = np.zeros(_COLUMNS, np.int32)
        for j in range(group):
            row = min(stripe * group + j, given.rows - 1)  # the last one pads
            line, value = floats(given.matrix + (row * width + first) * 4, columns), values[j]
            for c in range(columns):
                value[c] = line[c]
                below[c] = value[c] if value[c] < below[c] else below[c]
                above[c] = value[c] if value[c] > above[c] else above[c]
        for c in range(columns):
            exact = max(np.float64(above[c] - below[c]) / top, 2.0**-24)
            index = np.int32(min(max(math.ceil((math.log2(exact) + 24) * 16 - 1e-9), 0), 511))
            zero_point = -below[c] / table[index] * (np.float32(127) / top)
            words[c] = index << 7 | np.int32(_rounded(zero_point, np.float32(127)))
        if given.tried:
            _search(given, values, (below, above), words)
        data = packed_bytes(given.packed + stripe * given.stripe_bytes, given.stripe_bytes)
        for c in range(columns):
            at = code_bytes * width + 2 * (first + c)
            data[at], data[at + 1] = words[c] & 255, words[c] >> 8
            below[c] = table[words[c] >> 7]
            above[c] = -(table[512 + (words[c] & 127)] * below[c])
        for j in range(code_bytes):
            target = data[j * width + first :]
            value = values[j]
            upper = values[j + group - code_bytes]
            for c in range(columns):
                code = np.uint8(_rounded((value[c] - above[c]) / below[c], top))
                if bits == 4:
                    code |= np.uint8(_rounded((upper[c] - above[c]) / below[c], top)) << 4
                target[c] = code
