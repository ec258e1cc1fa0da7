"""Formats of quantized tensors: how many bits, which values share a scale, and what a scale takes. No torch.

A format divides a matrix [rows, width] into stripes, the smallest parts that can be read alone, of equally many bytes:

    axis 'in'    groups lie along a row     stripe = one row           codes of all its groups, then their scales
    axis 'out'   groups lie along a column  stripe = `group` rows      codes of all its groups, then their scales

The last group of a row (the last rows of a matrix) is filled up to a whole one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flexgen_helm.errors import UsageError
from flexgen_helm.identity import record_text, same_names

Axis = Literal["in", "out"]
Scales = Literal["pair", "word"]
Fit = Literal["range", "error"]


@dataclass(frozen=True)
class GroupFormat:
    """`group` neighbours along `axis` are stored in `bits` each and share a step and an offset.

    scales: 'pair' is step and offset in FP16, 32 bits a group (the paper's). 'word' is 16 bits a group: 9 of a
    logarithmic step and 7 of a zero point (`quant.arithmetic`), for values on both sides of zero.
    fit: the step from the least and the greatest value ('range', the paper's), or words where the squared error is
    least ('error').
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

    def identity_text(self) -> str:
        return record_text(
            self, "GroupFormat", {"bits": "bits", "group": "group_size", **same_names("axis scales fit")}
        )

    @property
    def scale_bytes(self) -> int:
        """Of one group."""
        return 4 if self.scales == "pair" else 2

    @property
    def code_bytes(self) -> int:
        """Of one group."""
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

    def bits_per_value(self, rows: int, width: int) -> float:
        """Scales and filling included."""
        return 8 * self.packed_bytes(rows, width) / (rows * width)
