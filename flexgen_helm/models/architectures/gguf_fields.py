"""The metadata of GGUF files in the words of `config.json`, so that an architecture reads both with one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.fields import GGUF_ROTATED

_REQUIRED = object()


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `config.json` that GGUF metadata stand for, and the file's 'tensor_names'.

    Raises KeyError for missing metadata.
    """

    def key(name: str, default: Any = _REQUIRED) -> Any:
        full = f"{metadata['general.architecture']}.{name}"
        return metadata[full] if default is _REQUIRED else metadata.get(full, default)

    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    head_dim = int(key("attention.key_length", hidden // heads))
    config = {
        "tensor_names": metadata["tensor_names"],
        "num_hidden_layers": int(key("block_count")),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": int(key("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "intermediate_size": int(key("feed_forward_length")),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(key("context_length")),
        "rms_norm_eps": float(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": key("rope.freq_base", 10_000.0),
        "rope_local_base_freq": key("rope.freq_base_swa", None),
        GGUF_ROTATED: int(key("rope.dimension_count", head_dim)),
        "rope_scaling": _rope_scaling(metadata, key),
        "sliding_window": key("attention.sliding_window", None) or None,
        "attn_logit_softcapping": key("attn_logit_softcapping", None),
        "final_logit_softcapping": key("final_logit_softcapping", None),
        "tie_word_embeddings": "output.weight" not in metadata["tensor_names"],
    }
    if experts := int(key("expert_count", 0)):
        config["num_experts"] = experts
        config["num_experts_per_tok"] = int(key("expert_used_count"))
        config["moe_intermediate_size"] = int(key("expert_feed_forward_length", None) or config["intermediate_size"])
        config["norm_topk_prob"] = True
    return config


def _rope_scaling(metadata: Mapping[str, Any], key: Callable[..., Any]) -> dict[str, Any]:
    """Return the file's own factors (Llama from 3.1 on, Phi-3 with a long context), or what stretches the rotation."""
    kind, positions = key("rope.scaling.type", None) or "none", int(key("context_length"))
    original = int(key("rope.scaling.original_context_length", positions))
    if factors := metadata["rope_factors"]:
        longrope = kind == "longrope" or "rope_factors_short.weight" in metadata["tensor_names"]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "original_max_position_embeddings": original if longrope else positions,
            "attention_factor": key("rope.scaling.attn_factor", None),
        }
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedArchitectureError(
            f"GGUF rope scaling {kind!r} is not supported; known are none, linear, yarn and longrope"
        )
    return {
        "rope_type": kind,
        "factor": float(key("rope.scaling.factor")),
        "original_max_position_embeddings": original,
        "beta_fast": key("rope.scaling.yarn_beta_fast", None),
        "beta_slow": key("rope.scaling.yarn_beta_slow", None),
    }
