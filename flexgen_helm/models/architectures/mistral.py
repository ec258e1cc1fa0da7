"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.fields import read_windows
from flexgen_helm.models.config import ModelConfig


def read_config(config: Mapping[str, Any], architecture: str = "mistral", **features: Any) -> ModelConfig:
    return llama.read_config(config, architecture, **features, windows=read_windows(config, lambda layer: True))


ARCHITECTURE = Architecture(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_config=read_config,
    prefixes=llama.ARCHITECTURE.prefixes,
    tensors=llama.ARCHITECTURE.tensors,
)
