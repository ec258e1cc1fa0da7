"""Decoders like GPT-2: layer norms, no gate. OPT, GPT-2, GPT-Neo, GPT-NeoX (Pythia), BLOOM and
MPT.
"""

from __future__ import annotations

from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.base import (
    Architecture,
    TensorSource,
    fused_sources,
    sources,
)
from flexgen_helm.models.architectures.fields import (
    Config,
    activation_of,
    decoder_config,
    layer_indices,
    read_rope,
)
from flexgen_helm.models.decoder_config import DecoderConfig


def _gpt_config(
    config: Config, architecture: str, hidden: int, heads: int, **features: Any
) -> DecoderConfig:
    """Fill the record of a decoder like GPT-2.

    features: the other fields of `DecoderConfig`, and those in which the architecture differs.
    """
    gpt: dict[str, Any] = dict(
        architecture=architecture,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=config["vocab_size"],
        embed_size=hidden,
        norm="layernorm",
        gated_mlp=False,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=config.get("tie_word_embeddings", True),
    )
    return decoder_config(config, **{**gpt, **features})


def _renamed(config: Config, **names: str) -> Config:
    """Return a configuration with the names that are read here.

    names: alias=name; the value of an alias wins over that of the name.
    """
    return {
        **config,
        **{name: config[alias] for alias, name in names.items() if config.get(alias) is not None},
    }


def read_opt(config: Config) -> DecoderConfig:
    hidden = config["hidden_size"]
    norm_before = config.get("do_layer_norm_before", True)
    bias = config.get("enable_bias", True)
    return _gpt_config(
        config,
        "opt",
        hidden,
        config["num_attention_heads"],
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


# OPT (125M to 175B, OPT-IML, Galactica): learned positions, ReLU; OPT-350M with post-norm and
# projections.
OPT = Architecture(
    "opt",
    ("OPTForCausalLM", "OPTModel"),
    read_opt,
    sources({
        "embed.tokens.weight": "decoder.embed_tokens.weight",
        "embed.positions.weight": "decoder.embed_positions.weight",
        "embed.project_in.weight": "decoder.project_in.weight",
        "head.project_out.weight": "decoder.project_out.weight",
        "head.norm": "decoder.final_layer_norm",
        "head.lm.weight": "lm_head.weight",
        "layers.{i}.attn_norm": "decoder.layers.{i}.self_attn_layer_norm",
        "layers.{i}.attn.q": "decoder.layers.{i}.self_attn.q_proj",
        "layers.{i}.attn.k": "decoder.layers.{i}.self_attn.k_proj",
        "layers.{i}.attn.v": "decoder.layers.{i}.self_attn.v_proj",
        "layers.{i}.attn.o": "decoder.layers.{i}.self_attn.out_proj",
        "layers.{i}.mlp_norm": "decoder.layers.{i}.final_layer_norm",
        "layers.{i}.mlp.up": "decoder.layers.{i}.fc1",
        "layers.{i}.mlp.down": "decoder.layers.{i}.fc2",
    }),
)  # fmt: skip


def read_gpt2(config: Config) -> DecoderConfig:
    config = _renamed(
        config,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    for flag in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(flag):
            raise UnsupportedArchitectureError(f"GPT-2 with {flag} is not supported")
    hidden = config["n_embd"]
    return _gpt_config(
        config,
        "gpt2",
        hidden,
        config["n_head"],
        num_layers=config["n_layer"],
        ffn_size=config.get("n_inner") or 4 * hidden,
        max_positions=config["n_positions"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=activation_of("GPT-2", config.get("activation_function", "gelu_new")),
        attn_scale=None if config.get("scale_attn_weights", True) else 1.0,
    )


# Learned positions, fused and transposed projections, tied head.
GPT2 = Architecture(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model"),
    read_gpt2,
    sources({
        "embed.tokens.weight": "wte.weight",
        "embed.positions.weight": "wpe.weight",
        "head.norm": "ln_f",
        "head.lm.weight": "lm_head.weight",
        "layers.{i}.attn_norm": "h.{i}.ln_1",
        "layers.{i}.mlp_norm": "h.{i}.ln_2",
    })
    | fused_sources("layers.{i}.attn", ("q", "k", "v"), "h.{i}.attn.c_attn", transposed=True)
    | sources({
        "layers.{i}.attn.o": "h.{i}.attn.c_proj",
        "layers.{i}.mlp.up": "h.{i}.mlp.c_fc",
        "layers.{i}.mlp.down": "h.{i}.mlp.c_proj",
    }, transposed=True),
    prefixes=("transformer.", ""),
)  # fmt: skip


def read_gpt_neo(config: Config) -> DecoderConfig:
    config = _renamed(config, num_layers="num_hidden_layers", num_attention_heads="num_heads")
    hidden, layers = config["hidden_size"], layer_indices(config)
    kinds = config.get("attention_layers") or [
        kind for kinds, count in config["attention_types"] for _ in range(count) for kind in kinds
    ]
    if len(kinds) != len(layers) or not {*kinds} <= {"global", "local"}:
        raise UnsupportedArchitectureError(
            f"GPT-Neo with the attention_layers {kinds} is not supported"
        )
    return _gpt_config(
        config,
        "gpt_neo",
        hidden,
        config["num_heads"],
        num_layers=len(layers),
        ffn_size=config.get("intermediate_size") or 4 * hidden,
        max_positions=config["max_position_embeddings"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=activation_of("GPT-Neo", config.get("activation_function", "gelu_new")),
        qkv_bias=False,
        attn_scale=1.0,
        windows=tuple(
            config.get("window_size", 256) if kind == "local" else None for kind in kinds
        ),
    )


# Learned positions, windows in every other layer, scores without a factor, tied head.
GPT_NEO = Architecture(
    "gpt_neo",
    ("GPTNeoForCausalLM", "GPTNeoModel"),
    read_gpt_neo,
    sources({
        "embed.tokens.weight": "wte.weight",
        "embed.positions.weight": "wpe.weight",
        "head.norm": "ln_f",
        "head.lm.weight": "lm_head.weight",
        "layers.{i}.attn_norm": "h.{i}.ln_1",
        "layers.{i}.attn.q": "h.{i}.attn.attention.q_proj",
        "layers.{i}.attn.k": "h.{i}.attn.attention.k_proj",
        "layers.{i}.attn.v": "h.{i}.attn.attention.v_proj",
        "layers.{i}.attn.o": "h.{i}.attn.attention.out_proj",
        "layers.{i}.mlp_norm": "h.{i}.ln_2",
        "layers.{i}.mlp.up": "h.{i}.mlp.c_fc",
        "layers.{i}.mlp.down": "h.{i}.mlp.c_proj",
    }),
    prefixes=("transformer.", ""),
)  # fmt: skip


def read_gpt_neox(config: Config) -> DecoderConfig:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("head_dim") not in (None, hidden // heads):
        raise UnsupportedArchitectureError("GPT-NeoX with a head_dim of its own is not supported")
    bias = config.get("attention_bias", True)
    # Beside the rope parameters `transformers` reads these names alone, and ignores those of other
    # architectures.
    rope_entries = {
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return _gpt_config(
        config,
        "gpt_neox",
        hidden,
        heads,
        num_layers=config["num_hidden_layers"],
        ffn_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config.get("layer_norm_eps", 1e-5),
        activation=activation_of("GPT-NeoX", config.get("hidden_act", "gelu")),
        rope=read_rope({**config, **rope_entries}, hidden // heads, is_partial=True),
        residual="parallel" if config.get("use_parallel_residual", True) else "pre_norm",
        qkv_bias=bias,
        out_bias=bias,
        tied_head=config.get("tie_word_embeddings", False),
    )


def _fused_blocks(layer: str, attention: str) -> dict[str, TensorSource]:
    """The layers of GPT-NeoX and BLOOM."""
    names = {
        "layers.{i}.attn_norm": f"{layer}.input_layernorm",
        "layers.{i}.attn.o": f"{layer}.{attention}.dense",
        "layers.{i}.mlp_norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.mlp.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": f"{layer}.mlp.dense_4h_to_h",
    }
    fused = fused_sources(
        "layers.{i}.attn", ("q", "k", "v"), f"{layer}.{attention}.query_key_value", by_head=True
    )
    return sources(names) | fused


# GPT-NeoX-20B, Pythia: parallel residual, rotary positions in a quarter of each head.
GPT_NEOX = Architecture(
    "gpt_neox",
    ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    read_gpt_neox,
    sources({
        "embed.tokens.weight": "embed_in.weight",
        "head.norm": "final_layer_norm",
        "head.lm.weight": "embed_out.weight",
    })
    | _fused_blocks("layers.{i}", "attention"),
    prefixes=("gpt_neox.", ""),
)  # fmt: skip

# ALiBi sets no context length; BLOOM was trained with this one.
_TRAINED_POSITIONS = 2048


def read_bloom(config: Config) -> DecoderConfig:
    config = _renamed(
        config, n_embed="hidden_size", num_hidden_layers="n_layer", num_attention_heads="n_head"
    )
    if config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedArchitectureError(
            "BLOOM with apply_residual_connection_post_layernorm is not supported"
        )
    hidden = config["hidden_size"]
    return _gpt_config(
        config,
        "bloom",
        hidden,
        config["n_head"],
        num_layers=config["n_layer"],
        ffn_size=4 * hidden,
        max_positions=config.get("seq_length") or _TRAINED_POSITIONS,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        alibi=True,
        embed_norm=True,
    )


# BLOOM (560M to 176B, BLOOMZ): ALiBi, an embedding norm.
BLOOM = Architecture(
    "bloom",
    ("BloomForCausalLM", "BloomModel"),
    read_bloom,
    sources({
        "embed.tokens.weight": "word_embeddings.weight",
        "embed.norm": "word_embeddings_layernorm",
        "head.norm": "ln_f",
        "head.lm.weight": "lm_head.weight",
    })
    | _fused_blocks("h.{i}", "self_attention"),
    prefixes=("transformer.", ""),
)  # fmt: skip


def read_mpt(config: Config) -> DecoderConfig:
    config = _renamed(
        config, hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers"
    )
    attention = config.get("attn_config") or {}
    supported_values = {
        "clip_qkv": None,
        "qk_ln": False,
        "prefix_lm": False,
        "alibi": True,
        "alibi_bias_max": 8,
        "no_bias": True,
        "logit_scale": None,
    }
    for name, supported in supported_values.items():
        if (value := {**config, **attention}.get(name)) not in (None, supported):
            raise UnsupportedArchitectureError(f"MPT with {name} {value!r} is not supported")
    hidden = config["d_model"]
    return _gpt_config(
        config,
        "mpt",
        hidden,
        config["n_heads"],
        num_layers=config["n_layers"],
        ffn_size=4 * hidden,
        max_positions=config["max_seq_len"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        norm_bias=False,
        activation="gelu",
        alibi=True,
        attn_scale=attention.get("softmax_scale"),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


# MPT (7B, 30B): ALiBi, no biases.
MPT = Architecture(
    "mpt",
    ("MptForCausalLM", "MptModel", "MPTForCausalLM"),
    read_mpt,
    sources({
        "embed.tokens.weight": "wte.weight",
        "head.norm": "norm_f",
        "head.lm.weight": "lm_head.weight",
        "layers.{i}.attn_norm": "blocks.{i}.norm_1",
        "layers.{i}.attn.o": "blocks.{i}.attn.out_proj",
        "layers.{i}.mlp_norm": "blocks.{i}.norm_2",
        "layers.{i}.mlp.up": "blocks.{i}.ffn.up_proj",
        "layers.{i}.mlp.down": "blocks.{i}.ffn.down_proj",
    })
    | fused_sources("layers.{i}.attn", ("q", "k", "v"), "blocks.{i}.attn.Wqkv"),
    prefixes=("transformer.", ""),
)  # fmt: skip
