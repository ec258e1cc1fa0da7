"""Triton's kernels by its interpreter, against plain torch: run as
`TRITON_INTERPRET=1 python -m …`, as JSON on stdout.

The interpreter replaces Triton's functions while they are imported, so it needs a process of its
own. Arguments are what it does, one after the other; the answer has a key for each:

    values     how many matrices are dequantized, by format, shape and dtype; fails if a bit differs
    blocks     how many matrices of published formats are dequantized, by format and dtype; fails if
               a bit differs
    bytes      how often each byte of a packed matrix is read
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from triton.runtime import interpreter

from flexgen_helm.quant import triton_launches
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize, quantize
from tests.helpers.blocks import EVERY_FORMAT

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
_DTYPES = (torch.float16, torch.float32)


def values():
    draw = torch.Generator().manual_seed(0)
    count = 0
    shapes = [_SHAPES[:2], _SHAPES, *[_SHAPES[:1]] * 5] * 2
    for fmt, (rows, width) in (
        (fmt, shape) for fmt, some in zip(_FORMATS, shapes, strict=True) for shape in some
    ):
        packed = quantize(torch.randn(rows, width, generator=draw) * 0.3, fmt)
        weights = dequantize(packed, fmt, rows, width)
        for dtype in _DTYPES:
            out = torch.full((rows, width), torch.nan, dtype=dtype)
            triton_launches.dequantize_into(packed, fmt, out)
            assert torch.equal(out, weights.to(dtype)), (fmt, rows, width, dtype)
            count += 1
    return count


def blocks():
    """Any bytes, at an odd address and with rows an odd number of bytes apart."""
    draw = torch.Generator().manual_seed(0)
    count = 0
    for fmt in EVERY_FORMAT:
        width = 3 * fmt.block_values
        size = fmt.stripe_bytes(width)
        memory = torch.randint(256, (31, size + 5 + size % 2), dtype=torch.uint8, generator=draw)
        packed = memory[:, 1 : size + 1]
        weights = decode(packed, fmt)
        for dtype, integers in ((torch.float16, torch.int16), (torch.float32, torch.int32)):
            out = triton_launches.dequantize_into(
                packed, fmt, torch.full((31, width), 7.0, dtype=dtype)
            )
            expected = weights.to(dtype)
            different = (out.view(integers) != expected.view(integers)) & ~(
                out.isnan() & expected.isnan()
            )
            assert not different.any(), (fmt.name, dtype, int(different.sum()))
            count += 1
    return count


def read_counts():
    """Count how many loads read each byte of packed matrices; equal addresses of one load are one
    read.
    """
    masked_load, counts, base = (
        interpreter.InterpreterBuilder.create_masked_load,
        np.zeros(0, np.int64),
        0,
    )

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
    for fmt in _FORMATS[:2] + _FORMATS[5:6] + _FORMATS[7:9] + _FORMATS[12:13]:
        packed = quantize(torch.randn(rows, width), fmt)
        counts, base = np.zeros(packed.numel(), np.int64), packed.data_ptr()
        triton_launches.dequantize_into(packed, fmt, torch.empty(rows, width))
        found.append({"format": str(fmt), "least": int(counts.min()), "most": int(counts.max())})
    return found


if __name__ == "__main__":
    done = {"values": values, "blocks": blocks, "bytes": read_counts}
    print(json.dumps({what: done[what]() for what in sys.argv[1:]}))
