"""Phi-3, 3.5 and 4: Llama with fused projections; long contexts by LongRoPE, served up to the original context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture, TensorSource, fused_sources
from flexgen_helm.models.architectures.fields import read_windows
from flexgen_helm.models.config import ModelConfig


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, **config}  # the default of `transformers`
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("type") == "yarn":  # the first exports' name for what they compute: LongRoPE
        config = {**config, "rope_scaling": {**scaling, "type": "longrope"}}
    model = llama.read_config(config, "phi3", windows=read_windows(config), qkv_bias=False, out_bias=False)
    if model.rope is None or model.rope.kind != "factors":
        return model
    # LongRoPE has a second set of factors for longer texts, which would change the keys of all earlier tokens.
    return replace(model, max_positions=min(model.max_positions, model.rope.original_max_positions))


def _fused_tensors(qkv: str, gate_up: str) -> dict[str, TensorSource]:
    projections = fused_sources("layers.{i}.attn", ("q", "k", "v"), qkv)
    return projections | fused_sources("layers.{i}.mlp", ("gate", "up"), gate_up)


ARCHITECTURE = Architecture(
    name="phi3",
    hf_names=("Phi3ForCausalLM", "Phi3Model"),
    read_config=read_config,
    tensors={
        **llama.ARCHITECTURE.tensors,
        **_fused_tensors("layers.{i}.self_attn.qkv_proj", "layers.{i}.mlp.gate_up_proj"),
    },
    gguf_names=("phi3",),
    gguf_tensors={**llama.GGUF_TENSORS, **_fused_tensors("blk.{i}.attn_qkv", "blk.{i}.ffn_up")},
)
