"""The metadata of GGUF files in the words of `config.json`, so that an architecture reads both with
one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.fields import GGUF_ROTATED

_REQUIRED = object()
# Keys that only these architectures use.
_USED_BY = {
    "attention.sliding_window": ("gemma2", "gemma3", "phi3"),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
    "rope.freq_base_swa": ("gemma3",),
    "expert_count": ("llama", "qwen3moe"),
}


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `config.json` that GGUF metadata stand for, and the file's
    'tensor_names'.

    A missing key has llama.cpp's default. Raises KeyError where there is none,
    `UnsupportedArchitectureError` for keys that nothing here reads.
    """
    architecture = metadata["general.architecture"]
    keys_read = set()

    def key(name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of the architecture's key `name`."""
        full_name = f"{architecture}.{name}"
        if architecture in _USED_BY.get(name, (architecture,)):
            keys_read.add(full_name)
        return metadata[full_name] if default is _REQUIRED else metadata.get(full_name, default)

    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    head_dim = int(key("attention.key_length", hidden // heads))
    rotated = int(key("rope.dimension_count", head_dim))
    is_gemma2 = architecture == "gemma2"
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
        GGUF_ROTATED: rotated,
        "rope_scaling": _rope_scaling(metadata, key),
        "sliding_window": key("attention.sliding_window", 4096 if is_gemma2 else None) or None,
        "attn_logit_softcapping": key("attn_logit_softcapping", 50.0 if is_gemma2 else None),
        "final_logit_softcapping": key("final_logit_softcapping", 30.0 if is_gemma2 else None),
        "tie_word_embeddings": "output.weight" not in metadata["tensor_names"],
    }
    if experts := int(key("expert_count", 0)):
        config |= dict(
            num_experts=experts,
            num_experts_per_tok=int(key("expert_used_count")),
            moe_intermediate_size=int(
                key("expert_feed_forward_length", None) or config["intermediate_size"]
            ),
            norm_topk_prob=True,
        )
    if rotated != head_dim and architecture != "phi3":
        raise UnsupportedArchitectureError(
            f"GGUF {architecture} that rotates a part of each head is not supported"
        )
    _require_all_read(metadata, keys_read, config)
    return config


def _require_all_read(
    metadata: Mapping[str, Any], keys_read: set[str], config: Mapping[str, Any]
) -> None:
    """Raise `UnsupportedArchitectureError` for keys of the architecture that were not read, unless
    their values change nothing.
    """
    architecture = metadata["general.architecture"]
    neutral: dict[str, Any] = {
        "vocab_size": (config["vocab_size"],),
        "attention.value_length": (config["head_dim"],),
        "attention.causal": (True,),
        "attention.sliding_window_pattern": {"gemma2": (2,), "gemma3": (6,)}.get(architecture, ()),
        "expert_gating_func": (1,),  # softmax
        "expert_weights_norm": (True,),
        "expert_weights_scale": (0.0, 1.0),
        "rope.scaling.finetuned": (True, False),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "tensor_data_layout": ("Meta AI original pth",),
        **dict.fromkeys(
            (
                "expert_count",
                "expert_used_count",
                "expert_shared_count",
                "expert_group_count",
                "pooling_type",
                "nextn_predict_layers",
                "leading_dense_block_count",
            ),
            (0,),
        ),
    }
    unread = [
        name
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.") and name not in keys_read
        if value not in neutral.get(name.removeprefix(f"{architecture}."), ())
    ]
    if unread:
        raise UnsupportedArchitectureError(
            f"GGUF metadata that nothing here reads, and that may change the numbers: "
            f"{', '.join(f'{name} = {str(metadata[name])[:40]}' for name in unread[:4])}"
        )


def _rope_scaling(metadata: Mapping[str, Any], key: Callable[..., Any]) -> dict[str, Any]:
    """Return the `rope_scaling` entry, as llama.cpp reads it: a factor without a type is linear.

    key: gives the value of a key of the architecture, or the default behind its name.
    The file may have its own factors (Llama from 3.1 on, Phi-3 with a long context).
    """
    kind, positions = key("rope.scaling.type", "linear"), int(key("context_length"))
    factor = float(key("rope.scaling.factor", None) or key("rope.scale_linear", None) or 1.0)
    original = int(key("rope.scaling.original_context_length", positions))
    magnitude = float(key("rope.scaling.attn_factor", 1.0))
    betas = {name: key(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
    factors = metadata["rope_factors"]
    known = ("none", "linear", "longrope") if factors else ("none", "linear", "yarn")
    if kind not in known or ((factors or kind == "none") and factor != 1.0):
        raise UnsupportedArchitectureError(
            f"GGUF rope scaling {kind!r} by {factor:g} with {len(factors)} factors of its own is "
            "not supported; known are none, linear and yarn without factors, none and longrope "
            "with them"
        )
    if factors:
        longrope = kind == "longrope" or "rope_factors_short.weight" in metadata["tensor_names"]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "original_max_position_embeddings": original if longrope else positions,
            "attention_factor": magnitude,
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": magnitude * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            **betas,
        }
    if magnitude != 1.0:
        raise UnsupportedArchitectureError(
            f"GGUF rope scaling {kind!r} with attn_factor {magnitude:g} is not supported"
        )
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
