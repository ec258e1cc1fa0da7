"""Products with stored weights: as they rest where the host can, else a tile of rows at a time in
the compute dtype.

On a device a tile is a whole matrix, up to a bound (`planner.workspace`), because each tile costs
launches. On the host it stays in the CPU cache, and its memory is reused: touching the pages of a
new tensor costs more than the conversion.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from flexgen_helm.kernels.products import linear, linear_as_stored
from flexgen_helm.planner.workspace import upcast_elements
from flexgen_helm.quant.block_products import block_matmul
from flexgen_helm.quant.dequantization import dequantize_into, quantized_matmul
from flexgen_helm.quant.formats import BlockFormat, StoredFormat
from flexgen_helm.shared_sizes import HOST_UPCAST_ELEMENTS

_thread_local = threading.local()


def tiled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packed: tuple[StoredFormat, int] | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiply x [T, in] by a stored weight transposed and add the bias [out] -> [T, out].

    weight: [out, in] in any dtype; packed: its stripes [stripes, bytes].
    packed: the format and the number of rows of a packed matrix.
    batch_invariant: the order of sums does not depend on T.
    """
    fmt, rows = packed or (None, len(weight))
    if fmt is None:
        if weight.dtype == x.dtype:
            return linear(x, weight, bias, batch_invariant)
        if (y := linear_as_stored(x, weight, bias, batch_invariant)) is not None:
            return y
    elif isinstance(fmt, BlockFormat):
        if (y := block_matmul(x, weight, fmt, bias, batch_invariant)) is not None:
            return y
    elif not batch_invariant and (y := quantized_matmul(x, weight, fmt, rows, bias)) is not None:
        return y
    width, stripe = x.shape[1], 1 if fmt is None else fmt.stripe_rows
    step = _tile_stripes(rows, width, stripe, x.device) * stripe

    def parts() -> Iterator[tuple[int, Tensor]]:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            tile = _tile_memory(count, width, x)
            if fmt is None:
                tile.copy_(weight[first : first + count])
            else:
                dequantize_into(weight[first // stripe : -(-(first + count) // stripe)], fmt, tile)
            yield (
                first,
                linear(
                    x, tile, None if bias is None else bias[first : first + count], batch_invariant
                ),
            )

    return join_rows(parts(), x, rows)


def join_rows(parts: Iterator[tuple[int, Tensor]], x: Tensor, rows: int) -> Tensor:
    """Join products of x [T, in] with tiles of a matrix to [T, rows]; parts: each tile's first row,
    and its product.
    """
    out = None
    for first, part in parts:
        if part.shape[1] == rows:
            out = part
            continue
        if out is None:
            out = x.new_empty((x.shape[0], rows))
        out[:, first : first + part.shape[1]] = part
    assert out is not None
    return out


def dequantize_tiled(
    packed: Tensor, fmt: StoredFormat, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize packed stripes to a matrix [rows, width]."""
    out = torch.empty((rows, width), dtype=dtype, device=packed.device)
    step = _tile_stripes(rows, width, fmt.stripe_rows, packed.device)
    for first in range(0, packed.shape[0], step):
        tile = out[first * fmt.stripe_rows : (first + step) * fmt.stripe_rows]
        dequantize_into(packed[first : first + step], fmt, tile)
    return out


def _tile_stripes(rows: int, width: int, stripe_rows: int, device: torch.device) -> int:
    """Return how many stripes of a matrix [rows, width] are brought to the compute dtype at
    once.
    """
    stripes, stripe_elements = math.ceil(rows / stripe_rows), stripe_rows * width
    return max(
        1, upcast_elements(stripes * stripe_elements, device.type != "cpu") // stripe_elements
    )


def _tile_memory(rows: int, width: int, x: Tensor) -> Tensor:
    """Return memory [rows, width] in the dtype of `x`; on the host valid until this thread's next
    call.
    """
    if x.device.type != "cpu":
        return x.new_empty((rows, width))
    tile: Tensor | None = getattr(_thread_local, "tile", None)
    if tile is None or tile.dtype != x.dtype or tile.numel() < rows * width:
        tile = _thread_local.tile = torch.empty(
            max(HOST_UPCAST_ELEMENTS, rows * width), dtype=x.dtype
        )
    return tile[: rows * width].view(rows, width)
