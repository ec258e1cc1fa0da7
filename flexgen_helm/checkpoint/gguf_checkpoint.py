"""One .gguf file: quantized or plain, with its own metadata and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import version
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.fingerprint import content_fingerprint
from flexgen_helm.checkpoint.folder import GENERATION_CONFIG, gguf_parts, model_config_from
from flexgen_helm.checkpoint.generation_config import read_generation_settings
from flexgen_helm.checkpoint.gguf_header import GgufHeader, read_gguf_header
from flexgen_helm.checkpoint.logical_tensor import (
    FLOAT_TYPES,
    LogicalTensor,
    ReadRows,
    plain_tensor,
)
from flexgen_helm.checkpoint.matching import match_tensors
from flexgen_helm.checkpoint.published_blocks import PublishedTensor, StoredPlane
from flexgen_helm.checkpoint.stored_tensors import StoredTensor, join_headers
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.models.architectures import architecture_of_gguf
from flexgen_helm.models.architectures.gguf_fields import gguf_config
from flexgen_helm.quant.block_formats import BLOCK_FORMATS

# The divisor of each rotary frequency, by architecture; the first that a file has is used.
_SHORT_FACTORS = "rope_factors_short.weight"
_ROPE_FACTORS = {"llama": ("rope_freqs.weight", _SHORT_FACTORS), "phi3": (_SHORT_FACTORS,)}
# Stored beside them, for texts beyond the original context, which are refused.
_LONG_FACTORS = "rope_factors_long.weight"
_SAMPLING = "general.sampling."
# Settings of sampling that every request has itself.
_REQUEST_SETTINGS = (f"{_SAMPLING}temp", f"{_SAMPLING}top_p")


class GgufCheckpoint(Checkpoint):
    """Opening reads the header (a tenth of a second, most of it the vocabulary) and checks every
    tensor's extent.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        architecture_name = str(header.metadata.get("general.architecture"))
        _require_language_model(path, header, architecture_name)
        self._parts, tensors = _read_parts(path, header)
        for tensor in tensors.values():
            _require_whole(tensor)
            _require_known_type(tensor)
        architecture = architecture_of_gguf(architecture_name)
        factor_names = _ROPE_FACTORS.get(architecture.name, ())
        factors = next((tensors[name] for name in factor_names if name in tensors), None)
        metadata = {
            **header.metadata,
            "tensor_names": frozenset(tensors),
            "rope_factors": () if factors is None else tuple(_read_vector(factors).tolist()),
        }
        read = architecture.read_gguf or architecture.read_config
        self.config = model_config_from(lambda content: read(gguf_config(content)), metadata, path)
        self.ignored_settings = {
            name: value
            for name, value in header.metadata.items()
            if name.startswith(_SAMPLING) and name not in _REQUEST_SETTINGS
        }
        if (path.parent / GENERATION_CONFIG).is_file():
            self.ignored_settings |= read_generation_settings(path.parent, "ignore").ignored
        self.tokenizer_path = path if "tokenizer.ggml.tokens" in metadata else None
        logical = {
            name: _logical_tensor(tensor, tensors.get(f"{name.removesuffix('.weight')}.scale"))
            for name, tensor in tensors.items()
        }
        self._tensors = match_tensors(self.config, architecture.gguf_tensors, logical, path)
        used = {part.name for matched in self._tensors.values() for part in matched.stored.parts}
        if factors is not None:
            used |= {*factor_names, _LONG_FACTORS}
        _require_all_used(path, tensors.keys() - used)
        self.formats = self._find_formats()
        types = {
            name: "" if name in self.formats else matched.stored.dtype
            for name, matched in self._tensors.items()
        }
        self._choose_type((dtype, self.shapes[name]) for name, dtype in types.items())

    @cached_property
    def fingerprint(self) -> str:
        return content_fingerprint(self._parts)

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        return self._tensors[name].stored.tiles(self._tensors[name].rows)

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        order = self.row_order(name)
        return None if order is None else lambda tensor: tensor[order]

    def row_order(self, name: str) -> torch.Tensor | None:
        """GGUF's Llama interleaves the two halves of each head's rotary rows; separate them
        again.
        """
        rope_heads = self._tensors[name].source.rope_heads
        if rope_heads is None:
            return None
        heads = {"q": self.config.num_heads, "kv": self.config.num_kv_heads}[rope_heads]
        return torch.arange(self.shapes[name][0]).view(heads, -1, 2).transpose(1, 2).flatten()


def _require_language_model(path: Path, header: GgufHeader, architecture: str) -> None:
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedArchitectureError(
            f"{path} is no language model but of the kind {kind!r} ({architecture}); name the "
            "model's own file, into which an adapter must be merged first (llama-export-lora)"
        )


def _require_whole(tensor: StoredTensor) -> None:
    if (missing := tensor.offset + tensor.size - tensor.file.size) > 0:
        raise CheckpointError(
            f"{tensor.file.path} is cut: it ends {missing} bytes before the end of tensor "
            f"{tensor.name}; fetch it again"
        )


def _require_all_used(path: Path, unused: Iterable[str]) -> None:
    # Input scales are for kernels that quantize activations too, which nothing here does.
    if unread := sorted(name for name in unused if not name.endswith(".input_scale")):
        raise UnsupportedArchitectureError(
            f"{path} has {len(unread)} tensors that nothing here reads, and without them the "
            f"numbers would be wrong: {', '.join(unread[:4])}; use the model's safetensors folder "
            "or another conversion"
        )


def _read_parts(path: Path, header: GgufHeader) -> tuple[list[Path], Mapping[str, StoredTensor]]:
    """Return the files of a model, of which large ones have several, and the tensors of all."""
    count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
    if not (isinstance(count, int) and isinstance(number, int)):
        raise CheckpointError(f"{path} is damaged: it is part {number!r} of {count!r}")
    parts = gguf_parts(path)
    if number != 0 or count not in (0, 1, len(parts)):
        raise CheckpointError(
            f"{path} is part {number + 1} of {count}; name the part that ends in "
            f"-00001-of-{count:05}.gguf, with the others beside it, or join them by "
            "llama-gguf-split --merge"
        )
    return parts, join_headers(
        [header.tensors, *(read_gguf_header(part).tensors for part in parts[1:])]
    )


def _require_known_type(tensor: StoredTensor) -> None:
    if tensor.dtype in FLOAT_TYPES or tensor.dtype in BLOCK_FORMATS:
        return
    try:
        kind = gguf.GGMLQuantizationType[tensor.dtype]
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise UnsupportedArchitectureError(
            f"{tensor.title} has the type {tensor.dtype}, for which gguf {version('gguf')} has no "
            "dequantization; pip install -U gguf, or quantize the model to another type"
        ) from None


def _logical_tensor(stored: StoredTensor, scale: StoredTensor | None = None) -> LogicalTensor:
    """Return a tensor as it is, in blocks, or dequantized; scale: of the whole matrix, or one for
    each expert.
    """
    tensor, fmt = plain_tensor(stored), BLOCK_FORMATS.get(stored.dtype)
    if fmt is not None and len(stored.shape) > 1:
        plane = StoredPlane(
            stored.file, stored.offset, fmt.stripe_bytes(stored.shape[-1]), fmt.block_bytes
        )
        tensor = replace(tensor, published=PublishedTensor(fmt, (plane,)))
    elif stored.dtype not in FLOAT_TYPES:
        tensor = replace(tensor, read=lambda: partial(_dequantize, stored))
    if scale is None:
        return tensor
    unscaled, num_rows = tensor, tensor.num_rows

    def read() -> ReadRows:
        scales, rows = _read_vector(scale), unscaled.reader()
        # One scale for all rows of a tile: a tile is of one expert, since each expert is read by
        # itself.
        return lambda start, count: (
            rows(start, count).float() * scales[start * len(scales) // num_rows]
        )

    return replace(tensor, parts=(stored, scale), published=None, read=read)


def _read_vector(stored: StoredTensor) -> torch.Tensor:
    """Return a whole vector in float32."""
    tensor = _logical_tensor(stored)
    return torch.cat([*tensor.tiles([range(tensor.num_rows)])]).float()


def _dequantize(stored: StoredTensor, start: int, count: int) -> torch.Tensor:
    """Return `count` rows from `start` on in float32, by the `gguf` package.

    Of a vector they are elements: all of it is dequantized, and then cut.
    """
    row_bytes = stored.size // prod(stored.shape[:-1])
    first, rows = (start, count) if len(stored.shape) > 1 else (0, 1)
    data = np.frombuffer(stored.read(first * row_bytes, rows * row_bytes), dtype=np.uint8).reshape(
        rows, -1
    )
    # The check for finite values refuses what blocks with an infinite scale dequantize to.
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[stored.dtype])
    values = values if len(stored.shape) > 1 else values[0, start : start + count]
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
