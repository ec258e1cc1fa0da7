"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.families import llama
from flexgen_helm.models.families.base import Family
from flexgen_helm.models.families.fields import read_windows
from flexgen_helm.models.spec import ModelSpec


def read_config(config: Mapping[str, Any], family: str = "mistral", **features: Any) -> ModelSpec:
    return llama.read_config(config, family, **features, windows=read_windows(config, lambda layer: True))


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_config=read_config,
    prefixes=llama.FAMILY.prefixes,
    tensors=llama.FAMILY.tensors,
)
