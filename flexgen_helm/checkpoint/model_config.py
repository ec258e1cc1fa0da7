"""The model config of a name, without weights and without torch: what a plan needs."""

from __future__ import annotations

import os

from flexgen_helm.checkpoint.catalog import HalfType
from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import ModelConfig


def read_model_config(model: str | os.PathLike[str] | ResolvedModel) -> tuple[ModelConfig, HalfType]:
    """Return the model config, and the type in which the weights are stored.

    Raises `UsageError` for a model that is neither in the catalog nor on this machine.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve(model)
    if resolved.entry is not None:
        return resolved.entry.config, resolved.entry.default_dtype
    if resolved.path is None or resolved.kind != "folder":
        raise UsageError(
            f"neither the catalog nor this machine has the sizes of {resolved.name}; name a catalog model or a folder "
            "with config.json"
        )
    _, config, content = read_config(resolved.path.parent if resolved.path.is_file() else resolved.path)
    dtype = content.get("dtype") or content.get("torch_dtype")
    return config, "bfloat16" if dtype == "bfloat16" else "float16"
