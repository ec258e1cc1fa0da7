"""Matrix products per dtype and their measured FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# In float32 on CPUs, PyTorch calls its BLAS (MKL), which stops at AVX2 on processors of other makers. oneDNN, also in
# PyTorch, uses what the processor has. The two differ in the last bits, so nothing that varies between two processes
# of a machine, such as a measurement, may choose between them.
# Rows of x up to which the BLAS is faster at W @ x.T than at x @ W.T.
_SKINNY_ROWS = 63
# Sizes of the measured products: side of the square weight, rows of x in decoding.
_WEIGHT_SIZE, _DECODE_ROWS = 1024, 16
# A product of `_DECODE_ROWS` rows that takes longer reveals a dtype that is hundreds of times slower than another, as
# 16 bits are on many CPUs; measuring it at full size would take seconds.
_EMULATED_S = 0.05


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; one dtype and device.

    weight: row-major, or as `column_major` returns it.
    """
    return _linear_of(x.device, x.dtype)(x, weight, bias)


def column_major(weight: Tensor) -> Tensor:
    """Return the matrix [out, in] in the memory layout that makes `linear` fastest: column-major for oneDNN.

    oneDNN reorders a row-major matrix for every product of few rows. Column-major, products of 4 to 64 rows run up to
    1.5 times as fast, larger ones no slower. The BLAS would take four times as long for 4 rows.
    """
    return _in_layout_of(_linear_of(weight.device, weight.dtype), weight)


def _in_layout_of(product: Linear, weight: Tensor) -> Tensor:
    return weight.t().contiguous().t() if product is _onednn() else weight


@cache
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of `linear` at a square product, in FLOP/s (a multiply-add counts two)."""
    product = _linear_of(device, dtype)
    emulated = _seconds(product, device, dtype, _DECODE_ROWS) > _EMULATED_S
    rows = _DECODE_ROWS if emulated else _WEIGHT_SIZE
    return 2.0 * rows * _WEIGHT_SIZE**2 / _seconds(product, device, dtype, rows)


def compute_dtype(device: torch.device, storage_dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of products for weights stored as `storage_dtype`.

    CPUs: float32, because results are promised within 1e-4 of a float32 reference, which 16 bits cannot keep.
    Accelerators: the faster of the two by measurement; some cards emulate bfloat16.
    """
    if device.type == "cpu":
        return torch.float32
    return max((storage_dtype, torch.float32), key=lambda dtype: matmul_flops(device, dtype))


def product_library(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of what computes products, for records."""
    product = _linear_of(device, dtype)
    return "PyTorch" if product is F.linear else "BLAS" if product is _blas else "oneDNN"


@cache
def _linear_of(device: torch.device, dtype: torch.dtype) -> Linear:
    if device.type != "cpu" or dtype != torch.float32:
        return F.linear
    return _onednn() or _blas


def _blas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] > _SKINNY_ROWS:
        return F.linear(x, weight, bias)
    y = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return y.t().contiguous()  # row-major, as all that follows reads it


@cache
def _onednn() -> Linear | None:
    """oneDNN's product, which PyTorch offers under an internal name only; None if this build lacks it."""
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


def _seconds(product: Linear, device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """Best of 4 calls; the first one also pays for start-up."""
    x = torch.ones(rows, _WEIGHT_SIZE, device=device, dtype=dtype)
    weight = _in_layout_of(product, torch.ones(_WEIGHT_SIZE, _WEIGHT_SIZE, device=device, dtype=dtype))
    best = float("inf")
    for _ in range(4):
        _synchronize(device)
        start = time.perf_counter()
        product(x, weight, None)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
