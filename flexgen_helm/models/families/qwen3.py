"""Qwen3: Llama with normed queries and keys; upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.families import llama, qwen2
from flexgen_helm.models.families.base import Family, Source
from flexgen_helm.models.spec import ModelSpec


def read_config(config: Mapping[str, Any], family: str = "qwen3", **features: Any) -> ModelSpec:
    given: dict[str, Any] = dict(
        head_dim=config.get("head_dim") or 128, qk_norm=True, windows=qwen2.upper_windows(config)
    )
    return llama.read_config(config, family, **{**given, **features})


def read_gguf(metadata: Mapping[str, Any]) -> ModelSpec:
    return llama.read_gguf(metadata, "qwen3", "qwen3", qk_norm=True)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read_config=read_config,
    prefixes=llama.FAMILY.prefixes,
    tensors={
        **llama.FAMILY.tensors,
        "layers.{i}.attn.q_norm": Source("layers.{i}.self_attn.q_norm"),
        "layers.{i}.attn.k_norm": Source("layers.{i}.self_attn.k_norm"),
    },
    gguf_architectures=("qwen3",),
    read_gguf=read_gguf,
    gguf_tensors={
        **llama.GGUF_TENSORS,
        "layers.{i}.attn.q_norm": Source("blk.{i}.attn_q_norm"),
        "layers.{i}.attn.k_norm": Source("blk.{i}.attn_k_norm"),
    },
)
