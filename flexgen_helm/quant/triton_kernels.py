"""Kernels for packed bytes on CUDA devices, in Triton: 4 bits, any axis, group and scales (layout: `quant.packing`).

Byte row j of a stripe holds the codes of value j (low half) and of value j + group / 2 (high half) of every group.
Every kernel takes a block of byte rows, so that it reads each byte once and unpacks both halves.

    dequantize   one launch a matrix; bits equal those of plain torch (`arithmetic.from_codes`, no fused multiply-add)
    matvec       one or two rows of x: multiply-adds in float32
    tiles        more rows of x: tensor cores, with weights rounded to the dtype of x, as dequantizing rounds them

A product may split its columns over programs that write partial sums in float32; `join` adds them. No atomics are
used, so equal calls give equal bits.

Parameters are annotated as `tl.tensor` or `tl.constexpr`: the compiler resolves annotations and knows no others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from flexgen_helm.quant.formats import GroupFormat

# Columns of a step of a product by tiles, by rows of x: what registers and shared memory hold without a spill.
# More rows than the last ones are left to a matrix that is dequantized once and a library's product. A weight takes 4.6
# bytes of traffic there and 0.6 here: on an H100, 4 bytes / 3.35 TB/s = 1.2 ps. Tiles that reach half of the library's
# 990 TFLOP/s lose 2 ps for 1,000 rows, so up to 590 rows would be faster; but beyond 128 the codes are read again.
# Without tensor cores (float32, and Triton before Ampere) a row of x takes 1.5 instructions a weight. A T4 does 4 in a
# ps, so 32 rows take the 4 bytes / 300 GB/s = 13 ps.
_TENSOR_CORE_COLUMNS = {16: 128, 32: 64, 64: 64, 128: 32}
_FMA_COLUMNS = {8: 32, 16: 16}
# Byte rows of a program that multiplies tiles.
_TILE_ROWS = 64
# Bytes of the vector loads of x and of the scales, and of the vector stores.
_VECTOR_BYTES = 16
# Byte rows times rows of x of a thread in a matvec; it has two accumulators for each, and more would not fit into its
# registers. So it takes 2 rows of x with groups of 32, and tensor cores take more: unpacking costs 2.5 instructions a
# weight for either, rounding it to 16 bits for tensor cores about 3 more, and multiply-adds 1 for every row of x.
_THREAD_SUMS = 32
_THREAD_CODES = 128  # bytes of codes of a thread's step, times rows of x
# Warps of a processor in a matvec: each has 4 KiB of codes in flight, and an H100 needs 15 KiB to keep its memory busy.
_MATVEC_WARPS = 16
# Bytes that partial sums may add to those of the packed matrix, as its reciprocal: written and read, 10 % in all.
_PARTIAL_SHARE = 10
_JOINED = 1024  # sums of a program that joins


@triton.jit
def _codes(at: tl.tensor, inside: tl.tensor) -> Any:
    """Low and high codes of the bytes at `at`, in float32."""
    byte = tl.load(at, mask=inside, other=0).to(tl.int32)
    return (byte & 15).to(tl.float32), (byte >> 4).to(tl.float32)


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
def _dequantize_out(
    packed: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stripe_bytes: tl.tensor,
    group: tl.constexpr,
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Axis 'out': one stripe, `chunks` runs of `vector` columns."""
    half: tl.constexpr = group // 2
    stripe = tl.program_id(0).to(tl.int64)
    data = packed + stripe * stripe_bytes
    place = (tl.arange(0, chunks) * vector)[:, None] + tl.arange(0, vector)[None, :]
    column = (tl.program_id(1) * (chunks * vector) + place)[None, :, :]
    lane = tl.arange(0, lanes)[:, None, None]
    inside = column < width
    numbers = data + half * width
    scale, offset = _scale_and_offset(numbers, column, column + width, inside, scales, zero_points, pairs)
    low, high = _codes(data + lane * width + column, (lane < half) & inside)
    row = stripe * group + lane
    at = out + row * width + column
    tl.store(at, low * scale + offset, mask=(lane < half) & (row < rows) & inside)
    at += tl.cast(half, tl.int64) * width
    tl.store(at, high * scale + offset, mask=(lane < half) & (row + half < rows) & inside)


@triton.jit
def _dequantize_in(
    packed: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    zero_points: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stripe_bytes: tl.tensor,
    group: tl.constexpr,
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """Axis 'in': `block_rows` rows, `chunks` runs of `vector` bytes of each."""
    half: tl.constexpr = group // 2
    groups = tl.cdiv(width, group)
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None, None]
    number, lane = _places(tl.program_id(1), lanes, chunks, vector)
    inside = (row < rows) & (number < groups)
    data = packed + row * stripe_bytes
    numbers, index = data + groups * half, (1 + pairs) * number
    scale, offset = _scale_and_offset(numbers, index, index + 1, inside, scales, zero_points, pairs)
    inside = inside & (lane < half)
    low, high = _codes(data + (number * half + lane), inside)
    column = number * group + lane
    at = out + row * width + column
    tl.store(at, low * scale + offset, mask=inside & (column < width))
    tl.store(at + half, high * scale + offset, mask=inside & (column + half < width))


@triton.jit
def _places(step: tl.tensor, lanes: tl.constexpr, chunks: tl.constexpr, vector: tl.constexpr) -> Any:
    """Axis 'in': group numbers [1, chunks, 1] and byte rows [1, chunks, vector] of a program's step along a row."""
    per_group: tl.constexpr = lanes // vector
    chunk = (step * chunks + tl.arange(0, chunks))[None, :, None]
    return chunk // per_group, chunk % per_group * vector + tl.arange(0, vector)[None, None, :]


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
def _matvec_out(
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
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    has_bias: tl.constexpr,
    padded_tokens: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Axis 'out': one stripe. y[t, r] = code[r] (scale x[t]) + offset x[t], summed apart.

    A thread keeps `vector` neighbouring columns of every byte row, so that it reads and multiplies their scales once.
    """
    half: tl.constexpr = group // 2
    stripe, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    data = packed + stripe * stripe_bytes
    numbers = data + half * width
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
        low, high = _codes(data + lane * width + column, (lane < half) & inside)
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
def _matvec_in(
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
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    has_bias: tl.constexpr,
    padded_tokens: tl.constexpr,
    chunks: tl.constexpr,
    vector: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """Axis 'in': `block_rows` rows. y[t, r] = sum over groups of scale (code x[t]) + offset (sum of x[t])."""
    half: tl.constexpr = group // 2
    groups = tl.cdiv(width, group)
    split = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    row_4d = row[None, :, None, None]
    token = tl.arange(0, padded_tokens)
    of_token = token[:, None, None, None]
    data = packed + row_4d * stripe_bytes
    numbers = data + groups * half
    total = tl.zeros((padded_tokens, block_rows, chunks), tl.float32)
    first = split * split_steps
    for step in tl.range(first, tl.minimum(first + split_steps, tl.cdiv(groups * (lanes // vector), chunks))):
        number, lane = _places(step, lanes, chunks, vector)
        number, lane = number[None, :, :, :], lane[None, :, :, :]
        inside = (row_4d < rows) & (number < groups)
        low, high = _codes(data + (number * half + lane), inside & (lane < half))
        index = (1 + pairs) * number
        scale, offset = _scale_and_offset(numbers, index, index + 1, inside, scales, zero_points, pairs)
        column = number * group + lane
        given, inside = x + of_token * width + column, (of_token < tokens) & (lane < half)
        x_low = tl.load(given, mask=inside & (column < width), other=0.0).to(tl.float32)
        x_high = tl.load(given + half, mask=inside & (column + half < width), other=0.0).to(tl.float32)
        total += tl.sum((low * x_low + high * x_high) * scale + offset * (x_low + x_high), 3)
    target = y + split.to(tl.int64) * tokens * rows
    _store(target, bias, tl.sum(total, 2), row[None, :], token[:, None], rows, (token < tokens)[:, None], has_bias)


@triton.jit
def _tiles_out(
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
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    has_bias: tl.constexpr,
    padded_tokens: tl.constexpr,
    block: tl.constexpr,
    block_stripes: tl.constexpr,
) -> None:
    """Axis 'out': `block_stripes` stripes; their low and high halves are two products with the same x."""
    half: tl.constexpr = group // 2
    byte_rows: tl.constexpr = block_stripes * lanes
    split = tl.program_id(1)
    first_stripe = tl.program_id(0).to(tl.int64) * block_stripes
    stripe = first_stripe + tl.arange(0, block_stripes)
    index = tl.arange(0, byte_rows)
    j, stripe_of_row = index % lanes, first_stripe + index // lanes
    whole = (j < half) & (stripe_of_row * group < rows)
    data, numbers = packed + stripe_of_row * stripe_bytes + j * width, packed + stripe * stripe_bytes + half * width
    token = tl.arange(0, padded_tokens)
    low_sum = tl.zeros((byte_rows, padded_tokens), tl.float32)
    high_sum = tl.zeros((byte_rows, padded_tokens), tl.float32)
    first = split * split_steps
    for step in tl.range(first, tl.minimum(first + split_steps, tl.cdiv(width, block))):
        column = step * block + tl.arange(0, block)
        inside = column < width
        low, high = _codes(data[:, None] + column[None, :], whole[:, None] & inside[None, :])
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
def _tiles_in(
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
    lanes: tl.constexpr,
    pairs: tl.constexpr,
    has_bias: tl.constexpr,
    padded_tokens: tl.constexpr,
    block_rows: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    """Axis 'in': `block_rows` rows; the low and the high halves of their groups multiply different columns of x."""
    half: tl.constexpr = group // 2
    block: tl.constexpr = block_groups * lanes
    groups = tl.cdiv(width, group)
    split = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    data = packed + row * stripe_bytes
    numbers = (data + groups * half)[:, None]
    index = tl.arange(0, block)
    token = tl.arange(0, padded_tokens)
    total = tl.zeros((block_rows, padded_tokens), tl.float32)
    first = split * split_steps
    for step in tl.range(first, tl.minimum(first + split_steps, tl.cdiv(groups, block_groups))):
        number = step * block_groups + tl.arange(0, block_groups)
        number_of_byte, j = step * block_groups + index // lanes, index % lanes
        whole = (number_of_byte < groups) & (j < half)
        at = data[:, None] + (number_of_byte * half + j)[None, :]
        low, high = _codes(at, (row < rows)[:, None] & whole[None, :])
        inside = (row < rows)[:, None] & (number < groups)[None, :]
        of_pair = ((1 + pairs) * number)[None, :]
        scale, offset = _scale_and_offset(numbers, of_pair, of_pair + 1, inside, scales, zero_points, pairs)
        scale = tl.broadcast_to(scale[:, :, None], (block_rows, block_groups, lanes))
        offset = tl.broadcast_to(offset[:, :, None], (block_rows, block_groups, lanes))
        scale, offset = tl.reshape(scale, (block_rows, block)), tl.reshape(offset, (block_rows, block))
        column = number_of_byte * group + j
        given, of_token = x + token[None, :] * width + column[:, None], (token < tokens)[None, :] & whole[:, None]
        x_low = tl.load(given, mask=of_token & (column < width)[:, None], other=0.0)
        x_high = tl.load(given + half, mask=of_token & (column + half < width)[:, None], other=0.0)
        total = tl.dot((low * scale + offset).to(x_low.dtype), x_low, total, input_precision="ieee")
        total = tl.dot((high * scale + offset).to(x_high.dtype), x_high, total, input_precision="ieee")
    target = y + split.to(tl.int64) * tokens * rows
    _store(target, bias, total, row[:, None], token[None, :], rows, (token < tokens)[None, :], has_bias)


@triton.jit
def _join(
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


@dataclass(frozen=True)
class Device:
    """What a plan asks of a device.

    processors: streaming multiprocessors.
    has_tensor_cores: Triton can use them: from Ampere on, and for 16 bits.
    """

    processors: int
    has_tensor_cores: bool


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    grid: programs along the rows; along the columns, which a product may split.
    split_steps: steps of its loop over columns that a program of a product takes.
    """

    kernel: Any
    grid: tuple[int, int]
    constants: dict[str, Any]
    num_warps: int
    split_steps: int = 0

    def run(self, *arguments: Any, fused: bool) -> None:
        """fused: multiply-adds may be rounded once."""
        self.kernel[self.grid](*arguments, **self.constants, num_warps=self.num_warps, enable_fp_fusion=fused)


@lru_cache(maxsize=1024)
def plan_dequantize(fmt: GroupFormat, rows: int, width: int, dtype: torch.dtype) -> Launch:
    """Plan the launch that dequantizes a matrix [rows, width] into `dtype`."""
    constants = _format_constants(fmt)
    lanes, vector = constants["lanes"], _VECTOR_BYTES // dtype.itemsize
    if fmt.axis == "out":
        chunks = min(128, _power_of_two(triton.cdiv(width, vector)))
        constants |= {"chunks": chunks, "vector": vector}
        grid = fmt.num_stripes(rows), triton.cdiv(width, chunks * vector)
        return Launch(_dequantize_out, grid, constants, max(1, min(8, chunks * lanes // 512)))
    vector = min(vector, lanes)
    row_chunks = fmt.stripe_groups(width) * (lanes // vector)
    chunks = min(128, _power_of_two(row_chunks))
    block_rows = min(_power_of_two(rows), 512 // chunks)
    constants |= {"chunks": chunks, "vector": vector, "block_rows": block_rows}
    grid = triton.cdiv(rows, block_rows), triton.cdiv(row_chunks, chunks)
    return Launch(_dequantize_in, grid, constants, 4)


@lru_cache(maxsize=1024)
def plan_product(
    fmt: GroupFormat, tokens: int, rows: int, width: int, dtype: torch.dtype, has_bias: bool, device: Device
) -> Launch | None:
    """Plan the launch that multiplies x [tokens, width] in `dtype` by a packed matrix [rows, width].

    None where dequantizing once is faster.
    """
    tensor_cores = device.has_tensor_cores and dtype.itemsize == 2
    tile_columns = _TENSOR_CORE_COLUMNS if tensor_cores else _FMA_COLUMNS
    if tokens > max(tile_columns):
        return None
    axis_out, padded = fmt.axis == "out", _power_of_two(tokens)
    constants = _format_constants(fmt)
    lanes, most_splits = constants["lanes"], partial_splits(fmt, tokens, rows, width)
    kernel: Any
    if padded * (lanes if axis_out else 16) <= _THREAD_SUMS:
        vector = min(_VECTOR_BYTES // dtype.itemsize, _THREAD_CODES // (lanes * padded) if axis_out else lanes)
        row_block = fmt.group_size if axis_out else 8 // padded
        row_chunks = triton.cdiv(width, vector) if axis_out else fmt.stripe_groups(width) * (lanes // vector)
        programs, warps_wanted = triton.cdiv(rows, row_block), _MATVEC_WARPS * device.processors
        # Warps of a program share the columns of a step: that needs no partial sums in memory.
        warps = min(8, _power_of_two(triton.cdiv(warps_wanted, programs)), _power_of_two(triton.cdiv(row_chunks, 32)))
        steps = triton.cdiv(row_chunks, 32 * warps)
        kernel = _matvec_out if axis_out else _matvec_in
        constants |= {"chunks": 32 * warps, "vector": vector}
        constants |= {} if axis_out else {"block_rows": row_block}
    else:
        warps, padded = 4 if padded < 128 else 8, max(padded, min(tile_columns))
        warps_wanted, block = 2 * warps * device.processors, tile_columns[padded]
        # Smaller tiles where the bound on partial sums would leave processors idle.
        stripe_rows = fmt.group_size if axis_out else 1
        stripes = max(1, _TILE_ROWS // (lanes if axis_out else 1))
        while stripes * lanes > 16 and stripes > (1 if axis_out else 16):
            if triton.cdiv(rows, stripes * stripe_rows) * most_splits >= device.processors:
                break
            stripes //= 2
        programs = triton.cdiv(rows, stripes * stripe_rows)
        if axis_out:
            kernel, steps = _tiles_out, triton.cdiv(width, block)
            constants |= {"block": block, "block_stripes": stripes}
        else:
            groups = max(1, block // lanes)
            kernel, steps = _tiles_in, triton.cdiv(fmt.stripe_groups(width), groups)
            constants |= {"block_rows": stripes, "block_groups": groups}
    # Joining partial sums is one more launch, so half of the warps are enough.
    splits = min(triton.cdiv(warps_wanted, programs * warps), steps, most_splits)
    splits = splits if 2 * programs * warps < warps_wanted else 1
    split_steps = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, split_steps)
    constants |= {"has_bias": has_bias and splits == 1, "padded_tokens": padded}
    return Launch(kernel, (programs, splits), constants, warps, split_steps)


def partial_splits(fmt: GroupFormat, tokens: int, rows: int, width: int) -> int:
    """Return how many partial sums, written and read in float32, take a tenth of the packed matrix's bytes."""
    return max(1, fmt.packed_bytes(rows, width) // (_PARTIAL_SHARE * 8 * tokens * rows))


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width], contiguous, of any floating type; returns it."""
    rows, width = out.shape
    with _on_device(packed):
        launch = plan_dequantize(fmt, rows, width, out.dtype)
        launch.run(packed, out, *_tables(fmt, packed), rows, width, packed.stride(0), fused=False)
    return out


def matmul(x: Tensor, packed: Tensor, fmt: GroupFormat, rows: int, bias: Tensor | None = None) -> Tensor | None:
    """x [T, width], contiguous, times the packed matrix [rows, width] transposed, plus bias [rows] -> [T, rows].

    None where dequantizing once is faster.
    """
    (tokens, width), device = x.shape, x.device
    y = x.new_empty((tokens, rows))
    if not tokens:
        return y
    launch = plan_product(fmt, tokens, rows, width, x.dtype, bias is not None, _describe(device))
    if launch is None:
        return None
    splits = launch.grid[1]
    target = y if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=device)
    given_bias = x if bias is None else bias
    sizes = tokens, rows, width, packed.stride(0), launch.split_steps
    with _on_device(packed):
        launch.run(x, packed, *_tables(fmt, packed), given_bias, target, *sizes, fused=True)
        if splits > 1:
            constants = {"has_bias": bias is not None, "block": _JOINED}
            join = Launch(_join, (triton.cdiv(tokens * rows, _JOINED), 1), constants, num_warps=4)
            join.run(target, given_bias, y, tokens * rows, rows, splits, fused=True)
    return y


def _format_constants(fmt: GroupFormat) -> dict[str, Any]:
    return {"group": fmt.group_size, "lanes": _power_of_two(fmt.group_size // 2), "pairs": fmt.scales == "pair"}


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _tables(fmt: GroupFormat, packed: Tensor) -> tuple[Tensor, Tensor]:
    return word_scales(packed.device), word_zero_points(fmt.bits, packed.device)


@lru_cache(maxsize=8)
def _describe(device: torch.device) -> Device:
    if device.type != "cuda":  # in Triton's interpreter
        return Device(1, True)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, properties.major >= 8)


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
