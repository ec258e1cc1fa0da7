"""One module per family: its record, its configuration reader and its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.core.errors import UnsupportedArchitectureError
from flexgen_helm.models.families import llama, mistral, opt, qwen2, qwen3
from flexgen_helm.models.families.base import Family, Source

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (opt, llama, mistral, qwen2, qwen3)}

__all__ = ["FAMILIES", "Family", "Source", "family_of_config", "family_of_gguf", "source_of"]


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
    return ", ".join(name for family in FAMILIES.values() for name in family.architectures if "CausalLM" in name)


def source_of(tensors: Mapping[str, Source], canonical: str) -> Source:
    """Where the canonical tensor lies, layer number and `.weight`/`.bias` filled in; KeyError if the map lacks it."""
    parts = canonical.split(".")
    index = parts[1] if parts[0] == "layers" else None
    if index is not None:
        parts[1] = "{i}"
    generic = ".".join(parts)
    source, ending = tensors.get(generic), ""
    if source is None:
        stem, _, leaf = generic.rpartition(".")
        source, ending = tensors[stem], "." + leaf
    name = source.name if index is None else source.name.replace("{i}", index)
    return Source(name + ending, source.rope_heads)
