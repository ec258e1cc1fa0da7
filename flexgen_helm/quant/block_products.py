"""Rows of blocks (`BlockFormat`) on the host: products with them as they rest, and decoded ones."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.kernels.products import linear_as_stored
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import BlockFormat

# Values that plain torch decodes at once: it takes about 20 bytes for each.
_TORCH_ELEMENTS = 1 << 20


def block_matmul(
    x: Tensor, packed: Tensor, fmt: BlockFormat, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor | None:
    """x [T, in] times packed rows [out, row bytes] transposed, plus bias [out] -> [T, out]; None where there is no way.

    x, bias: in float32 on the host; packed: bytes of each row are neighbours, at any address.
    batch_invariant: the order of sums does not depend on T.
    """
    width = x.shape[1]
    if x.device.type != "cpu" or x.dtype != torch.float32 or not x.shape[0] or not fmt.takes(width):
        return None
    if packed.shape[1] != fmt.stripe_bytes(width):
        return None
    return linear_as_stored(x, decode(packed, fmt), bias, batch_invariant)


def decode_into(packed: Tensor, fmt: BlockFormat, out: Tensor) -> Tensor:
    """Bytes [rows, row bytes] -> `out` [rows, width] in the compute dtype; returns it."""
    rows = max(1, _TORCH_ELEMENTS // out.shape[1])
    for first in range(0, packed.shape[0], rows):
        out[first : first + rows].copy_(decode(packed[first : first + rows], fmt))
    return out
