"""The loop over packed bytes for CUDA devices, in Triton: 4 bits, any axis and scales (`packed` has the layout).

One program unpacks a part of a row. Every element is read, scaled and written once, with the operations of
`arithmetic.decode` in its order and without fused multiply-add, so that the numbers are those of plain torch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexgen_helm.quant.arithmetic import word_steps, word_zeros
from flexgen_helm.quant.formats import GroupFormat

_BLOCK = 512


@triton.jit
def _unpack(
    packed: Any,
    out: Any,
    steps: Any,
    zeros: Any,
    width: Any,
    packed_stride: Any,
    group: tl.constexpr,
    along: tl.constexpr,
    paired: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    half = group // 2
    if along:
        number, place = column // group, column % group
        base = packed + row * packed_stride
        code_at = number * half + place % half
        scale_at = (width + group - 1) // group * half + number * (4 if paired else 2)
        offset_at = scale_at + 2
        high = place >= half
    else:
        place = row % group
        base = packed + row // group * packed_stride
        code_at = place % half * width + column
        scale_at = half * width + 2 * column
        offset_at = scale_at + 2 * width
        high = (place >= half) & (column >= 0)
    byte = tl.load(base + code_at, mask=inside, other=0).to(tl.int32)
    code = tl.where(high, byte >> 4, byte & 15).to(tl.float32)
    word = tl.load(base + scale_at, mask=inside, other=0).to(tl.int32)
    word |= tl.load(base + scale_at + 1, mask=inside, other=0).to(tl.int32) << 8
    if paired:
        second = tl.load(base + offset_at, mask=inside, other=0).to(tl.int32)
        second |= tl.load(base + offset_at + 1, mask=inside, other=0).to(tl.int32) << 8
        step = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = second.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        step = tl.load(steps + (word >> 7), mask=inside, other=0.0)
        offset = -(tl.load(zeros + (word & 127), mask=inside, other=0.0) * step)
    tl.store(out + row * width + column, code * step + offset, mask=inside)


def dequantize_into(packed: Tensor, fmt: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width], contiguous, of any floating type; returns it."""
    rows, width = out.shape
    launch: Any = _unpack[rows, triton.cdiv(width, _BLOCK)]
    launch(
        packed,
        out,
        word_steps(packed.device),
        word_zeros(fmt.bits, packed.device),
        width,
        packed.stride(0),
        group=fmt.group_size,
        along=fmt.axis == "in",
        paired=fmt.scales == "pair",
        block=_BLOCK,
        enable_fp_fusion=False,
    )
    return out
