"""Matrices that rest as published: in the quantized blocks of the model's own files, not expanded
to 16 bits.

A row is a row of blocks. A block's codes, scales and zero points may be in several stored tensors,
its planes, from which it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.quant.formats import BlockFormat

# Fills memory [count, row bytes] with the blocks of as many rows, from row `start` on.
FillRows = Callable[[int, Tensor], None]
# Returns bytes of a file: so many, from an offset on.
ReadBytes = Callable[[SourceFile, int, int], Tensor]


@dataclass(frozen=True)
class StoredPlane:
    """What the blocks of matrices have in one stored tensor: their codes, their scales, or all.

    An entry is what a block has there, such as the scale of its values. Several blocks may have the
    same one. By default every block has an entry. Row r of the matrices, one below the other, is in
    the stored row

        r // matrix_rows * stored_rows_per_matrix + r % matrix_rows // rows_per_entry

    offset: where the tensor begins in the file.
    row_bytes: of a stored row.
    block_bytes: of an entry.
    rows_per_entry, blocks_per_entry: neighbouring rows of a matrix, and neighbouring blocks of a
        row, that have the same entries.
    matrix_rows: of each matrix.
    stored_rows_per_matrix: 0 if all matrices have the same entries.
    """

    file: SourceFile
    offset: int
    row_bytes: int
    block_bytes: int
    rows_per_entry: int = 1
    blocks_per_entry: int = 1
    matrix_rows: int = 1
    stored_rows_per_matrix: int = 1


@dataclass(frozen=True)
class PublishedTensor:
    """The rows of a stored tensor as blocks of a format.

    planes: in the order in which a block has them; none where `open_rows` makes the blocks.
    transposed: the logical tensor is [..., in, out], the rows are [..., out, in].
    open_rows: reads what all rows need, and returns what makes their blocks; for files that store
        columns, or scales that are quantized too.
    """

    fmt: BlockFormat
    planes: tuple[StoredPlane, ...] = ()
    transposed: bool = False
    open_rows: Callable[[], FillRows] | None = None


@dataclass(frozen=True)
class StoredRows:
    """Rows of a stored tensor that are the next ones of a matrix."""

    rows: range
    planes: tuple[StoredPlane, ...]


def block_reader(published: PublishedTensor, title: str) -> FillRows:
    """Return what reads rows of blocks of a tensor; title: of that tensor, for messages."""
    if published.open_rows is not None:
        return published.open_rows()

    def read(file: SourceFile, offset: int, size: int) -> Tensor:
        return torch.frombuffer(file.read(offset, size, title), dtype=torch.uint8)

    plane = published.planes[0]
    whole = StoredPlane(plane.file, plane.offset, plane.row_bytes, published.fmt.block_bytes)

    def fill_rows(start: int, out: Tensor) -> None:
        if published.planes == (whole,):  # the file has whole blocks: no second copy
            plane.file.read_into(
                out.view(-1).numpy().data, plane.offset + start * plane.row_bytes, title
            )
            return
        parts = [StoredRows(range(start, start + len(out)), published.planes)]
        read_blocks(parts, 0, out.view(len(out), -1, published.fmt.block_bytes), read)

    return fill_rows


def read_blocks(parts: Sequence[StoredRows], first: int, out: Tensor, read: ReadBytes) -> None:
    """Fill `out` [rows, blocks, block bytes] with the rows of a matrix from row `first` on.

    parts: all rows of the matrix, in order.
    """
    done = 0
    for part in parts:
        skipped = min(first, len(part.rows))
        first -= skipped
        rows = part.rows[skipped : skipped + out.shape[0] - done]
        if not rows:
            continue
        blocks = out[done : done + len(rows)]
        for plane, plane_bytes in zip(
            part.planes, blocks.split([plane.block_bytes for plane in part.planes], dim=2)
        ):
            plane_bytes.copy_(_read_entries(plane, rows, out.shape[1], read))
        done += len(rows)
    assert done == out.shape[0]


def _read_entries(plane: StoredPlane, rows: range, blocks: int, read: ReadBytes) -> Tensor:
    """Return the entries of rows of blocks in a plane: [rows or 1, blocks or 1, bytes]."""
    row = torch.arange(rows.start, rows.stop)
    matrix, row_of_matrix = row // plane.matrix_rows, row % plane.matrix_rows
    stored_row = matrix * plane.stored_rows_per_matrix + row_of_matrix // plane.rows_per_entry
    first, stop = int(stored_row.min()), int(stored_row.max()) + 1
    data = read(
        plane.file, plane.offset + first * plane.row_bytes, (stop - first) * plane.row_bytes
    )
    per_row = -(-blocks // plane.blocks_per_entry)
    entries = data.view(stop - first, plane.row_bytes)[:, : per_row * plane.block_bytes].unflatten(
        1, (per_row, -1)
    )
    if 1 < stop - first < len(rows) or plane.stored_rows_per_matrix == 0:
        entries = entries[stored_row - first]
    if plane.blocks_per_entry == 1:
        return entries
    return entries[:, torch.arange(blocks) // plane.blocks_per_entry]
