"""One .gguf file: quantized or plain, with its own metadata and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint, checked_shapes, most_used_half_type, row_tiles
from flexgen_helm.checkpoint.fingerprint import SourceFile, content_fingerprint
from flexgen_helm.checkpoint.folder import model_config_from
from flexgen_helm.checkpoint.gguf_header import GgufTensor, read_gguf_header
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures import RowSelection, architecture_of_gguf, find_source, select_rows

_HALF_TYPES = {gguf.GGMLQuantizationType.BF16: torch.bfloat16, gguf.GGMLQuantizationType.F16: torch.float16}
# `gguf` dequantizes these from elements of their own type, all others from bytes.
_ELEMENT_TYPES = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}


class GgufCheckpoint(Checkpoint):
    """Opening reads the header (a tenth of a second, most of it the vocabulary) and checks every tensor's extent."""

    def __init__(self, path: Path) -> None:
        self._file = SourceFile.open(path)
        header = read_gguf_header(path)
        stored = header.tensors
        for tensor in stored.values():
            if (missing := tensor.offset + tensor.size - self._file.size) > 0:
                raise CheckpointError(f"{path} ends {missing} bytes before the end of tensor {tensor.name}")
        metadata = {
            **header.metadata,
            "tensor_names": frozenset(stored),
            "rope_factors": self._rope_factors(stored),
        }
        architecture = architecture_of_gguf(str(metadata.get("general.architecture")))
        assert architecture.read_gguf is not None, f"{architecture.name} claims GGUF architectures but reads none"
        self.config = model_config_from(architecture.read_gguf, metadata, path)
        self.tokenizer_path = path if "tokenizer.ggml.tokens" in metadata else None
        self._stored: dict[str, GgufTensor] = {}
        self._rows: dict[str, RowSelection] = {}
        self._interleaved_heads: dict[str, int] = {}
        heads = {"q": self.config.num_heads, "kv": self.config.num_kv_heads}
        shapes = checked_shapes(self.config, len(stored), path)
        for canonical, shape in shapes.items():
            source = find_source(architecture.gguf_tensors, canonical)
            if source.name not in stored:
                raise CheckpointError(f"{path} lacks the tensor {source.name}, which its metadata asks for")
            tensor, rows = stored[source.name], select_rows(source, canonical, self.config, shapes)
            expected = (rows.total // shape[0], *shape) if source.experts else (rows.total, *shape[1:])
            if tensor.shape != expected:
                raise CheckpointError(
                    f"{path}: tensor {source.name} has the shape {list(tensor.shape)}, but its metadata asks for "
                    f"{list(expected)}"
                )
            self._stored[canonical], self._rows[canonical] = tensor, rows
            if source.rope_heads is not None:
                self._interleaved_heads[canonical] = heads[source.rope_heads]
        self.storage_dtype = most_used_half_type(
            (_HALF_TYPES.get(tensor.kind), shapes[name]) for name, tensor in self._stored.items()
        )

    @cached_property
    def fingerprint(self) -> str:
        return content_fingerprint([self._file.path])

    def _title(self, name: str) -> str:
        return f"{self._file.path}: tensor {self._stored[name].name}"

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._stored[name]
        if len(stored.shape) == 1:
            yield self._dequantize(stored, 0, 1, stored.size)
            return
        row_bytes = stored.size // prod(stored.shape[:-1])
        for start, count in row_tiles(self._rows[name], stored.shape[-1]):
            yield self._dequantize(stored, start, count, row_bytes)

    def _dequantize(self, stored: GgufTensor, start: int, count: int, row_bytes: int) -> torch.Tensor:
        """Return `count` rows from `start` on, flat, in float32."""
        data = self._file.read(stored.offset + start * row_bytes, count * row_bytes, f"tensor {stored.name}")
        quantized = np.frombuffer(data, dtype=_ELEMENT_TYPES.get(stored.kind, np.uint8)).reshape(count, -1)
        # The check for finite values refuses what blocks with an infinite scale dequantize to.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(quantized, stored.kind)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1)

    def _rope_factors(self, stored: Mapping[str, GgufTensor]) -> tuple[float, ...]:
        """Return the divisor of each rotary frequency; empty if the file has none."""
        for name in ("rope_freqs.weight", "rope_factors_short.weight"):
            if (tensor := stored.get(name)) is not None:
                return tuple(self._dequantize(tensor, 0, 1, tensor.size).tolist())
        return ()

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """GGUF's Llama interleaves the two halves of each head's rotary rows; separate them again."""
        heads = self._interleaved_heads.get(name)
        if heads is None:
            return None
        return lambda tensor: tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
