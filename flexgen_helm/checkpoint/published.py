"""Bytes of matrices that rest as published: rows of blocks, gathered from the tensors that have
parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.checkpoint.stored_tensors import (
    FillRows,
    PublishedTensor,
    StoredPlane,
    StoredRows,
)

# Returns bytes of a file: so many, from an offset on.
ReadBytes = Callable[[SourceFile, int, int], Tensor]


def filler(published: PublishedTensor, title: str) -> FillRows:
    """Return what reads blocks of a tensor; title: of it, for messages."""
    if published.lay_out is not None:
        return published.lay_out()

    def read(file: SourceFile, offset: int, size: int) -> Tensor:
        return torch.frombuffer(file.read(offset, size, title), dtype=torch.uint8)

    plane = published.planes[0]
    whole = StoredPlane(plane.file, plane.offset, plane.row_bytes, published.fmt.block_bytes)

    def fill(start: int, out: Tensor) -> None:
        if published.planes == (whole,):  # no second copy
            plane.file.read_into(
                out.view(-1).numpy().data, plane.offset + start * plane.row_bytes, title
            )
            return
        parts = [StoredRows(range(start, start + len(out)), published.planes)]
        read_blocks(parts, 0, out.view(len(out), -1, published.fmt.block_bytes), read)

    return fill


def read_blocks(parts: Sequence[StoredRows], first: int, out: Tensor, read: ReadBytes) -> None:
    """Fill `out` [rows, blocks, block bytes] with the rows of a matrix from `first` on; parts: all
    of its rows.
    """
    done = 0
    for part in parts:
        skipped = min(first, len(part.rows))
        first -= skipped
        rows = part.rows[skipped : skipped + out.shape[0] - done]
        at = 0
        for plane in part.planes if rows else ():
            out[done : done + len(rows), :, at : at + plane.block_bytes] = _blocks(
                plane, rows, out.shape[1], read
            )
            at += plane.block_bytes
        done += len(rows)
    assert done == out.shape[0]


def _blocks(plane: StoredPlane, rows: range, blocks: int, read: ReadBytes) -> Tensor:
    """Return what blocks of some rows have in a plane: [rows or 1, blocks or 1, bytes]."""
    row = torch.arange(rows.start, rows.stop)
    row = row // plane.matrix_rows * plane.rows + row % plane.matrix_rows // plane.same_rows
    begin, end = int(row.min()), int(row.max()) + 1
    data = read(plane.file, plane.offset + begin * plane.row_bytes, (end - begin) * plane.row_bytes)
    stored = -(-blocks // plane.same_blocks)
    data = data.view(end - begin, plane.row_bytes)[:, : stored * plane.block_bytes].unflatten(
        1, (stored, -1)
    )
    if 1 < end - begin < len(rows) or plane.rows == 0:
        data = data[row - begin]
    return data if plane.same_blocks == 1 else data[:, torch.arange(blocks) // plane.same_blocks]
