"""Triton kernels that dequantize packed bytes on CUDA devices, and their launches: how a matrix is
divided among programs.

There are two kernels for a `GroupFormat`, one for each axis, with 4 or 8 bits and any scales
(layout: `quant.packing`), and one for every `BlockFormat`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from flexgen_helm.quant.blocks import numbers_of
from flexgen_helm.quant.formats import (
    BitField,
    BlockFormat,
    GroupFormat,
    Numbers,
    StoredFormat,
)


@triton.jit
def _codes(low_at: tl.tensor, high_at: tl.tensor, inside: tl.tensor, bits: tl.constexpr) -> Any:
    """Load the codes of the first and of the second half of groups, in float32: with 4 bits both
    from the bytes at `low_at`.
    """
    byte = tl.load(low_at, mask=inside, other=0).to(tl.int32)
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
    """Load the scales and offsets of groups from the 16-bit numbers at `numbers`: words at `index`,
    or, if `pairs`, scales at `index` and offsets at `offset_index`.

    scales, zero_points: of words (`arithmetic.word_scales`, `word_zero_points`).
    """
    if pairs:
        at = numbers.to(tl.pointer_type(tl.float16))
        scale = tl.load(at + index, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(at + offset_index, mask=inside, other=0.0).to(tl.float32)
    else:
        word = tl.load(numbers.to(tl.pointer_type(tl.uint16)) + index, mask=inside, other=0).to(
            tl.int32
        )
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
    """Axis 'out': dequantize `chunks` vectors of `vector` columns in one stripe.

    lanes: group / 2, rounded up to a power of two; other arguments: as `packing.PackedArgs`.
    """
    half: tl.constexpr = group // 2
    code_bytes: tl.constexpr = group * bits // 8
    stripe = tl.program_id(0).to(tl.int64)
    data = packed + stripe * stripe_bytes
    in_chunks = (tl.arange(0, chunks) * vector)[:, None] + tl.arange(0, vector)[None, :]
    column = (tl.program_id(1) * (chunks * vector) + in_chunks)[None, :, :]
    lane = tl.arange(0, lanes)[:, None, None]
    inside = column < width
    numbers = data + code_bytes * width
    scale, offset = _scale_and_offset(
        numbers, column, column + width, inside, scales, zero_points, pairs
    )
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
    """Axis 'in': dequantize `block_rows` rows, of each `chunks` vectors of `vector` code bytes.

    Arguments: as in `dequantize_out`.
    """
    half: tl.constexpr = group // 2
    code_bytes: tl.constexpr = group * bits // 8
    groups = tl.cdiv(width, group)
    row = (tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows))[:, None, None]
    per_group: tl.constexpr = lanes // vector
    chunk = (tl.program_id(1) * chunks + tl.arange(0, chunks))[None, :, None]
    number = chunk // per_group
    lane = chunk % per_group * vector + tl.arange(0, vector)[None, None, :]
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


# Values of blocks that a program decodes.
_BLOCKS_VALUES = tl.constexpr(2048)
# Indices of the tuples of `describe_blocks`: of what describes a block's numbers, and of what
# describes one array of them.
_CODES, _SCALES, _OFFSETS, _ZEROS, _DIVIDES = map(tl.constexpr, range(5))
_FIRST, _COUNT, _WIDTHS, _VALUES = map(tl.constexpr, range(4))


@triton.jit
def _numbers(block: tl.tensor, layout: tl.tensor, index: tl.tensor, array: tl.constexpr) -> Any:
    """Decode the numbers of an array at an index, in float32.

    block: addresses of blocks; layout, array: as `describe_blocks` returns them.
    """
    bits = tl.zeros_like(index)
    for part in tl.static_range(len(array[_WIDTHS])):
        at = tl.load(layout + (array[_FIRST] + part * array[_COUNT]) + index)
        found = tl.load(block + (at >> 3)).to(tl.int32) >> (at & 7)
        bits = (bits << array[_WIDTHS][part]) | (found & ((1 << array[_WIDTHS][part]) - 1))
    if array[_VALUES] == "F32":
        number = bits.to(tl.float32, bitcast=True)
    elif array[_VALUES] == "BF16":
        number = (bits << 16).to(tl.float32, bitcast=True)
    elif array[_VALUES] == "F16":
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = tl.load(layout + array[_VALUES] + bits).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _product(block: tl.tensor, layout: tl.tensor, numbers: tl.constexpr, kind: tl.constexpr) -> Any:
    """Return the scales, offsets or zero points of blocks [blocks, 1], as products of their factors
    [blocks, parts or 1, 1]; kind: `_SCALES`, `_OFFSETS` or `_ZEROS`.
    """
    product = tl.full((1, 1), 1.0, tl.float32)
    for i in tl.static_range(len(numbers[kind])):
        index = tl.arange(0, numbers[kind][i][_COUNT])[None, :]
        factor = _numbers(block, layout, index, numbers[kind][i])
        if numbers[_DIVIDES] and kind == _SCALES and i == 1:
            product = tl.div_rn(factor, product)
        else:
            product *= factor
    return product[:, :, None]


@triton.jit
def dequantize_blocks(
    packed: tl.tensor,
    out: tl.tensor,
    layout: tl.tensor,
    count: tl.tensor,
    row_blocks: tl.tensor,
    row_bytes: tl.tensor,
    block_bytes: tl.constexpr,
    numbers: tl.constexpr,
    parts: tl.constexpr,
    sign: tl.constexpr,
    factor: tl.constexpr,
) -> None:
    """Decode `_BLOCKS_VALUES` values of all `count` blocks; behind the last block it is decoded
    again.

    row_blocks, row_bytes: blocks of a row, and bytes from a row to the next.
    parts: of a block, which have a scale each; sign: of the offsets; others: see `describe_blocks`.
    """
    size: tl.constexpr = numbers[_CODES][_COUNT]
    chunk: tl.constexpr = _BLOCKS_VALUES // size
    number = tl.minimum(tl.program_id(0) * chunk + tl.arange(0, chunk), count - 1)[:, None]
    block = (
        packed + (number // row_blocks).to(tl.int64) * row_bytes + number % row_blocks * block_bytes
    )
    index = tl.reshape(tl.arange(0, size), (1, parts, size // parts))
    values = _numbers(block[:, :, None], layout, index, numbers[_CODES])
    if len(numbers[_ZEROS]):
        values -= _product(block, layout, numbers, _ZEROS)
    values *= _product(block, layout, numbers, _SCALES)
    values *= factor
    if len(numbers[_OFFSETS]):
        values += sign * _product(block, layout, numbers, _OFFSETS)
    tl.store(out + number.to(tl.int64)[:, :, None] * size + index, values)


# Bytes that a thread stores at once.
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    grid: number of programs along the rows, and along the columns.
    constants: its `tl.constexpr` arguments.
    """

    kernel: Any
    grid: tuple[int, int]
    constants: dict[str, Any]
    num_warps: int

    def run(self, *arguments: Any) -> None:
        """Launch the kernel; without fused multiply-adds, which plain torch does not round so."""
        self.kernel[self.grid](
            *arguments, **self.constants, num_warps=self.num_warps, enable_fp_fusion=False
        )


@lru_cache(maxsize=1024)
def plan_dequantize(fmt: GroupFormat, rows: int, width: int, dtype: torch.dtype) -> Launch:
    """Return the launch that dequantizes a matrix [rows, width] into `dtype`."""
    lanes, vector = next_power_of_2(fmt.group_size // 2), _VECTOR_BYTES // dtype.itemsize
    constants = {
        "group": fmt.group_size,
        "bits": fmt.bits,
        "lanes": lanes,
        "pairs": fmt.scales == "pair",
    }
    if fmt.axis == "out":
        chunks = min(128, next_power_of_2(cdiv(width, vector)))
        constants |= {"chunks": chunks, "vector": vector}
        grid = fmt.num_stripes(rows), cdiv(width, chunks * vector)
        return Launch(dequantize_out, grid, constants, max(1, min(8, chunks * lanes // 512)))
    vector = min(vector, lanes)
    row_chunks = fmt.stripe_groups(width) * (lanes // vector)
    chunks = min(128, next_power_of_2(row_chunks))
    block_rows = min(next_power_of_2(rows), 512 // chunks)
    constants |= {"chunks": chunks, "vector": vector, "block_rows": block_rows}
    grid = cdiv(rows, block_rows), cdiv(row_chunks, chunks)
    return Launch(dequantize_in, grid, constants, 4)


@lru_cache(maxsize=64)
def describe_blocks(fmt: BlockFormat, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Return the constants of `dequantize_blocks` for a format, and its layout, a table in int32.

    The constant `numbers` is (codes, factors of the scales, of the offsets, of the zero points,
    whether the second factor of a scale is divided by the first). The codes and each factor are an
    array of numbers in a block, described by a tuple: (index in the layout of the bits at which the
    numbers begin in a block, part by part; how many numbers; widths of the parts, the highest bits
    first; index in the layout of the values that the integers stand for, or the name of their
    floating-point type).
    """
    layout: list[int] = []

    def describe(numbers: Numbers) -> tuple[Any, ...]:
        first, parts = len(layout), numbers.parts[::-1]
        layout.extend(
            8 * byte + shift for part in parts for byte, shift in zip(part.bytes, part.shifts)
        )
        widths = tuple(part.width for part in parts)
        if (bits := sum(widths)) > 8:
            return first, numbers.count, widths, numbers.floating
        integers = torch.arange(1 << bits, dtype=torch.uint8)[:, None]
        values = numbers_of(integers, replace(numbers, parts=(BitField(8, (0,), (0,)),)))
        layout.extend(values[:, 0].view(torch.int32).tolist())
        return first, numbers.count, widths, len(layout) - len(integers)

    codes = describe(fmt.codes)
    factors = (tuple(map(describe, numbers)) for numbers in (fmt.scales, fmt.offsets, fmt.zeros))
    constants = {
        "block_bytes": fmt.block_bytes,
        "numbers": (codes, *factors, fmt.divides),
        "parts": max(factor.count for factor in fmt.scales + fmt.offsets),
        "sign": -1.0 if fmt.subtracts else 1.0,
        "factor": fmt.factor,
    }
    return constants, torch.tensor(layout, dtype=torch.int32).to(device)


def dequantize_into(packed: Tensor, fmt: StoredFormat, out: Tensor) -> Tensor:
    """Dequantize bytes [stripes, stripe_bytes] into `out` [rows, width], contiguous, of any
    floating dtype; return it.
    """
    rows, width = out.shape
    with _on_device(packed):
        if isinstance(fmt, BlockFormat):
            constants, layout = describe_blocks(fmt, packed.device)
            blocks = width // fmt.block_values
            launch = Launch(
                dequantize_blocks, (cdiv(out.numel(), _BLOCKS_VALUES.value), 1), constants, 4
            )
            launch.run(packed, out, layout, rows * blocks, blocks, packed.stride(0))
            return out
        launch = plan_dequantize(fmt, rows, width, out.dtype)
        tables = word_scales(packed.device), word_zero_points(fmt.bits, packed.device)
        launch.run(packed, out, *tables, rows, width, packed.stride(0))
    return out


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the tensor's device is current: Triton launches on that one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
