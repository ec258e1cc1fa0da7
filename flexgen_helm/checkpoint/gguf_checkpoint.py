"""One .gguf file: quantized or plain, with its own metadata and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from flexgen_helm.checkpoint.checkpoint import ByteSource, Checkpoint, checked_shapes, half_type, tiles
from flexgen_helm.checkpoint.fingerprint import content_fingerprint
from flexgen_helm.checkpoint.folder import check_sizes
from flexgen_helm.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from flexgen_helm.errors import CheckpointError, FlexgenError
from flexgen_helm.models.architectures import Architecture, RowSelection, architecture_of_gguf, find_source, select_rows
from flexgen_helm.models.config import ModelConfig

_HALVES = {gguf.GGMLQuantizationType.BF16: torch.bfloat16, gguf.GGMLQuantizationType.F16: torch.float16}


class GgufCheckpoint(Checkpoint):
    """Opening reads the header (a tenth of a second, most of it the vocabulary) and checks every tensor's extent."""

    def __init__(self, path: Path) -> None:
        self._file = ByteSource.of(path)
        header = _read_header(self._file)
        stored = header.tensors
        found = {"tensor_names": frozenset(stored), "rope_factors": self._rope_factors(stored)}
        metadata = {**header.metadata, **found}
        architecture, self.config = _read_spec(path, metadata)
        self.tokenizer_path = path if "tokenizer.ggml.tokens" in metadata else None
        self._stored: dict[str, GgufTensor] = {}
        self._rows: dict[str, RowSelection] = {}
        self._rope_heads: dict[str, int] = {}
        heads = {"q": self.config.num_heads, "kv": self.config.num_kv_heads}
        sizes: dict[torch.dtype, int] = {}
        shapes = checked_shapes(self.config, len(stored), path)
        for canonical, shape in shapes.items():
            source = find_source(architecture.gguf_tensors, canonical)
            tensor = stored.get(source.name)
            if tensor is None:
                raise CheckpointError(f"{path} lacks the tensor {source.name}, which its metadata asks for")
            rows = select_rows(source, canonical, self.config, shapes)
            wanted = (rows.total // shape[0], *shape) if source.experts else (rows.total, *shape[1:])
            if tensor.shape != wanted:
                raise CheckpointError(
                    f"{path}: tensor {source.name} has the shape {list(tensor.shape)}, but its metadata asks for "
                    f"{list(wanted)}"
                )
            self._stored[canonical], self._rows[canonical] = tensor, rows
            if source.rope_heads is not None:
                self._rope_heads[canonical] = heads[source.rope_heads]
            if tensor.kind in _HALVES:
                dtype = _HALVES[tensor.kind]
                sizes[dtype] = sizes.get(dtype, 0) + prod(shape) * dtype.itemsize
        self.storage_dtype = half_type(sizes)

    @cached_property
    def fingerprint(self) -> str:
        return content_fingerprint([self._file.path])

    def _where(self, name: str) -> str:
        return f"{self._file.path}: tensor {self._stored[name].name}"

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        stored, rows = self._stored[name], self._rows[name]
        if len(stored.shape) == 1:
            yield self._dequantized(stored, 0, 1, stored.size)
            return
        width = stored.shape[-1]
        row_bytes = stored.size // prod(stored.shape[:-1])
        for start, count in tiles(rows, width):
            yield self._dequantized(stored, start, count, row_bytes)

    def _dequantized(self, stored: GgufTensor, start: int, count: int, row_bytes: int) -> torch.Tensor:
        """`count` rows from `start` on, flat, in float32."""
        data = self._file.read(stored.offset + start * row_bytes, count * row_bytes, f"tensor {stored.name}")
        quantized = np.frombuffer(data, dtype=np.uint8).reshape(count, row_bytes)
        # Blocks that hold an infinite scale dequantize to what the finiteness check then refuses.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(_as_stored(quantized, stored.kind), stored.kind)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1)

    def _rope_factors(self, stored: Mapping[str, GgufTensor]) -> tuple[float, ...]:
        """By how much the file itself divides each rotary frequency; empty where it does not."""
        for name in ("rope_freqs.weight", "rope_factors_short.weight"):
            if (tensor := stored.get(name)) is not None:
                return tuple(self._dequantized(tensor, 0, 1, tensor.size).tolist())
        return ()

    def _rearranges(self, name: str) -> bool:
        return name in self._rope_heads

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rotary pairs lie side by side in the rows of GGUF's Llama; put each head back into two halves."""
        heads = self._rope_heads.get(name)
        if heads is None:
            return tensor
        half = tensor.shape[0] // heads // 2
        return tensor.view(heads, half, 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()


def _as_stored(quantized: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The plain types are dequantized from their own element type, all others from bytes."""
    plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    return quantized.view(plain[kind]) if kind in plain else quantized


def _read_header(file: ByteSource) -> GgufHeader:
    header = read_gguf_header(file.path)
    for tensor in header.tensors.values():
        if tensor.offset + tensor.size > file.size:
            short = tensor.offset + tensor.size - file.size
            raise CheckpointError(f"{file.path} ends {short} bytes before the end of tensor {tensor.name}")
    return header


def _read_spec(path: Path, metadata: Mapping[str, Any]) -> tuple[Architecture, ModelConfig]:
    architecture = architecture_of_gguf(str(metadata.get("general.architecture")))
    assert architecture.read_gguf is not None, f"{architecture.name} claims GGUF architectures but reads none"
    try:
        config = architecture.read_gguf(metadata)
        check_sizes(config, path)
        return architecture, config
    except FlexgenError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the metadata {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path} has metadata of the wrong kind or none where some is needed: {error}") from error
