"""The architecture record of a model by name, without its weights and without torch: what a plan needs."""

from __future__ import annotations

import os
from pathlib import Path

from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import ModelConfig


def read_model_config(name_or_path: str | os.PathLike[str]) -> tuple[ModelConfig, str]:
    """The record, and the type of the weights at rest ('float16' or 'bfloat16').

    Raises `UsageError` for a model that is neither in the catalogue nor on this machine.
    """
    resolved = resolve(name_or_path)
    if resolved.path is not None and resolved.kind == "folder":
        folder: Path = resolved.path.parent if resolved.path.is_file() else resolved.path
        _, spec, config = read_config(folder)
        return spec, storage_dtype(config.get("dtype") or config.get("torch_dtype"))
    if resolved.entry is not None:
        return resolved.entry.config, storage_dtype(resolved.entry.default_dtype)
    raise UsageError(
        f"a plan for {resolved.name} needs its sizes, which neither the catalogue nor this machine has; name a "
        "catalogue model or a folder with config.json"
    )


def storage_dtype(name: object) -> str:
    """The 16-bit type in which weights of a configuration's type rest."""
    return "bfloat16" if name == "bfloat16" else "float16"
