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


# Columns of a step of a product by tiles, by rows of x: what registers and shared memory hold without a spill. More
# rows are several products: 128 in one tile would unpack each code in all warps, five times the instructions of 64.
_TENSOR_CORE_COLUMNS = {16: 128, 32: 64, 64: 64}
_FMA_COLUMNS = {8: 32, 16: 16, 32: 16, 64: 16}
TILE_TOKENS = 64
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

# What decides how many rows of x are worth reading codes again instead of dequantizing once.
# Instructions of a tile for each weight by rows of x, with tensor cores: counted in the machine code for sm_80 to 90.
# Without them (float32, and before Ampere, where Triton has no tensor-core product) a row takes one multiply-add.
_TENSOR_CORE_INSTRUCTIONS = {16: 7.1, 32: 8.1, 64: 9.4}
_LANES = 128  # instructions of a processor and clock, in threads
# Share of the peak that loops of Triton reach. Assumed: no GPU has measured it.
_EFFICIENCY = 0.7
_PACKED_BYTES = 9 / 16  # of a weight, with 16 bits of scales for 32 values


@dataclass(frozen=True)
class Device:
    """What a plan asks of a device.

    processors: streaming multiprocessors.
    has_tensor_cores: Triton can use them: from Ampere on, and for 16 bits.
    rows_16_bits, rows_float32: most rows of x for which products read the codes (`direct_rows`).
    """

    processors: int
    has_tensor_cores: bool
    rows_16_bits: int = TILE_TOKENS
    rows_float32: int = TILE_TOKENS

    def rows(self, dtype: torch.dtype) -> int:
        return self.rows_16_bits if dtype.itemsize == 2 else self.rows_float32


def direct_rows(
    capability: tuple[int, int], processors: int, clock: float, memory_bytes_s: float, element_bytes: int
) -> int:
    """Return the most rows of x for which a product that reads codes is faster than one that dequantizes first.

    Both take what is longest: memory traffic, instructions, or multiply-adds, for each weight. Reading codes moves
    `_PACKED_BYTES` for every `TILE_TOKENS` rows. Dequantizing moves them once, and the weight twice.

    capability: of computing; clock: Hz; element_bytes: of x.
    """
    has_tensor_cores = capability >= (8, 0) and element_bytes == 2
    clocks = processors * clock
    # Multiply-adds of a processor and clock: in float32, and by tensor cores with sums in float32 (GeForce's for 8.6).
    fma = clocks * (64 if capability <= (8, 0) else 128)
    tensor_fma = clocks * {(7, 5): 512, (8, 0): 1024, (9, 0): 2048}.get(capability, 256 if capability[1] else 2048)
    library_fma = tensor_fma if element_bytes == 2 else fma

    def reading_codes(rows: int) -> float:
        seconds = 0.0
        for first in range(0, rows, TILE_TOKENS):
            tile = next(size for size in _TENSOR_CORE_INSTRUCTIONS if size >= min(rows - first, TILE_TOKENS))
            instructions, rate = (tile + 1, fma) if not has_tensor_cores else (tile, tensor_fma)
            loop = instructions / rate
            if has_tensor_cores:
                loop = max(loop, _TENSOR_CORE_INSTRUCTIONS[tile] / (clocks * _LANES))
            seconds += max(_PACKED_BYTES / memory_bytes_s, loop / _EFFICIENCY)
        return seconds

    def dequantizing(rows: int) -> float:
        reading = element_bytes / memory_bytes_s
        return (_PACKED_BYTES + element_bytes) / memory_bytes_s + max(reading, rows / library_fma)

    sizes = (*_TENSOR_CORE_INSTRUCTIONS, *range(2 * TILE_TOKENS, 5 * TILE_TOKENS, TILE_TOKENS))
    return max((rows for rows in sizes if reading_codes(rows) <= dequantizing(rows)), default=16)


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
        return Launch(dequantize_out, grid, constants, max(1, min(8, chunks * lanes // 512)))
    vector = min(vector, lanes)
    row_chunks = fmt.stripe_groups(width) * (lanes // vector)
    chunks = min(128, _power_of_two(row_chunks))
    block_rows = min(_power_of_two(rows), 512 // chunks)
    constants |= {"chunks": chunks, "vector": vector, "block_rows": block_rows}
    grid = triton.cdiv(rows, block_rows), triton.cdiv(row_chunks, chunks)
    return Launch(dequantize_in, grid, constants, 4)


@lru_cache(maxsize=1024)
def plan_product(
    fmt: GroupFormat, tokens: int, rows: int, width: int, dtype: torch.dtype, has_bias: bool, device: Device
) -> Launch:
    """Plan the launch that multiplies x [tokens, width] in `dtype` by a packed matrix [rows, width] of axis 'out'.

    tokens: at most `TILE_TOKENS`.
    """
    has_tensor_cores = device.has_tensor_cores and dtype.itemsize == 2
    tile_columns = _TENSOR_CORE_COLUMNS if has_tensor_cores else _FMA_COLUMNS
    padded = _power_of_two(tokens)
    constants = _format_constants(fmt)
    lanes, most_splits = constants["lanes"], partial_splits(fmt, tokens, rows, width)
    kernel: Any
    if padded * lanes <= _THREAD_SUMS:
        vector = min(_VECTOR_BYTES // dtype.itemsize, _THREAD_CODES // (lanes * padded))
        chunks = triton.cdiv(width, vector)
        programs, warps_wanted = fmt.num_stripes(rows), _MATVEC_WARPS * device.processors
        # Warps of a program share the columns of a step: that needs no partial sums in memory.
        warps = min(8, _power_of_two(triton.cdiv(warps_wanted, programs)), _power_of_two(triton.cdiv(chunks, 32)))
        kernel, steps = matvec, triton.cdiv(chunks, 32 * warps)
        constants |= {"chunks": 32 * warps, "vector": vector}
    else:
        warps, padded = 4, max(padded, min(tile_columns))
        warps_wanted, block = 2 * warps * device.processors, tile_columns[padded]
        # Smaller tiles where the bound on partial sums would leave processors idle.
        stripes = max(1, _TILE_ROWS // lanes)
        while stripes > 1 and stripes * lanes > 16:
            if triton.cdiv(rows, stripes * fmt.group_size) * most_splits >= device.processors:
                break
            stripes //= 2
        programs = triton.cdiv(rows, stripes * fmt.group_size)
        kernel, steps = tiles, triton.cdiv(width, block)
        constants |= {"block": block, "block_stripes": stripes}
    # Joining partial sums is one more launch, so half of the warps are enough.
    splits = min(triton.cdiv(warps_wanted, programs * warps), steps, most_splits)
    splits = splits if 2 * programs * warps < warps_wanted else 1
    split_steps = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, split_steps)
    constants |= {"has_bias": has_bias and splits == 1, "padded_tokens": padded}
    return Launch(kernel, (programs, splits), constants, warps, split_steps)


def most_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Return the most rows of x in `dtype` that `matmul` takes on a device."""
    return _describe(device).rows(dtype)


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
    if x.shape[0] > most_rows(x.device, x.dtype):
        return None
    y = x.new_empty((x.shape[0], rows))
    with _on_device(packed):
        for part in zip(x.split(TILE_TOKENS), y.split(TILE_TOKENS)) if len(x) else ():
            _multiply(*part, packed, fmt, bias)
    return y


def _multiply(x: Tensor, y: Tensor, packed: Tensor, fmt: GroupFormat, bias: Tensor | None) -> None:
    """Multiply at most `TILE_TOKENS` rows."""
    (tokens, width), rows, device = x.shape, y.shape[1], x.device
    launch = plan_product(fmt, tokens, rows, width, x.dtype, bias is not None, _describe(device))
    splits = launch.grid[1]
    target = y if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=device)
    given_bias = x if bias is None else bias
    sizes = tokens, rows, width, packed.stride(0), launch.split_steps
    launch.run(x, packed, *_tables(fmt, packed), given_bias, target, *sizes, fused=True)
    if splits > 1:
        constants = {"has_bias": bias is not None, "block": _JOINED}
        joining = Launch(join, (triton.cdiv(tokens * rows, _JOINED), 1), constants, num_warps=4)
        joining.run(target, given_bias, y, tokens * rows, rows, splits, fused=True)


def _format_constants(fmt: GroupFormat) -> dict[str, Any]:
    lanes = _power_of_two(fmt.group_size // 2)
    return {"group": fmt.group_size, "bits": fmt.bits, "lanes": lanes, "pairs": fmt.scales == "pair"}


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
    capability, processors = (properties.major, properties.minor), properties.multi_processor_count
    clock = 1e3 * properties.clock_rate
    memory_bytes_s = 2 * 1e3 * properties.memory_clock_rate * properties.memory_bus_width / 8  # double data rate
    if not clock * memory_bytes_s:  # some virtual machines do not say
        return Device(processors, capability >= (8, 0))
    rows = (direct_rows(capability, processors, clock, memory_bytes_s, element_bytes) for element_bytes in (2, 4))
    return Device(processors, capability >= (8, 0), *rows)


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
