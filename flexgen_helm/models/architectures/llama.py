"""Llama 2 and 3, SmolLM2, and the architectures that differ from it in a few fields.

RMS norm, rotary positions, gated SiLU, grouped keys and values.
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
    read_windows,
)
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.decoder_config import DecoderConfig


def read_llama(config: Config, architecture: str = "llama", **features: Any) -> DecoderConfig:
    """Read Llama's `config.json`. features: fields of `DecoderConfig` in which another architecture
    differs.
    """
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
    return decoder_config(config, **{**llama, **features})


def read_gguf(config: Config) -> DecoderConfig:
    """Read the metadata of Llama's files, which are also Mixtral's."""
    experts = None
    if "num_experts" in config:
        experts = MoEConfig(
            config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]
        )

    def has_bias(name: str) -> bool:  # no key of the metadata tells
        return f"blk.0.{name}.bias" in config["tensor_names"]

    return read_llama(
        config,
        experts=experts,
        qkv_bias=has_bias("attn_q"),
        out_bias=has_bias("attn_output"),
        mlp_bias=has_bias("ffn_up"),
    )


TENSORS = sources({
    "embed.tokens.weight": "embed_tokens.weight",
    "head.norm": "norm",
    "head.lm.weight": "lm_head.weight",
    "layers.{i}.attn_norm": "layers.{i}.input_layernorm",
    "layers.{i}.attn.q": "layers.{i}.self_attn.q_proj",
    "layers.{i}.attn.k": "layers.{i}.self_attn.k_proj",
    "layers.{i}.attn.v": "layers.{i}.self_attn.v_proj",
    "layers.{i}.attn.o": "layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.mlp.up": "layers.{i}.mlp.up_proj",
    "layers.{i}.mlp.down": "layers.{i}.mlp.down_proj",
})  # fmt: skip
QK_NORMS = sources({
    "layers.{i}.attn.q_norm": "layers.{i}.self_attn.q_norm",
    "layers.{i}.attn.k_norm": "layers.{i}.self_attn.k_norm",
})  # fmt: skip
POST_NORMS = sources({
    # Llama's name of the norm before the MLP
    "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
})  # fmt: skip
GGUF_TENSORS = sources({
    "embed.tokens.weight": "token_embd.weight",
    "head.norm": "output_norm",
    "head.lm.weight": "output.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm",
    "layers.{i}.attn.q": "blk.{i}.attn_q",
    "layers.{i}.attn.k": "blk.{i}.attn_k",
    "layers.{i}.attn.v": "blk.{i}.attn_v",
    "layers.{i}.attn.o": "blk.{i}.attn_output",
    "layers.{i}.attn.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.attn.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
    "layers.{i}.mlp.gate": "blk.{i}.ffn_gate",
    "layers.{i}.mlp.up": "blk.{i}.ffn_up",
    "layers.{i}.mlp.down": "blk.{i}.ffn_down",
    "layers.{i}.mlp.router": "blk.{i}.ffn_gate_inp",
}) | sources({
    "layers.{i}.mlp.experts.{e}.gate": "blk.{i}.ffn_gate_exps",
    "layers.{i}.mlp.experts.{e}.up": "blk.{i}.ffn_up_exps",
    "layers.{i}.mlp.experts.{e}.down": "blk.{i}.ffn_down_exps",
}, experts=True)  # fmt: skip

LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM", "LlamaModel"),
    read_config=read_llama,
    tensors=TENSORS,
    gguf_names=("llama",),
    read_gguf=read_gguf,
    # Its files alone interleave the rows of queries and keys.
    gguf_tensors=GGUF_TENSORS
    | {
        "layers.{i}.attn.q": TensorSource("blk.{i}.attn_q", rope_heads="q"),
        "layers.{i}.attn.k": TensorSource("blk.{i}.attn_k", rope_heads="kv"),
    },
)

# The functions below begin with what `transformers` takes for entries that a `config.json` leaves
# out.


def read_mistral(config: Config) -> DecoderConfig:
    config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    return read_llama(
        config, "mistral", windows=read_windows(config), qkv_bias=False, out_bias=False
    )


# A sliding window in every layer.
MISTRAL = Architecture("mistral", ("MistralForCausalLM", "MistralModel"), read_mistral, TENSORS)


def read_mixtral(config: Config) -> DecoderConfig:
    config = {
        "num_key_value_heads": 8,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        **config,
    }
    experts = MoEConfig(
        config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]
    )
    return read_llama(
        config,
        "mixtral",
        experts=experts,
        windows=read_windows(config),
        qkv_bias=False,
        out_bias=False,
    )


# Mistral with eight experts in every layer, two for each token.
MIXTRAL = Architecture(
    "mixtral",
    ("MixtralForCausalLM", "MixtralModel"),
    read_mixtral,
    TENSORS
    | sources({
        "layers.{i}.mlp.router": "layers.{i}.block_sparse_moe.gate",
        "layers.{i}.mlp.experts.{e}.gate": "layers.{i}.block_sparse_moe.experts.{e}.w1",
        "layers.{i}.mlp.experts.{e}.up": "layers.{i}.block_sparse_moe.experts.{e}.w3",
        "layers.{i}.mlp.experts.{e}.down": "layers.{i}.block_sparse_moe.experts.{e}.w2",
    }),
)  # fmt: skip


def read_olmo2(config: Config) -> DecoderConfig:
    config = {"rms_norm_eps": 1e-5, **config}
    return read_llama(
        config, "olmo2", residual="reordered_norm", qk_norm=True, qk_norm_all_heads=True
    )


# Norms behind both blocks instead of before them, and norms over all queries and all keys.
OLMO2 = Architecture(
    "olmo2",
    ("Olmo2ForCausalLM", "Olmo2Model"),
    read_olmo2,
    TENSORS | QK_NORMS | POST_NORMS,
    gguf_names=("olmo2",),
    gguf_tensors=GGUF_TENSORS,
)


def read_phi3(config: Config) -> DecoderConfig:
    config = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **config}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("su", "yarn"):  # the first exports' names for what they compute: LongRoPE
        config, kind = {**config, "rope_scaling": {**scaling, "rope_type": "longrope"}}, "longrope"
    if kind not in ("default", "longrope"):
        raise UnsupportedArchitectureError(
            f"Phi-3 with the rope type {kind!r} is not supported; known is longrope"
        )
    return read_phi3_gguf(config)


def read_phi3_gguf(config: Config) -> DecoderConfig:
    """Read GGUF metadata, or a `config.json` that `read_phi3` has completed."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return read_llama(
        config,
        "phi3",
        rope=read_rope(config, head_dim, is_partial=True),
        windows=read_windows(config),
        qkv_bias=False,
        out_bias=False,
    )


# Phi-3, 3.5 and 4: fused projections; long contexts by LongRoPE, served up to the original context.
PHI3 = Architecture(
    "phi3",
    ("Phi3ForCausalLM", "Phi3Model"),
    read_phi3,
    TENSORS
    | fused_sources("layers.{i}.attn", ("q", "k", "v"), "layers.{i}.self_attn.qkv_proj")
    | fused_sources("layers.{i}.mlp", ("gate", "up"), "layers.{i}.mlp.gate_up_proj"),
    gguf_names=("phi3",),
    read_gguf=read_phi3_gguf,
    gguf_tensors=GGUF_TENSORS
    | fused_sources("layers.{i}.attn", ("q", "k", "v"), "blk.{i}.attn_qkv")
    | fused_sources("layers.{i}.mlp", ("gate", "up"), "blk.{i}.ffn_up"),
)


def _upper_windows(config: Config) -> tuple[int | None, ...]:
    """Read windows only if `use_sliding_window` is set; published checkpoints name a size without
    using it.
    """
    if not config.get("use_sliding_window", False):
        return ()
    return read_windows(config, lambda layer: layer >= config.get("max_window_layers", 28))


def read_qwen2(config: Config) -> DecoderConfig:
    config = {"num_key_value_heads": 32, "sliding_window": 4096, **config}
    return read_llama(
        config, "qwen2", qkv_bias=True, out_bias=False, windows=_upper_windows(config)
    )


# Qwen2 and 2.5: biases on queries, keys and values; upper layers may have a sliding window.
QWEN2 = Architecture(
    "qwen2",
    ("Qwen2ForCausalLM", "Qwen2Model"),
    read_qwen2,
    TENSORS,
    gguf_names=("qwen2",),
    gguf_tensors=GGUF_TENSORS,
)


def read_qwen3(config: Config) -> DecoderConfig:
    config = {"num_key_value_heads": 32, "sliding_window": 4096, **config}
    return read_llama(
        config,
        "qwen3",
        head_dim=config.get("head_dim") or 128,
        qk_norm=True,
        windows=_upper_windows(config),
    )


# Normed queries and keys; upper layers may have a sliding window.
QWEN3 = Architecture(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3Model"),
    read_qwen3,
    TENSORS | QK_NORMS,
    gguf_names=("qwen3",),
    gguf_tensors=GGUF_TENSORS,
)


def read_qwen3_moe(config: Config) -> DecoderConfig:
    config = {"num_key_value_heads": 4, "sliding_window": 4096, **config}
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    experts = MoEConfig(
        count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        normalize=config.get("norm_topk_prob", False),
        dense_layers=tuple(i for i in layer_indices(config) if i in dense or (i + 1) % step),
    )
    return read_llama(
        config,
        "qwen3_moe",
        qk_norm=True,
        experts=experts,
        windows=read_windows(config) if config.get("use_sliding_window") else (),
    )


# Qwen3 with experts (30B-A3B, 235B-A22B): many small ones, eight for each token.
QWEN3_MOE = Architecture(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    read_qwen3_moe,
    TENSORS
    | QK_NORMS
    | sources({
        "layers.{i}.mlp.router": "layers.{i}.mlp.gate",
        "layers.{i}.mlp.experts.{e}.gate": "layers.{i}.mlp.experts.{e}.gate_proj",
        "layers.{i}.mlp.experts.{e}.up": "layers.{i}.mlp.experts.{e}.up_proj",
        "layers.{i}.mlp.experts.{e}.down": "layers.{i}.mlp.experts.{e}.down_proj",
    }),
    gguf_names=("qwen3moe",),
    gguf_tensors=GGUF_TENSORS,
)  # fmt: skip
