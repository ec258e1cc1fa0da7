"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.fields import read_windows
from flexgen_helm.models.decoder_config import DecoderConfig

# What `transformers` takes for entries that a `config.json` leaves out, where Llama's default is another.
_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def read_config(config: Mapping[str, Any], architecture: str = "mistral", **features: Any) -> DecoderConfig:
    config = {**_DEFAULTS, **config}
    features = {"windows": read_windows(config), "qkv_bias": False, "out_bias": False, **features}
    return llama.read_config(config, architecture, **features)


ARCHITECTURE = Architecture(
    name="mistral",
    hf_names=("MistralForCausalLM", "MistralModel"),
    read_config=read_config,
    tensors=llama.ARCHITECTURE.tensors,
)
