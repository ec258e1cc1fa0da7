"""Dequantization into the compute type, and products with quantized weights: compiled loops, else plain torch.

Plain torch passes over the values several times, each through memory; a compiled loop passes once and leaves the tile
in the cache. Both give the same bits. numba (CPUs) and Triton (CUDA) compile at the first call and keep the result on
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from flexgen_helm.quant.formats import GroupFormat, Scales
from flexgen_helm.quant.packing import dequantize

# Tokens up to which a product reads codes; for more, dequantizing once and a library's product are faster.
QUANTIZED_MATMUL_ROWS = 8


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width] in the compute type; returns it."""
    if fmt.bits == 4 and out.is_contiguous():
        if out.is_cuda and packed.stride(1) == 1 and (triton := _triton_kernel()) is not None:
            return triton(packed, fmt, out)
        if _on_cpu(packed, out) and (numba := _numba_kernels()) is not None:
            kernel = numba.dequantize_rows if fmt.axis == "in" else numba.dequantize_columns
            data, target, n = packed.numpy(), out.numpy(), fmt.stripe_rows
            _run_threads(kernel, fmt, len(data), lambda part: (data[part], target[part.start * n : part.stop * n]))
            return out
    return dequantize_with_torch(packed, fmt, out)


def dequantize_with_torch(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Do the same by plain operations of torch, for every device and format."""
    return out.copy_(dequantize(packed, fmt, *out.shape))


def quantized_matmul(x: Tensor, packed: Tensor, fmt: GroupFormat, rows: int) -> Tensor | None:
    """x [T, width] times the packed matrix [rows, width] transposed -> [T, rows], without dequantizing it.

    None where dequantizing is faster or there is no loop: more than `QUANTIZED_MATMUL_ROWS` tokens, other bits or
    axis, other devices and types.
    """
    if fmt.bits != 4 or fmt.axis != "out" or x.shape[0] > QUANTIZED_MATMUL_ROWS or not x.is_contiguous():
        return None
    numba = _numba_kernels() if _on_cpu(packed, x) else None
    if numba is None:
        return None
    y = torch.empty((x.shape[0], rows), dtype=torch.float32)
    data, given, target, group = packed.numpy(), x.numpy(), y.numpy(), fmt.group_size
    _run_threads(
        numba.matmul_columns,
        fmt,
        len(data),
        lambda part: (data[part], given, target[:, part.start * group : part.stop * group]),
    )
    return y


def _on_cpu(packed: Tensor, values: Tensor) -> bool:
    return packed.device.type == "cpu" and values.dtype == torch.float32


def _run_threads(
    kernel: Callable[..., None], fmt: GroupFormat, stripes: int, arguments: Callable[[slice], tuple[Any, ...]]
) -> None:
    """Run a numba kernel over all stripes, a part of them in every thread."""
    options = fmt.group_size, fmt.scales == "word", *_tables(fmt.scales, fmt.bits)
    threads = torch.get_num_threads()
    step = -(-stripes // threads)
    first, *others = [arguments(slice(start, min(start + step, stripes))) for start in range(0, stripes, step)]
    futures = [_thread_pool(threads).submit(kernel, *part, *options) for part in others]
    kernel(*first, *options)
    for future in futures:
        future.result()


@lru_cache(maxsize=1)
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="dequantize")


@lru_cache(maxsize=8)
def _tables(scales: Scales, bits: int) -> tuple[Any, Any]:
    """The two tables of the numba kernels."""
    if scales == "word":
        host = torch.device("cpu")
        return word_scales(host).numpy(), word_zero_points(bits, host).numpy()
    float32_of_fp16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return float32_of_fp16, float32_of_fp16


@lru_cache(maxsize=1)
def _numba_kernels() -> ModuleType | None:
    try:
        from flexgen_helm.quant import numba_kernels
    except ImportError:  # a machine without numba
        return None
    return numba_kernels


@lru_cache(maxsize=1)
def _triton_kernel() -> Callable[[Tensor, GroupFormat, Tensor], Tensor] | None:
    try:
        from flexgen_helm.quant.triton_kernels import dequantize_into as kernel
    except ImportError:  # this build of torch came without Triton
        return None
    return kernel
