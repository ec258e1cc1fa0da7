"""Entries of `config.json` that several architectures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.config import Activation, ModelConfig, RopeConfig

# Ten times the deepest model that is published. A config could say billions, and each layer is listed.
MAX_LAYERS = 10_000

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def gpt_config(config: Mapping[str, Any], architecture: str, hidden: int, heads: int, **features: Any) -> ModelConfig:
    """Fill the record of a decoder like GPT-2: layer norms, biases, no gate, and keys and values for every query head.

    features: the other fields of `ModelConfig`, and those in which the architecture differs.
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
    return ModelConfig(**{**gpt, **features})


def activation_of(architecture: str, name: str) -> Activation:
    """Translate the name of an activation function. Raises `UnsupportedArchitectureError` with the known ones."""
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedArchitectureError(
            f"{architecture} with the activation {name!r} is not supported; known are {known}"
        )
    return _ACTIVATIONS[name]


def layer_indices(config: Mapping[str, Any]) -> range:
    """Return the indices of the layers. Raises `ValueError` for a number of them that no model has."""
    layers = config["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers!r}; it must be from 1 to {MAX_LAYERS:,}")
    return range(layers)


def read_windows(
    config: Mapping[str, Any], slides: Callable[[int], bool] = lambda layer: True
) -> tuple[int | None, ...]:
    """Read `ModelConfig.windows`. slides: whether a layer has a window, if `layer_types` does not say."""
    size, layers = config.get("sliding_window"), layer_indices(config)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(layer) else "full_attention" for layer in layers]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != len(layers):
        raise UnsupportedArchitectureError(f"layer types {sorted(set(kinds))} of {len(kinds)} layers are not supported")
    if size is None or "sliding_attention" not in kinds:
        return ()
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)


def read_rope(config: Mapping[str, Any], head_dim: int, default_theta: float = 10_000.0) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    Raises `UnsupportedArchitectureError` for an unknown kind, and for one that depends on the text's length
    ('dynamic').
    """
    parameters = {**config, **(config.get("rope_parameters") or config.get("rope_scaling") or {})}

    def number(name: str, default: float | None = None) -> float:
        return float(parameters[name] if default is None else parameters.get(name) or default)

    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    dim = int(head_dim * number("partial_rotary_factor", 1.0))
    shared: dict[str, Any] = dict(theta=number("rope_theta", default_theta), dim=None if dim == head_dim else dim)
    if kind == "default":
        return RopeConfig(**shared)
    if kind == "linear":
        return RopeConfig(**shared, kind="linear", factor=number("factor"))
    shared["original_max_positions"] = original = int(
        parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    )
    if kind == "llama3":
        return RopeConfig(
            **shared,
            kind="llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    stretch = float(parameters.get("factor") or config["max_position_embeddings"] / original)
    if kind == "yarn":
        return RopeConfig(
            **shared,
            kind="yarn",
            factor=stretch,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(parameters.get("truncate", True)),
            magnitude=_yarn_magnitude(parameters, stretch),
        )
    if kind in ("longrope", "su"):
        factors = tuple(float(value) for value in parameters["short_factor"])
        if len(factors) != dim // 2:
            raise ValueError(f"short_factor has {len(factors)} entries, but {dim // 2} pairs rotate")
        magnitude = parameters.get("attention_factor")
        if magnitude is None:  # Ding et al. (2024)
            magnitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
        return RopeConfig(**shared, kind="factors", factors=factors, magnitude=float(magnitude))
    raise UnsupportedArchitectureError(
        f"rope type {kind!r} is not supported; known are default, linear, llama3, yarn and longrope"
    )


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Peng et al. (2023), section 3.4, as the published configurations refine it."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
