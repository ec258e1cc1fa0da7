"""A folder of safetensors files, single or sharded, with its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flexgen_helm.checkpoint.checkpoint import Checkpoint, checked_shapes, most_used_half_type, row_tiles
from flexgen_helm.checkpoint.fingerprint import SourceFile, check_blobs, content_fingerprint
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    TOKENIZER_FILES,
    deciding_files,
    read_config,
    tokenizer_folder,
    weight_files,
)
from flexgen_helm.checkpoint.manifest import TensorVerifier, is_conversion
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures import Architecture, RowSelection, find_source, select_rows
from flexgen_helm.models.config import ModelConfig

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file.

    dtype: safetensors' name of it.
    offset: bytes from the start of the file.
    rows: those that are the canonical tensor's.
    transposed: `rows` are columns in the file.
    """

    file: SourceFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    rows: RowSelection = RowSelection(0, 0, 0)
    transposed: bool = False


class SafetensorsCheckpoint(Checkpoint):
    """Opening checks every shard's header against the file's length and finds every tensor of the model."""

    def __init__(self, path: Path, fingerprint: str | None = None) -> None:
        """path: the folder, or one .safetensors file next to its `config.json`.

        fingerprint: of a hub snapshot, whose commit is its identity; None to compute it from the files on request.
        """
        self._folder = folder = path.parent if path.is_file() else path
        architecture, self.config, _ = read_config(folder)
        self._files = [path] if path.is_file() else weight_files(folder)
        self._snapshot_fingerprint = fingerprint
        self.tokenizer_path = tokenizer_folder(folder)
        stored: dict[str, _StoredTensor] = {}
        for file in self._files:
            stored.update(_read_header(file))
        shapes = checked_shapes(self.config, len(stored), path)
        self._stored = _match(stored, self.config, shapes, architecture, path)
        files = {tensor.name: tensor.file for tensor in self._stored.values()}
        self._verifier = TensorVerifier(folder, files) if is_conversion(folder) else None
        self.storage_dtype = most_used_half_type(
            (_DTYPES[tensor.dtype], shapes[name]) for name, tensor in self._stored.items()
        )

    @cached_property
    def fingerprint(self) -> str:
        if self._snapshot_fingerprint is not None:
            return self._snapshot_fingerprint
        if self._verifier is not None:
            return self._verifier.fingerprint
        others = (self._folder / name for name in (CONFIG, *TOKENIZER_FILES))
        return content_fingerprint([*self._files, *(file for file in others if file.is_file())])

    def verify(self) -> None:
        check_blobs(deciding_files(self._folder, self._files), hash_again=True)
        if self._verifier is not None:
            self._verifier.start_over()
        super().verify()

    def _title(self, name: str) -> str:
        stored = self._stored[name]
        return f"{stored.file.path}: tensor {stored.name}"

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._stored[name]
        if self._verifier is not None:
            self._verifier.check(stored.file, stored.name)
        dtype, width = _DTYPES[stored.dtype], prod(stored.shape[1:])
        row_bytes = width * dtype.itemsize
        # Columns cannot be read alone: read all rows and drop the columns of other tensors.
        rows = RowSelection(stored.shape[0], 0, stored.shape[0]) if stored.transposed else stored.rows
        for start, count in row_tiles(rows, width):
            data = stored.file.read(stored.offset + start * row_bytes, count * row_bytes, f"tensor {stored.name}")
            tile = torch.frombuffer(data, dtype=dtype)
            if stored.transposed:
                columns = slice(stored.rows.first, stored.rows.first + stored.rows.count)
                tile = tile.view(count, width)[:, columns].reshape(-1)
            yield tile

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if not self._stored[name].transposed:
            return None
        return lambda tensor: tensor.view(tensor.shape[::-1]).t().contiguous()


def _read_header(path: Path) -> dict[str, _StoredTensor]:
    file = SourceFile.open(path)
    try:
        # The library's parser judges the header: lengths, overlaps, the end of the data.
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt ({file.size} bytes): {error}") from error
    length = int.from_bytes(file.read(0, 8, "header length"), "little")
    header = json.loads(bytes(file.read(8, length, "header")))
    header.pop("__metadata__", None)
    start = 8 + length
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != file.size:
        raise CheckpointError(f"{path} is {file.size} bytes long but its header describes {end}; fetch it again")
    return {
        name: _StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _match(
    stored: Mapping[str, _StoredTensor],
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    path: Path,
) -> dict[str, _StoredTensor]:
    """Return canonical name -> stored tensor, with shapes and types checked."""
    matched: dict[str, _StoredTensor] = {}
    for canonical, shape in shapes.items():
        source = find_source(architecture.tensors, canonical)
        rows = select_rows(source, canonical, config, shapes)
        transposed = source.transposed and len(shape) > 1  # a bias is a vector either way
        expected = (shape[1], rows.total) if transposed else (rows.total, *shape[1:])
        names = [prefix + source.name for prefix in architecture.prefixes]
        tensor = next((stored[name] for name in names if name in stored), None)
        if tensor is None:
            raise CheckpointError(f"{path} lacks the tensor {names[0]}, which its {CONFIG} asks for")
        title = f"{tensor.file.path}: tensor {tensor.name}"
        if tensor.shape != expected:
            raise CheckpointError(f"{title} has the shape {list(tensor.shape)}, but {CONFIG} asks for {list(expected)}")
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{title} has the type {tensor.dtype}; supported are {', '.join(_DTYPES)}")
        matched[canonical] = replace(tensor, rows=rows, transposed=transposed)
    return matched
