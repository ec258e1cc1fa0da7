"""One module per family: its record, its configuration reader and its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import (
    bloom,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from flexgen_helm.models.architectures.base import Architecture, RowSelection, TensorSource, find_source, select_rows

_MODULES = (
    opt,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    gemma2,
    gemma3,
    phi3,
    gpt2,
    gpt_neox,
    bloom,
)
ARCHITECTURES: dict[str, Architecture] = {module.ARCHITECTURE.name: module.ARCHITECTURE for module in _MODULES}

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "RowSelection",
    "TensorSource",
    "architecture_of_config",
    "architecture_of_gguf",
    "select_rows",
    "find_source",
]


def architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    """The family that serves a `config.json`; raises `UnsupportedArchitectureError` with the supported list."""
    names = tuple(config.get("architectures") or ())
    for architecture in ARCHITECTURES.values():
        if set(names) & set(architecture.architectures) or (
            not names and config.get("model_type") == architecture.name
        ):
            return architecture
    wanted = ", ".join(names) or config.get("model_type") or "(none named)"
    raise UnsupportedArchitectureError(
        f"architecture {wanted} is not supported; supported are {supported_architectures()}"
    )


def architecture_of_gguf(name: str) -> Architecture:
    for architecture in ARCHITECTURES.values():
        if name in architecture.gguf_architectures:
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES.values() for name in architecture.gguf_architectures)
    raise UnsupportedArchitectureError(f"GGUF architecture {name!r} is not supported; supported are {known}")


def supported_architectures() -> str:
    """The architectures' names as `config.json` spells them, one a family."""
    return ", ".join(architecture.architectures[0] for architecture in ARCHITECTURES.values())
