"""Rows of blocks (`BlockFormat`) by plain operations of torch, on any device: decodes them, and
bounds their values. The compiled loops are compared with this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from flexgen_helm.quant.formats import BlockFormat, Numbers

_FLOATS = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Bits of the highest byte that are all set only in numbers that are not finite.
_NOT_FINITE = {"F16": 0x7C, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C}


def decode(packed: Tensor, fmt: BlockFormat) -> Tensor:
    """Decode bytes [rows, row bytes] to float32 [rows, width]."""
    blocks = packed.reshape(-1, fmt.block_bytes)
    values = numbers_of(blocks, fmt.codes)
    if fmt.zeros:
        values = values - _product(blocks, fmt.zeros, fmt.block_values)
    values = values * _product(blocks, fmt.scales, fmt.block_values, fmt.divides) * fmt.factor
    if fmt.offsets:
        offset = _product(blocks, fmt.offsets, fmt.block_values)
        values = values - offset if fmt.subtracts else values + offset
    return values.view(packed.shape[0], -1)


def has_non_finite(packed: Tensor, fmt: BlockFormat) -> bool:
    """Return whether a code or a scale in bytes [rows, row bytes] is infinite or NaN."""
    blocks = packed.reshape(-1, fmt.block_bytes)
    for numbers in (*fmt.scales, *fmt.offsets, fmt.codes):
        if numbers.floating in _NOT_FINITE:
            mask = _NOT_FINITE[numbers.floating]
            first, *more = high_bytes = numbers.parts[-1].bytes  # at equal distances
            step = more[0] - first if more else 1
            found = bool((blocks[:, first : high_bytes[-1] + 1 : step] & mask).eq(mask).any())
        else:
            can_be = numbers.floating or not all(map(math.isfinite, numbers.table or ()))
            found = bool(can_be) and not bool(numbers_of(blocks, numbers).isfinite().all())
        if found:
            return True
    return fmt.divides and not bool(
        _product(blocks, fmt.scales, fmt.block_values, True).isfinite().all()
    )


def magnitude_bound(packed: Tensor, fmt: BlockFormat) -> float:
    """Return a bound of the magnitude of all values in bytes [rows, row bytes]: the largest code,
    zero point, scale and offset together.
    """
    blocks = packed.reshape(-1, fmt.block_bytes)
    scale, offset, zero = (
        float(
            _product(blocks, factors, max(numbers.count for numbers in factors), is_divided)
            .abs()
            .max()
        )
        if factors
        else 0.0
        for factors, is_divided in (
            (fmt.scales, fmt.divides),
            (fmt.offsets, False),
            (fmt.zeros, False),
        )
    )
    return (_largest_code(fmt) + zero) * scale * fmt.factor + offset


@cache
def _largest_code(fmt: BlockFormat) -> float:
    every_byte = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, fmt.block_bytes)
    return float(numbers_of(every_byte, fmt.codes).nan_to_num(0.0, 0.0, 0.0).abs().max())


def _product(
    blocks: Tensor, factors: Sequence[Numbers], count: int, is_divided: bool = False
) -> Tensor:
    """Return the product of factors [blocks, count], each repeated over its equal part of `count`
    values; is_divided: the second is divided by the first.
    """
    product, *more = (
        numbers_of(blocks, numbers).repeat_interleave(count // numbers.count, 1)
        for numbers in factors
    )
    for factor in more:
        product = factor / product if is_divided else product * factor
    return product


def numbers_of(blocks: Tensor, numbers: Numbers) -> Tensor:
    """Return an array's numbers in all blocks [blocks, count], in float32."""
    device = blocks.device
    integer = torch.zeros(1, dtype=torch.int32, device=blocks.device)
    width = 0
    for part in numbers.parts:
        byte_numbers, shifts = (
            torch.tensor(indices, device=device) for indices in (part.bytes, part.shifts)
        )
        bits = blocks.index_select(1, byte_numbers).int() >> shifts.int() & (1 << part.width) - 1
        integer, width = integer | bits << width, width + part.width
    if numbers.floating:
        dtype = _FLOATS[numbers.floating]
        return integer.to(_INTEGERS[dtype.itemsize]).view(dtype).float()
    if numbers.table is not None:
        return torch.tensor(numbers.table, dtype=torch.float32, device=device)[integer.long()]
    if numbers.signed:
        integer = integer - (integer >> width - 1 << width)
    return (integer - numbers.zero).float()
