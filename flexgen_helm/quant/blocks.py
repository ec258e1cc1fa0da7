"""Rows of blocks, decoded by plain operations of torch on any device: what `BlockFormat` describes, word by word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_helm.quant.formats import BlockFormat, Numbers


def decode(packed: Tensor, fmt: BlockFormat) -> Tensor:
    """Bytes [rows, row bytes] -> float32 [rows, width]."""
    blocks = packed.reshape(-1, fmt.block_bytes)
    values = _numbers(blocks, fmt.codes).float() * _product(blocks, fmt.scales, fmt.block_values)
    if fmt.offsets:
        offset = _product(blocks, fmt.offsets, fmt.block_values)
        values = values - offset if fmt.subtracts else values + offset
    return values.view(packed.shape[0], -1)


def not_finite(packed: Tensor, fmt: BlockFormat) -> bool:
    """Whether a scale or an offset of bytes [rows, row bytes] is not finite; codes always are."""
    blocks = packed.reshape(-1, fmt.block_bytes)
    halves = (numbers for numbers in (*fmt.scales, *fmt.offsets) if numbers.is_half)
    return any(bool((blocks[:, part.parts[1].bytes[0]] & 0x7C).eq(0x7C).any()) for part in halves)


def _product(blocks: Tensor, factors: Sequence[Numbers], count: int) -> Tensor:
    """Return the product of factors for each of `count` values [blocks, count]."""
    product: Tensor | None = None
    for numbers in factors:
        factor = _numbers(blocks, numbers).repeat_interleave(count // numbers.count, 1)
        product = factor if product is None else product * factor
    assert product is not None
    return product


def _numbers(blocks: Tensor, numbers: Numbers) -> Tensor:
    """Return numbers of all blocks [blocks, count] in float32."""
    device, integer, width = blocks.device, torch.zeros(1, dtype=torch.int32, device=blocks.device), 0
    for part in numbers.parts:
        places, shifts = (torch.tensor(given, device=device) for given in (part.bytes, part.shifts))
        found = blocks.index_select(1, places).int() >> shifts.int() & (1 << part.width) - 1
        integer, width = integer | found << width, width + part.width
    if numbers.is_half:
        return (integer - (integer >> 15 << 16)).short().view(torch.float16).float()
    if numbers.table is not None:
        return torch.tensor(numbers.table, dtype=torch.float32, device=device)[integer.long()]
    if numbers.signed:
        integer = integer - (integer >> width - 1 << width)
    return (integer - numbers.zero).float()
