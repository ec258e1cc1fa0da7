"""Tensors as files have them: name, type, shape, and where their bytes are. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.errors import CheckpointError


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
