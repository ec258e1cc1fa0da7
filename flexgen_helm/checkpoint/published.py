"""Bytes of matrices that rest as published: rows of blocks, gathered from the tensors that have parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.checkpoint.stored_tensors import PublishedRows, StoredPlane

# Returns bytes of a file: so many, from an offset on.
ReadBytes = Callable[[SourceFile, int, int], Tensor]
# Fills memory [count, row bytes] with blocks of rows from `start` on.
FillRows = Callable[[int, Tensor], None]


def read_bytes(title: str, file: SourceFile, offset: int, size: int) -> Tensor:
    """Read bytes of a file; title: of the matrix, for messages."""
    return torch.frombuffer(file.read(offset, size, title), dtype=torch.uint8)


def read_blocks(parts: Sequence[PublishedRows], first: int, out: Tensor, read: ReadBytes) -> None:
    """Fill `out` [rows, blocks, block bytes] with the rows of a matrix from `first` on; parts: all of its rows."""
    done = 0
    for part in parts:
        skipped = min(first, len(part.rows))
        first -= skipped
        rows = part.rows[skipped : skipped + out.shape[0] - done]
        at = 0
        for plane in part.planes if rows else ():
            out[done : done + len(rows), :, at : at + plane.block_bytes] = _blocks(plane, rows, out.shape[1], read)
            at += plane.block_bytes
        done += len(rows)
    assert done == out.shape[0]


def _blocks(plane: StoredPlane, rows: range, blocks: int, read: ReadBytes) -> Tensor:
    """Return what blocks of some rows have in a plane: [rows, blocks, bytes], or one dimension of 1."""
    begin, end = rows.start // plane.same_rows, (rows.stop - 1) // plane.same_rows + 1
    data = read(plane.file, plane.offset + begin * plane.row_bytes, (end - begin) * plane.row_bytes)
    data = data.view(end - begin, -1, plane.block_bytes)
    if plane.same_rows > 1 < end - begin:
        data = data[torch.arange(rows.start, rows.stop) // plane.same_rows - begin]
    return data if plane.same_blocks == 1 else data[:, torch.arange(blocks) // plane.same_blocks]
