"""bitsandbytes: int8, or codes of 4 bits that name values of a table, with a scale for a block."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexgen_helm.checkpoint.quantized.config import HALF_TYPES
from flexgen_helm.checkpoint.quantized.group import QuantizedGroup
from flexgen_helm.checkpoint.quantized.logical_tensor import LogicalTensor, read_all, require
from flexgen_helm.checkpoint.quantized.scaled import Scaling, scaled
from flexgen_helm.checkpoint.stored_tensors import (
    FillRows,
    PublishedTensor,
    StoredPlane,
    StoredTensor,
)
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.block_formats import scaled_format
from flexgen_helm.quant.formats import BlockFormat


def bitsandbytes(group: QuantizedGroup) -> LogicalTensor | None:
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
        return scaled(group, name, Scaling(group.part(f"{stem}.SCB"), factor=1 / 127))
    states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    if group.first.dtype != "U8" and group.optional(*states) is None:
        return None
    return _from_table(group, group.part(*states))


class _TableLayout(NamedTuple):
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


def _table_layout(group: QuantizedGroup, state: StoredTensor, is_nested: bool) -> _TableLayout:
    """Read the state, which is JSON. Raises `CheckpointError`."""
    require(state, ("U8",))
    try:
        settings: dict[str, Any] = json.loads(bytes(state.read(0, state.size)))
        outputs, inputs = (int(size) for size in settings["shape"])
        layout = _TableLayout(
            outputs,
            inputs,
            int(settings["blocksize"]),
            int(settings["nested_blocksize"]) if is_nested else 1,
            float(settings["nested_offset"]) if is_nested else 0.0,
            HALF_TYPES.get(str(settings["dtype"]), group.quantization.dtype),
        )
        if min(layout.block, layout.nested_block, outputs, inputs) < 1:
            raise ValueError("a size below 1")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{state.title} is damaged: {error!r}") from error
    return layout


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
    layout = _table_layout(group, state, is_nested)
    outputs, inputs, block = layout.outputs, layout.inputs, layout.block
    blocks = -(-outputs * inputs // block)
    if codes.size != -(-outputs * inputs // 2):
        raise CheckpointError(
            f"{codes.title} has {codes.size} bytes, too few or too many for {outputs} x {inputs}"
        )
    require(absmax, ("U8" if is_nested else "F32",), (blocks,))
    require(table, ("F32",), (16,))
    for stored, size in zip(nested, (256, -(-blocks // layout.nested_block)), strict=False):
        require(stored, ("F32",), (size,))
    kind = "NF4" if state.name.endswith("nf4") else "FP4 of bitsandbytes"
    fmt = scaled_format(kind, "F32", inputs, block, table=tuple(read_all(table).tolist()))
    if fmt is None or fmt.scales[0].count > 1:
        raise CheckpointError(
            f"{codes.title} has rows of {inputs} values in blocks of {block}, which nothing here "
            "reads"
        )
    parts = (codes, absmax, table, state, *nested)
    tensor = LogicalTensor(name, (outputs, inputs), layout.dtype, parts)
    if not nested and inputs % block == 0:
        code_plane = StoredPlane(codes.file, codes.offset, inputs // 2, fmt.code_bytes)
        scales = StoredPlane(
            absmax.file,
            absmax.offset,
            row_bytes=inputs // block * 4,
            block_bytes=4,
            blocks_per_entry=block // fmt.block_values,
        )
        return replace(tensor, published=PublishedTensor(fmt, (scales, code_plane)))
    open_rows = partial(_coded_rows, fmt, layout, codes, (absmax, *nested))
    return replace(tensor, published=PublishedTensor(fmt, open_rows=open_rows))


def _coded_rows(
    fmt: BlockFormat,
    layout: _TableLayout,
    codes: StoredTensor,
    scaling: tuple[StoredTensor, ...],
) -> FillRows:
    """Return what makes rows of blocks; scaling: scales, and table and scales of theirs."""
    inputs = layout.inputs
    scales, *nested = map(read_all, scaling)
    if nested:
        table, factors = nested
        groups = torch.arange(len(scales)) // layout.nested_block
        scales = table[scales.long()] * factors[groups] + layout.offset

    def fill(start: int, out: Tensor) -> None:
        rows = out.view(len(out), -1, fmt.block_bytes)
        first = torch.arange(start * inputs, (start + len(out)) * inputs, fmt.block_values)
        rows[..., :4] = scales[first // layout.block].view(torch.uint8).view(len(out), -1, 4)
        data = codes.read(start * inputs // 2, len(out) * inputs // 2)
        rows[..., 4:] = torch.frombuffer(data, dtype=torch.uint8).view(len(out), -1, fmt.code_bytes)

    return fill
