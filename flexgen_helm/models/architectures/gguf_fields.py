"""Metadata of GGUF files that several architectures share; keys begin with the architecture's GGUF name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.fields import longrope_magnitude, yarn_magnitude
from flexgen_helm.models.config import MoEConfig, RopeConfig

_REQUIRED = object()


def gguf_key(metadata: Mapping[str, Any], gguf_name: str) -> Callable[..., Any]:
    """Make `key(name[, default])`, which reads `<gguf_name>.<name>`; KeyError if it is absent without a default."""

    def key(name: str, default: Any = _REQUIRED) -> Any:
        full = f"{gguf_name}.{name}"
        return metadata[full] if default is _REQUIRED else metadata.get(full, default)

    return key


def read_gguf_rope(metadata: Mapping[str, Any], gguf_name: str, head_dim: int) -> RopeConfig:
    """Read the rotation from the keys, or the file's own factors (Llama from 3.1 on, Phi-3 with a long context)."""
    key = gguf_key(metadata, gguf_name)
    dim = int(key("rope.dimension_count", head_dim))
    shared: dict[str, Any] = dict(theta=float(key("rope.freq_base", 10_000.0)), dim=None if dim == head_dim else dim)
    factors, kind = metadata["rope_factors"], key("rope.scaling.type", "none") or "none"
    positions = int(key("context_length"))
    original = int(key("rope.scaling.original_context_length", positions))
    if factors:
        longrope = kind == "longrope" or "rope_factors_short.weight" in metadata["tensor_names"]
        magnitude = key("rope.scaling.attn_factor", None)
        if magnitude is None:
            magnitude = longrope_magnitude(positions / original, original) if longrope else 1.0
        return RopeConfig(
            **shared,
            kind="factors",
            factors=factors,
            original_max_positions=original if longrope else positions,
            magnitude=float(magnitude),
        )
    if kind == "none":
        return RopeConfig(**shared)
    factor = float(key("rope.scaling.factor"))
    if kind == "linear":
        return RopeConfig(**shared, kind="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            **shared,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=float(key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(key("rope.scaling.yarn_beta_slow", 1.0)),
            magnitude=yarn_magnitude({}, factor),
        )
    raise UnsupportedArchitectureError(
        f"GGUF rope scaling {kind!r} is not supported; known are none, linear, yarn and longrope"
    )


def read_gguf_experts(metadata: Mapping[str, Any], gguf_name: str) -> MoEConfig | None:
    """Read the experts of every layer; None if the file has none."""
    key = gguf_key(metadata, gguf_name)
    count = int(key("expert_count", 0))
    if not count:
        return None
    size = key("expert_feed_forward_length", None) or key("feed_forward_length")
    return MoEConfig(count=count, per_token=int(key("expert_used_count")), ffn_size=int(size))
