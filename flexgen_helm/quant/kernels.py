"""Dequantization into the compute type, and products with quantized weights: compiled loops, else plain torch.

Plain torch passes over the values several times, each through memory; a compiled loop passes once and leaves the tile
in the cache. Both give the same bits. numba (CPUs) and Triton (CUDA) compile at the first call and keep the result on
disk. The first error of Triton, such as a machine without a C compiler, ends its use in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.hardware.process_state import TRITON, switch_off, switched_off
from flexgen_helm.kernels.team import empty, thread_pool
from flexgen_helm.kernels.trial import tried
from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from flexgen_helm.quant.formats import Axis, GroupFormat, Scales
from flexgen_helm.quant.packing import dequantize, quantize

Result = TypeVar("Result")

# Tokens up to which a product on the CPU reads codes; for more, dequantizing once and a library's product are faster.
QUANTIZED_MATMUL_ROWS = 8
_AXES: tuple[Axis, ...] = ("in", "out")
_SCALES: tuple[Scales, ...] = ("pair", "word")
# Values that plain torch dequantizes at once: it takes about 20 bytes for each.
_TORCH_ELEMENTS = 1 << 20


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width] in the compute type; returns it."""
    if fmt.has_kernels and out.is_contiguous():
        if _is_for_triton(packed, out):
            done = _with_triton(lambda kernels: kernels.dequantize_into(packed, fmt, out))
            return dequantize_with_torch(packed, fmt, out) if done is None else done
        if _on_cpu(packed, out) and (numba := _numba_kernels()) is not None:
            return _dequantize(numba, packed, fmt, out)
    return dequantize_with_torch(packed, fmt, out)


def _dequantize(numba: ModuleType, packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    kernel = numba.dequantize_rows if fmt.axis == "in" else numba.dequantize_columns
    data, target, n = packed.numpy(), out.numpy(), fmt.stripe_rows
    _run_threads(kernel, fmt, len(data), lambda part: (data[part], target[part.start * n : part.stop * n]))
    return out


def dequantize_with_torch(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Do the same by plain operations of torch, for every device and format."""
    width, stripe_rows = out.shape[1], fmt.stripe_rows
    step = max(1, _TORCH_ELEMENTS // (width * stripe_rows))  # stripes
    for first in range(0, packed.shape[0], step):
        tile = out[first * stripe_rows : (first + step) * stripe_rows]
        tile.copy_(dequantize(packed[first : first + step], fmt, *tile.shape))
    return out


def quantized_matmul(
    x: Tensor, packed: Tensor, fmt: GroupFormat, rows: int, bias: Tensor | None = None
) -> Tensor | None:
    """x [T, width] times the packed matrix [rows, width] transposed, plus bias [rows] -> [T, rows].

    The matrix is not dequantized in memory. None where dequantizing is faster or there is no kernel: more tokens than
    `QUANTIZED_MATMUL_ROWS` on the CPU or `triton_launches` takes on a device, other bits, axis 'in' (tables).
    """
    if not fmt.has_kernels or fmt.axis != "out" or not x.is_contiguous():
        return None
    if _is_for_triton(packed, x):
        return _with_triton(lambda kernels: kernels.matmul(x, packed, fmt, rows, bias))
    if x.shape[0] > QUANTIZED_MATMUL_ROWS:
        return None
    numba = _numba_kernels() if _on_cpu(packed, x) else None
    if numba is None:
        return None
    y = _product(numba, x, packed, fmt, rows)
    return y if bias is None else y.add_(bias)


def _product(numba: ModuleType, x: Tensor, packed: Tensor, fmt: GroupFormat, rows: int) -> Tensor:
    y = empty((x.shape[0], rows))
    data, given, target, group = packed.numpy(), x.numpy(), y.numpy(), fmt.group_size
    _run_threads(
        numba.matmul_columns,
        fmt,
        len(data),
        lambda part: (data[part], given, target[:, part.start * group : part.stop * group]),
    )
    return y


def most_fused_rows(device: torch.device, fmt: GroupFormat, dtype: torch.dtype) -> int:
    """Return the most rows of x whose product with a packed matrix on a CUDA device needs no dequantized one."""
    if not fmt.has_kernels or fmt.axis != "out" or device.type != "cuda":
        return 0
    return _with_triton(lambda kernels: kernels.most_rows(device, dtype)) or 0


def _is_for_triton(packed: Tensor, values: Tensor) -> bool:
    """Return whether Triton can take the tensors: its kernels read scales as numbers of 16 bits, at even addresses."""
    if not (packed.is_cuda and values.is_cuda) or packed.stride(1) != 1:
        return False
    return not (packed.storage_offset() | packed.stride(0)) & 1  # the memory itself begins at a multiple of 512


def _on_cpu(packed: Tensor, values: Tensor) -> bool:
    return packed.device.type == "cpu" and values.dtype == torch.float32


def _run_threads(
    kernel: Callable[..., None], fmt: GroupFormat, stripes: int, arguments: Callable[[slice], tuple[Any, ...]]
) -> None:
    """Run a numba kernel over all stripes, a part of them in every thread."""
    options = fmt.group_size, fmt.bits, fmt.scales == "word", *_tables(fmt.scales, fmt.bits)
    threads = torch.get_num_threads()
    step = -(-stripes // threads)
    first, *others = [arguments(slice(start, min(start + step, stripes))) for start in range(0, stripes, step)]
    futures = [thread_pool(threads).submit(kernel, *part, *options) for part in others]
    kernel(*first, *options)
    for future in futures:
        future.result()


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
    return tried("dequantization", _is_right, "flexgen_helm.quant.numba_kernels")


def _is_right(numba: ModuleType) -> bool:
    """Compare a matrix of each kind of bytes with PyTorch's dequantization, whose bits it has, and a product."""
    matrix = torch.arange(16 * 40, dtype=torch.float32, device="cpu").mul(0.37).sin().view(16, 40)
    formats = [GroupFormat(bits, 16, axis, scales) for bits in (4, 8) for axis in _AXES for scales in _SCALES]
    for fmt in formats:
        packed = quantize(matrix, fmt)
        expected, values = (torch.empty_like(matrix) for _ in range(2))
        dequantize_with_torch(packed, fmt, expected)
        _dequantize(numba, packed, fmt, values)
        if not torch.equal(values, expected):
            return False
        x = matrix[:3]
        if fmt.axis == "out" and not torch.allclose(_product(numba, x, packed, fmt, 16), x @ expected.t(), atol=1e-5):
            return False
    return True


def _triton_launches() -> ModuleType:
    from flexgen_helm.quant import triton_launches

    return triton_launches


def _with_triton(call: Callable[[ModuleType], Result | None]) -> Result | None:
    """Return the result of a call with Triton's kernels; None if there is none.

    The first error ends the use of Triton in this process, with one warning. It compiles a kernel at its first launch,
    for which it needs a driver, a C compiler, and a GPU that it knows. Too little memory is the caller's affair.
    """
    if TRITON in switched_off:
        return None
    try:
        return call(_triton_launches())
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        switch_off(TRITON, f"{type(error).__name__}: {error}".splitlines()[0])
        return None
