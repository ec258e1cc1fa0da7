"""A folder of safetensors files, single or sharded, with its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flexgen_helm.checkpoint.checkpoint import FileCheckpoint, row_tiles
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
from flexgen_helm.checkpoint.stored_tensors import StoredTensor, match_tensors
from flexgen_helm.errors import CheckpointError

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


class SafetensorsCheckpoint(FileCheckpoint):
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
        stored = {name: tensor for file in self._files for name, tensor in _read_header(file).items()}
        self._use(match_tensors(self.config, architecture.tensors, stored, path, CONFIG, architecture.prefixes))
        used = [tensor.stored for tensor in self._tensors.values()]
        for tensor in used:
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(f"{tensor.title} has the type {tensor.dtype}; supported are {', '.join(_DTYPES)}")
        self._verifier = TensorVerifier(folder, used) if is_conversion(folder) else None

    @cached_property
    def fingerprint(self) -> str:
        if self._snapshot_fingerprint is not None:
            return self._snapshot_fingerprint
        if self._verifier is not None:
            return self._verifier.manifest.fingerprint
        others = (self._folder / name for name in (CONFIG, *TOKENIZER_FILES))
        return content_fingerprint([*self._files, *(file for file in others if file.is_file())])

    def verify(self) -> None:
        check_blobs(deciding_files(self._folder, self._files), hash_again=True)
        if self._verifier is not None:
            used = (tensor.stored for tensor in self._tensors.values())
            self._verifier = TensorVerifier(self._folder, used, believe_memory=False)
        super().verify()

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        tensor = self._tensors[name]
        stored = tensor.stored
        if self._verifier is not None:
            self._verifier.check(stored)
        dtype, width = _DTYPES[stored.dtype], prod(stored.shape[1:])
        row_bytes = width * dtype.itemsize
        # Columns cannot be read alone: read all rows and drop the columns of other tensors.
        rows = [range(stored.shape[0])] if tensor.transposed else tensor.rows
        for start, count in row_tiles(rows, width):
            tile = torch.frombuffer(stored.read(start * row_bytes, count * row_bytes), dtype=dtype)
            if tensor.transposed:
                (columns,) = tensor.rows
                tile = tile.view(count, width)[:, columns.start : columns.stop].reshape(-1)
            yield tile

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if not self._tensors[name].transposed:
            return None
        return lambda tensor: tensor.view(tensor.shape[::-1]).t().contiguous()


def _read_header(path: Path) -> dict[str, StoredTensor]:
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
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return tensors
