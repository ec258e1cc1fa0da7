"""Packed bytes of a quantized matrix: what rests on a tier and crosses a link.

A stripe (see `formats`) is the code bytes of its groups and then their scales, each with the groups in the order of
the columns. With 4 bits, byte j of a group has value j below and value j + group / 2 above, so that both halves
unpack to runs; other widths are streams of bits, lowest first.

    axis 'in'    | group 0: g b/8 bytes | group 1 | …  | scale 0 | scale 1 | …
    axis 'out'   | byte 0 of every column | byte 1 of every column | … | step of every column | offset of every column
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.quant.arithmetic import from_codes, to_codes
from flexgen_helm.quant.formats import GroupFormat


def quantize(values: Tensor, fmt: GroupFormat) -> Tensor:
    """Matrix [rows, width] -> bytes [stripes, stripe_bytes]. Raises `CannotPack`."""
    groups = _grouped(values, fmt)  # [stripes, groups, group]
    codes, scales = to_codes(groups, fmt)
    if fmt.scales == "word":
        scales = _signed(scales)[..., None]
    code_bytes = pack_codes(codes, fmt.bits)
    if fmt.axis == "out":
        code_bytes, scales = code_bytes.transpose(1, 2), scales.transpose(1, 2)
    return torch.cat((_flat(code_bytes), _flat(scales)), 1)


def dequantize(packed: Tensor, fmt: GroupFormat, rows: int, width: int) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> float32 [rows, width], by plain operations of torch on any device."""
    stripes, groups = packed.shape[0], fmt.stripe_groups(width)
    border = groups * fmt.code_bytes
    code_bytes, scales = packed[:, :border], packed[:, border:]
    if fmt.axis == "out":
        codes = code_bytes.view(stripes, fmt.code_bytes, groups).transpose(1, 2)
        parts = scales.reshape(stripes, -1, groups, 2).transpose(1, 2)
    else:
        codes = code_bytes.view(stripes, groups, fmt.code_bytes)
        parts = scales.reshape(stripes, groups, -1, 2)
    # Bytes that were cut out of stripes need not lie at even addresses.
    numbers = parts[..., 0].to(torch.int32) | parts[..., 1].to(torch.int32) << 8
    found = numbers[..., 0]
    if fmt.scales == "pair":
        found = _signed(numbers).contiguous().view(torch.float16)
    values = from_codes(unpack_codes(codes, fmt.bits), found, fmt)
    if fmt.axis == "out":
        return values.transpose(1, 2).reshape(-1, width)[:rows]
    return values.reshape(stripes, -1)[:rows, :width]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., group] (uint8) -> bytes [..., group bits / 8]."""
    group = codes.shape[-1]
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., : group // 2] | codes[..., group // 2 :] << 4
    places = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = (codes[..., None] >> places & 1).reshape(*codes.shape[:-1], group * bits // 8, 8)
    return (stream << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.cat((packed & 15, packed >> 4), -1)
    stream = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    stream = stream.reshape(*packed.shape[:-1], -1, bits)
    return (stream << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)


def _grouped(values: Tensor, fmt: GroupFormat) -> Tensor:
    """[rows, width] -> [stripes, groups, group], filled up with the last value, which widens no range."""
    if fmt.axis == "in":
        rows, width = values.shape
        missing = -width % fmt.group_size
        if missing:
            values = torch.cat((values, values[:, -1:].expand(rows, missing)), 1)
        return values.reshape(rows, -1, fmt.group_size)
    return _grouped(values.t(), GroupFormat(group_size=fmt.group_size)).transpose(0, 1)


def _signed(words: Tensor) -> Tensor:
    """16 bits [...] (int32) with the same bits in int16."""
    return (words - ((words >> 15) << 16)).to(torch.int16)


def _flat(parts: Tensor) -> Tensor:
    """[stripes, …] -> bytes [stripes, bytes]."""
    flat = parts.reshape(parts.shape[0], -1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)
