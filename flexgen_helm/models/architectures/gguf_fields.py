"""The metadata of GGUF files in the words of `config.json`, so that an architecture reads both with one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.fields import GGUF_ROTATED

_REQUIRED = object()
# Keys that are not read -> values with which they change nothing; None stands for all.
_NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.layer_norm_epsilon": None,  # all norms here are RMS norms
    "attention.scale": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.finetuned": None,  # whether the stretched model was trained on
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": None,  # of the model's first publication
}


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `config.json` that GGUF metadata stand for, and the file's 'tensor_names'.

    What is missing has llama.cpp's default.

    Raises KeyError for missing metadata without one, and `UnsupportedArchitectureError` for keys of the architecture
    that nothing here reads.
    """
    architecture, read = str(metadata["general.architecture"]), set()

    def key(name: str, default: Any = _REQUIRED) -> Any:
        full = f"{architecture}.{name}"
        read.add(full)
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
        GGUF_ROTATED: int(key("rope.dimension_count", head_dim)),
        "rope_scaling": _rope_scaling(metadata, key),
        "tie_word_embeddings": "output.weight" not in metadata["tensor_names"],
    }
    neutral = {
        **_NEUTRAL,
        "attention.value_length": (head_dim,),
        "attention.sliding_window": (0, config["max_position_embeddings"]),
        "rope.freq_base_swa": (config["rope_theta"],),
        "vocab_size": (config["vocab_size"],),
    }
    if architecture == "phi3":
        config["sliding_window"] = key("attention.sliding_window", None) or None
    if architecture in ("gemma2", "gemma3"):
        config |= _windows(architecture, config["num_hidden_layers"], key)
    if metadata.get(f"{architecture}.expert_count"):
        config["num_experts"] = int(key("expert_count"))
        config["num_experts_per_tok"] = int(key("expert_used_count"))
        config["moe_intermediate_size"] = int(key("expert_feed_forward_length", None) or config["intermediate_size"])
        config["norm_topk_prob"] = True
    if unread := [name for name in metadata if name.startswith(f"{architecture}.") and name not in read]:
        values = {name: neutral.get(name.partition(".")[2], ()) for name in unread}
        if changing := [
            f"{name} = {metadata[name]}" for name, ok in values.items() if ok is not None and metadata[name] not in ok
        ]:
            raise UnsupportedArchitectureError(f"GGUF {architecture} with {', '.join(changing)} is not supported")
    return config


def _windows(architecture: str, layers: int, key: Callable[..., Any]) -> dict[str, Any]:
    """Return which layers of a Gemma have a window, its size, and the soft caps where the file has them."""
    gemma2 = architecture == "gemma2"
    window = key("attention.sliding_window", 4096) if gemma2 else key("attention.sliding_window")
    pattern = key("attention.sliding_window_pattern", 2 if gemma2 else 6)
    if not isinstance(pattern, list):
        pattern = [not pattern or (layer + 1) % pattern != 0 for layer in range(layers)]
    caps = {name: key(name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if not window or 0.0 in caps.values():
        raise UnsupportedArchitectureError(f"GGUF {architecture} with a window or soft cap of 0 is not supported")
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "rope_local_base_freq": None if gemma2 else key("rope.freq_base_swa", None),
        **{name: cap for name, cap in caps.items() if cap is not None},
    }


def _rope_scaling(metadata: Mapping[str, Any], key: Callable[..., Any]) -> dict[str, Any]:
    """Return the file's own factors (Llama from 3.1 on, Phi-3 with a long context), or what stretches the rotation."""
    positions = int(key("context_length"))
    original = int(key("rope.scaling.original_context_length", positions))
    kind, magnitude = key("rope.scaling.type", "linear"), key("rope.scaling.attn_factor", None)
    factor = float(key("rope.scaling.factor", key("rope.scale_linear", 0.0))) or 1.0
    betas = {name: key(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
    factors = metadata["rope_factors"]
    if kind == "none" and factor != 1.0:
        raise UnsupportedArchitectureError(f"GGUF rope scaling 'none' with the factor {factor:g} contradicts itself")
    if kind not in ("none", "linear", "yarn", "longrope") or (kind == "longrope") > bool(factors):
        raise UnsupportedArchitectureError(
            f"GGUF rope scaling {kind!r} is not supported; known are none, linear, yarn and, with factors, longrope"
        )
    if factors:
        if factor != 1.0 or kind == "yarn":
            raise UnsupportedArchitectureError(
                f"GGUF rope scaling {kind!r} by {factor:g} beside factors is not supported"
            )
        longrope = "rope_factors_short.weight" in metadata["tensor_names"]
        if longrope and original < positions:
            magnitude = key("rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "original_max_position_embeddings": original if longrope else positions,
            "attention_factor": 1.0 if magnitude is None else magnitude,
        }
    # llama.cpp multiplies it into the layers with a window, too, which are not stretched.
    if magnitude not in (None, 1.0) and (kind != "yarn" or metadata["general.architecture"] == "gemma3"):
        raise UnsupportedArchitectureError(f"GGUF rope.scaling.attn_factor = {magnitude} is not supported here")
    if kind == "yarn":
        own = 1.0 if magnitude is None else float(magnitude)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": own * (1.0 + 0.1 * math.log(factor)),
            **betas,
        }
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
