"""Find each tensor of a model among the stored ones; of a fused one it is a range of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures.base import TensorSource, find_source, select_rows
from flexgen_helm.models.config import ModelConfig, tensor_shapes

if TYPE_CHECKING:
    from flexgen_helm.checkpoint.logical_tensor import LogicalTensor


@dataclass(frozen=True)
class MatchedTensor:
    """A tensor of the model: these rows of a stored tensor. transposed: they are columns in the
    file.
    """

    stored: LogicalTensor
    rows: list[range]
    source: TensorSource
    transposed: bool


def find_stored(
    source: TensorSource, stored: Mapping[str, LogicalTensor], prefixes: Sequence[str]
) -> LogicalTensor | None:
    """Return the stored tensor that a source names, under the first prefix with which there is one;
    None without.
    """
    names = (prefix + source.name for prefix in prefixes)
    return next((stored[name] for name in names if name in stored), None)


def match_tensors(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    stored: Mapping[str, LogicalTensor],
    path: Path,
    prefixes: Sequence[str] = ("",),
) -> dict[str, MatchedTensor]:
    """Return canonical name -> stored tensor, with shapes checked.

    prefixes: of the stored names, best first.

    Raises `CheckpointError` if a tensor is missing or has another shape than the config asks for.
    """
    if config.num_layers > len(stored):  # a damaged number can be billions
        raise CheckpointError(
            f"{path} contains {len(stored)} tensors, too few for {config.num_layers} layers"
        )
    shapes = tensor_shapes(config)
    matched: dict[str, MatchedTensor] = {}
    for canonical, shape in shapes.items():
        source = find_source(sources, canonical)
        tensor = find_stored(source, stored, prefixes)
        if tensor is None:
            raise missing_tensor_error(path, prefixes[0] + source.name, stored)
        num_rows, rows = select_rows(source, canonical, config, shapes)
        transposed = source.transposed and len(shape) > 1  # a bias is a vector either way
        expected: tuple[int, ...] = (num_rows, *shape[1:])
        if transposed:
            expected = (shape[1], num_rows)
        elif source.experts:  # one stored tensor of all experts: [experts, rows, width]
            expected = (num_rows // shape[0], *shape)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{tensor.title} has the shape {list(tensor.shape)}, but its {described_by(path)} "
                f"asks for {list(expected)}"
            )
        matched[canonical] = MatchedTensor(tensor, rows, source, transposed)
    return matched


# What compiling and training in parallel put into names.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|module|_(?:forward|fsdp_wrapped|checkpoint_wrapped)_module)\."
)


def described_by(path: Path) -> str:
    """Return where a model gives its sizes, for messages."""
    return "metadata" if path.suffix == ".gguf" else "config.json"


def missing_tensor_error(path: Path, name: str, stored: Iterable[str]) -> CheckpointError:
    """Make the error for a tensor that is missing, or has a prefix that some wrapper of the model
    has left.
    """
    wrapped = next(
        (key for key in stored if f".{_WRAPPERS.sub('', key)}".endswith(f".{name}")), None
    )
    part = (_WRAPPERS.findall(wrapped) or [wrapped.removesuffix(name)])[0] if wrapped else ""
    hint = f"; it has {wrapped}: save the model again without '{part}'" if wrapped else ""
    return CheckpointError(
        f"{path} lacks the tensor {name}, which its {described_by(path)} asks for{hint}"
    )
