"""Metadata of GGUF files that several families share; keys begin with the architecture's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures.fields import longrope_magnitude, yarn_magnitude
from flexgen_helm.models.config import MoEConfig, RopeConfig

_REQUIRED = object()


def gguf_key(metadata: Mapping[str, Any], arch: str) -> Callable[..., Any]:
    """key(name[, default]) -> the value of `<arch>.<name>`; KeyError where it is absent and has no default."""

    def key(name: str, default: Any = _REQUIRED) -> Any:
        full = f"{arch}.{name}"
        return metadata[full] if default is _REQUIRED else metadata.get(full, default)

    return key


def read_gguf_rope(metadata: Mapping[str, Any], arch: str, head_dim: int) -> RopeConfig:
    """Rotation by the keys, or by the file's own factors (Llama 3.1 and later, Phi-3 for long contexts)."""
    key = gguf_key(metadata, arch)
    dim = int(key("rope.dimension_count", head_dim))
    shared: dict[str, Any] = dict(theta=float(key("rope.freq_base", 10_000.0)), dim=None if dim == head_dim else dim)
    factors, kind = metadata["rope_factors"], key("rope.scaling.type", "none") or "none"
    positions = int(key("context_length"))
    original = int(key("rope.scaling.original_context_length", positions))
    if factors:
        given = key("rope.scaling.attn_factor", None)
        long = kind == "longrope" or "rope_factors_short.weight" in metadata["tensor_names"]
        magnitude = longrope_magnitude(positions / original, original) if given is None and long else given
        return RopeConfig(
            **shared,
            kind="factors",
            factors=factors,
            original_max_positions=original if long else positions,
            magnitude=1.0 if magnitude is None else float(magnitude),
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


def read_gguf_experts(metadata: Mapping[str, Any], arch: str) -> MoEConfig | None:
    """The experts of every layer; None where the file has none."""
    key = gguf_key(metadata, arch)
    count = int(key("expert_count", 0))
    if not count:
        return None
    size = key("expert_feed_forward_length", None) or key("feed_forward_length")
    return MoEConfig(count=count, per_token=int(key("expert_used_count")), ffn_size=int(size))
