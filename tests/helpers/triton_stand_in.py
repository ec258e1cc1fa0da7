"""What a launch of a Triton kernel does, by plain torch: for devices that have no Triton, with all of its host code."""

from __future__ import annotations

from typing import Any

from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize
from flexgen_helm.quant.triton_launches import Launch


def written(launch: Launch) -> int:
    """Return which argument of a launch its kernel writes."""
    return 1 if launch.kernel.__name__ == "dequantize" else 4


def run(launch: Launch, *arguments: Any, fused: bool) -> None:
    """Stand in for `Launch.run`."""
    given, name = launch.constants, launch.kernel.__name__
    axis, scales = "in" if given.get("along_rows") else "out", "pair" if given["pairs"] else "word"
    fmt = GroupFormat(4, given["group"], axis, scales)
    if name == "dequantize":
        packed, out, _, rows, width, _ = arguments
        out.copy_(dequantize(packed, fmt, rows, width))
        return
    x, packed, _, bias, y, tokens, rows, width, _, _ = arguments
    weights = dequantize(packed, fmt, rows, width)
    if name == "tiles":
        weights = weights.to(x.dtype).float()
    total = x.float() @ weights.t()
    if given["has_bias"]:
        total += bias.float()
    if launch.grid[1] == 1:
        y.copy_(total)
    else:  # partial sums
        y.zero_()
        y[0].copy_(total)
