"""A folder of safetensors files, single or sharded, with its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flexgen_helm.checkpoint.checkpoint import ByteSource, Checkpoint, checked_shapes, half_type, tiles
from flexgen_helm.checkpoint.fingerprint import content_fingerprint
from flexgen_helm.checkpoint.folder import CONFIG, TOKENIZER_FILES, read_config, tokenizer_folder, weight_files
from flexgen_helm.checkpoint.manifest import TensorChecks, check_blobs, snapshot_files
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures import Architecture, RowSelection, find_source, select_rows
from flexgen_helm.models.config import ModelConfig

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class _Stored:
    """One tensor in a file. dtype: safetensors' name of it. offset: bytes from the start of the file. rows: those
    that are ours; transposed: they are columns in the file."""

    file: ByteSource
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    rows: RowSelection = RowSelection(0, 0, 0)
    transposed: bool = False


class SafetensorsCheckpoint(Checkpoint):
    """Opening checks every shard's header against the file's length and finds every tensor of the model.

    path: the folder, or one .safetensors file beside its `config.json`. fingerprint: given for a hub snapshot,
    whose commit is its identity; otherwise computed from the files' content when first asked for.
    """

    def __init__(self, path: Path, fingerprint: str | None = None) -> None:
        folder = path.parent if path.is_file() else path
        architecture, self.config, _ = read_config(folder)
        self._files = [path] if path.is_file() else weight_files(folder)
        self._folder, self._given_fingerprint = folder, fingerprint
        self.tokenizer_path = tokenizer_folder(folder)
        stored: dict[str, _Stored] = {}
        for file in self._files:
            stored.update(_read_header(file))
        self._stored = _match(stored, self.config, checked_shapes(self.config, len(stored), path), architecture, path)
        # Compared with a conversion's manifest, where there is one, before a tensor is first read.
        self._checks = TensorChecks.of(folder, {tensor.name: tensor.file for tensor in self._stored.values()})
        sizes: dict[torch.dtype, int] = {}
        for name, tensor in self._stored.items():
            dtype = _DTYPES[tensor.dtype]
            sizes[dtype] = sizes.get(dtype, 0) + prod(self.shapes[name]) * dtype.itemsize
        self.storage_dtype = half_type(sizes)

    @cached_property
    def fingerprint(self) -> str:
        if self._given_fingerprint is not None:
            return self._given_fingerprint
        if self._checks is not None:
            return self._checks.fingerprint
        others = [self._folder / name for name in (CONFIG, *TOKENIZER_FILES)]
        return content_fingerprint([*self._files, *(file for file in others if file.is_file())])

    def verify(self) -> None:
        check_blobs(snapshot_files(self._folder, self._files), anew=True)
        if self._checks is not None:
            self._checks.start_over()
        super().verify()

    def _where(self, name: str) -> str:
        stored = self._stored[name]
        return f"{stored.file.path}: tensor {stored.name}"

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._stored[name]
        if self._checks is not None:
            self._checks.check(stored.file, stored.name)
        dtype, width = _DTYPES[stored.dtype], prod(stored.shape[1:])
        # Columns cannot be read alone: all rows are, and what is not ours of them is dropped.
        rows = RowSelection(stored.shape[0], 0, stored.shape[0]) if stored.transposed else stored.rows
        for start, count in tiles(rows, width):
            data = stored.file.read(
                stored.offset + start * width * dtype.itemsize,
                count * width * dtype.itemsize,
                f"tensor {stored.name}",
            )
            piece = torch.frombuffer(data, dtype=dtype)
            if stored.transposed:
                piece = piece.view(count, width)[:, stored.rows.first : stored.rows.first + stored.rows.count]
                piece = piece.reshape(-1)
            yield piece

    def _rearranges(self, name: str) -> bool:
        return self._stored[name].transposed

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._stored[name].transposed:
            return tensor
        return tensor.view(tensor.shape[::-1]).t().contiguous()


def _read_header(path: Path) -> dict[str, _Stored]:
    file = ByteSource.of(path)
    try:
        # The library's parser is the judge of the header: lengths, overlaps, the end of the data.
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
        name: _Stored(file, name, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _match(
    stored: Mapping[str, _Stored],
    model_config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    path: Path,
) -> dict[str, _Stored]:
    """Canonical name -> stored tensor, shapes and types checked."""
    found: dict[str, _Stored] = {}
    for canonical, shape in shapes.items():
        source = find_source(architecture.tensors, canonical)
        name, rows = source.name, select_rows(source, canonical, model_config, shapes)
        transposed = source.transposed and len(shape) > 1  # a bias is a vector either way
        wanted = (shape[1], rows.total) if transposed else (rows.total, *shape[1:])
        tensor = next((stored[prefix + name] for prefix in architecture.prefixes if prefix + name in stored), None)
        if tensor is None:
            raise CheckpointError(
                f"{path} lacks the tensor {architecture.prefixes[0]}{name}, which its {CONFIG} asks for"
            )
        where = f"{tensor.file.path}: tensor {tensor.name}"
        if tensor.shape != wanted:
            raise CheckpointError(f"{where} has the shape {list(tensor.shape)}, but {CONFIG} asks for {list(wanted)}")
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{where} has the type {tensor.dtype}; known are {known}")
        found[canonical] = replace(tensor, rows=rows, transposed=transposed)
    return found
