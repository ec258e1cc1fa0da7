"""Products with weights as they rest: brought to the compute type by tile, never as a whole.

At rest a matrix has 16 bits a value, or is packed (`quant`). A tile of it becomes the compute type beside the product
that uses it; on the host in memory that each thread keeps, because the pages of a fresh tensor cost more than the
conversion.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from flexgen_helm.hardware.rates import linear
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.kernels import dequantize_into, quantized_matmul

# Elements of a weight that are brought to the compute type at once: 4 MiB in float32, so that a tile stays in cache.
TILE_ELEMENTS = 1 << 20

_scratch = threading.local()


def tiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, fmt: GroupFormat | None = None, rows: int = 0
) -> Tensor:
    """x [T, in] times a weight transposed, plus bias [out] -> [T, out].

    weight: [out, in] in any type; with a `form` the packed stripes [stripes, bytes] of `rows` rows.
    """
    if fmt is None:
        if weight.dtype == x.dtype:
            return linear(x, weight, bias)
        rows = weight.shape[0]
    elif (few := quantized_matmul(x, weight, fmt, rows)) is not None:
        return few if bias is None else few.add_(bias)
    width, stripe = x.shape[1], 1 if fmt is None else fmt.stripe_rows
    step = max(1, TILE_ELEMENTS // (width * stripe)) * stripe
    y = None
    for first in range(0, rows, step):
        count = min(step, rows - first)
        tile = _memory(count, width, x)
        if fmt is None:
            tile.copy_(weight[first : first + count])
        else:
            dequantize_into(weight[first // stripe : -(-(first + count) // stripe)], fmt, tile)
        part = linear(x, tile, None if bias is None else bias[first : first + count])
        if count == rows:
            return part
        if y is None:
            y = x.new_empty((x.shape[0], rows))
        y[:, first : first + count] = part
    assert y is not None
    return y


def dequantized(packed: Tensor, fmt: GroupFormat, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The whole matrix [rows, width], for one that shall rest in the compute type."""
    out = torch.empty((rows, width), dtype=dtype, device=packed.device)
    step = max(1, TILE_ELEMENTS // (width * fmt.stripe_rows))
    for first in range(0, packed.shape[0], step):
        at = first * fmt.stripe_rows
        dequantize_into(packed[first : first + step], fmt, out[at : at + step * fmt.stripe_rows])
    return out


def _memory(rows: int, width: int, like: Tensor) -> Tensor:
    """[rows, width] in the type of `like`; on the host valid until this thread's next call."""
    if like.device.type != "cpu":
        return like.new_empty((rows, width))
    held: Tensor | None = getattr(_scratch, "tile", None)
    if held is None or held.dtype != like.dtype or held.numel() < rows * width:
        held = _scratch.tile = torch.empty(max(TILE_ELEMENTS, rows * width), dtype=like.dtype)
    return held[: rows * width].view(rows, width)
