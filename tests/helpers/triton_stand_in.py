"""What a launch of a Triton kernel does, by plain torch: for devices that have no Triton, with all of its host code."""

from __future__ import annotations

from typing import Any

from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize
from flexgen_helm.quant.triton_launches import Launch


def written(launch: Launch) -> int:
    """Return which argument of a launch its kernel writes."""
    name = launch.kernel.__name__
    return 2 if name == "join" else 1 if name.startswith("dequantize") else 5


def run(launch: Launch, *arguments: Any, fused: bool) -> None:
    """Stand in for `Launch.run`."""
    given, name = launch.constants, launch.kernel.__name__
    if name == "join":
        partial, bias, y, _, _, splits = arguments
        total = partial[:splits].sum(0)
        y.copy_(total + bias.float() if given["has_bias"] else total)
        return
    axis, scales = "in" if name.endswith("_in") else "out", "pair" if given["pairs"] else "word"
    fmt = GroupFormat(4, given["group"], axis, scales)
    if name.startswith("dequantize"):
        packed, out, _, _, rows, width, _ = arguments
        out.copy_(dequantize(packed, fmt, rows, width))
        return
    x, packed, _, _, bias, y, tokens, rows, width, _, _ = arguments
    weights = dequantize(packed, fmt, rows, width)
    if name.startswith("tiles"):
        weights = weights.to(x.dtype).float()
    total = x.float() @ weights.t()
    if given["has_bias"]:
        total += bias.float()
    if launch.grid[1] == 1:
        y.copy_(total)
    else:  # partial sums
        y.zero_()
        y[0].copy_(total)
