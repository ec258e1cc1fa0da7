"""Phi-3, 3.5 and 4: Llama with fused projections; long contexts by LongRoPE, served up to the original context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture, TensorSource, fused_sources
from flexgen_helm.models.architectures.fields import read_rope, read_windows
from flexgen_helm.models.decoder_config import DecoderConfig

# What `transformers` takes for entries that a `config.json` leaves out, where Llama's default is another.
_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_DEFAULTS, **config}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("su", "yarn"):  # the first exports' names for what they compute: LongRoPE
        config, kind = {**config, "rope_scaling": {**scaling, "rope_type": "longrope"}}, "longrope"
    if kind not in ("default", "longrope"):
        raise UnsupportedArchitectureError(f"Phi-3 with the rope type {kind!r} is not supported; known is longrope")
    return read_gguf(config)


def read_gguf(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the metadata as `gguf_config` returns them, or a completed `config.json`."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return llama.read_config(
        config,
        "phi3",
        rope=read_rope(config, head_dim, is_partial=True),
        windows=read_windows(config),
        qkv_bias=False,
        out_bias=False,
    )


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
    read_gguf=read_gguf,
    gguf_tensors={**llama.GGUF_TENSORS, **_fused_tensors("blk.{i}.attn_qkv", "blk.{i}.ffn_up")},
)
