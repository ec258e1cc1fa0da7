"""The contract of all weights: a config, an identity, and tensors by canonical name, checked as
they are read.

Matrices are rounded to 16 bits once. Vectors are not rounded: they are small, and norms matter more
than matrices. In float16 Gemma's, which GGUF files store as 1 + w in float32, moved
log-probabilities by up to 3e-3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from flexgen_helm.checkpoint.logical_tensor import (
    FLOAT_TYPES,
    MOST_THREADS,
    LogicalTensor,
    row_tiles,
)
from flexgen_helm.checkpoint.matching import MatchedTensor
from flexgen_helm.checkpoint.published_blocks import (
    FillRows,
    StoredPlane,
    StoredRows,
    block_reader,
)
from flexgen_helm.concurrency import computed_ahead
from flexgen_helm.errors import CheckpointError, Float16Error
from flexgen_helm.kernels.team import use_one_thread
from flexgen_helm.models.config import ModelConfig, tensor_shapes
from flexgen_helm.quant.blocks import decode, has_non_finite, magnitude_bound
from flexgen_helm.quant.formats import BlockFormat
from flexgen_helm.quant.precisions import PublishedFormats

# Largest error of a bfloat16 tensor in float16, relative to its norm: that of rounding to bfloat16
# at all. Values from 2^-17 on lose nothing, smaller ones at most 2^-25.
_MAX_FLOAT16_ERROR = 2.0**-9
# Elements of this quadratic mean or more lose less in float16: at most 2^-25, or 2^-11 of
# themselves, each.
_SAFE_NORM = 2.0**-15
_SAVE_AS_BFLOAT16 = "use a copy of the model in bfloat16 (model.to(torch.bfloat16).save_pretrained)"


class StoredMatrix(NamedTuple):
    """Where files have a matrix.

    parts: stored tensors with their rows that are, one below the other, the matrix.
    transposed: they are stored [in, out], and those rows are columns there.
    """

    parts: list[tuple[LogicalTensor, range]]
    transposed: bool


class Checkpoint(ABC):
    """Weights of one model. Opening reads headers only; each tensor is read, checked and rounded on
    request.

    No file stays open, and reads from several threads do not disturb each other.

    config: sizes and features of the model.
    formats: of the matrices that rest as published, by name, which `packed_tiles` reads.
    rows_are_gathered: rows of a matrix are read from several places of the files.
    storage_dtype: of other matrices, float16 or bfloat16, the checkpoint's own 16-bit type; float16
        for float32 and GGUF weights. Weights that another tool quantized have the type of their
        scales.
    rounded: stored type -> share of the matrices' elements that have it, and are rounded to
        `storage_dtype`.
    as_float16: the checkpoint's own type is bfloat16, and `read_as_float16` has changed
        `storage_dtype`.
    tokenizer_path: a folder with tokenizer files, or the .gguf file that contains a tokenizer, or
        None.
    folder: of the model; None without one that has a `config.json`.
    ignored_settings: of sampling, that a GGUF file has or a `generation_config.json` beside it;
        they change nothing.
    origin: for records; a repository with its commit ('org/repo@0123…'), or the name of a folder or
        file. Filled by `open_checkpoint`.
    config_content: of `config.json`; None where there is none (GGUF files, dummy weights).
    """

    config: ModelConfig
    config_content: Mapping[str, Any] | None = None
    formats: Mapping[str, BlockFormat] = MappingProxyType({})
    rows_are_gathered: bool = False
    storage_dtype: torch.dtype
    rounded: Mapping[str, float] = MappingProxyType({})
    tokenizer_path: Path | None
    folder: Path | None = None
    ignored_settings: Mapping[str, Any] = MappingProxyType({})
    origin: str = ""
    as_float16: bool = False
    _tensors: Mapping[str, MatchedTensor] = MappingProxyType({})

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identity of the content in hexadecimal digits: equal for equal weights, whatever the
        path.
        """

    @abstractmethod
    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensor's elements in the file's order, as flat floating-point tensors of about
        a tile.
        """

    def _title(self, name: str) -> str:
        """File and tensor, for messages."""
        return self._tensors[name].stored.title

    def _reordering(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return what turns the file's order of elements into ours; None if they are the same."""
        return None

    @cached_property
    def published_formats(self) -> PublishedFormats:
        """`formats`, as a precision takes them."""
        return PublishedFormats(self.formats, self.rows_are_gathered)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical name -> shape, in the order in which a forward pass uses them."""
        return tensor_shapes(self.config)

    @property
    def _matrices(self) -> list[str]:
        return [name for name, shape in self.shapes.items() if len(shape) == 2]

    def packed_tiles(self, name: str, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
        """Yield the bytes of one of `formats`, flat, whole rows; about a tile at a time.

        dtype: of computing, whose range the values must fit.

        Raises `CheckpointError` if the file is short or has changed, or if a value is not finite.
        """
        row_bytes = self.formats[name].stripe_bytes(self.shapes[name][1])
        yield from self._packed_tiles(
            name, lambda start, count: torch.empty(count, row_bytes, dtype=torch.uint8), dtype
        )

    def read_packed(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` [rows, row bytes] with one of `formats`; errors: see `packed_tiles`."""
        for _ in self._packed_tiles(name, lambda start, count: out[start : start + count]):
            pass

    def _packed_tiles(
        self,
        name: str,
        memory: Callable[[int, int], torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[torch.Tensor]:
        """Read tiles of whole rows; memory: makes room [count, row bytes] for rows from one on."""
        width, fmt, title = self.shapes[name][1], self.formats[name], self._title(name)
        done = 0  # rows of the matrix in the parts so far
        for stored, rows in self._stored_matrix(name).parts:
            assert stored.published is not None
            fill = block_reader(stored.published, title)

            # Defaults are of this part: threads read ahead while the loop goes on.
            def read(
                tile: tuple[int, int], offset: int = done - rows.start, fill: FillRows = fill
            ) -> torch.Tensor:
                first, count = tile  # rows of the stored tensor
                packed = memory(offset + first, count)
                fill(first, packed)
                if has_non_finite(packed, fmt):
                    raise CheckpointError(
                        f"{title} contains a value that is not finite; fetch the model again"
                    )
                if dtype != torch.float32 and magnitude_bound(packed, fmt) > torch.finfo(dtype).max:
                    self._require_finite(name, decode(packed, fmt).view(-1))
                return packed.view(-1)

            yield from computed_ahead(
                read, [*row_tiles([rows], fmt.stripe_bytes(width))], MOST_THREADS, use_one_thread
            )
            done += len(rows)

    def _stored_matrix(self, name: str) -> StoredMatrix:
        """Return where files have a matrix; dummy weights have no parts."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return StoredMatrix([], False)
        return StoredMatrix([(tensor.stored, rows) for rows in tensor.rows], tensor.transposed)

    def _find_formats(self) -> dict[str, BlockFormat]:
        """Return the formats of the matrices that rest as published: all their parts are in one
        format, for which there is a compiled loop.
        """
        by_name = {}
        for name in self._matrices:
            parts, transposed = self._stored_matrix(name)
            formats = {
                published.fmt
                if (published := stored.published) and published.transposed == transposed
                else None
                for stored, _ in parts
            }
            fmt = formats.pop() if len(formats) == 1 else None
            if fmt is not None and fmt.has_loop:
                by_name[name] = fmt
        return by_name

    def stored_rows(self, name: str) -> Sequence[StoredRows]:
        """Return where files have the rows of a matrix as it rests, in order; none where they have
        another type.
        """
        parts, transposed = self._stored_matrix(name)
        if name in self.formats:
            return [
                StoredRows(rows, published.planes)
                for stored, rows in parts
                if (published := stored.published) and published.planes
            ]
        size = self.storage_dtype.itemsize
        in_place = [
            StoredRows(
                rows,
                (StoredPlane(part.file, part.offset, stored.width * size, stored.width * size),),
            )
            for stored, rows in parts
            for part in stored.parts[:1]  # a plain tensor has one
            # The header of an old file may have any length.
            if stored.is_plain
            and FLOAT_TYPES.get(stored.dtype) == self.storage_dtype
            and part.offset % size == 0
        ]
        return in_place if len(in_place) == len(parts) and self._reordering(name) is None else ()

    @property
    def expanded(self) -> Mapping[str, tuple[int, int]]:
        """Stored type -> bytes of quantized matrices that do not rest as published: in files, and
        in 16 bits.
        """
        bytes_of: dict[str, tuple[int, int]] = {}
        for name in self._matrices:
            if name in self.formats:
                continue
            parts = self._stored_matrix(name).parts
            # Parts of a fused matrix may differ in rows; their sums are right.
            elements = prod(self.shapes[name]) // max(1, len(parts))
            for stored, _ in parts:
                if not stored.is_plain:
                    kind, size = stored.parts[0].dtype, sum(part.size for part in stored.parts)
                    in_files, in_16_bits = bytes_of.get(kind, (0, 0))
                    bytes_of[kind] = (
                        in_files + size * elements // prod(stored.shape),
                        in_16_bits + 2 * elements,
                    )
        return bytes_of

    def row_order(self, name: str) -> torch.Tensor | None:
        """Return which row of the file is each row of one of `formats`; None where all are in
        order.
        """
        return None

    def _choose_type(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Choose bfloat16 if most elements of matrices have it, else float16, which rounds less;
        note what is rounded.

        tensors: stored type and shape of each; no type for one that rests as published.
        """
        elements: Counter[str] = Counter()
        for dtype, shape in tensors:
            elements[dtype] += prod(shape) if len(shape) > 1 else 0
        chosen = (
            "BF16"
            if 2 * elements["BF16"] > sum(elements[dtype] for dtype in FLOAT_TYPES)
            else "F16"
        )
        self.storage_dtype = torch.bfloat16 if chosen == "BF16" else torch.float16
        rounded = {
            dtype: number
            for dtype, number in elements.items()
            if number and dtype not in ("", chosen)
        }
        self.rounded = {dtype: number / sum(elements.values()) for dtype, number in rounded.items()}

    def read_as_float16(self, as_float16: bool) -> None:
        """Read a bfloat16 checkpoint in float16 from now on, or no longer; tensors are checked as
        they are read.
        """
        self.as_float16 = as_float16
        self.storage_dtype = torch.float16 if as_float16 else torch.bfloat16

    def tensor(self, name: str, empty: Callable[..., torch.Tensor] = torch.empty) -> torch.Tensor:
        """Read one tensor: on the CPU, contiguous, each value rounded once from the source.

        A matrix is in `storage_dtype`, a vector in float32.

        empty: makes its memory, of a shape and a `dtype`.

        Raises `CheckpointError` naming file and tensor if the file is short or changed, or if a
        value is not finite before or after rounding; `Float16Error` if float16 has not the values
        of a bfloat16 checkpoint; KeyError for a name that the model does not have.
        """
        tensor = empty(self.shapes[name], dtype=self._dtype_of(name))
        flat, done = tensor.view(-1), 0
        for tile in self._rounded_tiles(name):
            flat[done : done + tile.numel()] = tile
            done += tile.numel()
        assert done == flat.numel(), f"{self._title(name)}: {done} of {flat.numel()} elements"
        reorder = self._reordering(name)
        return tensor if reorder is None else reorder(tensor)

    def tiles(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the values of `tensor`, flat and in order; about a tile at a time unless they must
        be reordered.
        """
        if self._reordering(name) is not None:
            yield self.tensor(name).view(-1)
            return
        yield from self._rounded_tiles(name)

    def verify(self) -> None:
        """Read every tensor once; raises `CheckpointError` at the first that cannot be used."""
        for name in self.shapes:
            self.tensor(name)

    def _rounded_tiles(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tiles of the file in the dtype of `tensor`; see there for what is checked."""
        # Vectors rest in float32, and what computes in float16 rounds them too.
        dtype = self._computed_dtype(name) if self.as_float16 else self._dtype_of(name)
        error = total = 0.0
        for tile in self._read_tiles(name):
            self._require_finite(name, tile)
            if dtype == torch.float16 != tile.dtype:
                norm = float(torch.linalg.vector_norm(tile, dtype=torch.float32))
                if norm < _SAFE_NORM * sqrt(tile.numel()):
                    norm = float(torch.linalg.vector_norm(exact := tile.double()))
                    error += float((exact - tile.to(dtype)).square().sum())
                total += norm**2
            yield tile.to(self._dtype_of(name))
        if error > _MAX_FLOAT16_ERROR**2 * total:
            raise self._type_error(
                f"{self._title(name)} would lose {(error / total) ** 0.5:.1%} of its norm in "
                "float16"
            )

    def _type_error(self, problem: str) -> CheckpointError | Float16Error:
        if self.as_float16:
            return Float16Error(problem)
        return CheckpointError(f"{problem}; {_SAVE_AS_BFLOAT16}")

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if len(self.shapes[name]) == 1 else self.storage_dtype

    def _computed_dtype(self, name: str) -> torch.dtype:
        """Return the smallest dtype that a device computes with, whose range the tensor must
        fit.
        """
        return torch.float32 if self.config.has_float32(name) else self.storage_dtype

    def _require_finite(self, name: str, tile: torch.Tensor) -> None:
        # NaN propagates through minimum and maximum, and rounding is monotone: two numbers stand
        # for all.
        extremes = torch.stack(torch.aminmax(tile))
        if not extremes.isfinite().all():
            raise CheckpointError(
                f"{self._title(name)} contains a value that is not finite; fetch the model again"
            )
        if not extremes.to(self._computed_dtype(name)).isfinite().all():
            largest = float(extremes.abs().max())
            dtype = str(self._computed_dtype(name)).removeprefix("torch.")
            raise self._type_error(
                f"{self._title(name)} contains {largest:g}, too large for {dtype}"
            )
