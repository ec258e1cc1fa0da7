"""Matrix products: what computes them here, and their measured FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_helm.kernels.amx import amx_matmul, has_amx
from flexgen_helm.kernels.vector_products import multiplies_as_stored, vector_matmul

# On the host two compiled loops multiply in float32: by its matrix unit (`kernels.amx`) and by its
# vectors (`kernels.vector_products`). They and PyTorch differ in the last bits, so the choice among
# them may not depend on what varies between two processes of a machine, such as a measurement.

# Measured products have a square weight of this size, and, where they are slow, so many rows of x.
_WEIGHT_SIZE = 1024
_DECODE_ROWS = 16
_SQUARE = (_WEIGHT_SIZE, _WEIGHT_SIZE)
# A product of `_DECODE_ROWS` rows that takes longer reveals a dtype that is hundreds of times
# slower than another, as 16 bits are on many CPUs; measuring it at full size would take seconds.
_EMULATED_S = 0.05


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> Tensor:
    """Multiply x [T, in] with weight [out, in] transposed, and add bias [out] -> [T, out]; all on
    one device.

    weight: in the dtype of x, or in one that the host `multiplies_as_stored`.
    batch_invariant: the matrix unit multiplies few rows too, so the order of sums does not depend
        on T.
    """
    y = linear_as_stored(x, weight, bias, batch_invariant)
    return F.linear(x, weight, bias) if y is None else y


def linear_as_stored(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False
) -> Tensor | None:
    """Multiply x [T, in] in float32 with weight [out, in] transposed, as it rests on the host, by a
    compiled loop, and add bias [out] -> [T, out].

    None where no loop does; then PyTorch multiplies, with x and weight in one dtype.
    """
    y = amx_matmul(x, weight, bias, batch_invariant)
    return vector_matmul(x, weight, bias) if y is None else y


def multiplied_dtype(
    device: torch.device, dtype: torch.dtype, storage_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype that resident weights have for products in `dtype`: the stored one where the
    device multiplies them as stored, else `dtype`.
    """
    on_host = device.type == "cpu" and dtype == torch.float32
    return storage_dtype if on_host and multiplies_as_stored(storage_dtype) else dtype


@cache
def matmul_flops(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> float:
    """Measure the rate of a square product, in FLOP/s (a multiply-add counts two).

    weight_dtype: as `multiplied_dtype` returns it; None for `dtype`.
    """
    return _rate(linear, dtype, torch.ones(_SQUARE, device=device, dtype=weight_dtype or dtype))


@cache
def library_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the same rate for PyTorch's own product, with weights in `dtype`."""
    if device.type != "cpu":
        return matmul_flops(device, dtype)
    return _rate(F.linear, dtype, torch.ones(_SQUARE, device=device, dtype=dtype))


def _rate(
    product: Callable[[Tensor, Tensor, None], Tensor], dtype: torch.dtype, weight: Tensor
) -> float:
    emulated = _seconds(product, dtype, weight, _DECODE_ROWS) > _EMULATED_S
    rows = _DECODE_ROWS if emulated else _WEIGHT_SIZE
    return 2.0 * rows * _WEIGHT_SIZE**2 / _seconds(product, dtype, weight, rows)


def compute_dtype(device: torch.device, storage_dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of products for weights stored as `storage_dtype`.

    CPUs: float32, because results are promised within 1e-4 of a float32 reference, which 16 bits
        cannot keep.
    Accelerators: the faster of the two by measurement; some cards emulate bfloat16.
    """
    if device.type == "cpu":
        return torch.float32
    return max((storage_dtype, torch.float32), key=lambda dtype: matmul_flops(device, dtype))


def product_library(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of what computes products, for records."""
    if device.type != "cpu" or not multiplies_as_stored(dtype):
        return "PyTorch"
    return "AMX" if has_amx() else "vectors"


def _seconds(
    product: Callable[[Tensor, Tensor, None], Tensor], dtype: torch.dtype, weight: Tensor, rows: int
) -> float:
    """Return the shortest time of 4 calls; the first one also pays for start-up."""
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
