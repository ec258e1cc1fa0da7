"""Dequantization on CUDA devices, in Triton: 4 bits, any axis and scales (layout: `quant.packing`).

One program handles a part of a row. Every element is read, scaled and written once, by the operations of
`arithmetic.from_codes` in its order and without fused multiply-add, so that the bits equal those of plain torch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexgen_helm.quant.arithmetic import word_scales, word_zero_points
from flexgen_helm.quant.formats import GroupFormat

_BLOCK = 512  # elements of a program


@triton.jit
def _read_uint16(at: Any, inside: Any) -> Any:
    low = tl.load(at, mask=inside, other=0).to(tl.int32)
    return low | tl.load(at + 1, mask=inside, other=0).to(tl.int32) << 8


@triton.jit
def _dequantize(
    packed: Any,
    out: Any,
    scales: Any,
    zero_points: Any,
    width: Any,
    stripe_bytes: Any,
    group: tl.constexpr,
    axis_in: tl.constexpr,
    pairs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    half = group // 2
    if axis_in:
        number, place = column // group, column % group
        stripe = packed + row * stripe_bytes
        code_at = number * half + place % half
        scale_at = (width + group - 1) // group * half + number * (4 if pairs else 2)
        offset_at = scale_at + 2
        high = place >= half
    else:
        place = row % group
        stripe = packed + row // group * stripe_bytes
        code_at = place % half * width + column
        scale_at = half * width + 2 * column
        offset_at = scale_at + 2 * width
        high = (place >= half) & (column >= 0)
    byte = tl.load(stripe + code_at, mask=inside, other=0).to(tl.int32)
    code = tl.where(high, byte >> 4, byte & 15).to(tl.float32)
    word = _read_uint16(stripe + scale_at, inside)
    if pairs:
        scale = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = _read_uint16(stripe + offset_at, inside).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = tl.load(scales + (word >> 7), mask=inside, other=0.0)
        offset = -(tl.load(zero_points + (word & 127), mask=inside, other=0.0) * scale)
    tl.store(out + row * width + column, code * scale + offset, mask=inside)


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width], contiguous, of any floating type; returns it."""
    rows, width = out.shape
    launch: Any = _dequantize[rows, triton.cdiv(width, _BLOCK)]
    launch(
        packed,
        out,
        word_scales(packed.device),
        word_zero_points(fmt.bits, packed.device),
        width,
        packed.stride(0),
        group=fmt.group_size,
        axis_in=fmt.axis == "in",
        pairs=fmt.scales == "pair",
        block=_BLOCK,
        enable_fp_fusion=False,
    )
    return out
