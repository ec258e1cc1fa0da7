"""Products in float32 by the processor's vectors, with weights in 16 or 32 bits.

    y [T, out] = x [T, in] w^T        x in float32, w [out, in] as it rests

A product of a few rows takes as long as its matrix takes to come from memory, and 16 bits are half
the bytes of a float32 copy. A vector of the matrix is converted to float32 in registers and
multiplied with several rows. The order in which a result is summed does not depend on the number of
rows, so neither do its bits (`product_loop`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.kernels.team import DTYPE_CODES, empty, run_on_threads
from flexgen_helm.kernels.trial import Loops

# Arguments of the loops of `product_loop`: addresses of tensors, their strides (bytes from a row to
# the next), rows of x and y (or of the decoded matrix), rows of w, and steps of a row of w
# (`product_loop.RowLayout`).
ProductArgs = namedtuple("ProductArgs", "x x_stride w w_stride y y_stride rows outputs steps")
DecodeArgs = namedtuple("DecodeArgs", "w w_stride target target_stride rows steps")

# Least work of a thread, for which it is worth waking: elements of the matrix, times a quarter of
# the rows of x.
_THREAD_ELEMENTS = 1 << 17


def multiplies_as_stored(dtype: torch.dtype) -> bool:
    """Return whether products on the host, in float32, read weights in `dtype` as they rest."""
    module = loops() if dtype in DTYPE_CODES else None
    return module is not None and DTYPE_CODES[dtype] in module.READ_DTYPES


def vector_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Multiply x [T, in] with weight [out, in] transposed, and add bias [out] -> [T, out]; None
    where no loop takes such tensors.

    x, bias: in float32; weight: float16, bfloat16 or float32, rows of neighbouring elements.
    """
    width = x.shape[1]
    is_supported = (
        x.numel() > 0 and x.dtype == torch.float32 and x.stride(1) == 1 == weight.stride(1)
    )
    is_supported = (
        is_supported and x.device.type == weight.device.type == "cpu" and width == weight.shape[1]
    )
    if not is_supported or not multiplies_as_stored(weight.dtype) or (module := loops()) is None:
        return None
    steps = width // module.LANES
    loop = module.loops_for(module.rows_of(DTYPE_CODES[weight.dtype])).multiply
    y = multiply_rows(loop, x, weight, steps) if steps else x.new_zeros((len(x), len(weight)))
    for column in range(steps * module.LANES, width):  # that fill no vector
        y.addcmul_(x[:, column, None], weight[:, column].float())
    return y if bias is None else y.add_(bias)


def multiply_rows(loop: Any, x: Tensor, w: Tensor, steps: int) -> Tensor:
    """Multiply x [T, in] with the rows of w [out, …], each of so many steps -> [T, out].

    loop: a `product_loop.MatrixLoops.multiply` for the format of w.
    """
    (rows, width), outputs = x.shape, len(w)
    y = empty((rows, outputs))
    args = ProductArgs(
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        w=w.data_ptr(),
        w_stride=w.element_size() * w.stride(0),
        y=y.data_ptr(),
        y_stride=4 * outputs,
        rows=rows,
        outputs=outputs,
        steps=steps,
    )
    run_on_threads(loop, args, width * outputs * -(-rows // 4) // _THREAD_ELEMENTS)
    return y


def _examples() -> Iterator[Callable[[], Tensor]]:
    """Small whole numbers, in which nothing is rounded, and columns that fill no vector: few rows
    of x, and many.
    """
    for dtype in filter(multiplies_as_stored, DTYPE_CODES):
        weight = torch.arange(7 * 37, device="cpu").remainder(19).sub(9).to(dtype).view(7, -1)
        x = torch.arange(19 * 37, device="cpu").remainder(13).sub(6).float().view(19, -1)
        for count in (5, 19):
            yield partial(_product, x[:count], weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    y = vector_matmul(x, weight)
    return x @ weight.float().t() if y is None else y


loops = Loops("products by vectors", "flexgen_helm.kernels.product_loop", _examples)
