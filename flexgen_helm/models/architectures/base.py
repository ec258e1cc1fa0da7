"""What a family module provides, and the vocabulary of its tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flexgen_helm.models.config import ModelConfig


@dataclass(frozen=True)
class TensorSource:
    """Where a canonical tensor lies in a checkpoint.

    name: the checkpoint's name, with `{i}` for the layer and `{e}` for the expert. rope_heads: 'q' or 'kv' where the
    checkpoint stores rotary rows interleaved (GGUF of Llama) and they must be put back into halves. fused: the last
    parts of the canonical names that lie in this one tensor, in order ('q', 'k', 'v'), one whole after the other or,
    `by_head`, one head of each after the other. experts: all experts lie in this one tensor, each whole after the
    other. transposed: the matrix is stored [in, out].
    """

    name: str
    rope_heads: str | None = None
    fused: tuple[str, ...] = ()
    by_head: bool = False
    experts: bool = False
    transposed: bool = False


def fused_sources(
    owner: str, parts: tuple[str, ...], name: str, by_head: bool = False, transposed: bool = False
) -> dict[str, TensorSource]:
    """Canonical name -> Source of each of the `parts` of `owner` that lie in the one tensor `name`."""
    return {
        f"{owner}.{part}": TensorSource(name, fused=parts, by_head=by_head, transposed=transposed) for part in parts
    }


@dataclass(frozen=True)
class RowSelection:
    """Which rows of a stored tensor are one of ours: `count` from `first` on, `repeats` times, `stride` rows apart.

    total: rows that the stored tensor has. A vector's rows are its elements.
    """

    total: int
    first: int
    count: int
    stride: int = 0
    repeats: int = 1


def select_rows(
    source: TensorSource, canonical: str, model_config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> RowSelection:
    """The rows of `source` that are the canonical tensor, whose shapes `shapes` gives."""
    size = shapes[canonical][0]
    if source.experts:
        assert model_config.experts is not None and not source.fused
        return RowSelection(model_config.experts.count * size, int(canonical.split(".")[_EXPERT]) * size, size)
    if not source.fused:
        return RowSelection(size, 0, size)
    owner, _, leaf = canonical.rpartition(".")
    stem, _, part = owner.rpartition(".")
    sizes = [shapes[f"{stem}.{name}.{leaf}"][0] for name in source.fused]
    before = sum(sizes[: source.fused.index(part)])
    if not source.by_head:
        return RowSelection(sum(sizes), before, size)
    heads = model_config.num_heads
    return RowSelection(sum(sizes), before // heads, size // heads, sum(sizes) // heads, heads)


# Places in a canonical name: layers.{i}.mlp.experts.{e}.gate.weight
_LAYER, _EXPERT = 1, 4


def find_source(tensors: Mapping[str, TensorSource], canonical: str) -> TensorSource:
    """Where the canonical tensor lies, numbers and `.weight`/`.bias` filled in; KeyError if the map lacks it."""
    parts, numbers = canonical.split("."), {}
    if parts[0] == "layers":
        numbers["{i}"], parts[_LAYER] = parts[_LAYER], "{i}"
        if parts[_EXPERT - 1] == "experts":
            numbers["{e}"], parts[_EXPERT] = parts[_EXPERT], "{e}"
    generic = ".".join(parts)
    source, ending = tensors.get(generic), ""
    if source is None:
        stem, _, leaf = generic.rpartition(".")
        source, ending = tensors[stem], "." + leaf
    name = source.name
    for mark, number in numbers.items():
        name = name.replace(mark, number)
    return replace(source, name=name + ending)


@dataclass(frozen=True)
class Architecture:
    """One model family, declaratively.

    architectures: the names in `config.json`'s "architectures" (or GGUF's `general.architecture`) that it serves.
    read_config: configuration dictionary (as in `config.json`) -> ModelSpec; raises `UnsupportedArchitectureError`
    for a feature that the record cannot express. tensors: canonical name (layer as `{i}`) -> Source.
    prefixes: name prefixes that some exports of the same weights leave out or add.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    tensors: Mapping[str, TensorSource]
    prefixes: tuple[str, ...] = ("",)
    gguf_architectures: tuple[str, ...] = ()
    read_gguf: Callable[[Mapping[str, Any]], ModelConfig] | None = None
    gguf_tensors: Mapping[str, TensorSource] = field(default_factory=dict)
