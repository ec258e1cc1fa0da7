"""Products of a few rows with a matrix in 16 bits, on the host.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

A product of a few rows takes as long as its matrix takes to come from memory, and 16 bits are half of the bytes of a
float32 copy. A vector of the matrix is widened in registers and multiplied with several rows. Sums are in float32.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from flexgen_helm.kernels.layer_rows import add_bias
from flexgen_helm.kernels.team import empty, run_on_threads
from flexgen_helm.kernels.trial import tried

# Rows up to which this is faster than a library's product with a float32 copy, and than one that converts by tile.
MOST_ROWS_BESIDE_COPY, MOST_ROWS = 16, 64
# Elements of a matrix that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 17


def few_rows_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, most_rows: int = MOST_ROWS) -> Tensor | None:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; None where this is no gain or no way.

    x, bias: in float32; weight: float16 or bfloat16, rows of neighbouring elements.
    """
    compiled = _compiled() if 0 < x.shape[0] <= most_rows and _suits(x, weight) else None
    y = None if compiled is None else _multiply(compiled, x, weight)
    return y if y is None or bias is None else add_bias(y, bias)


def _multiply(compiled: ModuleType, x: Tensor, weight: Tensor) -> Tensor | None:
    """None for rows that are not whole vectors, and for numbers that the processor cannot convert."""
    is_bfloat16 = weight.dtype == torch.bfloat16
    if x.shape[1] % compiled.LANES or not (is_bfloat16 or compiled.CONVERTS_HALVES):
        return None
    y = empty((x.shape[0], weight.shape[0]))
    arguments = [x.data_ptr(), 4 * x.stride(0), weight.data_ptr(), 2 * weight.stride(0), y.data_ptr(), 4 * y.stride(0)]
    run_on_threads(
        compiled.address_of(compiled.few_rows),
        [is_bfloat16, *arguments, *y.shape, x.shape[1]],
        weight.numel() // _THREAD_ELEMENTS,
    )
    return y


def _suits(x: Tensor, weight: Tensor) -> bool:
    on_host = x.device.type == weight.device.type == "cpu" and x.shape[1] == weight.shape[1]
    in_16_bits = weight.dtype in (torch.float16, torch.bfloat16)
    return on_host and in_16_bits and x.dtype == torch.float32 and x.stride(1) == 1 == weight.stride(1)


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    return tried("products of a few rows", _is_right)


def _is_right(compiled: ModuleType) -> bool:
    """Compare products of small whole numbers, in which nothing is rounded."""
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.arange(7 * 2 * compiled.LANES).remainder(19).sub(9).to(dtype).view(7, -1)
        x = torch.arange(5 * weight.shape[1]).remainder(13).sub(6).float().view(5, -1)
        y = _multiply(compiled, x, weight)
        if y is not None and not torch.equal(y, x @ weight.float().t()):
            return False
    return True
