"""GPT-NeoX (Pythia, GPT-NeoX-20B): parallel residual, rotary positions in a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.base import Architecture, TensorSource, fused_sources
from flexgen_helm.models.architectures.fields import activation_of, gpt_config, read_rope
from flexgen_helm.models.decoder_config import DecoderConfig


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("head_dim") not in (None, hidden // heads):
        raise UnsupportedArchitectureError("GPT-NeoX with a head_dim of its own is not supported")
    bias = config.get("attention_bias", True)
    # Beside the rope parameters `transformers` reads these names alone, and ignores those of other architectures.
    beside = {
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return gpt_config(
        config,
        "gpt_neox",
        hidden,
        heads,
        num_layers=config["num_hidden_layers"],
        ffn_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config.get("layer_norm_eps", 1e-5),
        activation=activation_of("GPT-NeoX", config.get("hidden_act", "gelu")),
        rope=read_rope({**config, **beside}, hidden // heads, is_partial=True),
        residual="parallel" if config.get("use_parallel_residual", True) else "pre_norm",
        qkv_bias=bias,
        out_bias=bias,
        tied_head=config.get("tie_word_embeddings", False),
    )


_LAYER = "layers.{i}."
ARCHITECTURE = Architecture(
    name="gpt_neox",
    hf_names=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    read_config=read_config,
    prefixes=("gpt_neox.", ""),
    tensors={
        "embed.tokens.weight": TensorSource("embed_in.weight"),
        "head.norm": TensorSource("final_layer_norm"),
        "head.lm.weight": TensorSource("embed_out.weight"),
        "layers.{i}.attn_norm": TensorSource(_LAYER + "input_layernorm"),
        **fused_sources("layers.{i}.attn", ("q", "k", "v"), _LAYER + "attention.query_key_value", by_head=True),
        "layers.{i}.attn.o": TensorSource(_LAYER + "attention.dense"),
        "layers.{i}.mlp_norm": TensorSource(_LAYER + "post_attention_layernorm"),
        "layers.{i}.mlp.up": TensorSource(_LAYER + "mlp.dense_h_to_4h"),
        "layers.{i}.mlp.down": TensorSource(_LAYER + "mlp.dense_4h_to_h"),
    },
)
