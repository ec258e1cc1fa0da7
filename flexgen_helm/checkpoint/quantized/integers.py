"""Integers of 2, 3, 4, or 8 bits in words of 32; groups of inputs have a scale and a zero point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flexgen_helm.checkpoint.quantized.group import FLOATS, QuantizedGroup
from flexgen_helm.checkpoint.quantized.logical_tensor import (
    LogicalTensor,
    ReadRows,
    read_all,
    read_rows,
    require,
    title_of,
)
from flexgen_helm.checkpoint.quantized.scaled import Scaling, scaled
from flexgen_helm.checkpoint.stored_tensors import FillRows, PublishedTensor, StoredTensor
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.block_formats import scaled_format
from flexgen_helm.quant.formats import BlockFormat

_INDICES = ("I32", "I64")
# AWQ, gemm layout: where column j of each eight begins in the word.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


class _IntegerParts(NamedTuple):
    """What is read of a set before its rows are.

    words: reads rows of codes [count, in * bits / 32].
    zeros, scales: [out, groups].
    """

    words: ReadRows
    zeros: Tensor
    scales: Tensor


def _unpack(words: Tensor, bits: int, shifts: tuple[int, ...] | None = None) -> Tensor:
    """Return the integers of the streams of bits in words [n, columns]: int32 [32 n / bits,
    columns].

    shifts: where the integers of a word begin; None for one after the other.
    """
    if 32 % bits:
        stream = (words.unsqueeze(1) >> torch.arange(32)[:, None] & 1).flatten(0, 1)
        integers = (
            stream[: len(stream) // bits * bits].unflatten(0, (-1, bits))
            << torch.arange(bits)[:, None]
        )
        return integers.sum(1, dtype=torch.int32)
    begin = torch.tensor(shifts or range(0, 32, bits), dtype=torch.int32)
    return (words.unsqueeze(1) >> begin[:, None] & (1 << bits) - 1).flatten(0, 1)


def _group_size(group: QuantizedGroup, inputs: int, scale: StoredTensor, num_groups: int) -> int:
    """Return how many inputs share a scale: as configured, the last group cut off, or groups of
    equal lengths.
    """
    configured = group.quantization.group_sizes
    sizes = {size for size in configured if -(-inputs // size) == num_groups}
    if num_groups == 1 or (num_groups and not configured and inputs % num_groups == 0):
        sizes = {inputs // num_groups}
    if len(sizes) != 1:
        raise CheckpointError(
            f"{scale.title} has {num_groups} groups for {inputs} inputs, but config.json has group "
            f"sizes {configured}"
        )
    return sizes.pop()


def _grouped(
    group: QuantizedGroup,
    shape: tuple[int, int],
    bits: int,
    parts: tuple[StoredTensor, ...],
    read: Callable[[], _IntegerParts],
) -> LogicalTensor:
    """Return the tensor (code - zero point) * scale, whose inputs share scale and zero point by
    group.

    parts: codes, scales, and others. A g_idx [in] among them has the group of each input.
    """
    codes, scale, *_ = parts
    inputs, quantization = shape[1], group.quantization
    in_rows = codes.name.endswith("_packed")  # else columns are outputs
    has_zeros = (
        any("zero_point" in part.name for part in parts) if in_rows else not quantization.symmetric
    )
    num_groups = scale.shape[in_rows]
    g_idx = next((part for part in parts if part.name.endswith("g_idx")), None)
    if g_idx is not None:
        require(g_idx, _INDICES, (inputs,))
    elif quantization.act_order and num_groups > 1:
        raise CheckpointError(
            f"{codes.title} has groups of sorted inputs, but its g_idx is missing; fetch it again"
        )
    size = _group_size(group, inputs, scale, num_groups)
    in_order = torch.arange(inputs) // size
    index = in_order if g_idx is None else read_all(g_idx).long()
    # Some programs store zeros for groups in order.
    if quantization.act_order is False and not index.any():
        index = in_order
    name, kind = group.first.name.rpartition(".")[0] + ".weight", f"U{bits}"
    tensor = LogicalTensor(name, shape, group.dtype(scale), parts)
    fmt = (
        scaled_format(kind, scale.dtype, inputs, size, has_zero=has_zeros)
        if torch.equal(index, in_order)
        else None
    )
    if fmt is None:
        return replace(tensor, read=lambda: _indexed(index, bits, parts, read()))
    if in_rows and not has_zeros:
        return replace(
            scaled(group, name, Scaling(scale, (1, size), kind=kind, shape=shape)), parts=parts
        )
    return replace(
        tensor, published=PublishedTensor(fmt, open_rows=lambda: _rows_of_blocks(fmt, size, read()))
    )


def _indexed(
    index: Tensor, bits: int, stored: tuple[StoredTensor, ...], parts: _IntegerParts
) -> ReadRows:
    """Return what reads values of inputs whose groups are not in order; index: the group of
    each.
    """
    words, zeros, scales = parts
    inputs, num_groups = len(index), scales.shape[1]
    if inputs and not 0 <= int(index.min()) <= int(index.max()) < num_groups:
        raise CheckpointError(f"{stored[-1].title} names groups outside 0 to {num_groups - 1}")
    if (named := len(index.unique())) < num_groups:
        raise CheckpointError(
            f"{stored[-1].title} names {named} of {num_groups} groups, so that scales would not be "
            "used; quantize again"
        )

    def rows(start: int, count: int) -> Tensor:
        codes = _unpack(words(start, count).t(), bits)[:inputs].t()
        of_rows = slice(start, start + count)
        return (codes - zeros[of_rows][:, index]).float() * scales[of_rows][:, index].float()

    return rows


def _rows_of_blocks(fmt: BlockFormat, size: int, parts: _IntegerParts) -> FillRows:
    """Return what makes rows of blocks of what has been read; size: of a group."""
    words, zeros, scales = parts

    def fill(start: int, out: Tensor) -> None:
        blocks, of_rows = out.view(len(out), -1, fmt.block_bytes), slice(start, start + len(out))
        count, per_block = blocks.shape[1], fmt.scales[0].count
        group = torch.arange(count * per_block) * (fmt.block_values // per_block) // size
        factors = scales[of_rows][:, group].view(torch.uint8).unflatten(1, (count, -1))
        scale_bytes = factors.shape[2]
        blocks[..., :scale_bytes] = factors
        if fmt.zeros:
            blocks[..., scale_bytes : scale_bytes + per_block] = zeros[of_rows][:, group].unflatten(
                1, (count, -1)
            )
        codes = words(start, len(out)).contiguous().view(torch.uint8)[:, : fmt.code_bytes * count]
        blocks[..., -fmt.code_bytes :] = codes.unflatten(1, (count, -1))

    return fill


def _packed_parts(group: QuantizedGroup) -> tuple[StoredTensor, ...] | None:
    """Return x.qweight, x.scales, x.qzeros, and x.g_idx if there is one; None if the first tensor
    is no qweight.

    Raises `CheckpointError` for scales without weights: AWQ's of activations.
    """
    owner = group.stem(".scales")
    if owner is not None and group.optional(f"{owner}.qweight") is None:
        raise CheckpointError(
            f"{group.first.title} has no {owner}.qweight; scales of activations cannot be used"
        )
    stem = group.stem(".qweight")
    if stem is None:
        return None
    parts = (group.first, group.part(f"{stem}.scales"), group.part(f"{stem}.qzeros"))
    for part, types in zip(parts, (("I32",), FLOATS, ("I32",)), strict=True):
        require(part, types)
        if len(part.shape) != 2:
            raise CheckpointError(
                f"{part.title} has the shape {list(part.shape)}; expected is a matrix"
            )
    return parts


def gptq(group: QuantizedGroup) -> LogicalTensor | None:
    """GPTQ: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out],
    g_idx [in].
    """
    parts = _packed_parts(group)
    if parts is None:
        return None
    qweight, scales, qzeros = parts
    groups, outputs = scales.shape
    bits = qzeros.shape[1] * 32 // max(1, outputs)
    if bits not in (2, 3, 4, 8) or outputs * bits != qzeros.shape[1] * 32:
        raise CheckpointError(
            f"{qzeros.title} has {qzeros.shape[1]} words for {outputs} outputs: not 2, 3, 4 or 8 "
            "bits each"
        )
    inputs = qweight.shape[0] * 32 // bits
    require(qweight, ("I32",), (inputs * bits // 32, outputs))
    require(qzeros, ("I32",), (groups, outputs * bits // 32))
    offset, mask = group.quantization.zero_offset, (1 << bits) - 1

    def read() -> _IntegerParts:
        words, zeros = read_all(qweight).t(), _unpack(read_all(qzeros).t(), bits)
        # fixes the zero point, whichever version of the format stored it
        if group.quantization.symmetric:
            half = 1 << (bits - 1)
            if {int(zero) for zero in zeros.aminmax()} not in ({half}, {half - 1}):
                raise CheckpointError(
                    f"{qzeros.title} has zero points from {int(zeros.min())} to "
                    f"{int(zeros.max())}, but 'sym' in config.json means {half} for all; set 'sym' "
                    "to false if they are meant"
                )
            zeros = torch.full_like(zeros, half - offset)
        return _IntegerParts(
            lambda start, count: words[start : start + count],
            (zeros + offset) & mask,
            read_all(scales).t(),
        )

    g_idx = group.optional(qweight.name.removesuffix("qweight") + "g_idx")
    parts = parts if g_idx is None else (*parts, g_idx)
    return _grouped(group, (outputs, inputs), bits, parts, read)


def awq(group: QuantizedGroup) -> LogicalTensor | None:
    """AWQ, gemm layout: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out], 4
    bits.
    """
    parts = _packed_parts(group)
    if parts is None:
        return None
    qweight, scales, qzeros = parts
    groups, (inputs, words) = scales.shape[0], qweight.shape
    if inputs % 8:
        raise CheckpointError(f"{qweight.title} has {inputs} inputs, no multiple of 8")
    require(scales, FLOATS, (groups, words * 8))
    require(qzeros, ("I32",), (groups, words))

    def read() -> _IntegerParts:
        columns, zeros = read_all(qweight).t(), read_all(qzeros).t()

        def rows(start: int, count: int) -> Tensor:
            needed, skipped = columns[start // 8 : -(-(start + count) // 8)], start % 8
            codes = _unpack(needed, 4, _AWQ_SHIFTS)[skipped : skipped + count].to(torch.uint8)
            return (codes[:, ::2] | codes[:, 1::2] << 4).flatten().view(torch.int32).view(count, -1)

        return _IntegerParts(rows, _unpack(zeros, 4, _AWQ_SHIFTS), read_all(scales).t())

    return _grouped(group, (words * 8, inputs), 4, parts, read)


def packed_integers(group: QuantizedGroup, stem: str, scale: StoredTensor) -> LogicalTensor:
    """compressed-tensors, pack-quantized: weight_packed [out, in * bits / 32], weight_scale [out,
    groups].

    Codes and zero points have 4 or 8 bits, are signed, and are stored with 2 ** (bits - 1) added.
    weight_zero_point: [out * bits / 32, groups], in early files unpacked; without it all are zero.
    """
    packed, true_shape = group.first, group.part(f"{stem}.weight_shape")
    more = group.zero_point(f"{stem}.weight"), group.optional(f"{stem}.weight_g_idx")
    parts = (packed, scale, true_shape, *(part for part in more if part is not None))
    require(packed, ("I32",))
    require(scale, FLOATS)
    require(true_shape, _INDICES, (2,))
    outputs, inputs = (int(size) for size in read_all(true_shape))
    bits = next(
        (bits for bits in (4, 8) if packed.shape == (outputs, -(-inputs * bits // 32))), None
    )
    if bits is None or len(scale.shape) != 2 or scale.shape[0] not in (1, outputs):
        raise CheckpointError(
            f"{title_of(parts)}: shapes {list(packed.shape)} and {list(scale.shape)} do not fit 4 "
            f"or 8 bits of {outputs} x {inputs}"
        )
    groups, zero_point = scale.shape[1], more[0]
    if zero_point is not None:
        zero_rows = -(-outputs * bits // 32) if zero_point.dtype == "I32" else outputs
        require(zero_point, ("I32", "I8"), (zero_rows, groups))

    def read() -> _IntegerParts:
        offset = 1 << (bits - 1)
        if zero_point is None:
            zeros = torch.full((outputs, groups), offset, dtype=torch.int32)
        elif zero_point.dtype == "I8":
            zeros = read_all(zero_point).int() + offset
        else:
            zeros = _unpack(read_all(zero_point), bits)[:outputs]
        return _IntegerParts(
            partial(read_rows, packed, width=packed.shape[1]),
            zeros,
            read_all(scale).expand(outputs, -1),
        )

    return _grouped(group, (outputs, inputs), bits, parts, read)
