"""Codes of 8 or 4 bits with a scale for each block: FP8, INT8, FP4."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from flexgen_helm.checkpoint.quantized.group import FLOATS, FP8, QuantizedGroup
from flexgen_helm.checkpoint.quantized.logical_tensor import LogicalTensor, require, title_of
from flexgen_helm.checkpoint.stored_tensors import PublishedTensor, StoredPlane, StoredTensor
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.block_formats import SCALE_BYTES, scaled_format

_SCALES = (*FLOATS, "F8_E4M3", "F8_E8M0", "U8")


@dataclass(frozen=True)
class Scaling:
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


def scaled(group: QuantizedGroup, name: str, scaling: Scaling) -> LogicalTensor:
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
    grid, (rows_per_scale, shared) = _grid(scaling, shape, title_of(parts))
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
    scale_plane = StoredPlane(
        scale.file,
        scale.offset,
        row_bytes=grid[-1] * size,
        block_bytes=scales * size,
        rows_per_entry=rows_per_scale,
        blocks_per_entry=max(1, shared // fmt.block_values),
        matrix_rows=rows,
        # The matrices of a stack have scales each, or all have the same ones.
        stored_rows_per_matrix=grid[-2] if prod(grid[:-2]) > 1 else 0,
    )
    planes = [scale_plane]
    if divisor is not None:  # one entry for all blocks
        divisor_plane = StoredPlane(
            divisor.file, divisor.offset, 4, 4, rows, width // fmt.block_values, rows, 0
        )
        planes = [divisor_plane, scale_plane]
    if zero_point is not None:
        file, offset = zero_point.file, zero_point.offset
        planes.append(
            replace(scale_plane, file=file, offset=offset, row_bytes=grid[-1], block_bytes=scales)
        )
    row_bytes = codes.size // max(1, prod(leading) * rows)
    planes.append(StoredPlane(codes.file, codes.offset, row_bytes, fmt.code_bytes))
    return LogicalTensor(
        name, shape, group.dtype(scale), parts, PublishedTensor(fmt, tuple(planes))
    )


def fp4(group: QuantizedGroup, name: str, scaling: Scaling) -> LogicalTensor:
    """Return the tensor whose codes are two of E2M1 in each byte of the last dimension."""
    shape = *group.first.shape[:-1], 2 * prod(group.first.shape[-1:])
    return scaled(group, name, replace(scaling, kind="FP4", shape=shape))


def _grid(
    scaling: Scaling, shape: tuple[int, ...], title: str
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


def mxfp4(group: QuantizedGroup) -> LogicalTensor | None:
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
    stored = scaled(
        group,
        stem,
        Scaling(scales, kind="FP4", shape=(*leading, outputs, inputs := 2 * groups * num_bytes)),
    )
    assert stored.published is not None
    return replace(
        stored,
        shape=(*leading, inputs, outputs),
        published=replace(stored.published, transposed=True),
    )


def fp8(group: QuantizedGroup) -> LogicalTensor | None:
    """x in FP8 with x_scale_inv or x_scale, which both multiply; FP4 experts are I8 with scales of
    bytes.
    """
    codes = group.first
    if codes.dtype not in (*FP8, "I8") or codes.name.endswith(("_scale_inv", ".scale", "_scale")):
        return None
    stem = codes.name.removesuffix(".weight")
    scale = group.part(
        f"{codes.name}_scale_inv", f"{codes.name}_scale", f"{stem}.scale", f"{stem}.qscale_weight"
    )
    if codes.dtype == "I8":
        return fp4(group, codes.name, Scaling(scale, group.quantization.block))
    return scaled(group, codes.name, Scaling(scale, group.quantization.block))
