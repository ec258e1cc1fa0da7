"""Before a quantized checkpoint is used: rows of its own matrices against the description of their format.

Each format is written down once more, from the bits on, and nothing of `view` is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from flexgen_helm.checkpoint.published import read_blocks, read_bytes
from flexgen_helm.checkpoint.quantized.config import Quantization
from flexgen_helm.checkpoint.quantized.logical_tensor import LogicalTensor, read_rows
from flexgen_helm.checkpoint.stored_tensors import PublishedRows, StoredTensor
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.blocks import decode

_FP4 = np.outer([1, -1], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).flatten()
_PROVED_ROWS = 64  # of a matrix whose columns are compared
_AWQ_LANES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in their word eight outputs are


def require_described_values(tensors: Iterable[LogicalTensor], quantization: Quantization) -> None:
    """Raise `CheckpointError` if the smallest matrix of a kind is read otherwise than its format describes.

    Not looked at are tables of bitsandbytes, which are in the file, and stacks with a scale for each row.
    """
    smallest: dict[object, LogicalTensor] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.parts[0].size):
        if tensor.is_plain or tensor.parts[1].name.endswith("absmax"):
            continue
        if 1 < len(tensor.parts[1].shape) < len(tensor.shape):
            continue
        kind = tuple((part.name.rpartition(".")[2], part.dtype, len(part.shape)) for part in tensor.parts)
        smallest.setdefault((kind, _bits_of(tensor)), tensor)
    for tensor in smallest.values():
        read = tensor.prepare()
        for row in {0, tensor.shape[-2] // 2 + 1, tensor.shape[-2] - 1}:
            described = _row(tensor, quantization, row)
            for found in (read(row, 1).flatten().numpy(), _published_row(tensor, row)):
                same = np.isclose(found, described[: len(found)], rtol=1e-6, atol=0)
                if same[np.isfinite(found)].all():
                    continue
                raise CheckpointError(
                    f"{tensor.title}: row {row} is not read as its format ({quantization.title}) describes it; please "
                    f"report it with the name of the model"
                )


def _published_row(tensor: LogicalTensor, row: int) -> Any:
    """Return a row of the blocks in which a matrix rests, or the beginning of a column; nothing without blocks."""
    if (published := tensor.published) is None:
        return np.empty(0)
    rows, width = range(row, row + 1), tensor.shape[-1]
    if published.transposed:
        rows, width = range(min(_PROVED_ROWS, width)), tensor.shape[-2]
    packed = torch.empty(len(rows), published.fmt.stripe_bytes(width), dtype=torch.uint8)
    if published.planes:
        blocks = packed.view(len(rows), -1, published.fmt.block_bytes)
        read_blocks([PublishedRows(rows, published.planes)], 0, blocks, partial(read_bytes, tensor.title))
    elif published.lay_out:
        published.lay_out()(rows.start, packed)
    values = decode(packed, published.fmt)
    return (values[:, row] if published.transposed else values[0]).numpy()


def _bits_of(tensor: LogicalTensor) -> int:
    return 8 * tensor.parts[0].size // max(1, tensor.num_rows * tensor.width)


def _row(tensor: LogicalTensor, quantization: Quantization, row: int) -> Any:
    """Return (code - zero point) * scale of a row; in a stack, of the first matrix."""
    parts = {part.name.rpartition(".")[2].removeprefix("weight_"): _array(part) for part in tensor.parts}
    (codes, scales, *_), (rows, columns), bits = parts.values(), tensor.shape[-2:], _bits_of(tensor)
    zeros: Any = parts.get("qzeros", parts.get("zero_point"))
    half, block = 1 << bits - 1, quantization.block
    if len(tensor.shape) > 2 > len(tensor.parts[1].shape):
        scales = scales[:1]  # one for an expert
    if tensor.parts[0].name.endswith("_blocks"):  # stored by output: two inputs a byte, 32 a scale
        return _FP4[_integers(codes[:, row // 2], 4)[row % 2 :: 2]] * scales[:, row // 32]
    if "qweight" in parts:  # stored by input
        scales = scales.T
        if quantization.method == "awq":
            lanes = (_integers(words[:, row // 8], 4).reshape(-1, 8) for words in (codes, zeros))
            codes, zeros = (lane[:, _AWQ_LANES[row % 8]] for lane in lanes)
        else:
            codes, zeros = _integers(codes[:, row], bits), _integers(zeros, bits).reshape(len(zeros), -1)[:, row]
            zeros = np.where(bool(quantization.symmetric), half, (zeros + quantization.zero_offset) % (1 << bits))
    elif "shape" in parts:
        codes = _integers(codes[row], bits) - half
        if zeros is not None and zeros.dtype == np.int32:
            zeros = _integers(zeros.T, bits).reshape(zeros.shape[1], -1)[:, row] - half
    else:
        codes = _FP4[_integers(codes[row], 4)] if bits == 4 else codes[row].astype(float)
    down, across = (block[:1], block[1:]) if block else ((1,), quantization.group_sizes)
    line, group = _share(row, rows, len(scales), down), _share(np.arange(columns), columns, scales.shape[1], across)
    if "g_idx" in parts and parts["g_idx"].any():
        group = parts["g_idx"][:, 0]
    if zeros is not None:
        codes = codes - (zeros if zeros.ndim == 1 else zeros[line])[group]
    return codes * scales[line, group] / (127 if "SCB" in parts else parts.get("global_scale", [[1]])[0][0])


def _share(position: Any, length: int, count: int, sizes: Iterable[int]) -> Any:
    """Return which of `count` runs of a given size, or of equal lengths, a position is in."""
    return position // next((size for size in sizes if -(-length // size) == count), length // count)


def _array(stored: StoredTensor) -> Any:
    """Return a matrix, the first one of a stack, or a vector as a column; scales of bytes are exponents."""
    shape = stored.shape[-2:] if len(stored.shape) > 1 else (*stored.shape, 1, 1)[:2]
    tensor = read_rows(stored, 0, *shape)
    if stored.dtype in ("U8", "F8_E8M0") and "scale" in stored.name:
        return 2.0 ** (tensor.numpy().astype(int) - 127)
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def _integers(words: Any, bits: int) -> Any:
    """Return the integers of a stream of bits."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    return stream[: len(stream) // bits * bits].reshape(-1, bits) @ (1 << np.arange(bits))
