"""Llama 2 and 3, SmolLM2: RMS norm, rotary positions, gated SiLU, grouped keys and values. Base of many others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.architectures.fields import activation_of, read_rope, refuse_unread, within_original_context
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.decoder_config import DecoderConfig


def read_config(config: Mapping[str, Any], architecture: str = "llama", **features: Any) -> DecoderConfig:
    """Read Llama's `config.json`. features: fields of `DecoderConfig` in which another architecture differs."""
    refuse_unread(config, architecture)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = features.get("head_dim") or config.get("head_dim") or hidden // heads
    attention_bias = config.get("attention_bias", False)
    llama: dict[str, Any] = dict(
        architecture=architecture,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        embed_size=hidden,
        norm="rmsnorm",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=activation_of(architecture, config.get("hidden_act", "silu")),
        gated_mlp=True,
        rope=features.get("rope") or read_rope(config, head_dim),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=architecture == "llama" and config.get("mlp_bias", False),
        tied_head=config.get("tie_word_embeddings", False),
    )
    return within_original_context(DecoderConfig(**{**llama, **features}))


# No key of the metadata tells of biases.
_GGUF_BIASES = {"qkv_bias": "attn_q", "out_bias": "attn_output", "mlp_bias": "ffn_up"}


def read_gguf(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the metadata of Llama's files, which are also Mixtral's, as `gguf_config` returns them."""
    experts = None
    if "num_experts" in config:
        experts = MoEConfig(config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"])
    biased: dict[str, Any] = {
        field: f"blk.0.{name}.bias" in config["tensor_names"] for field, name in _GGUF_BIASES.items()
    }
    return read_config(config, experts=experts, **biased)


_LAYER = "layers.{i}."
ARCHITECTURE = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM", "LlamaModel"),
    read_config=read_config,
    tensors={
        "embed.tokens.weight": TensorSource("embed_tokens.weight"),
        "head.norm": TensorSource("norm"),
        "head.lm.weight": TensorSource("lm_head.weight"),
        "layers.{i}.attn_norm": TensorSource(_LAYER + "input_layernorm"),
        "layers.{i}.attn.q": TensorSource(_LAYER + "self_attn.q_proj"),
        "layers.{i}.attn.k": TensorSource(_LAYER + "self_attn.k_proj"),
        "layers.{i}.attn.v": TensorSource(_LAYER + "self_attn.v_proj"),
        "layers.{i}.attn.o": TensorSource(_LAYER + "self_attn.o_proj"),
        "layers.{i}.mlp_norm": TensorSource(_LAYER + "post_attention_layernorm"),
        "layers.{i}.mlp.gate": TensorSource(_LAYER + "mlp.gate_proj"),
        "layers.{i}.mlp.up": TensorSource(_LAYER + "mlp.up_proj"),
        "layers.{i}.mlp.down": TensorSource(_LAYER + "mlp.down_proj"),
    },
    gguf_names=("llama",),
    read_gguf=read_gguf,
    gguf_tensors={
        "embed.tokens.weight": TensorSource("token_embd.weight"),
        "head.norm": TensorSource("output_norm"),
        "head.lm.weight": TensorSource("output.weight"),
        "layers.{i}.attn_norm": TensorSource("blk.{i}.attn_norm"),
        "layers.{i}.attn.q": TensorSource("blk.{i}.attn_q", rope_heads="q"),
        "layers.{i}.attn.k": TensorSource("blk.{i}.attn_k", rope_heads="kv"),
        "layers.{i}.attn.v": TensorSource("blk.{i}.attn_v"),
        "layers.{i}.attn.o": TensorSource("blk.{i}.attn_output"),
        "layers.{i}.mlp_norm": TensorSource("blk.{i}.ffn_norm"),
        "layers.{i}.mlp.gate": TensorSource("blk.{i}.ffn_gate"),
        "layers.{i}.mlp.up": TensorSource("blk.{i}.ffn_up"),
        "layers.{i}.mlp.down": TensorSource("blk.{i}.ffn_down"),
        "layers.{i}.mlp.router": TensorSource("blk.{i}.ffn_gate_inp"),
        "layers.{i}.mlp.experts.{e}.gate": TensorSource("blk.{i}.ffn_gate_exps", experts=True),
        "layers.{i}.mlp.experts.{e}.up": TensorSource("blk.{i}.ffn_up_exps", experts=True),
        "layers.{i}.mlp.experts.{e}.down": TensorSource("blk.{i}.ffn_down_exps", experts=True),
    },
)
# Other architectures' files do not interleave the rows of queries and keys.
GGUF_TENSORS: Mapping[str, TensorSource] = {
    name: replace(source, rope_heads=None) for name, source in ARCHITECTURE.gguf_tensors.items()
}
