"""Qwen2 and 2.5: Llama with biases on queries, keys and values; upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.fields import read_windows
from flexgen_helm.models.config import ModelConfig


def upper_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows count only where `use_sliding_window` says so; published checkpoints name a size without using it."""
    if not config.get("use_sliding_window", False):
        return ()
    full = config.get("max_window_layers", 28)
    return read_windows(config, lambda layer: layer >= full)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return llama.read_config(config, "qwen2", qkv_bias=True, windows=upper_windows(config))


def read_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    return llama.read_gguf(metadata, "qwen2", "qwen2", qkv_bias=True)


ARCHITECTURE = Architecture(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read_config=read_config,
    prefixes=llama.ARCHITECTURE.prefixes,
    tensors=llama.ARCHITECTURE.tensors,
    gguf_architectures=("qwen2",),
    read_gguf=read_gguf,
    gguf_tensors=llama.GGUF_TENSORS,
)
