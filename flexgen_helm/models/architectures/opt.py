"""OPT (125M to 175B, OPT-IML, Galactica): learned positions, biases, ReLU; OPT-350M with post-norm and projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.architectures.fields import activation_of, gpt_config
from flexgen_helm.models.decoder_config import DecoderConfig


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    norm_before = config.get("do_layer_norm_before", True)
    bias = config.get("enable_bias", True)
    return gpt_config(
        config,
        "opt",
        hidden,
        heads,
        num_layers=config["num_hidden_layers"],
        ffn_size=config["ffn_dim"],
        max_positions=config["max_position_embeddings"],
        embed_size=config.get("word_embed_proj_dim") or hidden,
        norm_eps=1e-5,
        activation=activation_of("OPT", config.get("activation_function", "relu")),
        residual="pre_norm" if norm_before else "post_norm",
        norm_affine=config.get("layer_norm_elementwise_affine", True),
        final_norm=norm_before and not config.get("_remove_final_layer_norm", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
    )


_LAYER = "decoder.layers.{i}."
ARCHITECTURE = Architecture(
    name="opt",
    hf_names=("OPTForCausalLM", "OPTModel"),
    read_config=read_config,
    tensors={
        "embed.tokens.weight": TensorSource("decoder.embed_tokens.weight"),
        "embed.positions.weight": TensorSource("decoder.embed_positions.weight"),
        "embed.project_in.weight": TensorSource("decoder.project_in.weight"),
        "head.project_out.weight": TensorSource("decoder.project_out.weight"),
        "head.norm": TensorSource("decoder.final_layer_norm"),
        "head.lm.weight": TensorSource("lm_head.weight"),
        "layers.{i}.attn_norm": TensorSource(_LAYER + "self_attn_layer_norm"),
        "layers.{i}.attn.q": TensorSource(_LAYER + "self_attn.q_proj"),
        "layers.{i}.attn.k": TensorSource(_LAYER + "self_attn.k_proj"),
        "layers.{i}.attn.v": TensorSource(_LAYER + "self_attn.v_proj"),
        "layers.{i}.attn.o": TensorSource(_LAYER + "self_attn.out_proj"),
        "layers.{i}.mlp_norm": TensorSource(_LAYER + "final_layer_norm"),
        "layers.{i}.mlp.up": TensorSource(_LAYER + "fc1"),
        "layers.{i}.mlp.down": TensorSource(_LAYER + "fc2"),
    },
)
