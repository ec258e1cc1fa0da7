"""Launches of the Triton kernels: how a matrix is divided among programs, by its sizes and the device."""

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

# Kernels for packed bytes on CUDA devices, in Triton: 4 or 8 bits, any axis and scales (layout: `quant.packing`).


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
        self.kernel[self.grid](*arguments, **self.constants, num_warps=self.num_warps, enable_fp_fusion=False)


@lru_cache(maxsize=1024)
def plan_dequantize(fmt: GroupFormat, rows: int, width: int, dtype: torch.dtype) -> Launch:
    """Plan the launch that dequantizes a matrix [rows, width] into `dtype`."""
    constants = _format_constants(fmt)
    lanes, vector = constants["lanes"], _VECTOR_BYTES // dtype.itemsize
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


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width], contiguous, of any floating type; returns it."""
    rows, width = out.shape
    with _on_device(packed):
        launch = plan_dequantize(fmt, rows, width, out.dtype)
        tables = word_scales(packed.device), word_zero_points(fmt.bits, packed.device)
        launch.run(packed, out, *tables, rows, width, packed.stride(0))
    return out


def _format_constants(fmt: GroupFormat) -> dict[str, Any]:
    lanes = _power_of_two(fmt.group_size // 2)
    return {"group": fmt.group_size, "bits": fmt.bits, "lanes": lanes, "pairs": fmt.scales == "pair"}


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
