"""Launches of the Triton kernels: how a matrix is divided among programs, by its sizes and the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from flexgen_helm.quant import triton_kernels
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
        return Launch(triton_kernels.dequantize_out, grid, constants, max(1, min(8, chunks * lanes // 512)))
    vector = min(vector, lanes)
    row_chunks = fmt.stripe_groups(width) * (lanes // vector)
    chunks = min(128, _power_of_two(row_chunks))
    block_rows = min(_power_of_two(rows), 512 // chunks)
    constants |= {"chunks": chunks, "vector": vector, "block_rows": block_rows}
    grid = triton.cdiv(rows, block_rows), triton.cdiv(row_chunks, chunks)
    return Launch(triton_kernels.dequantize_in, grid, constants, 4)


@lru_cache(maxsize=1024)
def plan_product(
    fmt: GroupFormat, tokens: int, rows: int, width: int, dtype: torch.dtype, has_bias: bool, device: Device
) -> Launch | None:
    """Plan the launch that multiplies x [tokens, width] in `dtype` by a packed matrix [rows, width].

    None where dequantizing once is faster.
    """
    tile_columns = _tile_columns(device, dtype)
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
        kernel = triton_kernels.matvec_out if axis_out else triton_kernels.matvec_in
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
            kernel, steps = triton_kernels.tiles_out, triton.cdiv(width, block)
            constants |= {"block": block, "block_stripes": stripes}
        else:
            groups = max(1, block // lanes)
            kernel, steps = triton_kernels.tiles_in, triton.cdiv(fmt.stripe_groups(width), groups)
            constants |= {"block_rows": stripes, "block_groups": groups}
    # Joining partial sums is one more launch, so half of the warps are enough.
    splits = min(triton.cdiv(warps_wanted, programs * warps), steps, most_splits)
    splits = splits if 2 * programs * warps < warps_wanted else 1
    split_steps = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, split_steps)
    constants |= {"has_bias": has_bias and splits == 1, "padded_tokens": padded}
    return Launch(kernel, (programs, splits), constants, warps, split_steps)


def most_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Return the most rows of x in `dtype` that `matmul` takes on a device."""
    return max(_tile_columns(_describe(device), dtype))


def _tile_columns(device: Device, dtype: torch.dtype) -> dict[int, int]:
    return _TENSOR_CORE_COLUMNS if device.has_tensor_cores and dtype.itemsize == 2 else _FMA_COLUMNS


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
            join = Launch(triton_kernels.join, (triton.cdiv(tokens * rows, _JOINED), 1), constants, num_warps=4)
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
