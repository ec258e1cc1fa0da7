"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.families import llama
from flexgen_helm.models.families.base import Family
from flexgen_helm.models.spec import ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    return llama.read_config(config, "mistral", windows=llama.read_windows(config, default_from=0))


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_config=read_config,
    prefixes=llama.FAMILY.prefixes,
    tensors=llama.FAMILY.tensors,
)
