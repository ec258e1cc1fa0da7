"""Tensors as files have them: their headers, and the planes of published blocks. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.errors import CheckpointError
from flexgen_helm.quant.formats import BlockFormat

if TYPE_CHECKING:
    from torch import Tensor

# Fills memory [count, row bytes] with blocks of rows from `start` on.
FillRows = Callable[[int, "Tensor"], None]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    dtype: the file format's name of it.
    shape: rows first.
    offset, size: bytes, from the start of the file and of the data.
    """

    file: SourceFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def title(self) -> str:
        """File and tensor, for messages."""
        return f"{self.file.path}: tensor {self.name}"

    def read(self, offset: int, size: int) -> bytearray:
        """Read `size` bytes of the data from `offset` on."""
        return self.file.read(self.offset + offset, size, f"tensor {self.name}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return name -> tensor of a safetensors file.

    Raises `CheckpointError` if the file is truncated or corrupt.
    """
    from safetensors import SafetensorError, safe_open  # registration does without

    file = SourceFile.open(path)
    try:
        # The library's parser judges the header: lengths, overlaps, the end of the data.
        with safe_open(path, framework="np"):
            pass
    except (OSError, MemoryError):
        # safetensors reports every failure to open as a missing file.
        try:
            path.open("rb").close()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        advice = "free memory, allow more files (ulimit -n), or look at the disk (dmesg)"
        raise CheckpointError(f"{path} cannot be opened; {advice}") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt ({file.size} bytes): {error}"
        ) from error
    length = int.from_bytes(file.read(0, 8, "header length"), "little")
    header = json.loads(bytes(file.read(8, length, "header")))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(
            file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin
        )
    return tensors


def join_headers(headers: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Return the tensors of all files of a model.

    Raises `CheckpointError` if two files have a tensor of the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for name in tensors.keys() & header:
            first, second = tensors[name].file.path, header[name].file.path
            raise CheckpointError(
                f"{first} and {second.name} both have a tensor {name}; fetch the model again"
            )
        tensors |= header
    return tensors


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

    planes: in the order in which a block has them; none where rows are columns in the file.
    transposed: the logical tensor is [..., in, out], the rows are [..., out, in].
    open_rows: reads columns, and returns what makes blocks of rows.
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
