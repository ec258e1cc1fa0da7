"""Gemma 2 and 3: Llama with norms around both blocks, whose weights are added to one, and a window
in most layers.

Gemma 2 has soft caps on scores and logits. Gemma 3 has normed queries and keys instead, and another
rotation in windowed layers; of its sizes that are published with an image encoder, the text model
is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture, sources
from flexgen_helm.models.architectures.fields import (
    GGUF_ROTATED,
    Config,
    activation_of,
    read_rope,
    read_windows,
)
from flexgen_helm.models.architectures.llama import GGUF_TENSORS, POST_NORMS, QK_NORMS, TENSORS
from flexgen_helm.models.decoder_config import DecoderConfig, RopeConfig


def _alternating_windows(config: Config, full_every: int) -> tuple[int | None, ...]:
    return read_windows(config, lambda layer: (layer + 1) % full_every != 0)


def read_gemma2(config: Config, architecture: str = "gemma2", **features: Any) -> DecoderConfig:
    # the defaults of `transformers`
    config = {"num_key_value_heads": 4, "sliding_window": 4096, **config}
    if config.get("use_bidirectional_attention"):
        raise UnsupportedArchitectureError(
            f"{architecture} with use_bidirectional_attention generates nothing"
        )
    gemma: dict[str, Any] = dict(
        head_dim=config.get("head_dim") or 256,
        activation=activation_of(
            architecture, config.get("hidden_activation") or "gelu_pytorch_tanh"
        ),
        tied_head=config.get("tie_word_embeddings", True),
        windows=_alternating_windows(config, full_every=2),
        residual="sandwich",
        embed_scale=config["hidden_size"] ** 0.5,
        norm_plus_one=True,
        attn_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        attn_softcap=config.get("attn_logit_softcapping", 50.0),
        final_softcap=config.get("final_logit_softcapping", 30.0),
    )
    return llama.read_llama(config, architecture, **{**gemma, **features})


def _with_attention_scale(config: Config, layers_of_27b: int) -> Config:
    """Add the attention scale, which GGUF files lack.

    It is another for the 27B size, which is known by its number of layers.
    """
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scalar = (
        config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    )
    return {**config, "query_pre_attn_scalar": scalar}


_TENSORS = (
    TENSORS | POST_NORMS | sources({"layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm"})
)

GEMMA2 = Architecture(
    "gemma2",
    ("Gemma2ForCausalLM", "Gemma2Model"),
    read_gemma2,
    _TENSORS,
    overflows_float16=True,
    gguf_names=("gemma2",),
    # GGUF files store 1 + weight of every norm.
    read_gguf=lambda config: replace(
        read_gemma2(_with_attention_scale(config, layers_of_27b=46)), norm_plus_one=False
    ),
    gguf_tensors=GGUF_TENSORS,
)

# Entries that published configurations of Gemma 3's text model omit.
_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "sliding_window": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip


def read_gemma3(config: Config) -> DecoderConfig:
    tied = config.get("tie_word_embeddings", True)  # of the text model alone the entry is not asked
    text = {**_DEFAULTS, **(config.get("text_config") or config), "tie_word_embeddings": tied}
    if text.get("attn_logit_softcapping") is not None:
        raise UnsupportedArchitectureError("Gemma 3 with attn_logit_softcapping is not supported")
    rope, local_rope = _read_ropes(text)
    return read_gemma2(
        text,
        "gemma3",
        rope=rope,
        local_rope=local_rope,
        windows=_alternating_windows(text, text.get("sliding_window_pattern") or 6),
        qk_norm=True,
        attn_softcap=None,
        final_softcap=text.get("final_logit_softcapping"),
    )


def _read_ropes(text: Config) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of layers without and with a window.

    Raises `UnsupportedArchitectureError` for parameters that releases of `transformers` take for
    different ones.
    """
    by_kind, scaling = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    if by_kind and not {"full_attention", "sliding_attention"} & by_kind.keys():
        raise UnsupportedArchitectureError(
            "Gemma 3 with rope_parameters that are not by kind of layer is not supported"
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise UnsupportedArchitectureError(
            "Gemma 3 with rope_scaling by type instead of rope_type is not supported"
        )
    parameters = [rope for rope in (scaling, *by_kind.values()) if isinstance(rope, Mapping)]
    if not all(rope.get("truncate", True) for rope in parameters):
        raise UnsupportedArchitectureError(
            "Gemma 3 with rope_parameters that set truncate to false is not supported"
        )
    shared = {
        name: text[name]
        for name in ("max_position_embeddings", "partial_rotary_factor", GGUF_ROTATED)
        if text.get(name) is not None
    }

    def read(rope: Config, theta_name: str, default_theta: float) -> RopeConfig:
        config = {**shared, "rope_parameters": rope, "rope_theta": text.get(theta_name)}
        return read_rope(config, text["head_dim"], default_theta)

    full = {**(by_kind.get("full_attention") or {}), **scaling}
    local = by_kind.get("sliding_attention") or {}
    return read(full, "rope_theta", 1_000_000.0), read(local, "rope_local_base_freq", 10_000.0)


GEMMA3 = Architecture(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    read_gemma3,
    _TENSORS | QK_NORMS,
    overflows_float16=True,
    # 'language_model': with an image encoder, as published and as transformers 5 names the same
    # tensors.
    prefixes=("model.", "language_model.model.", "model.language_model.", "language_model.", ""),
    gguf_names=("gemma3",),
    read_gguf=lambda config: replace(
        read_gemma3(_with_attention_scale(config, layers_of_27b=62)), norm_plus_one=False
    ),
    gguf_tensors=GGUF_TENSORS,
)
