"""GPT-2: learned positions, layer norms, fused and transposed projections, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.base import Architecture, TensorSource, fused_sources
from flexgen_helm.models.architectures.fields import activation_of, gpt_config, with_own_names
from flexgen_helm.models.decoder_config import DecoderConfig

# Words of other architectures that `transformers` takes too.
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = with_own_names(config, _NAMES)
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(flag):
            raise UnsupportedArchitectureError(f"GPT-2 with {flag} is not supported")
    hidden, heads = config["n_embd"], config["n_head"]
    return gpt_config(
        config,
        "gpt2",
        hidden,
        heads,
        num_layers=config["n_layer"],
        ffn_size=config.get("n_inner") or 4 * hidden,
        max_positions=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=activation_of("GPT-2", config.get("activation_function", "gelu_new")),
        attn_scale=None if config.get("scale_attn_weights", True) else 1.0,
    )


_LAYER = "h.{i}."
ARCHITECTURE = Architecture(
    name="gpt2",
    hf_names=("GPT2LMHeadModel", "GPT2Model"),
    read_config=read_config,
    prefixes=("transformer.", ""),
    tensors={
        "embed.tokens.weight": TensorSource("wte.weight"),
        "embed.positions.weight": TensorSource("wpe.weight"),
        "head.norm": TensorSource("ln_f"),
        "head.lm.weight": TensorSource("lm_head.weight"),
        "layers.{i}.attn_norm": TensorSource(_LAYER + "ln_1"),
        **fused_sources("layers.{i}.attn", ("q", "k", "v"), _LAYER + "attn.c_attn", transposed=True),
        "layers.{i}.attn.o": TensorSource(_LAYER + "attn.c_proj", transposed=True),
        "layers.{i}.mlp_norm": TensorSource(_LAYER + "ln_2"),
        "layers.{i}.mlp.up": TensorSource(_LAYER + "mlp.c_fc", transposed=True),
        "layers.{i}.mlp.down": TensorSource(_LAYER + "mlp.c_proj", transposed=True),
    },
)
