"""Arithmetic of group-wise quantization (the paper, 'Group-wise Quantization'): values to codes and
back, in float32.

    code = round((x - offset) / scale), within 0 … 2^bits - 1        x' = code scale + offset

Scales 'pair': offset = min and scale = (max - min) / (2^bits - 1), both in FP16 and both rounded so
that the codes still cover the range. An error is at most half a scale.

Scales 'word', a number w of 16 bits:

    scale  = 2^((w >> 7) / 16 - 24)    512 values from 2^-24 to almost 2^8, 4.4 % apart
    offset = -zero_point scale         zero_point = (2^bits - 1) (w & 127) / 127, in codes
"""

from __future__ import annotations

from functools import lru_cache, reduce

import torch
from torch import Tensor

from flexgen_helm.errors import FlexgenError
from flexgen_helm.quant.formats import GroupFormat

ScaleOffset = tuple[Tensor, Tensor]  # float32 [...] each

# The grid of a word's scales and zero points.
SCALES_PER_OCTAVE = 16
LOWEST_EXPONENT = -24
NUM_SCALES = 512
LAST_ZERO_POINT = 127
_FP16_MAX = 65504.0
# Values that are fitted at a time: hundreds of passes go over them, so they stay in the caches.
_FITTED_VALUES = 1 << 19
# Scales that the fit tries: the one that covers a group's range, and the next smaller ones, down to
# 0.74 of it.
TRIED_SCALES = 8
# The order of a sum over a group: its terms are added to this many sums in turn, and these are
# added up by halves. So every device and the compiled loop find the same words.
PARTIAL_SUMS = 8


class NotQuantizableError(FlexgenError):
    """A value cannot be quantized; the message says which.

    Next: `flexgen-helm fetch MODEL --verify` tells damage; a model of such large values runs with
        `--precision fp16`.
    """


@lru_cache(maxsize=8)
def word_scales(device: torch.device) -> Tensor:
    """Return the scale [512] of each number that a word's upper 9 bits can hold."""
    # In double precision on the host, so that every device has the same numbers.
    exponents = torch.arange(NUM_SCALES, dtype=torch.float64) / SCALES_PER_OCTAVE + LOWEST_EXPONENT
    return torch.exp2(exponents).float().to(device)


@lru_cache(maxsize=8)
def word_zero_points(bits: int, device: torch.device) -> Tensor:
    """Return the zero point [128], in codes, of each number that a word's lower 7 bits can hold."""
    numbers = torch.arange(LAST_ZERO_POINT + 1, dtype=torch.float64)
    return (numbers * ((1 << bits) - 1) / LAST_ZERO_POINT).float().to(device)


@lru_cache(maxsize=8)
def word_table(bits: int, device: torch.device) -> Tensor:
    """Return the scales [512] and then the zero points [128] of words, for compiled loops."""
    return torch.cat((word_scales(device), word_zero_points(bits, device)))


def decode_words(words: Tensor, bits: int) -> ScaleOffset:
    """Return the scales and offsets of words [...] (int32)."""
    scale = word_scales(words.device)[words >> 7]
    return scale, -(word_zero_points(bits, words.device)[words & LAST_ZERO_POINT] * scale)


def to_codes(values: Tensor, fmt: GroupFormat, *, saturate: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize values [..., group] to codes [..., group] (uint8) and their scales.

    Scales are pairs [..., 2] (float16) or words [...] (int32).
    saturate: values that cannot be quantized are clamped, in their group alone, instead of raising
        an error, for which the host would wait for a device.

    Raises `NotQuantizableError` for values that are not finite or beyond the reach of the scales.
    """
    values = _saturated(values.float(), fmt) if saturate else values.float()
    if not saturate:
        check_quantizable(values, fmt)
    minimum, maximum = values.amin(-1), values.amax(-1)
    if fmt.scales == "pair":
        pairs = _range_pairs(minimum, maximum, fmt.bits)
        scale, offset = pairs[..., 0].float(), pairs[..., 1].float()
        return _round_codes(values, scale, offset, fmt.bits).to(torch.uint8), pairs
    words = _range_words(minimum, maximum, fmt.bits)
    if fmt.fit == "error":
        words = _fitted_words(values, words, fmt.bits)
    return _round_codes(values, *decode_words(words, fmt.bits), fmt.bits).to(torch.uint8), words


def from_codes(codes: Tensor, scales: Tensor, fmt: GroupFormat) -> Tensor:
    """Invert `to_codes` up to rounding: float32 [..., group]."""
    if fmt.scales == "pair":
        scale, offset = scales[..., 0].float(), scales[..., 1].float()
    else:
        scale, offset = decode_words(scales, fmt.bits)
    return codes.float() * scale[..., None] + offset[..., None]


def largest_value(fmt: GroupFormat) -> float:
    """Return the bound within which all values, of either sign, can be quantized."""
    if fmt.scales == "pair":
        return _FP16_MAX
    return (
        ((1 << fmt.bits) - 1) * 2.0 ** ((NUM_SCALES - 1) / SCALES_PER_OCTAVE + LOWEST_EXPONENT) / 2
    )


def check_quantizable(values: Tensor, fmt: GroupFormat) -> None:
    """Raise `NotQuantizableError` for values [..., group] that cannot be quantized."""
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise NotQuantizableError(
            "a value that is not finite cannot be quantized; fetch the model again"
        )
    if not values.numel():
        return
    limit = largest_value(fmt)
    if fmt.scales == "pair" and float(torch.maximum(values.max(), -values.min())) > limit:
        raise NotQuantizableError(
            f"a value beyond {limit:g} cannot be quantized with scales in FP16"
        )
    if fmt.scales == "word" and float(_spans(values).max()) > 2 * limit:
        raise NotQuantizableError(
            f"a group of values that spans more than {2 * limit:g} is out of reach of scales in 16 "
            "bits"
        )


def _saturated(values: Tensor, fmt: GroupFormat) -> Tensor:
    """Clamp the values of groups [..., group] that cannot be quantized, with 0 for NaN; return
    other groups unchanged.
    """
    values, limit = torch.nan_to_num(values, nan=0.0), largest_value(fmt)
    if fmt.scales == "pair":
        return values.clamp_(-limit, limit)
    group_limits = torch.where(_spans(values) > 2 * limit, limit, torch.inf)[..., None]
    return torch.minimum(torch.maximum(values, -group_limits), group_limits)


def _spans(values: Tensor) -> Tensor:
    """Return the spans [...] of groups [..., group]: maximum minus minimum, with zero among the
    values, because the range of words includes it.
    """
    return values.amax(-1).clamp_min_(0.0) - values.amin(-1).clamp_max_(0.0)


def _round_codes(values: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """Return the codes [..., group] of values, in float32; scale, offset: [...]."""
    scaled = (values - offset[..., None]).div_(scale[..., None])
    return scaled.round_().clamp_(0, (1 << bits) - 1)


def _range_pairs(minimum: Tensor, maximum: Tensor, bits: int) -> Tensor:
    offset = _round_half(minimum, down=True)
    scale = _round_half((maximum - offset.float()) / ((1 << bits) - 1), down=False)
    # A floor, so that a constant is code 0 exactly and nothing is divided by 0.
    scale = scale.clamp_min(torch.finfo(torch.float16).smallest_normal)
    return torch.stack((scale, offset), -1)


def _round_half(values: Tensor, down: bool) -> Tensor:
    """Round to FP16 downwards or upwards."""
    nearest = values.half()
    is_beyond = nearest.float() > values if down else nearest.float() < values
    neighbour = torch.nextafter(
        nearest, torch.full_like(nearest, -torch.inf if down else torch.inf)
    )
    return torch.where(is_beyond, neighbour, nearest).clamp(-_FP16_MAX, _FP16_MAX)


def _range_words(minimum: Tensor, maximum: Tensor, bits: int) -> Tensor:
    """Return words with the smallest scale that covers minimum, maximum and zero."""
    minimum, maximum = minimum.clamp_max(0.0), maximum.clamp_min(0.0)
    exact_scale = ((maximum - minimum).double() / ((1 << bits) - 1)).clamp_min(2.0**LOWEST_EXPONENT)
    index = torch.ceil((torch.log2(exact_scale) - LOWEST_EXPONENT) * SCALES_PER_OCTAVE - 1e-9)
    index = index.clamp(0, NUM_SCALES - 1).to(torch.int32)
    return index << 7 | _zero_point_index(-minimum / word_scales(minimum.device)[index], bits)


def _zero_point_index(zero_point: Tensor, bits: int) -> Tensor:
    """Return the number of a word's lower 7 bits for the zero point nearest to one, in codes."""
    return (
        (zero_point * (LAST_ZERO_POINT / ((1 << bits) - 1)))
        .round()
        .clamp(0, LAST_ZERO_POINT)
        .to(torch.int32)
    )


def _fitted_words(values: Tensor, words: Tensor, bits: int) -> Tensor:
    """Fit the words of all groups; on the CPU as many groups at a time as its caches hold with the
    temporaries.
    """
    if values.device.type != "cpu" or values.numel() <= _FITTED_VALUES:
        return _fit(values, words, bits)
    rows = max(1, _FITTED_VALUES // values.shape[-1])
    chunks = zip(values.flatten(0, -2).split(rows), words.flatten().split(rows))
    return torch.cat([_fit(*part, bits) for part in chunks]).view_as(words)


def _fit(values: Tensor, words: Tensor, bits: int) -> Tensor:
    """Search smaller scales and other zero points for the least squared error; return words.

    Clipping a group's extremes pays where the finer scale saves more on its other values. For every
    scale three zero points are tried, which clip below, on both sides, or above; each is replaced
    by the one that is best for the codes that it gives.
    """
    first_index, scales = words >> 7, word_scales(values.device)
    minimum, maximum = values.amin(-1).clamp_max_(0.0), values.amax(-1).clamp_min_(0.0)

    def remainder_and_offset(candidate: Tensor) -> ScaleOffset:
        """Return values - codes scale [..., group], and the candidate's offset [..., 1]."""
        scale, offset = (number[..., None] for number in decode_words(candidate, bits))
        codes = (values - offset).mul_(1 / scale).round_().clamp_(0, (1 << bits) - 1)
        return values - codes.mul_(scale), offset

    def error(candidate: Tensor) -> Tensor:
        remainder, offset = remainder_and_offset(candidate)
        return _sum_in_order(remainder.sub_(offset).square_())

    best, least_error = words, error(words)
    for step in range(TRIED_SCALES):
        index = (first_index - step).clamp_min(0)
        scale = scales[index]
        lowest, highest = -minimum / scale, (1 << bits) - 1 - maximum / scale
        for zero_point in (lowest, (lowest + highest) / 2, highest):
            remainder, _ = remainder_and_offset(index << 7 | _zero_point_index(zero_point, bits))
            candidate = index << 7 | _zero_point_index(
                -(_sum_in_order(remainder) / values.shape[-1]) / scale, bits
            )
            candidate_error = error(candidate)
            is_better = candidate_error < least_error
            best = torch.where(is_better, candidate, best)
            least_error = torch.where(is_better, candidate_error, least_error)
    return best


def _sum_in_order(terms: Tensor) -> Tensor:
    """Return the sums [...] of terms [..., group], in the order of `PARTIAL_SUMS`."""
    total = reduce(torch.add, terms.split(PARTIAL_SUMS, -1))
    while (half := total.shape[-1] // 2) > 0:
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
