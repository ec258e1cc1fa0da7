"""Qwen2 and 2.5: Llama with biases on queries, keys and values; upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.fields import read_windows
from flexgen_helm.models.decoder_config import DecoderConfig

# What `transformers` takes for entries that a `config.json` leaves out, where Llama's default is another.
DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}


def upper_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read windows only if `use_sliding_window` is set; published checkpoints name a size without using it."""
    if not config.get("use_sliding_window", False):
        return ()
    return read_windows(config, lambda layer: layer >= config.get("max_window_layers", 28))


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**DEFAULTS, **config}
    return llama.read_config(config, "qwen2", qkv_bias=True, out_bias=False, windows=upper_windows(config))


ARCHITECTURE = Architecture(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM", "Qwen2Model"),
    read_config=read_config,
    tensors=llama.ARCHITECTURE.tensors,
    gguf_names=("qwen2",),
    gguf_tensors=llama.GGUF_TENSORS,
)
