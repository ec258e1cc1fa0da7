"""Unpacking beside the product: compiled loops where they apply, and plain torch where they do not.

Plain operations of torch pass over the values several times, each through memory; a loop passes once, and on a
processor leaves the tile in its cache. All give the same numbers, bit for bit. numba (processors) and Triton (CUDA)
compile at the first call and keep the result on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.quant.arithmetic import word_steps, word_zeros
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize

_HOST = torch.device("cpu")
# Up to so many tokens a product takes codes as they are; beyond, unpacking once and a library's product are faster.
QUANTIZED_MATMUL_ROWS = 8


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width] in the compute type; returns it."""
    if out.is_cuda and (triton := _triton()) is not None and fmt.bits == 4 and _is_plain(packed, out):
        return triton(packed, fmt, out)
    loop = _loops().get((fmt.bits, fmt.axis, fmt.scales)) if _has_loop(packed, out) else None
    if loop is None:
        return dequantize_with_torch(packed, fmt, out)
    source, target, rows = packed.numpy(), out.numpy(), fmt.stripe_rows
    _in_parts(source.shape[0], fmt, lambda some: (source[some], target[some.start * rows : some.stop * rows]), loop)
    return out


def quantized_matmul(x: Tensor, packed: Tensor, fmt: GroupFormat, rows: int) -> Tensor | None:
    """x [T, width] of a few tokens times the matrix [rows, width] transposed -> [T, rows], without unpacking it.

    None where no loop does that faster than unpacking and a product: for more tokens, other formats and devices.
    """
    loop = _loops().get((fmt.bits, fmt.axis, f"{fmt.scales} dot"))
    if loop is None or x.shape[0] > QUANTIZED_MATMUL_ROWS or not _has_loop(packed, x):
        return None
    y = torch.empty((x.shape[0], rows), dtype=torch.float32)
    source, given, target, group = packed.numpy(), x.numpy(), y.numpy(), fmt.group_size
    _in_parts(
        source.shape[0],
        fmt,
        lambda some: (source[some], given, target[:, some.start * group : some.stop * group]),
        loop,
    )
    return y


def _in_parts(
    stripes: int, fmt: GroupFormat, arguments: Callable[[slice], tuple[Any, ...]], loop: Callable[..., None]
) -> None:
    """A loop over stripes, a part in every thread."""
    tables = _tables(fmt.bits) if fmt.scales == "word" else (_halves(), _halves())
    threads = torch.get_num_threads()
    step = -(-stripes // threads)
    parts = [arguments(slice(first, min(first + step, stripes))) for first in range(0, stripes, step)]
    others = [_pool(threads).submit(loop, *part, fmt.group_size, *tables) for part in parts[1:]]
    loop(*parts[0], fmt.group_size, *tables)
    for other in others:
        other.result()


def dequantize_with_torch(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """The same by plain operations of torch, for every device and format."""
    return out.copy_(dequantize(packed, fmt, *out.shape))


def _has_loop(packed: Tensor, out: Tensor) -> bool:
    return packed.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()


def _is_plain(packed: Tensor, out: Tensor) -> bool:
    return packed.stride(1) == 1 and out.is_contiguous()


@lru_cache(maxsize=1)
def _triton() -> Callable[[Tensor, GroupFormat, Tensor], Tensor] | None:
    try:
        from flexgen_helm.quant.triton_kernels import dequantize_into as found
    except ImportError:  # torch for this machine came without it
        return None
    return found


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="unpacking")


@lru_cache(maxsize=8)
def _tables(bits: int) -> tuple[Any, Any]:
    return word_steps(_HOST).numpy(), word_zeros(bits, _HOST).numpy()


@lru_cache(maxsize=1)
def _halves() -> Any:
    """float32 of every FP16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@lru_cache(maxsize=1)
def _loops() -> dict[tuple[int, str, str], Callable[..., None]]:
    """(bits, axis, scales) -> loop(packed, out, group, tables)."""
    try:
        from flexgen_helm.quant import numba_kernels
    except ImportError:  # a machine without numba
        return {}
    return {
        (4, "in", "pair"): numba_kernels.rows_pair,
        (4, "in", "word"): numba_kernels.rows_word,
        (4, "out", "pair"): numba_kernels.columns_pair,
        (4, "out", "word"): numba_kernels.columns_word,
        (4, "out", "pair dot"): numba_kernels.columns_pair_dot,
        (4, "out", "word dot"): numba_kernels.columns_word_dot,
    }
