"""Packed bytes of a quantized matrix: how it is stored on every tier and crosses links.

A stripe (`quant.formats`) is the code bytes of its groups, then their scales. With 4 bits, byte j
of a group has value j in its low half and value j + group / 2 in its high half, so that both halves
unpack to runs.

    axis 'in'    | group 0: group bits / 8 bytes | group 1 | … | scales of group 0 | of group 1 | …
    axis 'out'   | byte 0 of every column | byte 1 … | scale of every column | offset …
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from flexgen_helm.kernels.team import run_on_threads
from flexgen_helm.kernels.trial import Loops
from flexgen_helm.quant.arithmetic import (
    TRIED_SCALES,
    check_quantizable,
    from_codes,
    to_codes,
    word_table,
)
from flexgen_helm.quant.formats import Fit, GroupFormat

# Arguments of the loops over packed bytes:
#
#     packed, stripe_bytes    address of the first stripe, and bytes from one stripe to the next
#     stripes                 how many
#     group_size, bits        of the format
#     has_words               scales are words, else pairs
#     table                   address of float32 numbers: of a word's scales [512] and zero points
#                             [128] (`arithmetic.word_table`), or the value of every FP16 number
#     matrix, rows, width     the values in float32, which are packed or dequantized
#     y, x_rows               only of a product: y [x_rows, rows] = x [x_rows, width] times the
#                             packed matrix transposed, where `matrix` is x
#     tried_scales            only of packing with the least squared error
PackedArgs = namedtuple(
    "PackedArgs",
    "packed stripe_bytes stripes group_size bits has_words table matrix rows width y x_rows "
    "tried_scales",
    defaults=(0, 0, 0),
)


def quantize(values: Tensor, fmt: GroupFormat, *, saturate: bool = False) -> Tensor:
    """Pack a matrix [rows, width] into bytes [stripes, stripe_bytes].

    saturate, and errors: see `to_codes`.
    """
    if not saturate and (packed := _pack_by_loop(values, fmt)) is not None:
        return packed
    codes, scales = to_codes(_to_groups(values, fmt), fmt, saturate=saturate)
    if fmt.scales == "word":
        scales = _to_int16(scales)[..., None]
    code_bytes = _pack_codes(codes, fmt.bits)
    if fmt.axis == "out":
        code_bytes, scales = code_bytes.transpose(1, 2), scales.transpose(1, 2)
    stripes = codes.shape[0]
    return torch.cat(
        (
            code_bytes.reshape(stripes, -1),
            scales.reshape(stripes, -1).contiguous().view(torch.uint8),
        ),
        1,
    )


def dequantize(packed: Tensor, fmt: GroupFormat, rows: int, width: int) -> Tensor:
    """Dequantize bytes [stripes, stripe_bytes] to float32 [rows, width], by plain operations of
    torch on any device.
    """
    stripes, groups = packed.shape[0], fmt.stripe_groups(width)
    code_bytes, scale_bytes = packed.tensor_split([groups * fmt.code_bytes], dim=1)
    if fmt.axis == "out":
        codes = code_bytes.view(stripes, fmt.code_bytes, groups).transpose(1, 2)
        scale_words = scale_bytes.reshape(stripes, -1, groups, 2).transpose(1, 2)
    else:
        codes = code_bytes.view(stripes, groups, fmt.code_bytes)
        scale_words = scale_bytes.reshape(stripes, groups, -1, 2)
    # Each scale's low and high byte are joined by arithmetic: a view as int16 would fail, because
    # stripes may begin at odd addresses.
    words = scale_words[..., 0].to(torch.int32) | scale_words[..., 1].to(torch.int32) << 8
    scales = (
        words[..., 0] if fmt.scales == "word" else _to_int16(words).contiguous().view(torch.float16)
    )
    values = from_codes(_unpack_codes(codes, fmt.bits), scales, fmt)
    if fmt.axis == "out":
        return values.transpose(1, 2).reshape(-1, width)[:rows]
    return values.reshape(stripes, -1)[:rows, :width]


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., group] (uint8) -> bytes [..., group bits / 8]."""
    half = codes.shape[-1] // 2
    return codes if bits == 8 else codes[..., :half] | codes[..., half:] << 4


def _unpack_codes(packed: Tensor, bits: int) -> Tensor:
    return packed if bits == 8 else torch.cat((packed & 15, packed >> 4), -1)


def _pack_by_loop(values: Tensor, fmt: GroupFormat) -> Tensor | None:
    """Pack a matrix [rows, width] by the compiled loop; return None for formats and devices without
    one.
    """
    has_loop = fmt.axis == "out" and fmt.scales == "word" and values.device.type == "cpu"
    if not has_loop or not values.numel() or (module := loops()) is None:
        return None
    matrix = values.float().contiguous()
    rows, width = matrix.shape
    check_quantizable(_to_groups(matrix, fmt), fmt)
    packed = torch.empty((fmt.num_stripes(rows), fmt.stripe_bytes(width)), dtype=torch.uint8)
    table = word_table(fmt.bits, packed.device)
    tried_scales = TRIED_SCALES if fmt.fit == "error" else 0
    args = packed_args(packed, fmt, table, matrix)._replace(tried_scales=tried_scales)
    run_on_threads(module.pack_columns, args, packed.shape[0] * width)
    return packed


def packed_args(packed: Tensor, fmt: GroupFormat, table: Tensor, matrix: Tensor) -> PackedArgs:
    """Return the arguments of a loop over packed bytes; the matrix [rows, width] is contiguous."""
    rows, width = matrix.shape
    return PackedArgs(
        packed=packed.data_ptr(),
        stripe_bytes=packed.stride(0),
        stripes=packed.shape[0],
        group_size=fmt.group_size,
        bits=fmt.bits,
        has_words=fmt.scales == "word",
        table=table.data_ptr(),
        matrix=matrix.data_ptr(),
        rows=rows,
        width=width,
    )


def _examples() -> Iterator[Callable[[], Tensor]]:
    matrix = torch.randn(
        40, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    fits: tuple[Fit, ...] = ("range", "error")
    for bits, fit in product((4, 8), fits):
        yield partial(_rounded, matrix, GroupFormat(bits, 32, "out", "word", fit))


def _rounded(matrix: Tensor, fmt: GroupFormat) -> Tensor:
    return dequantize(quantize(matrix, fmt), fmt, *matrix.shape)


loops = Loops("packing", "flexgen_helm.quant.packing_loop", _examples)


def _to_groups(values: Tensor, fmt: GroupFormat) -> Tensor:
    """[rows, width] -> [stripes, groups, group_size]; the last group is padded with its last value,
    which widens no range.
    """
    if fmt.axis == "out":
        return _to_groups(values.t(), GroupFormat(group_size=fmt.group_size)).transpose(0, 1)
    rows, width = values.shape
    missing = -width % fmt.group_size
    if missing:
        values = torch.cat((values, values[:, -1:].expand(rows, missing)), 1)
    return values.reshape(rows, -1, fmt.group_size)


def _to_int16(words: Tensor) -> Tensor:
    """Words of 16 bits [...] (int32) -> int16 with the same bits."""
    return (words - ((words >> 15) << 16)).to(torch.int16)
