"""Gemma 3, text: Gemma 2 with normed queries and keys instead of soft caps, and another rotation in windowed layers.

The sizes from 4B on are published with an image encoder; only their text model is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import gemma2, qwen3
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.fields import read_rope
from flexgen_helm.models.config import ModelConfig

# Entries that published configurations of the text model omit.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    text = {**_DEFAULTS, **(config.get("text_config") or config)}
    if text.get("attn_logit_softcapping") is not None:
        raise UnsupportedArchitectureError("Gemma 3 with attn_logit_softcapping is not supported")
    ropes = text.get("rope_parameters") or {}
    if "full_attention" in ropes:  # transformers 5: one set of parameters for each kind of layer
        text = {**text, "rope_parameters": ropes["full_attention"]}
        local = {**text, "rope_parameters": ropes["sliding_attention"]}
    else:
        local = {"rope_theta": text.get("rope_local_base_freq")}
    return gemma2.read_config(
        text,
        "gemma3",
        rope=read_rope(text, text["head_dim"], default_theta=1_000_000.0),
        local_rope=read_rope(local, text["head_dim"]),
        windows=gemma2.alternating_windows(text, text.get("sliding_window_pattern") or 6),
        qk_norm=True,
        attn_softcap=None,
        final_softcap=text.get("final_logit_softcapping"),
    )


def read_gguf(config: Mapping[str, Any]) -> ModelConfig:
    return gemma2.read_gguf(config, read_config, layers_of_27b=62)


ARCHITECTURE = Architecture(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    read_config=read_config,
    overflows_float16=True,
    # 'language_model': with an image encoder, as published and as transformers 5 names the same tensors.
    prefixes=("model.", "language_model.model.", "model.language_model.", "language_model.", ""),
    tensors={**qwen3.ARCHITECTURE.tensors, **gemma2.ARCHITECTURE.tensors},
    gguf_names=("gemma3",),
    read_gguf=read_gguf,
    gguf_tensors={**qwen3.ARCHITECTURE.gguf_tensors, **gemma2.ARCHITECTURE.gguf_tensors},
)
