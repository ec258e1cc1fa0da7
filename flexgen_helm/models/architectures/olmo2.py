"""OLMo 2: Llama with norms behind both blocks instead of before them, and norms over all queries and all keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.decoder_config import DecoderConfig


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = {"rms_norm_eps": 1e-5, **config}  # the default of `transformers`
    return llama.read_config(config, "olmo2", residual="reordered_norm", qk_norm=True, qk_norm_all_heads=True)


_LAYER = "layers.{i}."
ARCHITECTURE = Architecture(
    name="olmo2",
    hf_names=("Olmo2ForCausalLM", "Olmo2Model"),
    read_config=read_config,
    tensors={
        **llama.ARCHITECTURE.tensors,
        "layers.{i}.attn.q_norm": TensorSource(_LAYER + "self_attn.q_norm"),
        "layers.{i}.attn.k_norm": TensorSource(_LAYER + "self_attn.k_norm"),
        # Llama has this name for the norm before the MLP.
        "layers.{i}.attn_post_norm": TensorSource(_LAYER + "post_attention_layernorm"),
        "layers.{i}.mlp_post_norm": TensorSource(_LAYER + "post_feedforward_layernorm"),
    },
    gguf_names=("olmo2",),
    gguf_tensors={
        **llama.GGUF_TENSORS,
        "layers.{i}.attn.q_norm": TensorSource("blk.{i}.attn_q_norm"),
        "layers.{i}.attn.k_norm": TensorSource("blk.{i}.attn_k_norm"),
        "layers.{i}.attn_post_norm": TensorSource("blk.{i}.post_attention_norm"),
        "layers.{i}.mlp_post_norm": TensorSource("blk.{i}.post_ffw_norm"),
    },
)
