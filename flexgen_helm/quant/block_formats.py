"""The stored types of published files: `BLOCK_FORMATS` of GGUF, and `scaled_format` for codes and
scales of safetensors. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from flexgen_helm.quant.formats import BitField, BlockFormat, Numbers


def _bits(count: int, first_byte: int, width: int, span: int, shift: int = 0) -> BitField:
    """Return where `count` numbers have `width` bits each, packed from byte `first_byte` on.

    The numbers go over `span` bytes, taking the lowest bits of each, then over the same bytes again
    with the next bits, and when these are full over the next `span` bytes.
    shift: the bit of a byte at which the lowest number begins.
    """
    per_byte, numbers = 8 // width, range(count)
    in_bytes = tuple(first_byte + i // (span * per_byte) * span + i % span for i in numbers)
    return BitField(width, in_bytes, tuple(shift + width * (i // span % per_byte) for i in numbers))


def _floats(kind: str, first: int, size: int, count: int = 1) -> Numbers:
    """Return where a block has `count` neighbouring floating-point numbers of `size` bytes each."""
    places = (tuple(range(first + byte, first + byte + count * size, size)) for byte in range(size))
    return Numbers(tuple(BitField(8, place, (0,) * count) for place in places), floating=kind)


def _half(first: int) -> Numbers:
    """Return where a block has one FP16 number."""
    return _floats("F16", first, 2)


def _k_scales(first: int) -> tuple[Numbers, Numbers]:
    """Return where Q4_K and Q5_K have eight scales and eight minimums of 6 bits, in 12 bytes."""
    scales = BitField(4, (*range(first, first + 4), *range(first + 8, first + 12)), (0,) * 8)
    minimums = BitField(4, tuple(range(first + 4, first + 12)), (0,) * 4 + (4,) * 4)
    return (
        Numbers((scales, _bits(8, first, 2, 4, 4))),
        Numbers((minimums, _bits(8, first + 4, 2, 4, 4))),
    )


# Values of codes, by code. E2M1, doubled as in GGUF, which halves the scales beside them:
_FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
_HALF_E8M0 = tuple(2.0 ** (exponent - 128) for exponent in range(256))
# E4M3, whose sign bit is ignored, and whose NaN is 0:
_HALF_E4M3 = tuple(
    0.0 if e == 0x7F else 2.0 ** (max(e >> 3 & 15, 1) - 8) * ((e & 7) / 8 + (e >> 3 & 15 > 0))
    for e in range(256)
)
_IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))

# The types of GGUF: name, values and bytes of a block, codes, scales, offsets.
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

# ---- safetensors, where codes and scales are tensors of their own, which weight files join ----

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
# Values of a block: the most for which loops are unrolled, and the fewest that they take.
_MAX_BLOCK_VALUES = 128
_MIN_BLOCK_VALUES = 32
# Version of the blocks in weight files. A higher one orphans the files that were written before.
LAYOUT_VERSION = 1


@cache
def scaled_format(
    codes: str,
    scale: str,
    width: int,
    values_per_scale: int,
    *,
    has_zero: bool = False,
    is_divided: bool = False,
    factor: float = 1.0,
    table: tuple[float, ...] = _NF4,
) -> BlockFormat | None:
    """Return the format of blocks that have one scale, or several, and behind them the codes; None
    for types or widths without one.

    codes: F8_E4M3, F8_E5M2, or I8; FP4, U2, U3, U4, or U8: a stream of bits from the lowest bit of
        each byte on, where a U code has its zero point in the middle of its range; any other name:
        4 bits that are an index of `table`, the upper ones of a byte first.
    scale: a type of `SCALE_BYTES`.
    width: values of a row.
    values_per_scale: neighbouring values with the same scale.
    has_zero: behind the scales there is a byte for each, the zero point of its I8 or U codes.
    is_divided: before the scales there is a float32, which divides them.
    factor: of all values, a constant.
    """
    block_values = math.gcd(_MAX_BLOCK_VALUES, width, values_per_scale)
    if block_values == values_per_scale < _MIN_BLOCK_VALUES:  # a block has several scales
        block_values = math.gcd(_MAX_BLOCK_VALUES, width)
    num_scales, offset = max(1, block_values // values_per_scale), 4 * is_divided
    if (scale_bytes := SCALE_BYTES.get(scale)) is None:
        return None
    scales: tuple[Numbers, ...]
    if scale == "F8_E8M0":
        scales = (Numbers((_bits(num_scales, offset, 8, num_scales),), table=_E8M0),)
    else:
        scales = (_floats(scale, offset, scale_bytes, num_scales),)
    if is_divided:
        scales = (_floats("F32", 0, 4), *scales)
    offset += num_scales * scale_bytes
    zeros: tuple[Numbers, ...] = ()
    if has_zero:
        zeros = (Numbers((_bits(num_scales, offset, 8, num_scales),), signed=codes == "I8"),)
        offset += num_scales
    code_numbers = _codes(codes, block_values, offset, has_zero, table)
    code_bits = block_values * sum(part.width for part in code_numbers.parts)
    if code_bits % 8:
        return None
    name = f"{codes} {scale} {values_per_scale if num_scales > 1 else block_values}"
    name += " zero" * has_zero + f" x {factor:.3g}" * (factor != 1)
    layout = name, block_values, offset + code_bits // 8, code_numbers, scales
    return BlockFormat(*layout, zeros=zeros, divides=is_divided, factor=factor)


def _codes(kind: str, count: int, first: int, has_zero: bool, table: tuple[float, ...]) -> Numbers:
    """Return where a block has its codes, from byte `first` on; kind: see `scaled_format`."""
    if kind.startswith("F8"):
        return Numbers((_bits(count, first, 8, count),), floating=kind)
    if kind == "I8":
        return Numbers((_bits(count, first, 8, count),), signed=True)
    if kind == "FP4":
        return Numbers((_bits(count, first, 4, 1),), table=_FP4_CODES)
    if not kind.startswith("U"):
        return Numbers(
            (BitField(4, tuple(first + i // 2 for i in range(count)), (4, 0) * (count // 2)),),
            table=table,
        )
    width = int(kind[1:])
    piece = 1 if width == 3 else width  # bits that no byte boundary divides
    stream = [range(bit, count * width, width) for bit in range(0, width, piece)]
    parts = (
        BitField(piece, tuple(first + i // 8 for i in bits), tuple(i % 8 for i in bits))
        for bits in stream
    )
    return Numbers(tuple(parts), zero=0 if has_zero else 1 << width - 1)
