"""Entries of `config.json` that several families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.config import Activation, RopeConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation_of(architecture: str, name: str) -> Activation:
    """Our name of an activation function; raises `UnsupportedArchitectureError` with the known ones."""
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedArchitectureError(
            f"{architecture} with the activation {name!r} is not supported; known are {known}"
        )
    return _ACTIVATIONS[name]


def read_windows(config: Mapping[str, Any], sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Windows by layer, in tokens: where `layer_types` has them, else in the layers for which `sliding` is true."""
    size, layers = config.get("sliding_window"), config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if sliding(layer) else "full_attention" for layer in range(layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        raise UnsupportedArchitectureError(f"layer types {sorted(set(kinds))} of {len(kinds)} layers are not supported")
    if size is None or "sliding_attention" not in kinds:
        return ()
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)


_ROPE_KINDS = "default, linear, llama3, yarn and longrope"


def read_rope(config: Mapping[str, Any], head_dim: int, default_theta: float = 10_000.0) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).

    Raises `UnsupportedArchitectureError` naming the known kinds for one that depends on the text's length
    ('dynamic') or is not known.
    """
    parameters = {**config, **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or default_theta)
    dim = int(head_dim * float(parameters.get("partial_rotary_factor") or 1.0))
    shared: dict[str, Any] = dict(theta=theta, dim=None if dim == head_dim else dim)
    if kind == "default":
        return RopeConfig(**shared)
    if kind == "linear":
        return RopeConfig(**shared, kind="linear", factor=float(parameters["factor"]))
    original = int(parameters.get("original_max_position_embeddings") or config["max_position_embeddings"])
    if kind == "llama3":
        return RopeConfig(
            **shared,
            kind="llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_positions=original,
        )
    if kind == "yarn":
        factor = float(parameters.get("factor") or config["max_position_embeddings"] / original)
        return RopeConfig(
            **shared,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
            magnitude=yarn_magnitude(parameters, factor),
        )
    if kind in ("longrope", "su"):
        factors = tuple(float(value) for value in parameters["short_factor"])
        if len(factors) != dim // 2:
            raise ValueError(f"short_factor has {len(factors)} entries, but {dim // 2} pairs rotate")
        stretch = float(parameters.get("factor") or config["max_position_embeddings"] / original)
        given = parameters.get("attention_factor")
        return RopeConfig(
            **shared,
            kind="factors",
            factors=factors,
            original_max_positions=original,
            magnitude=longrope_magnitude(stretch, original) if given is None else float(given),
        )
    raise UnsupportedArchitectureError(f"rope type {kind!r} is not supported; known are {_ROPE_KINDS}")


def longest_context(positions: int, rope: RopeConfig) -> int:
    """How many of a model's positions one set of frequencies serves.

    LongRoPE has one set for texts up to the original context and another for longer ones, which would change the
    keys of all earlier tokens; the first is used, so texts end there.
    """
    return min(positions, rope.original_max_positions) if rope.kind == "factors" else positions


def yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Peng et al. (2023), section 3.4, as the published configurations refine it."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    part, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(part) / grown(whole) if part and whole else grown(1.0)


def longrope_magnitude(stretch: float, original: int) -> float:
    """Ding et al. (2024), of a context `stretch` times the `original` number of tokens."""
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
