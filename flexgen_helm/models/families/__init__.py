"""One module per family: its record, its configuration reader and its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.core.errors import UnsupportedArchitectureError
from flexgen_helm.models.families import (
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
from flexgen_helm.models.families.base import Family, Rows, Source, rows_of, source_of

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
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}

__all__ = ["FAMILIES", "Family", "Rows", "Source", "family_of_config", "family_of_gguf", "rows_of", "source_of"]


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family that serves a `config.json`; raises `UnsupportedArchitectureError` with the supported list."""
    names = tuple(config.get("architectures") or ())
    for family in FAMILIES.values():
        if set(names) & set(family.architectures) or (not names and config.get("model_type") == family.name):
            return family
    wanted = ", ".join(names) or config.get("model_type") or "(none named)"
    raise UnsupportedArchitectureError(f"architecture {wanted} is not supported; supported are {supported()}")


def family_of_gguf(architecture: str) -> Family:
    for family in FAMILIES.values():
        if architecture in family.gguf_architectures:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.gguf_architectures)
    raise UnsupportedArchitectureError(f"GGUF architecture {architecture!r} is not supported; supported are {known}")


def supported() -> str:
    """The architectures' names as `config.json` spells them, one a family."""
    return ", ".join(family.architectures[0] for family in FAMILIES.values())
