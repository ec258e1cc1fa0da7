"""The header of a GGUF file, metadata and tensor table, read in one pass.

`gguf.GGUFReader` makes several numpy views per string: 2 s for a vocabulary of 49,152, four times that for Llama 3.
This reader takes a tenth of a second; types, block sizes and dequantization stay the `gguf` package's.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType, Keys

from flexgen_helm.errors import CheckpointError

_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor in the file. shape: as in torch, rows first. offset, size: bytes from the start, and of the data."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """metadata: every key as a Python bool, int, float, str or list of these. tensors: by the file's own names.

    Shared by all who read the file.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read what precedes the tensors' data; once, for model and tokenizer ask for it several times in a process.

    Raises `CheckpointError`, which names the file, if it is missing, not GGUF 2 or 3 in little-endian order,
    truncated or corrupt.
    """
    try:
        found = os.stat(path)
        return _read(os.path.abspath(path), (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    # mmap refuses an empty file with ValueError, as an unknown type does
    except (ValueError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error


@lru_cache(maxsize=1)  # a vocabulary is some 20 MB of strings
def _read(path: str, identity: tuple[int, ...]) -> GgufHeader:
    """identity: changes with the file's content."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(data).header()


class _Cursor:
    """A position in the mapped file; every method reads what lies there and moves behind it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        magic, version, n_tensors, n_keys = self._unpack("IIQQ")
        if magic != GGUF_MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; known are {' and '.join(map(str, _VERSIONS))}, little-endian")
        metadata = {self._string(): self._value(self._type()) for _ in range(n_keys)}
        table = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in table:
            if name in tensors:
                raise ValueError(f"it has two tensors named {name}")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"tensor {name} has rows of {shape[-1]} elements, no multiple of {block}")
            tensors[name] = GgufTensor(name, kind, shape, begin + offset, prod(shape) // block * block_bytes)
        return GgufHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        (n_dims,) = self._unpack("I")
        if not 1 <= n_dims <= 4:
            raise ValueError(f"tensor {name} has {n_dims} dimensions")
        shape = self._unpack(f"{n_dims}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, GGMLQuantizationType(kind), shape, offset

    def _unpack(self, fmt: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + fmt)
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _type(self) -> GGUFValueType:
        return GGUFValueType(self._unpack("I")[0])

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        text = self._data[self._at : self._at + length]
        if len(text) != length:
            raise ValueError(f"a string of {length} bytes at offset {self._at} runs past the end")
        self._at += length
        return text.decode("utf-8")

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        inner = self._type()
        (length,) = self._unpack("Q")
        if inner in _SCALARS:
            # Not longer than the file, so that a corrupt length fails here rather than in an allocation.
            if length > len(self._data):
                raise ValueError(f"an array of {length} values at offset {self._at} runs past the end")
            return list(self._unpack(f"{length}{_SCALARS[inner]}"))
        return [self._value(inner) for _ in range(length)]
