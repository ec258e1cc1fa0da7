"""A folder of safetensors files of a model that runs by `transformers`' modules, named as its state dict asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from flexgen_helm.checkpoint.folder import CONFIG, read_config
from flexgen_helm.checkpoint.quantized.logical_tensor import LogicalTensor
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.checkpoint.state_dict import StateDictReader
from flexgen_helm.checkpoint.stored_tensors import StoredRange, StoredTensor
from flexgen_helm.models.architectures import architecture_by_modules
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.transformers_backend.code_digest import loading_digest
from flexgen_helm.models.transformers_backend.config import TransformersConfig
from flexgen_helm.models.transformers_backend.empty_model import empty_model


class StateDictCheckpoint(SafetensorsCheckpoint):
    """Tensors by canonical name, of which each is an entry of the state dict or one expert of it."""

    def _read_config(self, folder: Path) -> tuple[Architecture, ModelConfig, dict[str, Any]]:
        return read_config(folder, architecture_by_modules)

    def _find(self, architecture: Architecture, tensors: Mapping[str, LogicalTensor], path: Path) -> None:
        assert isinstance(self.config, TransformersConfig)
        self._modules = self.config.modules
        self._reader = StateDictReader(empty_model(self._modules.text), tensors, path, CONFIG)
        head, table = self._modules.head_key, self._modules.table_key
        if self._reader.has_own(head) and self._reader.has_own(table):
            self._untie_if_different(self._reader.tiles(head), self._reader.tiles(table))
        self._choose_type((self._reader.tensors(key)[0].dtype, shape) for key, shape in self._reader.shapes.items())

    @cached_property
    def fingerprint(self) -> str:
        """Of the files, and of how `transformers` makes a state dict of them, by which weight files are named."""
        return hashlib.sha256(f"{super().fingerprint} {loading_digest()}".encode()).hexdigest()

    def _used_parts(self) -> Iterator[StoredTensor]:
        for key in self._reader.shapes:
            for tensor in self._reader.tensors(key):
                yield from tensor.parts

    def _title(self, name: str) -> str:
        return self._reader.title(self._modules.key(name)[0])

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        key, expert, _ = self._modules.key(name)
        if self._verifier is not None:
            for tensor in self._reader.tensors(key):
                for part in tensor.parts:
                    self._verifier.check(part)
        for tile in self._reader.tiles(key, expert):
            yield tile if tile.is_floating_point() else tile.float()

    def stored_range(self, name: str) -> StoredRange | None:
        key, expert, is_transposed = self._modules.key(name)
        entry = None if is_transposed else self._reader.stored_rows(key, expert)
        return None if entry is None else self._range_of(*entry)

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if not self._modules.key(name)[2]:
            return None
        return lambda tensor: tensor.view(tensor.shape[::-1]).t().contiguous()
