"""What a format of quantized matrices is: one that the program itself packs (`GroupFormat`), or a
stored type of published files (`BlockFormat`; those that exist are in `quant.block_formats`). No
torch.

Of a `GroupFormat`:

    group    `group_size` neighbouring values that share one scale and one zero point
    codes    those values as integers 0 … 2^bits - 1
    stripe   the smallest part of a packed matrix [rows, width] that can be read alone: the codes of
             its groups, then their scales; all stripes have equally many bytes

    axis 'in'    groups run along a row       stripe = one row
    axis 'out'   groups run along a column    stripe = `group_size` rows

The last group of a row (axis 'in') or of a column (axis 'out') is padded to a whole one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from flexgen_helm.errors import UsageError
from flexgen_helm.identity import Identified

Axis = Literal["in", "out"]
Scales = Literal["pair", "word"]
Fit = Literal["range", "error"]


@dataclass(frozen=True)
class GroupFormat(
    Identified, name="GroupFormat", first_version="bits group=group_size axis scales fit"
):
    """Group-wise quantization of a matrix (the paper, 'Group-wise Quantization').

    bits: of a code, 4 or 8.
    group_size: values of a group, a multiple of 8.
    axis: 'in' groups values of one row, 'out' values of one column (the paper's choice for
        weights).
    scales: how a group's scale and zero point are stored (`quant.arithmetic`).
        'pair': scale and minimum in FP16: 32 bits a group (the paper's).
        'word': 9 bits of a logarithmic scale and 7 of the zero point: 16 bits a group. Ranges
        include zero.
    fit: 'range' takes the scale from minimum and maximum (the paper's); 'error' searches the word
        of least squared error.
    """

    bits: int = 4
    group_size: int = 64
    axis: Axis = "in"
    scales: Scales = "pair"
    fit: Fit = "range"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"{self.bits} bits: quantized values take 4 or 8 bits each")
        if self.group_size < 8 or self.group_size % 8:
            raise UsageError(f"groups of {self.group_size}: a group has a multiple of 8 values")
        if self.fit == "error" and self.scales != "word":
            raise UsageError(
                "the least squared error is searched on the grid of 16-bit scales: take "
                "scales='word'"
            )

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
        """Rows of a stripe."""
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


StoredFormat: TypeAlias = "GroupFormat | BlockFormat"


@dataclass(frozen=True)
class BitField:
    """`width` bits of each number of a block: number i has them in the block's byte `bytes[i]`,
    from bit `shifts[i]` on.
    """

    width: int
    bytes: tuple[int, ...]
    shifts: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """An array of numbers inside a block, such as its codes or its scales.

    parts: the bits of each number, the lowest first; together they are an integer.
    zero: is subtracted from the integer.
    signed: the highest of the integer's 8 bits is its sign.
    table: the values that the integer is an index of; None: the integer is the value.
    floating: the integer is the bits of a floating-point number: F16, BF16, F32, F8_E4M3 or
        F8_E5M2, as safetensors calls them; '' otherwise.
    """

    parts: tuple[BitField, ...]
    zero: int = 0
    signed: bool = False
    table: tuple[float, ...] | None = None
    floating: str = ""

    @property
    def count(self) -> int:
        return len(self.parts[0].bytes)


@dataclass(frozen=True)
class BlockFormat:
    """A stored type whose rows are blocks of neighbouring values, each of equally many bytes.

        value[i] = (code[i] - zero[i]) scale[i] factor + offset[i]    in float32, rounded each time

    name: what files call it.
    block_values, block_bytes: values of a block, and its size.
    codes: one for each value.
    scales: factors of the scale, multiplied in this order; each has one number for the block, or
        one for each of its equal parts.
    offsets: factors of the offset, likewise; none: the offset is 0.
    subtracts: the offset is subtracted instead.
    zeros: factors of the zero points, one number for each scale; none: the zero points are 0.
    divides: the second factor of the scale is divided by the first instead.
    factor: of all values, a constant.
    """

    name: str
    block_values: int
    block_bytes: int
    codes: Numbers
    scales: tuple[Numbers, ...]
    offsets: tuple[Numbers, ...] = ()
    subtracts: bool = False
    zeros: tuple[Numbers, ...] = ()
    divides: bool = False
    factor: float = 1.0
    axis: ClassVar[Axis] = "in"
    stripe_rows: ClassVar[int] = 1

    def __hash__(self) -> int:
        return hash(self.name)  # a hash of all fields would take longer than a product's call

    @property
    def has_loop(self) -> bool:
        """Whether compiled loops read it: a block fills whole vectors of any processor."""
        return self.block_values % 32 == 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block_values * sum(part.width for part in self.codes.parts) // 8

    def has_whole_blocks(self, width: int) -> bool:
        """Whether rows of `width` values are whole blocks."""
        return width % self.block_values == 0

    def stripe_bytes(self, width: int) -> int:
        return width // self.block_values * self.block_bytes

    def num_stripes(self, rows: int) -> int:
        return rows

    def packed_bytes(self, rows: int, width: int) -> int:
        return rows * self.stripe_bytes(width)
