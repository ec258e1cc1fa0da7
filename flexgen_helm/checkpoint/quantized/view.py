"""The tensors of a model as if they had never been quantized: stored sets -> one logical tensor
each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexgen_helm.checkpoint.quantized.config import HALF_TYPES, Quantization
from flexgen_helm.checkpoint.quantized.logical_tensor import (
    LogicalTensor,
    ReadRows,
    plain_tensor,
    read_all,
    read_rows,
    require,
    title_of,
)
from flexgen_helm.checkpoint.stored_tensors import (
    FillRows,
    PublishedTensor,
    StoredPlane,
    StoredTensor,
)
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.formats import SCALE_BYTES, BlockFormat, scaled_format

# Of activations and caches, which are not quantized here.
_UNUSED = (
    ".activation_scale",
    ".input_activation_scale",
    ".input_global_scale",
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".k_scale",
    ".output_scale",
    ".qscale_act",
    ".q_scale",
    ".v_scale",
    ".weight_format",
)
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "F16", "BF16")
_SCALES = (*_FLOATS, "F8_E4M3", "F8_E8M0", "U8")
_INDICES = ("I32", "I64")


@dataclass(frozen=True)
class QuantizedGroup:
    """Stored tensors that are one matrix of the model. first: the tensor whose name or type
    announces it.
    """

    first: StoredTensor
    stored: Mapping[str, StoredTensor]
    quantization: Quantization

    def stem(self, ending: str) -> str | None:
        """Return the first tensor's name without its ending, or None if it has another."""
        return self.first.name.removesuffix(ending) if self.first.name.endswith(ending) else None

    def part(self, *names: str) -> StoredTensor:
        """Return the first tensor that exists of these; raises `CheckpointError` if none does."""
        part = self.optional(*names)
        if part is None:
            raise CheckpointError(
                f"{self.first.title} is quantized, but its {names[0]} is missing; fetch it again"
            )
        return part

    def optional(self, *names: str) -> StoredTensor | None:
        return next((self.stored[name] for name in names if name in self.stored), None)

    def zero_point(self, name: str) -> StoredTensor | None:
        """Return the zero points that compressed-tensors stores, which must be there if codes are
        not symmetric.
        """
        find = self.part if self.quantization.symmetric is False else self.optional
        return find(f"{name}_zero_point")

    def dtype(self, scale: StoredTensor) -> str:
        """Return the 16-bit type of values with this scale: its own, if it has 16 bits."""
        return scale.dtype if scale.dtype in ("F16", "BF16") else self.quantization.dtype


def logical_tensors(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, path: Path
) -> dict[str, LogicalTensor]:
    """Return name -> tensor of the model, in the stored order; without `quantization` all are
    plain.

    Raises `CheckpointError` for a set that is incomplete or has shapes or types that do not fit.
    """
    if quantization is None:
        return {name: plain_tensor(tensor) for name, tensor in stored.items()}
    read_set = _READERS[quantization.method]
    found = (read_set(QuantizedGroup(first, stored, quantization)) for first in stored.values())
    quantized = [tensor for tensor in found if tensor is not None]
    parts = {part.name for tensor in quantized for part in tensor.parts}
    plain = [
        plain_tensor(t)
        for name, t in stored.items()
        if name not in parts and not name.endswith(_UNUSED)
    ]
    tensors: dict[str, LogicalTensor] = {}
    for tensor in (*plain, *quantized):
        if tensor.name in tensors:
            raise CheckpointError(
                f"{path} has {tensor.name} twice: plain, and quantized in {tensor.title}"
            )
        tensors[tensor.name] = tensor
    return tensors


# ---- codes of 8 or 4 bits with a scale for each block: FP8, INT8, FP4 ----


@dataclass(frozen=True)
class _Scaling:
    """value[i, j] = (code[i, j] - zero point) * (scale[i // block rows, j // block columns] /
    global scale) * factor.

    scale: one for all; one for each of the leading indices or rows; or a grid over the last two
        dimensions.
    block: rows and columns that share a scale, where the scales' shape fits; None to divide evenly.
    zero_point: of the scales' shape; None if all are zero.
    kind, shape: of the codes, where several are in a byte or word; see `scaled_format`.
    """

    scale: StoredTensor
    block: tuple[int, int] | None = None
    global_scale: StoredTensor | None = None
    zero_point: StoredTensor | None = None
    factor: float = 1.0
    kind: str = ""
    shape: tuple[int, ...] = ()


def _scaled(group: QuantizedGroup, name: str, scaling: _Scaling) -> LogicalTensor:
    """Return the tensor whose codes, [..., rows, columns], are the group's first tensor."""
    codes = group.first
    scale = scaling.scale
    zero_point = scaling.zero_point
    divisor = scaling.global_scale
    shape = scaling.shape or codes.shape
    parts = tuple(part for part in (codes, scale, divisor, zero_point) if part is not None)
    require(scale, _SCALES)
    if divisor is not None:
        require(divisor, ("F32",), (1,))
    if zero_point is not None:
        require(zero_point, (codes.dtype,), scale.shape)
    if len(shape) < 2:
        raise CheckpointError(
            f"{title_of(parts)}: a quantized tensor needs two dimensions, not {list(shape)}"
        )
    grid, (same_rows, shared) = _grid(scaling, shape, title_of(parts))
    (*leading, rows, width), kind = shape, "F8_E8M0" if scale.dtype == "U8" else scale.dtype
    options = {"has_zero": zero_point is not None, "is_divided": divisor is not None}
    fmt = scaled_format(
        scaling.kind or codes.dtype, kind, width, shared, factor=scaling.factor, **options
    )
    if fmt is None:
        raise CheckpointError(
            f"{title_of(parts)}: nothing here reads {codes.dtype} with a scale for {shared} values"
        )
    size, scales = SCALE_BYTES[kind], max(1, fmt.block_values // shared)
    # All matrices of a stack have the same scales, or each its own.
    at_row = (
        same_rows,
        max(1, shared // fmt.block_values),
        rows,
        grid[-2] if prod(grid[:-2]) > 1 else 0,
    )
    planes = [StoredPlane(scale.file, scale.offset, grid[-1] * size, scales * size, *at_row)]
    if zero_point is not None:
        planes.append(StoredPlane(zero_point.file, zero_point.offset, grid[-1], scales, *at_row))
    if divisor is not None:
        planes.insert(
            0,
            StoredPlane(
                divisor.file, divisor.offset, 4, 4, rows, width // fmt.block_values, rows, 0
            ),
        )
    row_bytes = codes.size // max(1, prod(leading) * rows)
    planes.append(StoredPlane(codes.file, codes.offset, row_bytes, fmt.code_bytes))
    return LogicalTensor(
        name, shape, group.dtype(scale), parts, PublishedTensor(fmt, tuple(planes))
    )


def _fp4(group: QuantizedGroup, name: str, scaling: _Scaling) -> LogicalTensor:
    """Return the tensor whose codes are two of E2M1 in each byte of the last dimension."""
    shape = *group.first.shape[:-1], 2 * prod(group.first.shape[-1:])
    return _scaled(group, name, replace(scaling, kind="FP4", shape=shape))


def _grid(
    scaling: _Scaling, shape: tuple[int, ...], title: str
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the scales' shape with as many dimensions as the tensor's, and the rows and columns
    that share a scale.
    """
    scale_shape, sizes = scaling.scale.shape, shape[-2:]
    missing = len(shape) - len(scale_shape)
    grid = (1,) * len(shape) if prod(scale_shape) == 1 else (*scale_shape, *[1] * missing)
    # One for each row, or for each expert; or a grid for each expert.
    fits = len(grid) == len(shape) and grid[:-2] in (shape[:-2], (1,) * len(shape[:-2]))
    fits = fits and (missing <= 0 or all(size in (1, full) for size, full in zip(grid, shape)))
    block = scaling.block
    # The last block of a row or column may be cut off, so the shapes alone can mislead: 24 rows in
    # 2 blocks of 16.
    if block is None or grid[-2:] != (-(-sizes[0] // block[0]), -(-sizes[1] // block[1])):
        block = sizes[0] // max(1, grid[-2]), sizes[1] // max(1, grid[-1])
        fits = fits and (grid[-2] * block[0], grid[-1] * block[1]) == sizes
    if not fits:
        raise CheckpointError(
            f"{title}: scales of shape {list(scale_shape)} do not fit weights of {list(shape)}"
        )
    return grid, block


def _mxfp4(group: QuantizedGroup) -> LogicalTensor | None:
    """gpt-oss: x_blocks [expert, out, groups, 16 bytes] and x_scales [expert, out, groups] are x
    [expert, in, out].
    """
    stem = group.stem("_blocks")
    if stem is None:
        return None
    blocks, scales = group.first, group.part(f"{stem}_scales")
    if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[:-1] != scales.shape:
        raise CheckpointError(
            f"{blocks.title} has {blocks.dtype} {list(blocks.shape)}, which does not fit scales of "
            f"{list(scales.shape)}"
        )
    *leading, outputs, groups, num_bytes = blocks.shape
    stored = _scaled(
        group,
        stem,
        _Scaling(scales, kind="FP4", shape=(*leading, outputs, inputs := 2 * groups * num_bytes)),
    )
    assert stored.published is not None
    return replace(
        stored,
        shape=(*leading, inputs, outputs),
        published=replace(stored.published, transposed=True),
    )


def _fp8(group: QuantizedGroup) -> LogicalTensor | None:
    """x in FP8 with x_scale_inv or x_scale, which both multiply; FP4 experts are I8 with scales of
    bytes.
    """
    codes = group.first
    if codes.dtype not in (*_FP8, "I8") or codes.name.endswith(("_scale_inv", ".scale", "_scale")):
        return None
    stem = codes.name.removesuffix(".weight")
    scale = group.part(
        f"{codes.name}_scale_inv", f"{codes.name}_scale", f"{stem}.scale", f"{stem}.qscale_weight"
    )
    if codes.dtype == "I8":
        return _fp4(group, codes.name, _Scaling(scale, group.quantization.block))
    return _scaled(group, codes.name, _Scaling(scale, group.quantization.block))


# ---- integers of 2, 3, 4, or 8 bits in words of 32, with scales and zero points for groups of
# inputs ----

# AWQ, gemm layout: where column j of each eight begins in the word.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
# What reads a set once: rows of words [count, in * bits / 32]; zero points and scales [out,
# groups].
_Parts = tuple[ReadRows, Tensor, Tensor]


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
    read: Callable[[], _Parts],
) -> LogicalTensor:
    """Return the tensor (code - zero point) * scale, whose inputs share scale and zero point by
    group.

    parts: codes, scales, and others. A g_idx [in] among them has the group of each input.
    """
    scale, inputs, quantization = parts[1], shape[1], group.quantization
    in_rows = parts[0].name.endswith("_packed")
    has_zeros = (
        any("zero_point" in part.name for part in parts) if in_rows else not quantization.symmetric
    )
    num_groups = scale.shape[in_rows]
    g_idx = next((part for part in parts if part.name.endswith("g_idx")), None)
    if g_idx is not None:
        require(g_idx, _INDICES, (inputs,))
    elif quantization.act_order and num_groups > 1:
        raise CheckpointError(
            f"{parts[0].title} has groups of sorted inputs, but its g_idx is missing; fetch it "
            "again"
        )
    size = _group_size(group, inputs, scale, num_groups)
    in_order = torch.arange(inputs) // size
    index = in_order if g_idx is None else read_all(g_idx).long()
    # some programs store zeros for groups in order
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
            _scaled(group, name, _Scaling(scale, (1, size), kind=kind, shape=shape)), parts=parts
        )
    return replace(
        tensor, published=PublishedTensor(fmt, lay_out=lambda: _laid_out(fmt, size, read()))
    )


def _indexed(index: Tensor, bits: int, stored: tuple[StoredTensor, ...], parts: _Parts) -> ReadRows:
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


def _laid_out(fmt: BlockFormat, size: int, parts: _Parts) -> FillRows:
    """Return what makes rows of blocks of what has been read; size: of a group."""
    words, zeros, scales = parts

    def fill(start: int, out: Tensor) -> None:
        blocks, of_rows = out.view(len(out), -1, fmt.block_bytes), slice(start, start + len(out))
        count, per_block = blocks.shape[1], fmt.scales[0].count
        group = torch.arange(count * per_block) * (fmt.block_values // per_block) // size
        factors = scales[of_rows][:, group].view(torch.uint8).unflatten(1, (count, -1))
        at = factors.shape[2]
        blocks[..., :at] = factors
        if fmt.zeros:
            blocks[..., at : at + per_block] = zeros[of_rows][:, group].unflatten(1, (count, -1))
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
    for part, types in zip(parts, (("I32",), _FLOATS, ("I32",)), strict=True):
        require(part, types)
        if len(part.shape) != 2:
            raise CheckpointError(
                f"{part.title} has the shape {list(part.shape)}; expected is a matrix"
            )
    return parts


def _gptq(group: QuantizedGroup) -> LogicalTensor | None:
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

    def read() -> _Parts:
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
        return (
            lambda start, count: words[start : start + count],
            (zeros + offset) & mask,
            read_all(scales).t(),
        )

    g_idx = group.optional(qweight.name.removesuffix("qweight") + "g_idx")
    parts = parts if g_idx is None else (*parts, g_idx)
    return _grouped(group, (outputs, inputs), bits, parts, read)


def _awq(group: QuantizedGroup) -> LogicalTensor | None:
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
    require(scales, _FLOATS, (groups, words * 8))
    require(qzeros, ("I32",), (groups, words))

    def read() -> _Parts:
        columns, zeros = read_all(qweight).t(), read_all(qzeros).t()

        def rows(start: int, count: int) -> Tensor:
            needed, skipped = columns[start // 8 : -(-(start + count) // 8)], start % 8
            codes = _unpack(needed, 4, _AWQ_SHIFTS)[skipped : skipped + count].to(torch.uint8)
            return (codes[:, ::2] | codes[:, 1::2] << 4).flatten().view(torch.int32).view(count, -1)

        return rows, _unpack(zeros, 4, _AWQ_SHIFTS), read_all(scales).t()

    return _grouped(group, (words * 8, inputs), 4, parts, read)


def _packed(group: QuantizedGroup, stem: str, scale: StoredTensor) -> LogicalTensor:
    """compressed-tensors, pack-quantized: weight_packed [out, in * bits / 32], weight_scale [out,
    groups].

    Codes and zero points have 4 or 8 bits, are signed, and are stored with 2 ** (bits - 1) added.
    weight_zero_point: [out * bits / 32, groups], in early files unpacked; without it all are zero.
    """
    packed, true_shape = group.first, group.part(f"{stem}.weight_shape")
    more = group.zero_point(f"{stem}.weight"), group.optional(f"{stem}.weight_g_idx")
    parts = (packed, scale, true_shape, *(part for part in more if part is not None))
    require(packed, ("I32",))
    require(scale, _FLOATS)
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

    def read() -> _Parts:
        offset = 1 << (bits - 1)
        if zero_point is None:
            zeros = torch.full((outputs, groups), offset, dtype=torch.int32)
        elif zero_point.dtype == "I8":
            zeros = read_all(zero_point).int() + offset
        else:
            zeros = _unpack(read_all(zero_point), bits)[:outputs]
        return (
            partial(read_rows, packed, width=packed.shape[1]),
            zeros,
            read_all(scale).expand(outputs, -1),
        )

    return _grouped(group, (outputs, inputs), bits, parts, read)


def _compressed(group: QuantizedGroup) -> LogicalTensor | None:
    """compressed-tensors: weight_packed in words is integers, in bytes FP4; weight in one byte is
    FP8 or INT8.
    """
    first, quantization = group.first, group.quantization
    stem = group.stem(".weight_packed")
    if stem is not None:
        scale = group.part(f"{stem}.weight_scale")
        if first.dtype != "U8":
            return _packed(group, stem, scale)
        global_scale = (
            group.part(f"{stem}.weight_global_scale") if scale.dtype == "F8_E4M3" else None
        )
        return _fp4(group, f"{stem}.weight", _Scaling(scale, global_scale=global_scale))
    if first.dtype not in (*_FP8, "I8") or not first.name.endswith("weight"):
        return None
    scale, zero_point = group.part(f"{first.name}_scale"), group.zero_point(first.name)
    block = quantization.block or next(((1, size) for size in quantization.group_sizes), None)
    return _scaled(group, first.name, _Scaling(scale, block, zero_point=zero_point))


# ---- bitsandbytes: int8, or codes of 4 bits that name values of a table, in blocks of their own
# scale ----


def _bitsandbytes(group: QuantizedGroup) -> LogicalTensor | None:
    """Linear layers as x.weight: int8 with x.SCB, or 4 bits with x.weight.absmax and more."""
    name, stem = group.first.name, group.stem(".weight")
    if stem is None:
        return None
    if group.first.dtype == "I8":
        layout = group.optional(f"{stem}.weight_format")
        if layout is not None and any(layout.read(0, layout.size)):
            raise CheckpointError(
                f"{layout.title}: rows of int8 are permuted for one kind of GPU; use the original"
            )
        return _scaled(group, name, _Scaling(group.part(f"{stem}.SCB"), factor=1 / 127))
    states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    if group.first.dtype != "U8" and group.optional(*states) is None:
        return None
    return _from_table(group, group.part(*states))


class _TableState(NamedTuple):
    """What bitsandbytes says of a matrix in 4 bits.

    block, nested_block: values of a scale, and scales of a scale of theirs.
    offset: of scales that have scales.
    """

    outputs: int
    inputs: int
    block: int
    nested_block: int
    offset: float
    dtype: str


def _table_state(group: QuantizedGroup, state: StoredTensor, is_nested: bool) -> _TableState:
    """Read the state, which is JSON. Raises `CheckpointError`."""
    require(state, ("U8",))
    try:
        settings: dict[str, Any] = json.loads(bytes(state.read(0, state.size)))
        outputs, inputs = (int(size) for size in settings["shape"])
        found = _TableState(
            outputs,
            inputs,
            int(settings["blocksize"]),
            int(settings["nested_blocksize"]) if is_nested else 1,
            float(settings["nested_offset"]) if is_nested else 0.0,
            HALF_TYPES.get(str(settings["dtype"]), group.quantization.dtype),
        )
        if min(found.block, found.nested_block, outputs, inputs) < 1:
            raise ValueError("a size below 1")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{state.title} is damaged: {error!r}") from error
    return found


def _from_table(group: QuantizedGroup, state: StoredTensor) -> LogicalTensor:
    """NF4 or FP4: flat codes, two a byte, the upper four bits first; value = table[code] *
    absmax[block].

    state: JSON with shape, type, and block sizes.
    """
    codes, name = group.first, group.first.name
    table, absmax = group.part(f"{name}.quant_map"), group.part(f"{name}.absmax")
    # Table and scales of absmax, if that is quantized too, with 8 bits.
    is_nested = absmax.dtype == "U8"
    nested = (
        [group.part(f"{name}.nested_{kind}") for kind in ("quant_map", "absmax")]
        if is_nested
        else []
    )
    known = _table_state(group, state, is_nested)
    outputs, inputs, block = known.outputs, known.inputs, known.block
    blocks = -(-outputs * inputs // block)
    if codes.size != -(-outputs * inputs // 2):
        raise CheckpointError(
            f"{codes.title} has {codes.size} bytes, too few or too many for {outputs} x {inputs}"
        )
    require(absmax, ("U8" if is_nested else "F32",), (blocks,))
    require(table, ("F32",), (16,))
    for stored, size in zip(nested, (256, -(-blocks // known.nested_block)), strict=False):
        require(stored, ("F32",), (size,))
    kind = "NF4" if state.name.endswith("nf4") else "FP4 of bitsandbytes"
    fmt = scaled_format(kind, "F32", inputs, block, table=tuple(read_all(table).tolist()))
    if fmt is None or fmt.scales[0].count > 1:
        raise CheckpointError(
            f"{codes.title} has rows of {inputs} values in blocks of {block}, which nothing here "
            "reads"
        )
    parts = (codes, absmax, table, state, *nested)
    tensor = LogicalTensor(name, (outputs, inputs), known.dtype, parts)
    if not nested and inputs % block == 0:
        code_plane = StoredPlane(codes.file, codes.offset, inputs // 2, fmt.code_bytes)
        same = block // fmt.block_values
        scales = StoredPlane(absmax.file, absmax.offset, inputs // block * 4, 4, same_blocks=same)
        return replace(tensor, published=PublishedTensor(fmt, (scales, code_plane)))
    lay_out = partial(_coded_rows, fmt, known, codes, (absmax, *nested))
    return replace(tensor, published=PublishedTensor(fmt, lay_out=lay_out))


def _coded_rows(
    fmt: BlockFormat,
    known: _TableState,
    codes: StoredTensor,
    scaling: tuple[StoredTensor, ...],
) -> FillRows:
    """Return what makes rows of blocks; scaling: scales, and table and scales of theirs."""
    inputs = known.inputs
    scales, *nested = map(read_all, scaling)
    if nested:
        table, factors = nested
        groups = torch.arange(len(scales)) // known.nested_block
        scales = table[scales.long()] * factors[groups] + known.offset

    def fill(start: int, out: Tensor) -> None:
        rows = out.view(len(out), -1, fmt.block_bytes)
        first = torch.arange(start * inputs, (start + len(out)) * inputs, fmt.block_values)
        rows[..., :4] = scales[first // known.block].view(torch.uint8).view(len(out), -1, 4)
        data = codes.read(start * inputs // 2, len(out) * inputs // 2)
        rows[..., 4:] = torch.frombuffer(data, dtype=torch.uint8).view(len(out), -1, fmt.code_bytes)

    return fill


_READERS: Mapping[str, Callable[[QuantizedGroup], LogicalTensor | None]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
