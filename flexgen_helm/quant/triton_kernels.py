"""Kernels for packed bytes on CUDA devices, in Triton: 4 or 8 bits, any axis and scales (layout: `quant.packing`).

With 4 bits byte row j of a stripe holds the codes of value j (low half) and of value j + group / 2 (high half) of every
group; with 8 bits byte row j + group / 2 holds the latter. Every kernel takes a block of values of the low half and
those of the high half with them, so that it reads each byte once.

    dequantize   one launch a matrix; bits equal those of plain torch (`arithmetic.from_codes`, no fused multiply-add)
    matvec       axis 'out': one or two rows of x: multiply-adds in float32
    tiles        axis 'out': more rows of x, by tensor cores; weights are rounded to its dtype, as dequantizing does

A product may split its columns over programs that write partial sums in float32; `join` adds them. No atomics are
used, so equal calls give equal bits. `quant.triton_launches` chooses the constants and launches.

Parameters are annotated as `tl.tensor` or `tl.constexpr`: the compiler resolves annotations and knows no others.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _codes(at: tl.tensor, high_at: tl.tensor, inside: tl.tensor, bits: tl.constexpr) -> Any:
    """Low and high codes, in float32: of the bytes at `at`; with 8 bits the high ones are the bytes at `high_at`."""
    byte = tl.load(at, mask=inside, other=0).to(tl.int32)
    if bits == 4:
        low, high = byte & 15, byte >> 4
    else:
        low, high = byte, tl.load(high_at, mask=inside, other=0).to(tl.int32)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _scale_and_offset(
    numbers: tl.tensor,
    index: tl.tensor,
    offset_index: tl.tensor,
    inside: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    pairs: tl.constexpr,
) -> Any:
    """Scale and offset of groups: of words, or of pairs, by their indices among the 16-bit numbers at `numbers`."""
    if pairs:
        at = numbers.to(tl.pointer_type(tl.float16))
        scale = tl.load(at + index, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(at + offset_index, mask=inside, other=0.0).to(tl.float32)
    else:
        word = tl.load(numbers.to(tl.pointer_type(tl.uint16)) + index, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales + (word >> 7))
        offset = -(tl.load(zero_points + (word & 127)) * scale)
    return scale, offset


@triton.jit
def dequantize_out(
    packed: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stripe_bytes: tl.tensor,
    group: tl.constexpr,
    bits: tl.constexpr,
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Axis 'out': one stripe, `chunks` runs of `vector` columns."""
    half: tl.constexpr = group // 2
    code_bytes: tl.constexpr = group * bits // 8
    stripe = tl.program_id(0).to(tl.int64)
    data = packed + stripe * stripe_bytes
    place = (tl.arange(0, chunks) * vector)[:, None] + tl.arange(0, vector)[None, :]
    column = (tl.program_id(1) * (chunks * vector) + place)[None, :, :]
    lane = tl.arange(0, lanes)[:, None, None]
    inside = column < width
    numbers = data + code_bytes * width
    scale, offset = _scale_and_offset(numbers, column, column + width, inside, scales, zero_points, pairs)
    codes_at = data + lane * width + column
    low, high = _codes(codes_at, codes_at + half * width, (lane < half) & inside, bits)
    row = stripe * group + lane
    at = out + row * width + column
    tl.store(at, low * scale + offset, mask=(lane < half) & (row < rows) & inside)
    at += tl.cast(half, tl.int64) * width
    tl.store(at, high * scale + offset, mask=(lane < half) & (row + half < rows) & inside)


@triton.jit
def dequantize_in(
    packed: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stripe_bytes: tl.tensor,
    group: tl.constexpr,
    bits: tl.constexpr,
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """Axis 'in': `block_rows` rows, `chunks` runs of `vector` bytes of each."""
    half: tl.constexpr = group // 2
    code_bytes: tl.constexpr = group * bits // 8
    groups = tl.cdiv(width, group)
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None, None]
    per_group: tl.constexpr = lanes // vector
    chunk = (tl.program_id(1) * chunks + tl.arange(0, chunks))[None, :, None]
    number, lane = chunk // per_group, chunk % per_group * vector + tl.arange(0, vector)[None, None, :]
    inside = (row < rows) & (number < groups)
    data = packed + row * stripe_bytes
    numbers, index = data + groups * code_bytes, (1 + pairs) * number
    scale, offset = _scale_and_offset(numbers, index, index + 1, inside, scales, zero_points, pairs)
    inside = inside & (lane < half)
    codes_at = data + (number * code_bytes + lane)
    low, high = _codes(codes_at, codes_at + half, inside, bits)
    column = number * group + lane
    at = out + row * width + column
    tl.store(at, low * scale + offset, mask=inside & (column < width))
    tl.store(at + half, high * scale + offset, mask=inside & (column + half < width))


@triton.jit
def _store(
    y: tl.tensor,
    bias: tl.tensor,
    value: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    has_bias: tl.constexpr,
) -> None:
    """Write sums of the products of rows `row` and tokens `token`."""
    if has_bias:
        value += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y + token * rows + row, value, mask=inside & (row < rows))


@triton.jit
def matvec(
    x: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stripe_bytes: tl.tensor,
    split_steps: tl.tensor,
    group: tl.constexpr,
    bits: tl.constexpr,
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    has_bias: tl.constexpr,
    padded_tokens: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """One stripe. y[t, r] = code[r] (scale x[t]) + offset x[t], summed apart.

    A thread keeps `vector` neighbouring columns of every byte row, so that it reads and multiplies their scales once.
    """
    half: tl.constexpr = group // 2
    code_bytes: tl.constexpr = group * bits // 8
    stripe, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    data = packed + stripe * stripe_bytes
    numbers = data + code_bytes * width
    j, token = tl.arange(0, lanes), tl.arange(0, padded_tokens)
    lane, of_token = j[None, :, None, None], token[:, None, None, None]
    place = ((tl.arange(0, chunks) * vector)[:, None] + tl.arange(0, vector)[None, :])[None, None, :, :]
    low_sum = tl.zeros((padded_tokens, lanes, chunks), tl.float32)
    high_sum = tl.zeros((padded_tokens, lanes, chunks), tl.float32)
    constant = tl.zeros((padded_tokens, chunks), tl.float32)
    first = split * split_steps
    for step in tl.range(first, tl.minimum(first + split_steps, tl.cdiv(width, chunks * vector))):
        column = step * (chunks * vector) + place
        inside = column < width
        codes_at = data + lane * width + column
        low, high = _codes(codes_at, codes_at + half * width, (lane < half) & inside, bits)
        scale, offset = _scale_and_offset(numbers, column, column + width, inside, scales, zero_points, pairs)
        given = tl.load(x + of_token * width + column, mask=(of_token < tokens) & inside, other=0.0).to(tl.float32)
        constant += tl.sum(tl.sum(given * offset, 3), 1)
        low_sum += tl.sum(low * (given * scale), 3)
        high_sum += tl.sum(high * (given * scale), 3)
    constants = tl.sum(constant, 1)[:, None]
    target = y + split.to(tl.int64) * tokens * rows
    row, inside = stripe * group + j[None, :], (j < half)[None, :] & (token < tokens)[:, None]
    _store(target, bias, tl.sum(low_sum, 2) + constants, row, token[:, None], rows, inside, has_bias)
    _store(target, bias, tl.sum(high_sum, 2) + constants, row + half, token[:, None], rows, inside, has_bias)


@triton.jit
def tiles(
    x: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stripe_bytes: tl.tensor,
    split_steps: tl.tensor,
    group: tl.constexpr,
    bits: tl.constexpr,
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    has_bias: tl.constexpr,
    padded_tokens: tl.constexpr,
    block: tl.constexpr,
    block_stripes: tl.constexpr,
) -> None:
    """`block_stripes` stripes; their low and high halves are two products with the same x."""
    half: tl.constexpr = group // 2
    code_bytes: tl.constexpr = group * bits // 8
    byte_rows: tl.constexpr = block_stripes * lanes
    split = tl.program_id(1)
    first_stripe = tl.program_id(0).to(tl.int64) * block_stripes
    stripe = first_stripe + tl.arange(0, block_stripes)
    index = tl.arange(0, byte_rows)
    j, stripe_of_row = index % lanes, first_stripe + index // lanes
    whole = (j < half) & (stripe_of_row * group < rows)
    data = packed + stripe_of_row * stripe_bytes + j * width
    numbers = packed + stripe * stripe_bytes + code_bytes * width
    token = tl.arange(0, padded_tokens)
    low_sum = tl.zeros((byte_rows, padded_tokens), tl.float32)
    high_sum = tl.zeros((byte_rows, padded_tokens), tl.float32)
    first = split * split_steps
    for step in tl.range(first, tl.minimum(first + split_steps, tl.cdiv(width, block))):
        column = step * block + tl.arange(0, block)
        inside = column < width
        codes_at = data[:, None] + column[None, :]
        low, high = _codes(codes_at, codes_at + half * width, whole[:, None] & inside[None, :], bits)
        of_stripe = (stripe * group < rows)[:, None] & inside[None, :]
        scale, offset = _scale_and_offset(
            numbers[:, None], column[None, :], column[None, :] + width, of_stripe, scales, zero_points, pairs
        )
        scale = tl.broadcast_to(scale[:, None, :], (block_stripes, lanes, block))
        offset = tl.broadcast_to(offset[:, None, :], (block_stripes, lanes, block))
        scale, offset = tl.reshape(scale, (byte_rows, block)), tl.reshape(offset, (byte_rows, block))
        of_token = (token < tokens)[None, :] & inside[:, None]
        given = tl.load(x + token[None, :] * width + column[:, None], mask=of_token, other=0.0)
        low_weights = (low * scale + offset).to(given.dtype)
        high_weights = (high * scale + offset).to(given.dtype)
        low_sum = tl.dot(low_weights, given, low_sum, input_precision="ieee")
        high_sum = tl.dot(high_weights, given, high_sum, input_precision="ieee")
    target = y + split.to(tl.int64) * tokens * rows
    row, inside = (stripe_of_row * group + j)[:, None], (j < half)[:, None] & (token < tokens)[None, :]
    _store(target, bias, low_sum, row, token[None, :], rows, inside, has_bias)
    _store(target, bias, high_sum, row + half, token[None, :], rows, inside, has_bias)


@triton.jit
def join(
    partial: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    has_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Add the partial sums [splits, count] and the bias."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < count
    total, at = tl.zeros((block,), tl.float32), partial + index
    for _ in tl.range(0, splits):
        total += tl.load(at, mask=inside, other=0.0)
        at += count
    if has_bias:
        total += tl.load(bias + index % rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + index, total, mask=inside)
