"""Loops over packed bytes that numba compiles (see `kernels`; `packed` says how the bytes lie)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_compiled = numba.njit(nogil=True, cache=True)


@_compiled
def _number(codes: Any, at: int) -> Any:
    """The 16 bits at byte `at`, which need not be even."""
    return np.int32(codes[at]) | np.int32(codes[at + 1]) << np.int32(8)


@_compiled
def _row(codes: Any, line: Any, source: int, target: int, group: int, step: Any, offset: Any) -> None:
    """One group of a row, or as much of it as the row has."""
    half = group // 2
    if target + group <= line.shape[0]:
        for j in range(half):
            line[target + j] = np.float32(codes[source + j] & 15) * step + offset
        for j in range(half):
            line[target + half + j] = np.float32(codes[source + j] >> 4) * step + offset
    else:
        for j in range(line.shape[0] - target):
            code = codes[source + j] & 15 if j < half else codes[source + j - half] >> 4
            line[target + j] = np.float32(code) * step + offset


@_compiled
def rows_word(packed: Any, out: Any, group: int, steps: Any, zeros: Any) -> None:
    half, groups = group // 2, (out.shape[1] + group - 1) // group
    for row in range(out.shape[0]):
        codes = packed[row]
        for number in range(groups):
            word = _number(codes, groups * half + 2 * number)
            step = steps[word >> 7]
            _row(codes, out[row], number * half, number * group, group, step, -(zeros[word & 127] * step))


@_compiled
def rows_pair(packed: Any, out: Any, group: int, halves: Any, _: Any) -> None:
    half, groups = group // 2, (out.shape[1] + group - 1) // group
    for row in range(out.shape[0]):
        codes = packed[row]
        for number in range(groups):
            at = groups * half + 4 * number
            step, offset = halves[_number(codes, at)], halves[_number(codes, at + 2)]
            _row(codes, out[row], number * half, number * group, group, step, offset)


@_compiled
def _stripe(codes: Any, out: Any, half: int, step: Any, offset: Any) -> None:
    """The rows of a stripe, or as many as there are; step and offset by column."""
    width = out.shape[1]
    for j in range(min(half, out.shape[0])):
        line, source = out[j], codes[j * width : (j + 1) * width]
        for column in range(width):
            line[column] = np.float32(source[column] & 15) * step[column] + offset[column]
    for j in range(min(half, out.shape[0] - half)):
        line, source = out[half + j], codes[j * width : (j + 1) * width]
        for column in range(width):
            line[column] = np.float32(source[column] >> 4) * step[column] + offset[column]


@_compiled
def _pair_scales(codes: Any, first: int, halves: Any, step: Any, offset: Any) -> None:
    """Scales of a stripe's columns, whose bytes begin at `first`."""
    width = step.shape[0]
    for column in range(width):
        at = first + 2 * column
        step[column], offset[column] = halves[_number(codes, at)], halves[_number(codes, at + 2 * width)]


@_compiled
def _word_scales(codes: Any, first: int, steps: Any, zeros: Any, step: Any, offset: Any) -> None:
    """The same of 16-bit words."""
    for column in range(step.shape[0]):
        word = _number(codes, first + 2 * column)
        step[column] = steps[word >> 7]
        offset[column] = -(zeros[word & 127] * step[column])


@_compiled
def columns_pair(packed: Any, out: Any, group: int, halves: Any, _: Any) -> None:
    rows, width = out.shape
    half = group // 2
    step, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range((rows + group - 1) // group):
        codes = packed[stripe]
        _pair_scales(codes, half * width, halves, step, offset)
        _stripe(codes, out[stripe * group :], half, step, offset)


@_compiled
def columns_word(packed: Any, out: Any, group: int, steps: Any, zeros: Any) -> None:
    rows, width = out.shape
    half = group // 2
    step, offset = np.empty(width, np.float32), np.empty(width, np.float32)
    for stripe in range((rows + group - 1) // group):
        codes = packed[stripe]
        _word_scales(codes, half * width, steps, zeros, step, offset)
        _stripe(codes, out[stripe * group :], half, step, offset)


# Sums may be taken in any order: there is no unpacked product whose bits they would have to match.
_summing = numba.njit(nogil=True, cache=True, fastmath=True)


@_summing
def _stripe_dot(codes: Any, x: Any, y: Any, first: int, half: int, scaled: Any, offset: Any) -> None:
    """Products of some rows with a stripe: y[t, first + j] = sum over c of (code step + offset) x[t, c].

    x, scaled: [rows, width], scaled = x step; rows in fours, so that a code is converted once for four.
    """
    count, width = x.shape
    stop = min(first + 2 * half, y.shape[1])
    t = 0
    while t < count:
        four = t + 4 <= count
        for j in range(half):
            source = codes[j * width : (j + 1) * width]
            if four:
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
                x0, x1, x2, x3 = scaled[t], scaled[t + 1], scaled[t + 2], scaled[t + 3]
                for c in range(width):
                    low, high = np.float32(source[c] & 15), np.float32(source[c] >> 4)
                    a0 += low * x0[c]
                    a1 += low * x1[c]
                    a2 += low * x2[c]
                    a3 += low * x3[c]
                    b0 += high * x0[c]
                    b1 += high * x1[c]
                    b2 += high * x2[c]
                    b3 += high * x3[c]
                if first + j < stop:
                    y[t, first + j], y[t + 1, first + j], y[t + 2, first + j], y[t + 3, first + j] = a0, a1, a2, a3
                if first + half + j < stop:
                    at = first + half + j
                    y[t, at], y[t + 1, at], y[t + 2, at], y[t + 3, at] = b0, b1, b2, b3
            else:
                a, b, own = np.float32(0.0), np.float32(0.0), scaled[t]
                for c in range(width):
                    a += np.float32(source[c] & 15) * own[c]
                    b += np.float32(source[c] >> 4) * own[c]
                if first + j < stop:
                    y[t, first + j] = a
                if first + half + j < stop:
                    y[t, first + half + j] = b
        t += 4 if four else 1
    for t in range(count):
        constant, own = np.float32(0.0), x[t]
        for c in range(width):
            constant += offset[c] * own[c]
        for at in range(first, stop):
            y[t, at] += constant


@_summing
def columns_pair_dot(packed: Any, x: Any, y: Any, group: int, halves: Any, _: Any) -> None:
    count, width = x.shape
    half = group // 2
    step, offset, scaled = np.empty(width, np.float32), np.empty(width, np.float32), np.empty_like(x)
    for stripe in range(packed.shape[0]):
        codes = packed[stripe]
        _pair_scales(codes, half * width, halves, step, offset)
        for t in range(count):
            scaled[t] = x[t] * step
        _stripe_dot(codes, x, y, stripe * group, half, scaled, offset)


@_summing
def columns_word_dot(packed: Any, x: Any, y: Any, group: int, steps: Any, zeros: Any) -> None:
    count, width = x.shape
    half = group // 2
    step, offset, scaled = np.empty(width, np.float32), np.empty(width, np.float32), np.empty_like(x)
    for stripe in range(packed.shape[0]):
        codes = packed[stripe]
        _word_scales(codes, half * width, steps, zeros, step, offset)
        for t in range(count):
            scaled[t] = x[t] * step
        _stripe_dot(codes, x, y, stripe * group, half, scaled, offset)
