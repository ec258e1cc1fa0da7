"""Phi-3, 3.5 and 4: Llama with fused projections; long contexts by LongRoPE, served up to the original context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.families import llama
from flexgen_helm.models.families.base import Family, Source
from flexgen_helm.models.families.fields import longest_context, read_rope, read_windows
from flexgen_helm.models.spec import ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("type") == "yarn":  # the first exports' name for what they compute: LongRoPE
        config = {**config, "rope_scaling": {**scaling, "type": "longrope"}}
    rope = read_rope(config, config["hidden_size"] // config["num_attention_heads"])
    return llama.read_config(
        config,
        "phi3",
        rope=rope,
        max_positions=longest_context(config, rope),
        windows=read_windows(config, lambda layer: True),
        qkv_bias=False,
        out_bias=False,
    )


def _fused(name: str, *parts: str) -> Source:
    return Source("layers.{i}." + name, fused=parts)


_QKV = _fused("self_attn.qkv_proj", "q", "k", "v")
_GATE_UP = _fused("mlp.gate_up_proj", "gate", "up")
FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    read_config=read_config,
    prefixes=llama.FAMILY.prefixes,
    tensors={
        **llama.FAMILY.tensors,
        "layers.{i}.attn.q": _QKV,
        "layers.{i}.attn.k": _QKV,
        "layers.{i}.attn.v": _QKV,
        "layers.{i}.mlp.gate": _GATE_UP,
        "layers.{i}.mlp.up": _GATE_UP,
    },
)
