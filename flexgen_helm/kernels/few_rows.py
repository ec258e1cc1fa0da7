"""Products of a few rows with a matrix in 16 bits, on the host.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

A product of a few rows takes as long as its matrix takes to come from memory, and 16 bits are half of the bytes of a
float32 copy. A vector of the matrix is widened in registers and multiplied with several rows. Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from flexgen_helm.kernels.layer_rows import add_bias
from flexgen_helm.kernels.team import KINDS, empty, run_on_threads
from flexgen_helm.kernels.trial import Loops

# Rows up to which this is faster than a library's product with a float32 copy, and than one that converts by tile.
MOST_ROWS_BESIDE_COPY, MOST_ROWS = 16, 64
# Elements of a matrix that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 17


def few_rows_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, most_rows: int = MOST_ROWS) -> Tensor | None:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; None where this is no gain or no way.

    x, bias: in float32; weight: float16 or bfloat16, rows of neighbouring elements.
    """
    (count, width), outputs = x.shape, weight.shape[0]
    suits = 0 < count <= most_rows and x.dtype == torch.float32 and x.stride(1) == 1 == weight.stride(1)
    suits = suits and weight.dtype in (torch.float16, torch.bfloat16) and width == weight.shape[1]
    if not suits or not x.device.type == weight.device.type == "cpu" or (module := loops()) is None:
        return None
    if width % module.LANES or not (weight.dtype == torch.bfloat16 or module.CONVERTS_HALVES):
        return None
    y = empty((count, outputs))
    arguments = [KINDS[weight.dtype], x.data_ptr(), 4 * x.stride(0), weight.data_ptr(), 2 * weight.stride(0)]
    arguments += [y.data_ptr(), 4 * outputs, count, outputs, width]
    run_on_threads(module.few_rows.address, arguments, weight.numel() // _THREAD_ELEMENTS)
    return y if bias is None else add_bias(y, bias)


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Small whole numbers, in which nothing is rounded."""
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.arange(7 * 32, device="cpu").remainder(19).sub(9).to(dtype).view(7, -1)
        x = torch.arange(5 * 32, device="cpu").remainder(13).sub(6).float().view(5, -1)
        yield partial(_product, x, weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    y = few_rows_matmul(x, weight)
    return x @ weight.float().t() if y is None else y


loops = Loops("products of a few rows", "flexgen_helm.kernels.product_loop", _examples)
