"""Formats of quantized matrices: bits, groups, and the encoding of scales. No torch.

    group    `group_size` neighbouring values that share one scale and one zero point
    codes    those values as integers 0 … 2^bits - 1
    stripe   the smallest part of a packed matrix [rows, width] that can be read alone; all have equally many bytes

    axis 'in'    groups run along a row     stripe = one row             codes of its groups, then their scales
    axis 'out'   groups run along a column  stripe = `group_size` rows   codes of its groups, then their scales

The last group of a row (axis 'in') or of a column (axis 'out') is padded to a whole one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flexgen_helm.errors import UsageError
from flexgen_helm.identity import Identified

Axis = Literal["in", "out"]
Scales = Literal["pair", "word"]
Fit = Literal["range", "error"]


@dataclass(frozen=True)
class GroupFormat(Identified, name="GroupFormat", first_version="bits group=group_size axis scales fit"):
    """Group-wise quantization of a matrix (the paper, 'Group-wise Quantization').

    bits: of a code, 2 to 8.
    group_size: values of a group, a multiple of 8.
    axis: 'in' groups values of one row, 'out' values of one column (the paper's choice for weights).
    scales: how a group's scale and zero point are stored (`quant.arithmetic`).
        'pair': scale and minimum in FP16: 32 bits a group (the paper's).
        'word': 9 bits of a logarithmic scale and 7 of the zero point: 16 bits a group. Ranges include zero.
    fit: 'range' takes the scale from minimum and maximum (the paper's); 'error' searches the word of least squared
        error.
    """

    bits: int = 4
    group_size: int = 64
    axis: Axis = "in"
    scales: Scales = "pair"
    fit: Fit = "range"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UsageError(f"{self.bits} bits: quantized values take 2 to 8 bits each")
        if self.group_size < 8 or self.group_size % 8:
            raise UsageError(f"groups of {self.group_size}: a group has a multiple of 8 values")
        if self.fit == "error" and self.scales != "word":
            raise UsageError("the least squared error is searched on the grid of 16-bit scales: take scales='word'")

    @property
    def has_kernels(self) -> bool:
        """Whether compiled loops read the codes: two or one in a byte (`quant.packing`)."""
        return self.bits in (4, 8)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one group's scale and zero point."""
        return 4 if self.scales == "pair" else 2

    @property
    def code_bytes(self) -> int:
        """Bytes of one group's codes."""
        return self.group_size * self.bits // 8

    @property
    def stripe_rows(self) -> int:
        return 1 if self.axis == "in" else self.group_size

    def stripe_groups(self, width: int) -> int:
        """Groups of a stripe of rows with `width` values."""
        return math.ceil(width / self.group_size) if self.axis == "in" else width

    def stripe_bytes(self, width: int) -> int:
        return self.stripe_groups(width) * (self.code_bytes + self.scale_bytes)

    def num_stripes(self, rows: int) -> int:
        return math.ceil(rows / self.stripe_rows)

    def packed_bytes(self, rows: int, width: int) -> int:
        return self.num_stripes(rows) * self.stripe_bytes(width)
