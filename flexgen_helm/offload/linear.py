"""Products with stored weights: a tile of rows at a time is brought to the compute dtype, never a whole matrix.

On the host the tile's memory is reused, because touching the pages of a new tensor costs more than the conversion.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from flexgen_helm.hardware.rates import linear
from flexgen_helm.planner.constants import UPCAST_ELEMENTS
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.kernels import dequantize_into, quantized_matmul

# Elements of a tile in the compute dtype: 4 MiB in float32, which stays in the CPU's cache. The product may copy them.
TILE_ELEMENTS = UPCAST_ELEMENTS // 2

_thread_local = threading.local()


def tiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, fmt: GroupFormat | None = None, rows: int = 0
) -> Tensor:
    """Multiply x [T, in] by a stored weight transposed and add the bias [out] -> [T, out].

    weight: [out, in] in any dtype; with `fmt` the packed stripes [stripes, bytes] of `rows` rows.
    """
    if fmt is None:
        if weight.dtype == x.dtype:
            return linear(x, weight, bias)
        rows = weight.shape[0]
    elif (y := quantized_matmul(x, weight, fmt, rows)) is not None:
        return y if bias is None else y.add_(bias)
    width, stripe = x.shape[1], 1 if fmt is None else fmt.stripe_rows
    step = max(1, TILE_ELEMENTS // (width * stripe)) * stripe
    out = None
    for first in range(0, rows, step):
        count = min(step, rows - first)
        tile = _tile_memory(count, width, x)
        if fmt is None:
            tile.copy_(weight[first : first + count])
        else:
            dequantize_into(weight[first // stripe : -(-(first + count) // stripe)], fmt, tile)
        part = linear(x, tile, None if bias is None else bias[first : first + count])
        if count == rows:
            return part
        if out is None:
            out = x.new_empty((x.shape[0], rows))
        out[:, first : first + count] = part
    assert out is not None
    return out


def dequantize_tiled(packed: Tensor, fmt: GroupFormat, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Dequantize packed stripes to a matrix [rows, width]."""
    out = torch.empty((rows, width), dtype=dtype, device=packed.device)
    step = max(1, TILE_ELEMENTS // (width * fmt.stripe_rows))  # stripes
    for first in range(0, packed.shape[0], step):
        tile = out[first * fmt.stripe_rows : (first + step) * fmt.stripe_rows]
        dequantize_into(packed[first : first + step], fmt, tile)
    return out


def _tile_memory(rows: int, width: int, x: Tensor) -> Tensor:
    """Return memory [rows, width] in the dtype of `x`; on the host valid until this thread's next call."""
    if x.device.type != "cpu":
        return x.new_empty((rows, width))
    tile: Tensor | None = getattr(_thread_local, "tile", None)
    if tile is None or tile.dtype != x.dtype or tile.numel() < rows * width:
        tile = _thread_local.tile = torch.empty(max(TILE_ELEMENTS, rows * width), dtype=x.dtype)
    return tile[: rows * width].view(rows, width)
