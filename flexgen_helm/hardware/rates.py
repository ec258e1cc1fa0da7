"""Rates of the machine at hand, and the product that reaches them. Measured when asked for, never assumed.

No torch at import: a plan needs the numbers of a profile, not the library.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# PyTorch's float32 products on CPUs go to its BLAS (MKL), which keeps to AVX2 on processors of other makers; oneDNN,
# which PyTorch carries too, uses what the processor has. Results may differ in the last bits, so the choice must not
# flip between two processes on one machine: the BLAS is taken only where it is clearly faster.
_CLEARLY = 1.3
# Below this many rows `W @ x.T` outruns `x @ W.T` in the BLAS.
_SKINNY_ROWS = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; one type and device.

    weight: contiguous, or as `by_input` lays it out.
    """
    return _fastest(x.device, x.dtype)(x, weight, bias)


def column_major(weight: Tensor) -> Tensor:
    """The same matrix [out, in], in memory one input after the other where that makes `linear` faster.

    oneDNN brings a matrix of a few rows' product into this order every time: in it already, products of 4 to 64 rows
    run up to 1.5 times as fast, those of many rows no slower. The BLAS takes four
    times as long for 4 rows of it.
    """
    return _with_layout(weight, _fastest(weight.device, weight.dtype))


def _with_layout(weight: Tensor, product: Linear) -> Tensor:
    return weight.t().contiguous().t() if product is _onednn() else weight


@cache
def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Operations a second of a square product in `dtype` by `linear` (best of 4; a multiply-add counts two).

    A type that is hundreds of times slower than another (16 bits on many CPUs) is noticed by a product of a few
    rows, so ruling it out costs milliseconds.
    """
    product = _fastest(device, dtype)
    few = 16
    rows = few if _seconds(product, device, dtype, few, size) > 0.05 else size
    return 2.0 * rows * size * size / _seconds(product, device, dtype, rows, size)


def compute_dtype(device: torch.device, rest_dtype: torch.dtype) -> torch.dtype:
    """The type that products run in.

    On CPUs float32: the results are promised to 1e-4 of a float32 reference, which 16 bits cannot keep. On an
    accelerator the faster of the checkpoint's 16-bit type and float32, by measurement (some cards emulate bfloat16).
    """
    import torch

    if device.type == "cpu":
        return torch.float32
    return max((rest_dtype, torch.float32), key=lambda dtype: matmul_flops(device, dtype))


@cache
def _fastest(device: torch.device, dtype: torch.dtype) -> Linear:
    import torch

    if device.type != "cpu" or dtype != torch.float32:
        return torch.nn.functional.linear
    onednn = _onednn()
    if onednn is None:
        return _blas
    sizes = (16, 256)  # decoding and prefill
    ratio = min(_seconds(onednn, device, dtype, n, 1024) / _seconds(_blas, device, dtype, n, 1024) for n in sizes)
    return _blas if ratio > _CLEARLY else onednn


def _blas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    import torch

    if x.shape[0] >= _SKINNY_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return y.t().contiguous()  # row by row, as everything that follows reads it


@cache
def _onednn() -> Linear | None:
    """oneDNN's product, which PyTorch offers under an internal name only; None where this build lacks it."""
    import torch

    try:
        op = torch.ops.mkldnn._linear_pointwise
        probe = op(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4), "none", [], "")
        if not torch.equal(probe, torch.full((2, 4), 4.0)):
            return None
    except (AttributeError, RuntimeError):
        return None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return op(x, weight, bias, "none", [], "")

    return product


def _seconds(product: Linear, device: torch.device, dtype: torch.dtype, rows: int, size: int) -> float:
    """Best of 4 calls; the first one also pays for start-up."""
    import torch

    x = torch.ones(rows, size, device=device, dtype=dtype)
    weight = _with_layout(torch.ones(size, size, device=device, dtype=dtype), product)
    best = float("inf")
    for _ in range(4):
        _synchronize(device)
        began = time.perf_counter()
        product(x, weight, None)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
