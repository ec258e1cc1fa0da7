"""The arithmetic of group-wise quantization (the paper, 'Group-wise Quantization'): values to codes and back.

    code = round((x - offset) / step), within 0 … 2^bits - 1        x' = code step + offset

Scales as a 'pair': offset = min and step = (max - min) / (2^bits - 1), each in FP16; rounded so that the steps from
the offset still reach the greatest value, which bounds every error by half a step. Scales as a 'word' w of 16 bits:

    step = 2^((w >> 7) / 16 - 24)        offset = -(2^bits - 1) / 127 (w & 127) step

a step from 2^-24 to nearly 2^8, within 2.2 % of any, and a zero point between the codes. All in float32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.errors import FlexgenError
from flexgen_helm.quant.formats import GroupFormat

Scaled = tuple[Tensor, Tensor]  # step, offset: float32 [...]

_OCTAVE, _LOWEST, _STEPS = 16, -24, 512
_ZEROS = 127
_LARGEST = 65504.0  # of FP16
# Steps that are tried, from the one that covers a group's range to 0.7 of it, and refits of each zero point.
_TRIED_STEPS, _REFITS = 8, 1


class NotQuantizableError(FlexgenError):
    """A value cannot be quantized."""


@lru_cache(maxsize=8)
def word_steps(device: torch.device) -> Tensor:
    """Step of each of the 512 numbers that a word's upper bits can be."""
    # In double precision on the host, so that every device has the same numbers.
    exponents = torch.arange(_STEPS, dtype=torch.float64) / _OCTAVE + _LOWEST
    return torch.exp2(exponents).float().to(device)


def word_zeros(bits: int, device: torch.device) -> Tensor:
    """Zero point, in codes, of each of the 128 numbers that a word's lower bits can be."""
    return (torch.arange(_ZEROS + 1, dtype=torch.float64) * ((1 << bits) - 1) / _ZEROS).float().to(device)


def scales_of(words: Tensor, bits: int) -> Scaled:
    """Words [...] (int32) -> step and offset."""
    step = word_steps(words.device)[words >> 7]
    return step, -(word_zeros(bits, words.device)[words & _ZEROS] * step)


def to_codes(values: Tensor, fmt: GroupFormat) -> tuple[Tensor, Tensor]:
    """Values [..., group] -> codes [..., group] (uint8) and scales: [..., 2] in FP16, or words [...] (int32).

    Raises `CannotPack`.
    """
    values = values.float()
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise NotQuantizableError("a value that is not finite cannot be quantized; fetch the model again")
    least, greatest = values.amin(-1), values.amax(-1)
    if fmt.scales == "pair":
        scales = _pair(least, greatest, fmt.bits)
        step, offset = scales[..., 0].float(), scales[..., 1].float()
        return _codes(values, step, offset, fmt.bits), scales
    if least.numel() and float((greatest.clamp_min(0.0) - least.clamp_max(0.0)).max()) > 2 * largest_value(fmt):
        raise NotQuantizableError(
            f"a group of values that spans more than {2 * largest_value(fmt):g} is out of reach of scales in 16 bits"
        )
    words = _covering_words(least, greatest, fmt.bits)
    if fmt.fit == "error":
        words = _fitted_words(values, words, fmt.bits)
    return _codes(values, *scales_of(words, fmt.bits), fmt.bits), words


def largest_value(fmt: GroupFormat) -> float:
    """Values between this and its negative can be packed."""
    return _LARGEST if fmt.scales == "pair" else ((1 << fmt.bits) - 1) * 2.0 ** ((_STEPS - 1) / _OCTAVE + _LOWEST) / 2


def from_codes(codes: Tensor, scales: Tensor, fmt: GroupFormat) -> Tensor:
    """The inverse of `encode`, up to rounding: float32 [..., group]."""
    if fmt.scales == "pair":
        step, offset = scales[..., 0].float(), scales[..., 1].float()
    else:
        step, offset = scales_of(scales, fmt.bits)
    return codes.float() * step[..., None] + offset[..., None]


def _codes(values: Tensor, step: Tensor, offset: Tensor, bits: int) -> Tensor:
    return _rounded(values, step, offset, bits).to(torch.uint8)


def _rounded(values: Tensor, step: Tensor, offset: Tensor, bits: int) -> Tensor:
    scaled = (values - offset[..., None]).div_(step[..., None])
    return scaled.round_().clamp_(0, (1 << bits) - 1)


def _pair(least: Tensor, greatest: Tensor, bits: int) -> Tensor:
    if least.numel() and float(torch.maximum(greatest.max(), -least.min())) > _LARGEST:
        raise NotQuantizableError(f"a value beyond {_LARGEST:g} cannot be quantized with scales in FP16")
    offset = _half(least, down=True)
    step = _half((greatest - offset.float()) / ((1 << bits) - 1), down=False)
    # A floor, so that a constant is code 0 exactly and nothing is divided by 0.
    step = step.clamp_min(torch.finfo(torch.float16).smallest_normal)
    return torch.stack((step, offset), -1)


def _half(values: Tensor, down: bool) -> Tensor:
    """FP16, rounded to the side that keeps the range covered."""
    near = values.half()
    wrong = near.float() > values if down else near.float() < values
    further = torch.nextafter(near, torch.full_like(near, -torch.inf if down else torch.inf))
    return torch.where(wrong, further, near).clamp(-_LARGEST, _LARGEST)


def _covering_words(least: Tensor, greatest: Tensor, bits: int) -> Tensor:
    """The smallest step of the grid from which every value is within reach, and its zero point."""
    least, greatest = least.clamp_max(0.0), greatest.clamp_min(0.0)
    top = (1 << bits) - 1
    width = (greatest - least).double() / top
    number = torch.ceil((torch.log2(width.clamp_min(2.0**_LOWEST)) - _LOWEST) * _OCTAVE - 1e-9)
    number = number.clamp(0, _STEPS - 1).to(torch.int32)
    step = word_steps(least.device)[number]
    return number << 7 | _zero_number(-least / step, bits)


def _zero_number(zero: Tensor, bits: int) -> Tensor:
    """The grid's nearest number for a zero point in codes."""
    return (zero * (_ZEROS / ((1 << bits) - 1))).round().clamp(0, _ZEROS).to(torch.int32)


def _fitted_words(values: Tensor, words: Tensor, bits: int) -> Tensor:
    """The word with the least squared error among smaller steps, each with zero points of its own.

    Clipping a group's extremes pays where the finer step saves more on the others; it may clip below, above, or on
    both sides, and each of these is then refitted: the codes it gives want another offset. No data are needed.
    """
    top = (1 << bits) - 1
    step, offset = scales_of(words, bits)
    covering = _rounded(values, step, offset, bits) * step[..., None] + offset[..., None]
    best, least = words, (values - covering).square_().sum(-1)
    start, steps = words >> 7, word_steps(values.device)
    below, above = values.amin(-1).clamp_max_(0.0), values.amax(-1).clamp_min_(0.0)
    for down in range(_TRIED_STEPS):
        number = (start - down).clamp_min(0)
        step = steps[number]
        lowest, highest = -below / step, top - above / step
        for zero in (lowest, (lowest + highest) / 2, highest):
            for refit in range(_REFITS + 1):
                found = number << 7 | _zero_number(zero, bits)
                _, offset = scales_of(found, bits)
                rest = values - _rounded(values, step, offset, bits).mul_(step[..., None])
                if refit < _REFITS:
                    zero = -rest.mean(-1) / step
                    continue
                error = (rest - offset[..., None]).square_().sum(-1)
                better = error < least
                best, least = torch.where(better, found, best), torch.where(better, error, least)
    return best
