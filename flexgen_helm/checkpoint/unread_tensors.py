"""Stored tensors that nothing reads: they change no number, are another model's, or are refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from flexgen_helm.checkpoint.logical_tensor import FLOAT_TYPES, LogicalTensor
from flexgen_helm.errors import CheckpointError
from flexgen_helm.progress import Message, report

# Buffers that older releases stored: frequencies of rotations, causal masks, numbers of positions.
_BUFFERS = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.(masked_)?bias|position_ids)$"
)


def check_unread(tensors: Iterable[LogicalTensor], read: Collection[str], path: Path) -> None:
    """Refuse tensors that would change what a module computes; report those of other models.

    tensors: all stored ones but those that are known to change no number.
    read: stored names of the tensors that the model consists of.

    Raises `CheckpointError` for one inside a module of the model, such as a bias, a norm, or an
    adapter. Biases of zeros are none: some tools write them for every quantized weight.
    """
    # Modules of the model: those with a tensor, and the layers that these are in.
    modules = {name.rpartition(".")[0] for name in read}
    modules |= {
        module for name in read for module in _modules(name) if re.search(r"\.\d+(\.|$)", module)
    }
    unread = [
        tensor for tensor in tensors if tensor.name not in read and not _BUFFERS.search(tensor.name)
    ]
    inside = [
        tensor
        for tensor in unread
        if not modules.isdisjoint(_modules(tensor.name)) and not _is_zero_bias(tensor)
    ]
    if inside:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        raise CheckpointError(
            f"{inside[0].title}{more} would change what is computed, but the model that its "
            "config.json describes has no such tensor; correct the file, or merge an adapter into "
            "its base"
        )
    outside = {_part(tensor.name) for tensor in unread if modules.isdisjoint(_modules(tensor.name))}
    if outside:
        named = ", ".join(sorted(outside)[:4]) + (", …" if len(outside) > 4 else "")
        unused = f"{path} also has tensors that are no part of the model and are not used: {named}"
        report(Message(unused))


def _modules(name: str) -> list[str]:
    """Return the modules that a tensor is in, outermost first."""
    names = name.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


def _part(name: str) -> str:
    """Return the first two names of a tensor, without numbers."""
    return ".".join([part for part in name.split(".") if not part.isdigit()][:2])


def _is_zero_bias(tensor: LogicalTensor) -> bool:
    is_bias = tensor.name.endswith(".bias") and tensor.dtype in FLOAT_TYPES
    return is_bias and not any(tile.any() for tile in tensor.tiles([range(tensor.num_rows)]))
