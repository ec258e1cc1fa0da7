"""Open a model's weights by name, fetched first if needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.dummy_checkpoint import DummyCheckpoint
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.folder import folder_of, read_config, tokenizer_folder
from flexgen_helm.checkpoint.local_files import origin_of, snapshot_fingerprint_of
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.transformers_backend.config import TransformersConfig


def open_checkpoint(
    name_or_path: str | os.PathLike[str] | ResolvedModel,
    *,
    revision: str | None = None,
    weights: Literal["pretrained", "dummy"] = "pretrained",
    seed: int = 0,
) -> Checkpoint:
    """Open a model's weights; a precision suffix in the name is accepted and ignored.

    weights: 'dummy' makes seeded random weights from the model's sizes alone, which the catalog, a
        local folder's `config.json` or a .gguf file gives.

    Raises `UnknownModelError`, `UnsupportedArchitectureError` or `CheckpointError`, each naming
    problem and remedy.
    """
    resolved = resolve(name_or_path, revision)
    if weights == "dummy":
        checkpoint: Checkpoint = _dummy(resolved, seed)
        checkpoint.origin = f"dummy weights of {resolved.name}, seed {seed}"
        return checkpoint
    path = fetch(resolved)
    if path.suffix == ".gguf" and path.is_file():
        checkpoint = _open_gguf(path)
    else:
        kind = type(read_config(folder_of(path)).config)
        checkpoint = open_as(kind, path, snapshot_fingerprint_of(resolved, path))
    checkpoint.origin = origin_of(resolved, path)
    return checkpoint


def _dummy(resolved: ResolvedModel, seed: int) -> DummyCheckpoint:
    if resolved.kind == "gguf" and resolved.path is not None:
        checkpoint = _open_gguf(resolved.path)
        return DummyCheckpoint(
            checkpoint.config, seed, checkpoint.storage_dtype, checkpoint.tokenizer_path
        )
    config, dtype = read_model_config(resolved)
    tokenizer_path = None if resolved.path is None else tokenizer_folder(folder_of(resolved.path))
    return DummyCheckpoint(config, seed, getattr(torch, dtype), tokenizer_path)


def _open_gguf(path: Path) -> Checkpoint:
    # Imported late: the gguf package is needed for these files only.
    from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def open_as(kind: type[ModelConfig], path: Path, fingerprint: str | None = None) -> Checkpoint:
    """Open a folder of safetensors files for a kind of config.

    That is the caller's choice: modules of `transformers` compute what our own decoder does, too.
    """
    if not issubclass(kind, TransformersConfig):
        return SafetensorsCheckpoint(path, fingerprint)
    # Imported late: transformers takes seconds and 80 MB.
    from flexgen_helm.checkpoint.state_dict_checkpoint import StateDictCheckpoint

    return StateDictCheckpoint(path, fingerprint)
