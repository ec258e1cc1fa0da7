"""What a launch of a Triton kernel does, by plain torch: for devices that have no Triton, with all of its host code."""

from __future__ import annotations

from torch import Tensor

from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize
from flexgen_helm.quant.triton_launches import Launch


def run(launch: Launch, packed: Tensor, out: Tensor, *_: object) -> None:
    """Stand in for `Launch.run`."""
    given, axis = launch.constants, "in" if launch.kernel.__name__.endswith("_in") else "out"
    fmt = GroupFormat(given["bits"], given["group"], axis, "pair" if given["pairs"] else "word")
    out.copy_(dequantize(packed, fmt, *out.shape))
