"""Rows of blocks (`BlockFormat`): decodes them, and multiplies with them as they rest on the host,
by the compiled loops of `block_loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from flexgen_helm.kernels.amx import has_amx
from flexgen_helm.kernels.team import empty, run_on_threads
from flexgen_helm.kernels.trial import Loops
from flexgen_helm.kernels.vector_products import DecodeArgs, multiply_rows
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import BlockFormat

# Values that plain torch decodes at once: it takes about 20 bytes for each.
TORCH_ELEMENTS = 1 << 20
# Least work of a thread, for which it is worth waking.
_THREAD_ELEMENTS = 1 << 17
# Rows of x from which on the matrix unit is faster, with decoded tiles.
_AMX_ROWS = 28


def block_matmul(
    x: Tensor,
    packed: Tensor,
    fmt: BlockFormat,
    bias: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor | None:
    """Multiply x [T, in] with packed rows [out, row bytes] transposed, and add bias [out] ->
    [T, out]; None where no loop takes such tensors.

    The result equals `vector_matmul` with the decoded matrix, bit for bit.

    x, bias: in float32; packed: at any address, the bytes of a row are neighbours.
    batch_invariant: None where the host has a matrix unit, to which the caller gives decoded tiles;
        it also gets them for many rows of x, which it multiplies faster.
    """
    count, width = x.shape
    if not (count and x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(1) == 1):
        return None
    if has_amx() and (batch_invariant or count >= _AMX_ROWS):
        return None
    if not _is_supported(packed, fmt, width) or (module := loops(fmt)()) is None:
        return None
    y = multiply_rows(module.loops_for(fmt).multiply, x, packed, width // fmt.block_values)
    return y if bias is None else y.add_(bias)


def decode_into(packed: Tensor, fmt: BlockFormat, out: Tensor) -> Tensor:
    """Decode bytes [rows, row bytes] into `out` [rows, width], of any floating dtype; return it."""
    rows, width = out.shape
    on_host = out.dtype == torch.float32 and out.device.type == "cpu" and out.stride(1) == 1
    if on_host and _is_supported(packed, fmt, width) and (module := loops(fmt)()) is not None:
        args = DecodeArgs(
            w=packed.data_ptr(),
            w_stride=packed.stride(0),
            target=out.data_ptr(),
            target_stride=4 * out.stride(0),
            rows=rows,
            steps=width // fmt.block_values,
        )
        run_on_threads(module.loops_for(fmt).decode, args, out.numel() // _THREAD_ELEMENTS)
        return out
    step = max(1, TORCH_ELEMENTS // width)
    for first in range(0, rows, step):
        out[first : first + step].copy_(decode(packed[first : first + step], fmt))
    return out


def _is_supported(packed: Tensor, fmt: BlockFormat, width: int) -> bool:
    on_host = packed.device.type == "cpu" and packed.dtype == torch.uint8 and packed.stride(1) == 1
    is_whole = (
        fmt.has_loop and fmt.has_whole_blocks(width) and packed.shape[1] == fmt.stripe_bytes(width)
    )
    return on_host and is_whole and packed.numel() > 0


@cache
def loops(fmt: BlockFormat) -> Loops:
    return Loops(
        f"products with {fmt.name}",
        "flexgen_helm.quant.block_loop",
        partial(_examples, fmt),
        tolerance=0.0,
    )


def _examples(fmt: BlockFormat) -> Iterator[Callable[[], Tensor]]:
    """Decoded values, and products with few rows of x and with many, whose sums have one term, so
    that nothing is rounded.
    """
    width = 2 * fmt.block_values
    numbers = torch.arange(7 * fmt.stripe_bytes(width), device="cpu").mul(2654435761) >> 16
    # without the bits 0b01000100 no scale is infinite or NaN
    packed = (numbers & 0b10111011).to(torch.uint8).view(7, -1)
    yield lambda: decode_into(packed, fmt, empty((7, width)))
    for count in (3, 19):
        columns = torch.arange(count, device="cpu").mul(5).remainder(width)
        yield partial(
            _product, torch.eye(width, dtype=torch.float32, device="cpu")[columns], packed, fmt
        )


def _product(x: Tensor, packed: Tensor, fmt: BlockFormat) -> Tensor:
    y = block_matmul(x, packed, fmt)
    return x @ decode(packed, fmt).t() if y is None else y
