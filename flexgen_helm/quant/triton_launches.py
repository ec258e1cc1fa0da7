"""Launches of the Triton kernels: how a matrix is divided among programs, by its sizes and the
device.
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

from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from flexgen_helm.quant.blocks import numbers_of
from flexgen_helm.quant.formats import (
    BitField,
    BlockFormat,
    GroupFormat,
    Numbers,
    StoredFormat,
)

# Kernels for packed bytes on CUDA devices, in Triton: 4 or 8 bits, any axis and scales (layout:
# `quant.packing`), and one for all stored types of published files.


@triton.jit
def _codes(at: tl.tensor, high_at: tl.tensor, inside: tl.tensor, bits: tl.constexpr) -> Any:
    """Low and high codes, in float32: of the bytes at `at`; with 8 bits the high ones are the bytes
    at `high_at`.
    """
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
    """Scale and offset of groups: of words, or of pairs, by their indices among the 16-bit numbers
    at `numbers`.
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
    """Axis 'in': `block_rows` rows, `chunks` runs of `vector` bytes of each."""
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


@triton.jit
def _numbers(block: tl.tensor, layout: tl.tensor, index: tl.tensor, given: tl.constexpr) -> Any:
    """Some numbers of blocks, in float32. given: as `describe_blocks` describes them."""
    bits = tl.zeros_like(index)
    for part in tl.static_range(len(given[2])):
        at = tl.load(layout + (given[0] + part * given[1]) + index)
        found = tl.load(block + (at >> 3)).to(tl.int32) >> (at & 7)
        bits = (bits << given[2][part]) | (found & ((1 << given[2][part]) - 1))
    if given[3] == "F32":
        number = bits.to(tl.float32, bitcast=True)
    elif given[3] == "BF16":
        number = (bits << 16).to(tl.float32, bitcast=True)
    elif given[3] == "F16":
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = tl.load(layout + given[3] + bits).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _product(block: tl.tensor, layout: tl.tensor, numbers: tl.constexpr, kind: int) -> Any:
    """Products of scales (1), offsets (2) or zeros (3) of blocks [blocks, 1], for parts [blocks,
    parts or 1, 1].
    """
    product = tl.full((1, 1), 1.0, tl.float32)
    for i in tl.static_range(len(numbers[kind])):
        factor = _numbers(
            block, layout, tl.arange(0, numbers[kind][i][1])[None, :], numbers[kind][i]
        )
        if numbers[4] and kind == 1 and i == 1:
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
    """Stored types: some of all `count` blocks, or the last one again; their `parts` have a scale
    each.
    """
    size: tl.constexpr = numbers[0][0][1]
    chunk: tl.constexpr = _BLOCKS_VALUES // size
    number = tl.minimum(tl.program_id(0) * chunk + tl.arange(0, chunk), count - 1)[:, None]
    block = (
        packed + (number // row_blocks).to(tl.int64) * row_bytes + number % row_blocks * block_bytes
    )
    index = tl.reshape(tl.arange(0, size), (1, parts, size // parts))
    values = _numbers(block[:, :, None], layout, index, numbers[0][0])
    if len(numbers[3]):
        values -= _product(block, layout, numbers, 3)
    values *= _product(block, layout, numbers, 1)
    values *= factor
    if len(numbers[2]):
        values += sign * _product(block, layout, numbers, 2)
    tl.store(out + number.to(tl.int64)[:, :, None] * size + index, values)


# Bytes of the vector stores.
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched; grid: programs along the rows, and along the columns."""

    kernel: Any
    grid: tuple[int, int]
    constants: dict[str, Any]
    num_warps: int

    def run(self, *arguments: Any) -> None:
        """Multiply-adds are rounded twice, as plain torch rounds them."""
        self.kernel[self.grid](
            *arguments, **self.constants, num_warps=self.num_warps, enable_fp_fusion=False
        )


@lru_cache(maxsize=1024)
def plan_dequantize(fmt: GroupFormat, rows: int, width: int, dtype: torch.dtype) -> Launch:
    """Plan the launch that dequantizes a matrix [rows, width] into `dtype`."""
    lanes, vector = _power_of_two(fmt.group_size // 2), _VECTOR_BYTES // dtype.itemsize
    constants = {
        "group": fmt.group_size,
        "bits": fmt.bits,
        "lanes": lanes,
        "pairs": fmt.scales == "pair",
    }
    if fmt.axis == "out":
        chunks = min(128, _power_of_two(triton.cdiv(width, vector)))
        constants |= {"chunks": chunks, "vector": vector}
        grid = fmt.num_stripes(rows), triton.cdiv(width, chunks * vector)
        return Launch(dequantize_out, grid, constants, max(1, min(8, chunks * lanes // 512)))
    vector = min(vector, lanes)
    row_chunks = fmt.stripe_groups(width) * (lanes // vector)
    chunks = min(128, _power_of_two(row_chunks))
    block_rows = min(_power_of_two(rows), 512 // chunks)
    constants |= {"chunks": chunks, "vector": vector, "block_rows": block_rows}
    grid = triton.cdiv(rows, block_rows), triton.cdiv(row_chunks, chunks)
    return Launch(dequantize_in, grid, constants, 4)


@lru_cache(maxsize=64)
def describe_blocks(fmt: BlockFormat, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Return constants of the kernel, and its layout in int32: where numbers begin, in bits, and
    what they can be.

    Numbers are a tuple: where the layout has them, their count, bits of their parts, and where it
    has their values.
    """
    layout: list[int] = []

    def describe(given: Numbers) -> tuple[Any, ...]:
        first, parts = len(layout), given.parts[::-1]  # the highest bits first
        layout.extend(
            8 * byte + shift for part in parts for byte, shift in zip(part.bytes, part.shifts)
        )
        known = first, given.count, tuple(part.width for part in parts)
        if (bits := sum(known[2])) > 8:
            return *known, given.floating
        codes = torch.arange(1 << bits, dtype=torch.uint8)[:, None]
        values = numbers_of(codes, replace(given, parts=(BitField(8, (0,), (0,)),)))
        layout.extend(values[:, 0].view(torch.int32).tolist())
        return *known, len(layout) - len(codes)

    given = (fmt.codes,), fmt.scales, fmt.offsets, fmt.zeros
    constants = {
        "block_bytes": fmt.block_bytes,
        "numbers": (*(tuple(map(describe, numbers)) for numbers in given), fmt.divides),
        "parts": max(factor.count for factor in fmt.scales + fmt.offsets),
        "sign": -1.0 if fmt.subtracts else 1.0,
        "factor": fmt.factor,
    }
    return constants, torch.tensor(layout, dtype=torch.int32).to(device)


def dequantize_into(packed: Tensor, fmt: StoredFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width], contiguous, of any floating type;
    returns it.
    """
    rows, width = out.shape
    with _on_device(packed):
        if isinstance(fmt, BlockFormat):
            (constants, layout), blocks = (
                describe_blocks(fmt, packed.device),
                width // fmt.block_values,
            )
            launch = Launch(
                dequantize_blocks, (triton.cdiv(out.numel(), _BLOCKS_VALUES.value), 1), constants, 4
            )
            launch.run(packed, out, layout, rows * blocks, blocks, packed.stride(0))
            return out
        launch = plan_dequantize(fmt, rows, width, out.dtype)
        tables = word_scales(packed.device), word_zero_points(fmt.bits, packed.device)
        launch.run(packed, out, *tables, rows, width, packed.stride(0))
    return out


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
