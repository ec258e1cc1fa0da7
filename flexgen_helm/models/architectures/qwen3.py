"""Qwen3: Llama with normed queries and keys; upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama, qwen2
from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.decoder_config import DecoderConfig


def read_config(config: Mapping[str, Any], architecture: str = "qwen3", **features: Any) -> DecoderConfig:
    config = {**qwen2.DEFAULTS, **config}
    qwen3 = {"head_dim": config.get("head_dim") or 128, "qk_norm": True, "windows": qwen2.upper_windows(config)}
    return llama.read_config(config, architecture, **{**qwen3, **features})


ARCHITECTURE = Architecture(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM", "Qwen3Model"),
    read_config=read_config,
    tensors={
        **llama.ARCHITECTURE.tensors,
        "layers.{i}.attn.q_norm": TensorSource("layers.{i}.self_attn.q_norm"),
        "layers.{i}.attn.k_norm": TensorSource("layers.{i}.self_attn.k_norm"),
    },
    gguf_names=("qwen3",),
    gguf_tensors={
        **llama.GGUF_TENSORS,
        "layers.{i}.attn.q_norm": TensorSource("blk.{i}.attn_q_norm"),
        "layers.{i}.attn.k_norm": TensorSource("blk.{i}.attn_k_norm"),
    },
)
