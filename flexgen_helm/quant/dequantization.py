"""Dequantization into the compute dtype, and a host's products with quantized weights: by compiled
loops, else by plain torch.

Plain torch passes over the values several times, each through memory; a compiled loop passes once
and leaves the tile in the cache. Both dequantize to the same bits. A host's products of few rows
sum codes instead of dequantized weights, and differ by rounding. numba (CPUs) and Triton (CUDA)
compile at the first call and cache the result on disk. The first error of Triton, such as a machine
without a C compiler, ends its use in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module

import torch
from torch import Tensor

from flexgen_helm.hardware.fast_paths import TRITON, switch_off, switched_off
from flexgen_helm.kernels.team import empty, run_on_threads
from flexgen_helm.kernels.trial import Loops
from flexgen_helm.quant.arithmetic import word_table
from flexgen_helm.quant.block_products import TORCH_ELEMENTS, decode_into
from flexgen_helm.quant.formats import Axis, BlockFormat, GroupFormat, Scales, StoredFormat
from flexgen_helm.quant.packing import dequantize, packed_args, quantize

# Rows of x up to which a product on the CPU reads codes; for more it is faster to dequantize first.
QUANTIZED_MATMUL_ROWS = 32
_AXES: tuple[Axis, ...] = ("in", "out")
_SCALES: tuple[Scales, ...] = ("pair", "word")


def dequantize_into(packed: Tensor, fmt: StoredFormat, out: Tensor) -> Tensor:
    """Dequantize bytes [stripes, stripe_bytes] into `out` [rows, width], of any floating dtype;
    return it.
    """
    if _is_for_triton(packed, fmt, out) and _with_triton(packed, fmt, out):
        return out
    if isinstance(fmt, BlockFormat):
        return decode_into(packed, fmt, out)
    if out.is_contiguous() and _on_cpu(packed, out) and (module := loops()) is not None:
        loop = module.dequantize_rows if fmt.axis == "in" else module.dequantize_columns
        args = packed_args(packed, fmt, _table(fmt.scales, fmt.bits), out)
        run_on_threads(loop, args, len(packed))
        return out
    return dequantize_with_torch(packed, fmt, out)


def dequantize_with_torch(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Do the same as `dequantize_into` by plain operations of torch, on any device."""
    width, stripe_rows = out.shape[1], fmt.stripe_rows
    step = max(1, TORCH_ELEMENTS // (width * stripe_rows))  # stripes
    for first in range(0, packed.shape[0], step):
        tile = out[first * stripe_rows : (first + step) * stripe_rows]
        tile.copy_(dequantize(packed[first : first + step], fmt, *tile.shape))
    return out


def quantized_matmul(
    x: Tensor, packed: Tensor, fmt: GroupFormat, rows: int, bias: Tensor | None = None
) -> Tensor | None:
    """Multiply x [T, width] with a packed matrix [rows, width] transposed, and add bias [rows] ->
    [T, rows], without dequantizing the matrix in memory.

    None where it is faster to dequantize or there is no loop: for more rows of x than
    `QUANTIZED_MATMUL_ROWS`, on other devices, with axis 'in' (tables).
    """
    if x.shape[0] > QUANTIZED_MATMUL_ROWS or fmt.axis != "out" or not x.is_contiguous():
        return None
    if not _on_cpu(packed, x) or (module := loops()) is None:
        return None
    y = empty((x.shape[0], rows))
    args = packed_args(packed, fmt, _table(fmt.scales, fmt.bits), x)
    args = args._replace(rows=rows, y=y.data_ptr(), x_rows=len(x))
    run_on_threads(module.matmul_columns, args, len(packed))
    return y if bias is None else y.add_(bias)


def _is_for_triton(packed: Tensor, fmt: StoredFormat, out: Tensor) -> bool:
    """Return whether Triton's kernels take the tensors. Of a `GroupFormat` they read the scales as
    16-bit numbers, which must lie at even addresses.
    """
    if not (packed.is_cuda and out.is_cuda and out.is_contiguous()) or packed.stride(1) != 1:
        return False
    if isinstance(fmt, BlockFormat):
        return True
    # the storage itself begins at a multiple of 512
    return not (packed.storage_offset() | packed.stride(0)) & 1


def _on_cpu(packed: Tensor, values: Tensor) -> bool:
    on_host = packed.device.type == values.device.type == "cpu"
    return on_host and packed.stride(1) == 1 and values.dtype == torch.float32


@lru_cache(maxsize=8)
def _table(scales: Scales, bits: int) -> Tensor:
    """Return the `table` of `PackedArgs`."""
    if scales == "word":
        return word_table(bits, torch.device("cpu"))
    return (
        torch.arange(1 << 16, dtype=torch.int32, device="cpu")
        .to(torch.uint16)
        .view(torch.float16)
        .float()
    )


def _examples() -> Iterator[Callable[[], Tensor]]:
    """A matrix of each bits, axis and scales, and a product."""
    matrix = torch.arange(16 * 40, dtype=torch.float32, device="cpu").mul(0.37).sin().view(16, 40)
    for fmt in (
        GroupFormat(bits, 16, axis, scales)
        for bits in (4, 8)
        for axis in _AXES
        for scales in _SCALES
    ):
        stripes = quantize(matrix, fmt)
        # with other bytes between the stripes, as in caches
        packed = torch.cat((stripes, stripes.flip(1)), 1)[:, : stripes.shape[1]]
        yield partial(_matrix, packed, fmt)
        if fmt.axis == "out":
            yield partial(_product, matrix[:5], packed, fmt)


def _matrix(packed: Tensor, fmt: GroupFormat) -> Tensor:
    return dequantize_into(packed, fmt, torch.zeros((16, 40), dtype=torch.float32, device="cpu"))


def _product(x: Tensor, packed: Tensor, fmt: GroupFormat) -> Tensor:
    y = quantized_matmul(x, packed, fmt, 16)
    return x @ dequantize(packed, fmt, 16, x.shape[1]).t() if y is None else y


loops = Loops("dequantization", "flexgen_helm.quant.dequantization_loop", _examples, tolerance=1e-4)


def _with_triton(packed: Tensor, fmt: StoredFormat, out: Tensor) -> bool:
    """Dequantize with Triton's kernels; return whether they did.

    The first error ends the use of Triton in this process, with one warning. It compiles a kernel
    at its first launch, for which it needs a driver, a C compiler, and a GPU that it knows. Too
    little memory is the caller's affair.
    """
    if TRITON in switched_off:
        return False
    try:
        import_module("flexgen_helm.quant.triton_launches").dequantize_into(packed, fmt, out)
        return True
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        switch_off(TRITON, f"{type(error).__name__}: {error}".splitlines()[0])
        return False
