"""Entries of `config.json` that several architectures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.decoder_config import Activation, DecoderConfig, RopeConfig

Config = Mapping[str, Any]  # content of `config.json`, or what `gguf_config` returns

# Ten times the deepest model that is published. A config could say billions, and each layer is
# listed.
MAX_LAYERS = 10_000

# Rotated elements of a head, as GGUF files say for every architecture. No `config.json` has an
# entry of this name.
GGUF_ROTATED = "rope.dimension_count"

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def decoder_config(config: Config, **record: Any) -> DecoderConfig:
    """Make a record of its fields, `architecture` among them.

    With LongRoPE the context length is limited to the original one: the second set of factors, for
    longer texts, would change the keys of all earlier tokens.

    Raises `UnsupportedArchitectureError` for entries that `transformers` applies to any model, and
    no record has.
    """
    if config.get("is_causal") is False:
        raise UnsupportedArchitectureError(
            f"{record['architecture']} with is_causal false generates nothing"
        )
    if config.get("per_layer_config"):
        raise UnsupportedArchitectureError(
            f"{record['architecture']} with per_layer_config is not supported"
        )
    for rope in (record["rope"], record.get("local_rope")):
        if rope is not None and rope.kind == "factors":
            record["max_positions"] = min(record["max_positions"], rope.original_max_positions)
    return DecoderConfig(**record)


def activation_of(architecture: str, name: str) -> Activation:
    """Translate the name of an activation function. Raises `UnsupportedArchitectureError` with the
    known ones.
    """
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedArchitectureError(
            f"{architecture} with the activation {name!r} is not supported; known are {known}"
        )
    return _ACTIVATIONS[name]


def layer_indices(config: Mapping[str, Any]) -> range:
    """Return the indices of the layers. Raises `ValueError` for a number of them that no model
    has.
    """
    layers = config["num_hidden_layers"]
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers!r}; it must be from 1 to {MAX_LAYERS:,}")
    return range(layers)


def read_windows(
    config: Mapping[str, Any], slides: Callable[[int], bool] | None = None
) -> tuple[int | None, ...]:
    """Read `DecoderConfig.windows`.

    slides: whether a layer has a window, if `layer_types` does not say; None if every layer has it,
        and the architecture ignores that entry.
    """
    size, layers = config.get("sliding_window"), layer_indices(config)
    kinds = None if slides is None else config.get("layer_types")
    if kinds is None:
        kinds = [
            "sliding_attention" if slides is None or slides(layer) else "full_attention"
            for layer in layers
        ]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != len(layers):
        raise UnsupportedArchitectureError(
            f"layer types {sorted(set(kinds))} of {len(kinds)} layers are not supported"
        )
    if size is None or "sliding_attention" not in kinds:
        return ()
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    default_theta: float = 10_000.0,
    is_partial: bool = False,
) -> RopeConfig:
    """Read `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    Their entries may also stand in the configuration itself. Of entries that contradict each other
    the one wins that `transformers` takes (`modeling_rope_utils.py`): `rope_scaling` before
    `rope_parameters`, and either before the configuration itself, but for the original context.

    is_partial: the architecture rotates the part of a head that `partial_rotary_factor` says;
        others ignore the entry.

    Raises `UnsupportedArchitectureError` for an unknown kind, and for one that depends on the
    text's length ('dynamic').
    """
    rope: Config = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise UnsupportedArchitectureError(
            f"rope parameters by kind of layer ({', '.join(nested)}) are not supported"
        )

    def or_outside(name: str, default: float) -> float:
        return float(rope.get(name) or config.get(name) or default)

    kind = rope.get("rope_type") or rope.get("type") or "default"
    rotated = int(head_dim * or_outside("partial_rotary_factor", 1.0))
    dim = config.get(GGUF_ROTATED, rotated if is_partial else head_dim)
    if not is_partial and rotated != head_dim and kind != "default":
        raise UnsupportedArchitectureError(
            f"rope type {kind!r} with the partial_rotary_factor {rotated / head_dim:g} is not "
            "supported; transformers ignores the factor for this architecture without a rope type "
            "only"
        )
    return RopeConfig(
        theta=or_outside("rope_theta", default_theta),
        dim=None if dim == head_dim else dim,
        **_stretching(kind, rope, config, dim),
    )


def _stretching(kind: str, rope: Config, config: Config, dim: int) -> dict[str, Any]:
    """Return the fields of `RopeConfig` that say how rotations are stretched to a longer context.

    kind: `rope_type`. rope: the rope parameters of `config`.
    dim: rotated elements of a head.
    """
    if kind == "default":
        return {}
    if kind == "linear":
        return {"kind": kind, "factor": float(rope["factor"])}
    if kind not in ("llama3", "yarn", "longrope"):
        raise UnsupportedArchitectureError(
            f"rope type {kind!r} is not supported; known are default, linear, llama3, yarn and "
            "longrope"
        )
    longest, name = config["max_position_embeddings"], "original_max_position_embeddings"
    original = int(config.get(name) or rope.get(name) or longest)
    fields: dict[str, Any] = {"kind": kind, "original_max_positions": original}
    if kind == "llama3":
        return fields | {
            name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
        }
    stretch = float(rope.get("factor") or longest / original)
    if kind == "yarn":
        return fields | dict(
            factor=stretch,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            magnitude=_yarn_magnitude(rope, stretch),
        )
    factors = tuple(float(value) for value in rope["short_factor"])
    if len(factors) != dim // 2:
        raise ValueError(f"short_factor has {len(factors)} entries, but {dim // 2} pairs rotate")
    magnitude = rope.get("attention_factor")
    if magnitude is None:  # Ding et al. (2024)
        magnitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return fields | dict(kind="factors", factors=factors, magnitude=float(magnitude))


def _yarn_magnitude(rope: Config, factor: float) -> float:
    """Factor on cosines and sines: Peng et al. (2023), section 3.4, as published configurations
    refine it.
    """
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    log = 0.1 * math.log(max(factor, 1.0))
    return (log * scale + 1.0) / (log * scale_all + 1.0) if scale and scale_all else log + 1.0
