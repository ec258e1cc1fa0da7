"""What a family module provides, and the vocabulary of its tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexgen_helm.models.spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """Where a canonical tensor lies in a checkpoint.

    name: the checkpoint's name, with `{i}` for the layer. rope_heads: 'q' or 'kv' where the checkpoint stores
    rotary rows interleaved (GGUF of Llama) and they must be put back into halves.
    """

    name: str
    rope_heads: str | None = None


@dataclass(frozen=True)
class Family:
    """One model family, declaratively.

    architectures: the names in `config.json`'s "architectures" (or GGUF's `general.architecture`) that it serves.
    read_config: configuration dictionary (as in `config.json`) -> ModelSpec; raises `UnsupportedArchitectureError`
    for a feature that the record cannot express. tensors: canonical name (layer as `{i}`) -> Source.
    prefixes: name prefixes that some exports of the same weights leave out or add.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelSpec]
    tensors: Mapping[str, Source]
    prefixes: tuple[str, ...] = ("",)
    gguf_architectures: tuple[str, ...] = ()
    read_gguf: Callable[[Mapping[str, Any]], ModelSpec] | None = None
    gguf_tensors: Mapping[str, Source] = field(default_factory=dict)
