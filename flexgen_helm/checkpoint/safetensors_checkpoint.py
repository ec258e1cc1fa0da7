"""A folder of safetensors files, single or sharded, with its `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.fingerprint import check_blobs, content_fingerprint
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    FolderConfig,
    deciding_files,
    folder_of,
    identity_files,
    read_config,
    tokenizer_folder,
    weight_files,
)
from flexgen_helm.checkpoint.logical_tensor import (
    FLOAT_TYPES,
    LogicalTensor,
)
from flexgen_helm.checkpoint.manifest import is_conversion, verify_conversion
from flexgen_helm.checkpoint.matching import find_stored, match_tensors
from flexgen_helm.checkpoint.quantized.config import read_quantization
from flexgen_helm.checkpoint.quantized.readers import logical_tensors
from flexgen_helm.checkpoint.stored_tensors import join_headers, read_header
from flexgen_helm.checkpoint.unread_tensors import check_unread
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures.base import Architecture, find_source
from flexgen_helm.models.config import EMBED_TABLE, HEAD_MATRIX


class SafetensorsCheckpoint(Checkpoint):
    """Opening checks every shard's header against the file's length and finds every tensor of the
    model.
    """

    def __init__(self, path: Path, fingerprint: str | None = None) -> None:
        """path: the folder, or one .safetensors file next to its `config.json`.

        fingerprint: of a hub snapshot, whose commit is its identity; None to compute it from the
            files on request.
        """
        self._path = path
        folder = folder_of(path)
        self.folder: Path = folder
        architecture, self.config, self.config_content = self._read_config(folder)
        self._files = [path] if path.is_file() else weight_files(folder)
        self._snapshot_fingerprint = fingerprint
        self.tokenizer_path = tokenizer_folder(folder)
        stored = join_headers(map(read_header, self._files))
        self._manifest = verify_conversion(folder, self._files) if is_conversion(folder) else None
        quantization = read_quantization(self.config_content, folder / CONFIG)
        tensors = logical_tensors(stored, quantization, path)
        self._match_tensors(architecture, tensors, path)
        if quantization is not None:
            self.formats = self._find_formats()
        self.rows_are_gathered = bool(self.formats) or any(
            len(self._stored_matrix(name).parts) > 1 for name in self._matrices
        )

    # `StateDictCheckpoint` reads the config for modules of `transformers`, and finds tensors by
    # their state dict.

    def _read_config(self, folder: Path) -> FolderConfig:
        return read_config(folder)

    def _match_tensors(
        self, architecture: Architecture, tensors: Mapping[str, LogicalTensor], path: Path
    ) -> None:
        """Find the model's tensors among those of the files.

        Raises `CheckpointError` for what does not fit.
        """
        head, table = (
            find_stored(find_source(architecture.tensors, name), tensors, architecture.prefixes)
            for name in (HEAD_MATRIX, EMBED_TABLE)
        )
        if head is not None and table is not None:
            self._untie_if_different(_float_tiles(head), _float_tiles(table))
        self._tensors = match_tensors(
            self.config, architecture.tensors, tensors, path, architecture.prefixes
        )
        self._choose_type(
            (self._tensors[name].stored.dtype, self.shapes[name]) for name in self._tensors
        )
        read = {matched.stored.name for matched in self._tensors.values()}
        # A head that equals the embedding table stays unread.
        check_unread((tensor for tensor in tensors.values() if tensor is not head), read, path)
        for matched in self._tensors.values():
            _require_float(matched.stored)

    def _untie_if_different(
        self, head: Iterator[torch.Tensor], table: Iterator[torch.Tensor]
    ) -> None:
        """Give the model a head of its own if that of the files differs from the embedding table.

        So does `transformers`, whatever `tie_word_embeddings` says: fine-tunes that trained their
        head leave it true.
        head, table: tiles, which are read up to the first difference.
        """
        if self.config.tied_head and not all(
            a is not None and b is not None and torch.equal(a.float(), b.float())
            for a, b in zip_longest(head, table)
        ):
            self.config = replace(self.config, tied_head=False)

    @cached_property
    def fingerprint(self) -> str:
        if self._snapshot_fingerprint is not None:
            return self._snapshot_fingerprint
        if self._manifest is not None:
            return self._manifest.fingerprint
        return content_fingerprint(identity_files(self._path))

    def verify(self) -> None:
        check_blobs(deciding_files(self.folder, self._files), hash_again=True)
        if self._manifest is not None:
            verify_conversion(self.folder, self._files, hash_again=True)
        super().verify()

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        tensor = self._tensors[name]
        stored = tensor.stored
        # Columns cannot be read alone: read all rows and drop the columns of other tensors.
        for tile in stored.tiles([range(stored.num_rows)] if tensor.transposed else tensor.rows):
            if tensor.transposed:
                (columns,) = tensor.rows
                tile = tile.view(-1, stored.width)[:, columns.start : columns.stop].reshape(-1)
            yield tile

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if not self._stored_matrix(name).transposed:
            return None
        return lambda tensor: tensor.view(tensor.shape[::-1]).t().contiguous()


def _float_tiles(tensor: LogicalTensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor; none of a type that `_require_float` refuses."""
    return tensor.tiles([range(tensor.num_rows)] if tensor.dtype in FLOAT_TYPES else [])


def _require_float(tensor: LogicalTensor) -> None:
    if tensor.dtype not in FLOAT_TYPES:
        supported = ", ".join(FLOAT_TYPES)
        raise CheckpointError(
            f"{tensor.title} has the type {tensor.dtype}; supported are {supported}"
        )
