"""What an architecture's module provides: `Architecture`, and where checkpoints store each
canonical tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flexgen_helm.models.config import ModelConfig


@dataclass(frozen=True)
class TensorSource:
    """Where a checkpoint stores a canonical tensor.

    name: stored name; `{i}` is the layer, `{e}` the expert.
    rope_heads: the stored rows interleave the halves of every head, which `num_heads` ('q') or
        `num_kv_heads` ('kv') counts, and must be separated (GGUF files of Llama).
    fused: last parts of the canonical names that share the stored tensor, in order: ('q', 'k',
        'v').
    by_head: fused tensors alternate head by head instead of following each other as a whole.
    experts: the stored tensor holds all experts, one after the other.
    transposed: the matrix is stored [in, out].
    """

    name: str
    rope_heads: Literal["q", "kv"] | None = None
    fused: tuple[str, ...] = ()
    by_head: bool = False
    experts: bool = False
    transposed: bool = False


def sources(names: Mapping[str, str], **how: Any) -> dict[str, TensorSource]:
    """Canonical name -> source. names: canonical -> stored; how: fields of every source."""
    return {canonical: TensorSource(name, **how) for canonical, name in names.items()}


def fused_sources(
    owner: str, parts: tuple[str, ...], name: str, **how: Any
) -> dict[str, TensorSource]:
    """Canonical name -> source of each of the `parts` of `owner` that share the stored tensor
    `name`.
    """
    return dict.fromkeys(
        (f"{owner}.{part}" for part in parts), TensorSource(name, fused=parts, **how)
    )


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    name: value of `ModelConfig.architecture`, and `model_type` in `config.json`.
    hf_names: entries of "architectures" in `config.json`; the first one is shown to users.
    read_config: content of `config.json` -> `ModelConfig`. Raises `UnsupportedArchitectureError`
        for a feature that the record cannot express, KeyError for a missing entry.
    tensors: canonical name, with `{i}` and `{e}` -> where safetensors files store it. Keys without
        `.weight` and `.bias` stand for both.
    prefixes: of stored names; exports of the same weights differ in them.
    gguf_names: values of `general.architecture` in GGUF files; empty if GGUF files are not
        supported.
    read_gguf: as `read_config`, of what `gguf_fields.gguf_config` returns; None if `read_config`
        reads that too.
    gguf_tensors: as `tensors`, for GGUF files.
    overflows_float16: hidden states of published models exceed 65,504, so float16 cannot take
        bfloat16's place.
    """

    name: str
    hf_names: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    tensors: Mapping[str, TensorSource]
    prefixes: tuple[str, ...] = ("model.", "")
    gguf_names: tuple[str, ...] = ()
    read_gguf: Callable[[Mapping[str, Any]], ModelConfig] | None = None
    gguf_tensors: Mapping[str, TensorSource] = field(default_factory=dict)
    overflows_float16: bool = False


# Indices of the numbers in layers.{i}.mlp.experts.{e}.gate.weight
_LAYER, _EXPERT = 1, 4


def find_source(tensors: Mapping[str, TensorSource], canonical: str) -> TensorSource:
    """Find where the canonical tensor is stored, with layer, expert and `.weight` or `.bias` filled
    in.

    Raises KeyError if `tensors` lacks it.
    """
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
    for placeholder, number in numbers.items():
        name = name.replace(placeholder, number)
    return replace(source, name=name + ending)


def select_rows(
    source: TensorSource,
    canonical: str,
    model_config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[int, list[range]]:
    """Return the number of rows of the tensor stored at `source`, and those of them that form the
    canonical tensor.

    The rows of a vector are its elements.
    shapes: of all canonical tensors.
    """
    size = shapes[canonical][0]
    if source.experts:
        assert model_config.experts is not None and not source.fused
        first = int(canonical.split(".")[_EXPERT]) * size
        return model_config.experts.count * size, [range(first, first + size)]
    if not source.fused:
        return size, [range(size)]
    owner, _, leaf = canonical.rpartition(".")
    stem, _, part = owner.rpartition(".")
    sizes = [shapes[f"{stem}.{name}.{leaf}"][0] for name in source.fused]
    total, first = sum(sizes), sum(sizes[: source.fused.index(part)])
    if not source.by_head:
        return total, [range(first, first + size)]
    heads = model_config.num_heads
    starts = range(first // heads, total, total // heads)
    return total, [range(start, start + size // heads) for start in starts]
