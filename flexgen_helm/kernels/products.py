"""Matrix products: what computes them here, and their measured FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.hardware.process_state import HALVES, switched_off
from flexgen_helm.kernels.amx import amx_matmul, has_amx, multiplies_as_stored
from flexgen_helm.kernels.few_rows import few_rows_matmul

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# In float32 on CPUs, PyTorch calls its BLAS (MKL), which stops at AVX2 on processors of other makers. oneDNN, also in
# PyTorch, uses the vectors that the processor has, and a compiled loop (`kernels.amx`) its matrix unit. They differ in
# the last bits, so nothing that varies between two processes of a machine, such as a measurement, may choose.
# Rows of x up to which the BLAS is faster at W @ x.T than at x @ W.T.
_SKINNY_ROWS = 63
# Sizes of the measured products: side of the square weight, rows of x in decoding.
_WEIGHT_SIZE, _DECODE_ROWS = 1024, 16
_SQUARE = (_WEIGHT_SIZE, _WEIGHT_SIZE)
# A product of `_DECODE_ROWS` rows that takes longer reveals a dtype that is hundreds of times slower than another, as
# 16 bits are on many CPUs; measuring it at full size would take seconds.
_EMULATED_S = 0.05


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; one dtype and device.

    weight: row-major, or as `column_major` returns it.
    """
    y = amx_matmul(x, weight, bias)
    return _linear_of(x.device, x.dtype)(x, weight, bias) if y is None else y


def linear_as_stored(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [T, in] times weight [out, in] in 16 bits on the host, transposed, plus bias [out] -> [T, out].

    None where the weight is to be converted first.
    """
    y = amx_matmul(x, weight, bias)
    return few_rows_matmul(x, weight, bias) if y is None else y


def column_major(weight: Tensor) -> Tensor:
    """Return the matrix [out, in] in the memory layout that makes `linear` fastest.

    That is column-major for oneDNN, and row-major for the matrix unit.

    oneDNN reorders a row-major matrix for every product of few rows. Column-major, products of 4 to 64 rows run up to
    1.5 times as fast, larger ones no slower. The BLAS would take four times as long for 4 rows.
    """
    if weight.device.type == "cpu" and multiplies_as_stored(weight.dtype, *weight.shape):
        return weight
    return _in_layout_of(_linear_of(weight.device, weight.dtype), weight)


def _in_layout_of(product: Linear, weight: Tensor) -> Tensor:
    return weight.t().contiguous().t() if product is _onednn() else weight


def multiplied_dtype(device: torch.device, dtype: torch.dtype, storage_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products in `dtype` take resident weights in: the stored one, or `dtype` itself."""
    on_host = device.type == "cpu" and dtype == torch.float32
    return storage_dtype if on_host and multiplies_as_stored(storage_dtype, *_SQUARE) else dtype


@cache
def matmul_flops(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> float:
    """Measure the rate of a square product, in FLOP/s (a multiply-add counts two).

    weight_dtype: as `multiplied_dtype` returns it; None for `dtype`.
    """
    weight = torch.ones(_SQUARE, device=device, dtype=weight_dtype or dtype)
    if weight.dtype == dtype:
        return _rate(linear, dtype, column_major(weight))
    return _rate(linear_as_stored, dtype, weight)


@cache
def library_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of such a product by PyTorch alone, weights in the same dtype."""
    if product_library(device, dtype) != "AMX":
        return matmul_flops(device, dtype)
    product = _linear_of(device, dtype)
    return _rate(product, dtype, _in_layout_of(product, torch.ones(_SQUARE, device=device, dtype=dtype)))


def _rate(product: Callable[[Tensor, Tensor, None], Tensor | None], dtype: torch.dtype, weight: Tensor) -> float:
    emulated = _seconds(product, dtype, weight, _DECODE_ROWS) > _EMULATED_S
    rows = _DECODE_ROWS if emulated else _WEIGHT_SIZE
    return 2.0 * rows * _WEIGHT_SIZE**2 / _seconds(product, dtype, weight, rows)


def compute_dtype(device: torch.device, storage_dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of products for weights stored as `storage_dtype`.

    CPUs: float32, because results are promised within 1e-4 of a float32 reference, which 16 bits cannot keep.
    Accelerators: the faster of the two by measurement; some cards emulate bfloat16.
    """
    if device.type == "cpu" or HALVES in switched_off:
        return torch.float32
    return max((storage_dtype, torch.float32), key=lambda dtype: matmul_flops(device, dtype))


def product_library(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of what computes products, for records."""
    if device.type == "cpu" and dtype == torch.float32 and has_amx():
        return "AMX"
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
    """oneDNN's product, which PyTorch offers under an internal name only; None if it is absent or inexact."""
    try:
        op = torch.ops.mkldnn._linear_pointwise
        # Several threads share it, of which OpenMP may not give all, and bfloat16 and TF32 cannot hold it.
        ones = torch.ones(512, 512, dtype=torch.float32, device="cpu")
        probe = op(ones + 2.0**-12, ones, ones[0], "none", [], "")
        if not probe.eq(513.125).all():
            return None
    except (AttributeError, RuntimeError):
        return None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return op(x, weight, bias, "none", [], "")

    return product


def _seconds(
    product: Callable[[Tensor, Tensor, None], Tensor | None], dtype: torch.dtype, weight: Tensor, rows: int
) -> float:
    """Best of 4 calls; the first one also pays for start-up."""
    x = torch.ones(rows, _WEIGHT_SIZE, device=weight.device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        _synchronize(weight.device)
        start = time.perf_counter()
        product(x, weight, None)
        _synchronize(weight.device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
