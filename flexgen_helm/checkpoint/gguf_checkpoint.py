"""One .gguf file: quantized or plain, with its own metadata and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch

from flexgen_helm.checkpoint.checkpoint import FileCheckpoint, row_tiles
from flexgen_helm.checkpoint.fingerprint import content_fingerprint
from flexgen_helm.checkpoint.folder import model_config_from
from flexgen_helm.checkpoint.gguf_header import read_gguf_header
from flexgen_helm.checkpoint.stored_tensors import StoredTensor, match_tensors
from flexgen_helm.concurrency import computed_ahead
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures import architecture_of_gguf
from flexgen_helm.models.architectures.gguf_fields import gguf_config

# `gguf` dequantizes these from elements of their own type, all others from bytes.
_ELEMENT_TYPES = {"F32": np.float32, "F16": np.float16}
# `gguf` dequantizes 16 rows at a time: neighbouring rows that together have about so many elements count as one.
_ROW_ELEMENTS = 8192
_MOST_THREADS = 4  # each holds a tile
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")


class GgufCheckpoint(FileCheckpoint[StoredTensor]):
    """Opening reads the header (a tenth of a second, most of it the vocabulary) and checks every tensor's extent."""

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        for tensor in header.tensors.values():
            if (missing := tensor.offset + tensor.size - header.file.size) > 0:
                raise CheckpointError(f"{path} ends {missing} bytes before the end of tensor {tensor.name}")
        # The divisor of each rotary frequency, where the file has them.
        factors = next((header.tensors[name] for name in _ROPE_FACTORS if name in header.tensors), None)
        metadata = {
            **header.metadata,
            "tensor_names": frozenset(header.tensors),
            "rope_factors": () if factors is None else tuple(_dequantize(factors, 0, 1, factors.size).tolist()),
        }
        architecture = architecture_of_gguf(str(metadata.get("general.architecture")))
        read = architecture.read_gguf or architecture.read_config
        self.config = model_config_from(lambda content: read(gguf_config(content)), metadata, path)
        self.tokenizer_path = path if "tokenizer.ggml.tokens" in metadata else None
        self._path = path
        self._use(match_tensors(self.config, architecture.gguf_tensors, header.tensors, path, "metadata"))

    @cached_property
    def fingerprint(self) -> str:
        return content_fingerprint([self._path])

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._tensors[name].stored
        if len(stored.shape) == 1:
            yield _dequantize(stored, 0, 1, stored.size)
            return
        row_bytes = stored.size // prod(stored.shape[:-1])
        parts = row_tiles(self._tensors[name].rows, stored.shape[-1])
        yield from computed_ahead(lambda part: _dequantize(stored, *part, row_bytes), [*parts], _MOST_THREADS)

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """GGUF's Llama interleaves the two halves of each head's rotary rows; separate them again."""
        rope_heads = self._tensors[name].source.rope_heads
        if rope_heads is None:
            return None
        heads = {"q": self.config.num_heads, "kv": self.config.num_kv_heads}[rope_heads]
        return lambda tensor: tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _dequantize(stored: StoredTensor, start: int, count: int, row_bytes: int) -> torch.Tensor:
    """Return `count` rows from `start` on, flat, in float32."""
    data = stored.read(start * row_bytes, count * row_bytes)
    joined = _rows_to_join(count, stored.shape[-1])
    quantized = np.frombuffer(data, dtype=_ELEMENT_TYPES.get(stored.dtype, np.uint8)).reshape(count // joined, -1)
    # The check for finite values refuses what blocks with an infinite scale dequantize to.
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType[stored.dtype])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1)


def _rows_to_join(count: int, width: int) -> int:
    """Return how many rows of `width` elements to dequantize as one, a divisor of `count`."""
    return next((rows for rows in range(_ROW_ELEMENTS // width, 1, -1) if count % rows == 0), 1)
