"""Gemma 3, text: Gemma 2 with normed queries and keys instead of soft caps, and another rotation in windowed layers.

The sizes from 4B on are published with an image encoder; only their text model is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import gemma2, qwen3
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.architectures.fields import GGUF_ROTATED, read_rope
from flexgen_helm.models.decoder_config import DecoderConfig, RopeConfig

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


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    tied = config.get("tie_word_embeddings", True)  # of the text model alone the entry is not asked
    text = {**_DEFAULTS, **(config.get("text_config") or config), "tie_word_embeddings": tied}
    if text.get("attn_logit_softcapping") is not None:
        raise UnsupportedArchitectureError("Gemma 3 with attn_logit_softcapping is not supported")
    rope, local_rope = _read_ropes(text)
    return gemma2.read_config(
        text,
        "gemma3",
        rope=rope,
        local_rope=local_rope,
        windows=gemma2.alternating_windows(text, text.get("sliding_window_pattern") or 6),
        qk_norm=True,
        attn_softcap=None,
        final_softcap=text.get("final_logit_softcapping"),
    )


def _read_ropes(text: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of layers without and with a window.

    Raises `UnsupportedArchitectureError` for parameters that releases of `transformers` take for different ones.
    """
    by_kind, scaling = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    if by_kind and not {"full_attention", "sliding_attention"} & by_kind.keys():
        raise UnsupportedArchitectureError(
            "Gemma 3 with rope_parameters that are not by kind of layer is not supported"
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise UnsupportedArchitectureError("Gemma 3 with rope_scaling by type instead of rope_type is not supported")
    if not all(own.get("truncate", True) for own in (scaling, *by_kind.values()) if isinstance(own, Mapping)):
        raise UnsupportedArchitectureError("Gemma 3 with rope_parameters that set truncate to false is not supported")
    beside = {name: text.get(name) for name in ("max_position_embeddings", "partial_rotary_factor", GGUF_ROTATED)}
    beside = {name: value for name, value in beside.items() if value is not None}
    full = {**(by_kind.get("full_attention") or {}), **scaling}
    return (
        read_rope(
            {**beside, "rope_parameters": full, "rope_theta": text.get("rope_theta")}, text["head_dim"], 1_000_000.0
        ),
        read_rope(
            {
                **beside,
                "rope_parameters": by_kind.get("sliding_attention"),
                "rope_theta": text.get("rope_local_base_freq"),
            },
            text["head_dim"],
        ),
    )


def read_gguf(config: Mapping[str, Any]) -> DecoderConfig:
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
