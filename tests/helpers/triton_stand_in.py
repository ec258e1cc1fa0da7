"""What a launch of a Triton kernel does, by plain torch: for devices that have no Triton, with all
of its host code.
"""

import torch

from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import BitField, BlockFormat, GroupFormat, Numbers
from flexgen_helm.quant.packing import dequantize


def run(launch, packed, out, layout, *_):
    """Stand in for `Launch.run`."""
    if launch.kernel.__name__ == "dequantize_blocks":
        out.copy_(decode(packed, block_format(launch.constants, layout)))
        return
    given, axis = launch.constants, "in" if launch.kernel.__name__.endswith("_in") else "out"
    fmt = GroupFormat(given["bits"], given["group"], axis, "pair" if given["pairs"] else "word")
    out.copy_(dequantize(packed, fmt, *out.shape))


def block_format(given, layout):
    """Return the format that a launch's constants and layout describe."""

    def numbers(first, count, widths, values):
        found = layout[first : first + len(widths) * count].view(len(widths), count)
        parts = tuple(
            BitField(w, tuple((at >> 3).tolist()), tuple((at & 7).tolist()))
            for w, at in zip(widths, found)
        )
        if isinstance(values, str):
            return Numbers(parts[::-1], floating=values)
        table = layout[values : values + (1 << sum(widths))].view(torch.float32)
        return Numbers(parts[::-1], table=tuple(table.tolist()))

    first, *factors, divides = given["numbers"]
    codes = numbers(*first)
    scales, offsets, zeros = (tuple(numbers(*x) for x in kind) for kind in factors)
    size, subtracts = given["block_bytes"], given["sign"] < 0
    return BlockFormat(
        "", codes.count, size, codes, scales, offsets, subtracts, zeros, divides, given["factor"]
    )
