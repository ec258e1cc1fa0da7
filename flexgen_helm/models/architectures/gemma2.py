"""Gemma 2: norms around both blocks, soft caps on scores and logits, every other layer with a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import llama
from flexgen_helm.models.architectures.base import Architecture, TensorSource
from flexgen_helm.models.architectures.fields import activation_of, read_windows
from flexgen_helm.models.decoder_config import DecoderConfig


def alternating_windows(config: Mapping[str, Any], full_every: int) -> tuple[int | None, ...]:
    return read_windows(config, lambda layer: (layer + 1) % full_every != 0)


def read_config(config: Mapping[str, Any], architecture: str = "gemma2", **features: Any) -> DecoderConfig:
    config = {"num_key_value_heads": 4, "sliding_window": 4096, **config}  # the defaults of `transformers`
    if config.get("use_bidirectional_attention"):
        raise UnsupportedArchitectureError(f"{architecture} with use_bidirectional_attention generates nothing")
    gemma: dict[str, Any] = dict(
        head_dim=config.get("head_dim") or 256,
        activation=activation_of(architecture, config.get("hidden_activation") or "gelu_pytorch_tanh"),
        tied_head=config.get("tie_word_embeddings", True),
        windows=alternating_windows(config, full_every=2),
        residual="sandwich",
        embed_scale=config["hidden_size"] ** 0.5,
        norm_plus_one=True,
        attn_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        attn_softcap=config.get("attn_logit_softcapping", 50.0),
        final_softcap=config.get("final_logit_softcapping", 30.0),
    )
    return llama.read_config(config, architecture, **{**gemma, **features})


def read_gguf(
    config: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], DecoderConfig] = read_config,
    layers_of_27b: int = 46,
) -> DecoderConfig:
    """Read the metadata as `gguf_config` returns them; the files store 1 + weight of every norm.

    layers_of_27b: the files lack the attention scale, which is another for the 27B size, known by its layers.
    """
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return replace(read({**config, "query_pre_attn_scalar": scalar}), norm_plus_one=False)


_LAYER = "layers.{i}."
ARCHITECTURE = Architecture(
    name="gemma2",
    hf_names=("Gemma2ForCausalLM", "Gemma2Model"),
    read_config=read_config,
    overflows_float16=True,
    tensors={
        **llama.ARCHITECTURE.tensors,
        "layers.{i}.attn_post_norm": TensorSource(_LAYER + "post_attention_layernorm"),
        "layers.{i}.mlp_norm": TensorSource(_LAYER + "pre_feedforward_layernorm"),
        "layers.{i}.mlp_post_norm": TensorSource(_LAYER + "post_feedforward_layernorm"),
    },
    gguf_names=("gemma2",),
    read_gguf=read_gguf,
    gguf_tensors={
        **llama.GGUF_TENSORS,
        "layers.{i}.attn_post_norm": TensorSource("blk.{i}.post_attention_norm"),
        "layers.{i}.mlp_post_norm": TensorSource("blk.{i}.post_ffw_norm"),
    },
)
