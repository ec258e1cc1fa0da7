"""Formats of quantized matrices: what the program itself packs (`GroupFormat`), and the stored
types of published files (`BlockFormat`, in the table `BLOCK_FORMATS`). No torch.

    group    `group_size` neighbouring values that share one scale and one zero point
    codes    those values as integers 0 … 2^bits - 1
    stripe   the smallest part of a packed matrix [rows, width] that can be read alone; all have
             equally many bytes

    axis 'in'    groups run along a row       stripe = one row
    axis 'out'   groups run along a column    stripe = `group_size` rows
    stripe       codes of its groups, then their scales

The last group of a row (axis 'in') or of a column (axis 'out') is padded to a whole one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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

# ---- stored types of published files ----


@dataclass(frozen=True)
class Bits:
    """Some bits of each number of a block: number i has them in byte `bytes[i]`, from bit
    `shifts[i]` on.
    """

    width: int
    bytes: tuple[int, ...]
    shifts: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """Numbers of a block.

    parts: their bits, the lowest first.
    zero: is subtracted from the integer that the bits are.
    signed: the highest of 8 bits is the integer's sign.
    table: what the integer names; None for itself.
    floating: the bits are a floating-point number: F16, BF16, F32, F8_E4M3 or F8_E5M2, as
        safetensors calls them.
    """

    parts: tuple[Bits, ...]
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
    block_values, block_bytes: of a block.
    codes: of its values.
    scales: factors of the scale, multiplied in this order: one for the block, or one for each of
        its equal parts.
    offsets: likewise of the offset, which is 0 where there are none.
    subtracts: the offset is subtracted.
    zeros: of the zero points, one for each scale; 0 where there are none.
    divides: the second factor of the scale is divided by the first.
    factor: of all values.
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
        return hash(self.name)  # of all fields it would take longer than a product's call

    @property
    def has_loop(self) -> bool:
        """Whether compiled loops read it: its values fill their vectors."""
        return self.block_values % 32 == 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block_values * sum(part.width for part in self.codes.parts) // 8

    def takes(self, width: int) -> bool:
        """Whether rows of `width` values are whole blocks."""
        return width % self.block_values == 0

    def stripe_bytes(self, width: int) -> int:
        return width // self.block_values * self.block_bytes

    def num_stripes(self, rows: int) -> int:
        return rows

    def packed_bytes(self, rows: int, width: int) -> int:
        return rows * self.stripe_bytes(width)


def _bits(count: int, at: int, width: int, span: int, shift: int = 0) -> Bits:
    """Return bits of numbers in chunks of `span` bytes: a chunk has one number of each byte, then
    the next of each.
    """
    per_byte, numbers = 8 // width, range(count)
    places = tuple(at + i // (span * per_byte) * span + i % span for i in numbers)
    return Bits(width, places, tuple(shift + width * (i // span % per_byte) for i in numbers))


def _float(kind: str, at: int, size: int, count: int = 1) -> Numbers:
    places = (tuple(range(at + byte, at + byte + count * size, size)) for byte in range(size))
    return Numbers(tuple(Bits(8, bytes_, (0,) * count) for bytes_ in places), floating=kind)


def _half(at: int) -> Numbers:
    return _float("F16", at, 2)


def _k_scales(at: int) -> tuple[Numbers, Numbers]:
    """Eight scales and eight minimums of 6 bits in 12 bytes, as Q4_K and Q5_K have them."""
    scales = Bits(4, (*range(at, at + 4), *range(at + 8, at + 12)), (0,) * 8)
    minimums = Bits(4, tuple(range(at + 4, at + 12)), (0,) * 4 + (4,) * 4)
    return Numbers((scales, _bits(8, at, 2, 4, 4))), Numbers((minimums, _bits(8, at + 4, 2, 4, 4)))


# Twice the values of E2M1; scales beside them are halved.
_FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
_HALF_E8M0 = tuple(2.0 ** (exponent - 128) for exponent in range(256))
# E4M3 without a sign: the bit in its place counts nothing, and what would be NaN is 0.
_HALF_E4M3 = tuple(
    0.0 if e == 0x7F else 2.0 ** (max(e >> 3 & 15, 1) - 8) * ((e & 7) / 8 + (e >> 3 & 15 > 0))
    for e in range(256)
)
_IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))

# GGUF: what its type is called, values and bytes of a block, and where they are.
BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        BlockFormat("Q4_0", 32, 18, Numbers((_bits(32, 2, 4, 16),), zero=8), (_half(0),)),
        BlockFormat("Q4_1", 32, 20, Numbers((_bits(32, 4, 4, 16),)), (_half(0),), (_half(2),)),
        BlockFormat(
            "Q5_0", 32, 22, Numbers((_bits(32, 6, 4, 16), _bits(32, 2, 1, 1)), zero=16), (_half(0),)
        ),
        BlockFormat(
            "Q5_1",
            32,
            24,
            Numbers((_bits(32, 8, 4, 16), _bits(32, 4, 1, 1))),
            (_half(0),),
            (_half(2),),
        ),
        BlockFormat("Q8_0", 32, 34, Numbers((_bits(32, 2, 8, 32),), signed=True), (_half(0),)),
        BlockFormat(
            "Q2_K",
            256,
            84,
            Numbers((_bits(256, 16, 2, 32),)),
            (_half(80), Numbers((_bits(16, 0, 4, 16),))),
            (_half(82), Numbers((_bits(16, 0, 4, 16, 4),))),
            subtracts=True,
        ),
        BlockFormat(
            "Q3_K",
            256,
            110,
            Numbers((_bits(256, 32, 2, 32), _bits(256, 0, 1, 32)), zero=4),
            (_half(108), Numbers((_bits(16, 96, 4, 8), _bits(16, 104, 2, 4)), zero=32)),
        ),
        BlockFormat(
            "Q4_K",
            256,
            144,
            Numbers((_bits(256, 16, 4, 32),)),
            (_half(0), _k_scales(4)[0]),
            (_half(2), _k_scales(4)[1]),
            subtracts=True,
        ),
        BlockFormat(
            "Q5_K",
            256,
            176,
            Numbers((_bits(256, 48, 4, 32), _bits(256, 16, 1, 32))),
            (_half(0), _k_scales(4)[0]),
            (_half(2), _k_scales(4)[1]),
            subtracts=True,
        ),
        BlockFormat(
            "Q6_K",
            256,
            210,
            Numbers((_bits(256, 0, 4, 64), _bits(256, 128, 2, 32)), zero=32),
            (_half(208), Numbers((_bits(16, 192, 8, 16),), signed=True)),
        ),
        BlockFormat("IQ4_NL", 32, 18, Numbers((_bits(32, 2, 4, 16),), table=_IQ4), (_half(0),)),
        BlockFormat(
            "IQ4_XS",
            256,
            136,
            Numbers((_bits(256, 8, 4, 16),), table=_IQ4),
            (_half(0), Numbers((_bits(8, 4, 4, 1), _bits(8, 2, 2, 1)), zero=32)),
        ),
        BlockFormat(
            "MXFP4",
            32,
            17,
            Numbers((_bits(32, 1, 4, 16),), table=_FP4),
            (Numbers((_bits(1, 0, 8, 1),), table=_HALF_E8M0),),
        ),
        BlockFormat(
            "NVFP4",
            64,
            36,
            Numbers((_bits(64, 4, 4, 8),), table=_FP4),
            (Numbers((_bits(4, 0, 8, 4),), table=_HALF_E4M3),),
        ),
        BlockFormat("TQ2_0", 256, 66, Numbers((_bits(256, 0, 2, 32),), zero=1), (_half(64),)),
    )
}


# ---- codes and scales of folders, which have tensors of their own ----

_FP4_CODES = tuple(value / 2 for value in _FP4[:8]) + tuple(-value / 2 for value in _FP4[:8])
_E8M0 = (*(2.0 ** (exponent - 127) for exponent in range(255)), math.nan)
# QLoRA, appendix E: quantiles of a normal distribution.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
SCALE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1}
# Values of a block: the most that a loop decodes without a turn, and the fewest.
_MOST_VALUES, _FEWEST_VALUES = 128, 32
# Of blocks in weight files. A higher one orphans those that were written.
LAYOUT_VERSION = 1


@cache
def scaled_format(
    codes: str,
    scale: str,
    width: int,
    shared: int,
    *,
    has_zero: bool = False,
    is_divided: bool = False,
    factor: float = 1.0,
    table: tuple[float, ...] = _NF4,
) -> BlockFormat | None:
    """Return the format of blocks of a scale, or several, and codes behind; None for types or
    widths without one.

    codes: F8_E4M3, F8_E5M2, I8; FP4, U2, U3, U4, or U8, as a stream from the lowest bit of each
        byte on, where a U code counts from its middle; another name for 4 bits that name values of
        a table, the upper ones of a byte first.
    scale: a type of `SCALE_BYTES`.
    width, shared: values of a row, and neighbouring ones with the same scale.
    has_zero: a byte behind each scale is where I8 and U codes count from.
    is_divided: a float32 before the scale divides it.
    factor: of all values.
    """
    values = math.gcd(_MOST_VALUES, width, shared)
    if values == shared < _FEWEST_VALUES:  # a block has several scales
        values = math.gcd(_MOST_VALUES, width)
    parts, at = max(1, values // shared), 4 * is_divided
    if (size := SCALE_BYTES.get(scale)) is None:
        return None
    scales: tuple[Numbers, ...]
    if scale == "F8_E8M0":
        scales = (Numbers((_bits(parts, at, 8, parts),), table=_E8M0),)
    else:
        scales = (_float(scale, at, size, parts),)
    if is_divided:
        scales = (_float("F32", 0, 4), *scales)
    at += parts * size
    zeros = (Numbers((_bits(parts, at, 8, parts),), signed=codes == "I8"),) if has_zero else ()
    numbers = _codes(codes, values, at + has_zero * parts, has_zero, table)
    bits = values * sum(part.width for part in numbers.parts)
    if bits % 8:
        return None
    name = f"{codes} {scale} {shared if parts > 1 else values}" + " zero" * has_zero
    name += f" x {factor:.3g}" * (factor != 1)
    size = at + has_zero * parts + bits // 8
    return BlockFormat(
        name, values, size, numbers, scales, zeros=zeros, divides=is_divided, factor=factor
    )


def _codes(kind: str, count: int, at: int, has_zero: bool, table: tuple[float, ...]) -> Numbers:
    """Return codes from byte `at` on; see `scaled_format`."""
    if kind.startswith("F8"):
        return Numbers((_bits(count, at, 8, count),), floating=kind)
    if kind == "I8":
        return Numbers((_bits(count, at, 8, count),), signed=True)
    if kind == "FP4":
        return Numbers((_bits(count, at, 4, 1),), table=_FP4_CODES)
    if not kind.startswith("U"):
        return Numbers(
            (Bits(4, tuple(at + i // 2 for i in range(count)), (4, 0) * (count // 2)),), table=table
        )
    width = int(kind[1:])
    step = 1 if width == 3 else width  # which a byte has whole
    stream = [range(bit, count * width, width) for bit in range(0, width, step)]
    parts = (
        Bits(step, tuple(at + i // 8 for i in bits), tuple(i % 8 for i in bits)) for bits in stream
    )
    return Numbers(tuple(parts), zero=0 if has_zero else 1 << width - 1)
