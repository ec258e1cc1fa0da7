"""From a name to a `Checkpoint`, fetched first where needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.dummy import DummyCheckpoint
from flexgen_helm.checkpoint.fetch import WHEEL, Progress, fetch_resolved
from flexgen_helm.checkpoint.fingerprint import snapshot_fingerprint
from flexgen_helm.checkpoint.folder import read_config, tokenizer_folder
from flexgen_helm.checkpoint.manifest import is_conversion, read_manifest
from flexgen_helm.checkpoint.model_config import storage_dtype
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.errors import UsageError


def open_checkpoint(
    name_or_path: str | os.PathLike[str] | ResolvedModel,
    *,
    revision: str | None = None,
    weights: Literal["pretrained", "dummy"] = "pretrained",
    seed: int = 0,
    progress: Progress | None = None,
) -> Checkpoint:
    """Open a model's weights; a precision suffix in the name is accepted and does not matter here.

    weights 'dummy' gives seeded random weights and needs the model's sizes only: from the catalogue, or a local
    folder's `config.json`, or a .gguf file. Raises `UnknownModelError`, `UnsupportedArchitectureError` or
    `CheckpointError`, each naming what is wrong and what to do.
    """
    resolved = name_or_path if isinstance(name_or_path, ResolvedModel) else resolve(name_or_path, revision)
    if weights == "dummy":
        dummy = _dummy(resolved, seed)
        dummy.origin = f"dummy weights of {resolved.name}, seed {seed}"
        return dummy
    path = fetch_resolved(resolved, progress)
    checkpoint = _open(resolved, path)
    checkpoint.origin = _origin(resolved, path)
    return checkpoint


def _open(resolved: ResolvedModel, path: Path) -> Checkpoint:
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    if resolved.kind == "hub" and not is_conversion(path):
        assert resolved.hub_repo is not None
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        return SafetensorsCheckpoint(path, snapshot_fingerprint(resolved.hub_repo, path.name, sizes))
    return SafetensorsCheckpoint(path)


def _origin(resolved: ResolvedModel, path: Path) -> str:
    if resolved.kind == "hub":
        return f"{resolved.hub_repo}@{path.name}"
    if resolved.kind == "wheel":
        return WHEEL
    if path.is_dir() and is_conversion(path):
        return str(read_manifest(path).get("origin"))
    return path.resolve().name


def _gguf(path: Path) -> Checkpoint:
    # Needs the gguf package, which a machine with safetensors only may lack.
    from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def _dummy(resolved: ResolvedModel, seed: int) -> DummyCheckpoint:
    if resolved.entry is not None:
        return DummyCheckpoint(resolved.entry.config, seed, _half(resolved.entry.default_dtype))
    if resolved.path is None:
        raise UsageError(
            f"dummy weights of {resolved.name} need its sizes, which the catalogue does not have; name a catalogue "
            "model or a folder with config.json"
        )
    if resolved.kind == "gguf":
        real = _gguf(resolved.path)
        return DummyCheckpoint(real.config, seed, real.storage_dtype, real.tokenizer_path)
    folder: Path = resolved.path.parent if resolved.path.is_file() else resolved.path
    _, model_config, config = read_config(folder)
    return DummyCheckpoint(
        model_config, seed, _half(config.get("dtype") or config.get("torch_dtype")), tokenizer_folder(folder)
    )


def _half(name: object) -> torch.dtype:
    found: torch.dtype = getattr(torch, storage_dtype(name))
    return found
