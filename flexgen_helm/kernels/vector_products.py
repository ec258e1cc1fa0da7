"""Products in float32 by the processor's vectors, with weights in 16 or 32 bits.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

A product of a few rows takes as long as its matrix takes to come from memory, and 16 bits are half
of the bytes of a float32 copy. A vector of the matrix is widened in registers and multiplied with
several rows. The order of a result's sums does not depend on the number of rows, so neither do its
bits (`product_loop`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.kernels.team import KINDS, empty, run_on_threads
from flexgen_helm.kernels.trial import Loops

# What the loops of `product_loop` are given: tensors, bytes of their rows, rows of x (and y) and of
# the matrix, steps of a row.
Product = namedtuple("Product", "x x_row w w_row y y_row count outputs steps")
DecodeRows = namedtuple("DecodeRows", "w w_row target target_row rows steps")

# Elements of a matrix, times rows in fours, that occupy a thread for longer than it takes to wake.
_THREAD_ELEMENTS = 1 << 17


def multiplies_as_stored(dtype: torch.dtype) -> bool:
    """Return whether products on the host, in float32, read weights in `dtype` as they rest."""
    module = loops() if dtype in KINDS else None
    return module is not None and KINDS[dtype] in module.READ_KINDS


def vector_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out]; None where there is
    no way.

    x, bias: in float32; weight: float16, bfloat16 or float32, rows of neighbouring elements.
    """
    width = x.shape[1]
    suits = x.numel() > 0 and x.dtype == torch.float32 and x.stride(1) == 1 == weight.stride(1)
    suits = suits and x.device.type == weight.device.type == "cpu" and width == weight.shape[1]
    if not suits or not multiplies_as_stored(weight.dtype) or (module := loops()) is None:
        return None
    steps, loop = width // module.LANES, module.loops(module.of_kind(KINDS[weight.dtype]))[0]
    y = multiply_rows(loop, x, weight, steps) if steps else x.new_zeros((len(x), len(weight)))
    for column in range(steps * module.LANES, width):  # that fill no vector
        y.addcmul_(x[:, column, None], weight[:, column].float())
    return y if bias is None else y.add_(bias)


def multiply_rows(loop: Any, x: Tensor, w: Tensor, steps: int) -> Tensor:
    """Multiply x [T, in] with rows of a matrix [out, …] in so many steps -> [T, out]."""
    (count, width), outputs = x.shape, len(w)
    y = empty((count, outputs))
    given = Product(
        x=x.data_ptr(),
        x_row=4 * x.stride(0),
        w=w.data_ptr(),
        w_row=w.element_size() * w.stride(0),
        y=y.data_ptr(),
        y_row=4 * outputs,
        count=count,
        outputs=outputs,
        steps=steps,
    )
    run_on_threads(loop, given, width * outputs * -(-count // 4) // _THREAD_ELEMENTS)
    return y


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Small whole numbers, in which nothing is rounded, and columns that fill no vector: few rows
    of x, and many.
    """
    for dtype in filter(multiplies_as_stored, KINDS):
        weight = torch.arange(7 * 37, device="cpu").remainder(19).sub(9).to(dtype).view(7, -1)
        x = torch.arange(19 * 37, device="cpu").remainder(13).sub(6).float().view(19, -1)
        for count in (5, 19):
            yield partial(_product, x[:count], weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    y = vector_matmul(x, weight)
    return x @ weight.float().t() if y is None else y


loops = Loops("products by vectors", "flexgen_helm.kernels.product_loop", _examples)
