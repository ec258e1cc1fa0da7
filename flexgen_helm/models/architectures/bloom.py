"""BLOOM (560M to 176B, BLOOMZ): ALiBi, an embedding norm, fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.base import Architecture, TensorSource, fused_sources
from flexgen_helm.models.architectures.fields import gpt_config, with_own_names
from flexgen_helm.models.decoder_config import DecoderConfig

# ALiBi sets no context length; the models were trained with this one.
_TRAINED_POSITIONS = 2048


# Words of other architectures that `transformers` takes too.
_NAMES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = with_own_names(config, _NAMES)
    if config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedArchitectureError("BLOOM with apply_residual_connection_post_layernorm is not supported")
    hidden, heads = config["hidden_size"], config["n_head"]
    return gpt_config(
        config,
        "bloom",
        hidden,
        heads,
        num_layers=config["n_layer"],
        ffn_size=4 * hidden,
        max_positions=config.get("seq_length") or _TRAINED_POSITIONS,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        alibi=True,
        embed_norm=True,
    )


_LAYER = "h.{i}."
ARCHITECTURE = Architecture(
    name="bloom",
    hf_names=("BloomForCausalLM", "BloomModel"),
    read_config=read_config,
    prefixes=("transformer.", ""),
    tensors={
        "embed.tokens.weight": TensorSource("word_embeddings.weight"),
        "embed.norm": TensorSource("word_embeddings_layernorm"),
        "head.norm": TensorSource("ln_f"),
        "head.lm.weight": TensorSource("lm_head.weight"),
        "layers.{i}.attn_norm": TensorSource(_LAYER + "input_layernorm"),
        **fused_sources("layers.{i}.attn", ("q", "k", "v"), _LAYER + "self_attention.query_key_value", by_head=True),
        "layers.{i}.attn.o": TensorSource(_LAYER + "self_attention.dense"),
        "layers.{i}.mlp_norm": TensorSource(_LAYER + "post_attention_layernorm"),
        "layers.{i}.mlp.up": TensorSource(_LAYER + "mlp.dense_h_to_4h"),
        "layers.{i}.mlp.down": TensorSource(_LAYER + "mlp.dense_4h_to_h"),
    },
)
