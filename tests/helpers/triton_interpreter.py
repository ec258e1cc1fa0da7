"""Triton's kernels by its interpreter, against plain torch: run as `TRITON_INTERPRET=1 python -m …`, as JSON on stdout.

The interpreter replaces Triton's functions while they are imported, so it needs a process of its own. Arguments are
what it does, one after the other; the answer has a key for each:

    values     numbers of dequantizing and products, by format, shape and dtype; fails if they differ
    spoiled    the same with one code changed, and whether that was noticed
    bytes      how often each byte of a packed matrix is read
"""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from flexgen_helm.quant import triton_launches
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize, quantize

_FORMATS = [
    GroupFormat(bits, group, axis, scales, fit)
    for axis in ("out", "in")
    for bits, group, scales, fit in (
        (4, 32, "word", "error"),
        (4, 64, "pair", "range"),
        (4, 8, "word", "range"),
        (4, 24, "pair", "range"),
        (4, 128, "word", "range"),
        (8, 32, "word", "range"),
        (8, 24, "pair", "range"),
    )
]
_SHAPES = [(67, 300), (9, 4200), (5, 70), (1, 1)]
_TOKENS = (1, 2, 3, 9)
_DTYPES = (torch.float16, torch.float32)
# The interpreter cuts numbers off where a device rounds them to bfloat16, and has no dot product of them.
_CUT_OFF_TOKENS = (1, 2)
# Products: error of a sum in float32, and of weights and results in 16 bits, relative to the sum of absolute values.
_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def values(spoiled: bool = False) -> dict[str, object]:
    draw = torch.Generator().manual_seed(0)
    dequantized, products, kernels, formats = 0, 0, set(), set()
    shapes = [_SHAPES[:2], _SHAPES, *[_SHAPES[:1]] * 5] * 2
    for fmt, (rows, width) in ((fmt, shape) for fmt, some in zip(_FORMATS, shapes, strict=True) for shape in some):
        packed = quantize(torch.randn(rows, width, generator=draw) * 0.3, fmt)
        weights = dequantize(packed, fmt, rows, width)
        packed[0, 0] ^= spoiled
        for dtype in _DTYPES:
            out = torch.full((rows, width), torch.nan, dtype=dtype)
            triton_launches.dequantize_into(packed, fmt, out)
            assert torch.equal(out, weights.to(dtype)), (fmt, rows, width, dtype)
            dequantized += 1
        if fmt.axis != "out":
            continue
        cases = [*itertools.product(_TOKENS, _DTYPES), *((tokens, torch.bfloat16) for tokens in _CUT_OFF_TOKENS)]
        for number, (tokens, dtype) in enumerate(cases):
            if dtype == torch.bfloat16 and fmt.group_size > 32:
                continue  # by tiles
            if (number + fmt.group_size // 8) % 5:
                continue
            # One processor leaves the columns whole, a thousand split them over programs.
            device = triton_launches.Device(1000 if number % 2 else 1, has_tensor_cores=dtype != torch.float32)
            triton_launches._describe = lambda _, device=device: device
            x = torch.randn(tokens, width, generator=draw).to(dtype)
            bias = torch.randn(rows, generator=draw).to(dtype) if number % 4 < 2 else None
            launch = triton_launches.plan_product(fmt, tokens, rows, width, dtype, bias is not None, device)
            y = triton_launches.matmul(x, packed, fmt, rows, bias)
            _compare(x, weights, bias, y, (fmt, rows, width, tokens, dtype))
            kernels.add(f"{launch.kernel.__name__}{' split' if launch.grid[1] > 1 else ''}")
            formats.add(f"{fmt.bits} {fmt.axis} {fmt.group_size}")  # dequantized above, and multiplied
            products += 1
    return {
        "dequantized": dequantized,
        "products": products,
        "kernels": sorted(kernels),
        "formats": sorted(formats),
    }


def is_noticed() -> bool:
    """Whether the comparison fails if one code is changed."""
    try:
        values(spoiled=True)
    except AssertionError:
        return True
    return False


def _compare(x: Tensor, weights: Tensor, bias: Tensor | None, y: Tensor, case: object) -> None:
    exact = x.double() @ weights.double().t()
    bound = x.double().abs() @ (weights.double().abs() + 1).t() + 1
    if bias is not None:
        exact += bias.double()
    assert y.dtype == x.dtype and ((y.double() - exact).abs() <= _TOLERANCE[x.dtype] * bound).all(), case


def read_counts() -> list[dict[str, object]]:
    """Count how many loads read each byte of packed matrices; equal addresses of one load are one read."""
    masked_load, counts, base = interpreter.InterpreterBuilder.create_masked_load, np.zeros(0, np.int64), 0

    def counting(self, ptrs, mask, *rest):
        result = masked_load(self, ptrs, mask, *rest)
        size = interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
        for offset in range(size):
            offsets = np.unique(ptrs.data[mask.data]).astype(np.int64) + offset - base
            counts[offsets[(offsets >= 0) & (offsets < len(counts))]] += 1
        return result

    interpreter.InterpreterBuilder.create_masked_load = counting
    found: list[dict[str, object]] = []
    rows, width = 70, 576
    for fmt, tokens in itertools.product(_FORMATS[:2] + _FORMATS[5:6] + _FORMATS[7:9] + _FORMATS[12:13], (0, 1, 9)):
        if tokens and fmt.axis != "out":
            continue
        packed = quantize(torch.randn(rows, width), fmt)
        counts, base = np.zeros(packed.numel(), np.int64), packed.data_ptr()
        triton_launches._describe = lambda _: triton_launches.Device(100, True)
        if tokens:
            triton_launches.matmul(torch.randn(tokens, width).half(), packed, fmt, rows)
        else:
            triton_launches.dequantize_into(packed, fmt, torch.empty(rows, width))
        found.append({"format": str(fmt), "tokens": tokens, "least": int(counts.min()), "most": int(counts.max())})
    return found


if __name__ == "__main__":
    done = {"values": values, "spoiled": is_noticed, "bytes": read_counts}
    print(json.dumps({what: done[what]() for what in sys.argv[1:]}))
