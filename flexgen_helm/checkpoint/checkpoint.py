"""The one contract of all weights: a spec, an identity, and tensors by canonical name, checked as they are read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures import RowSelection
from flexgen_helm.models.config import ModelConfig, tensor_shapes

# Elements that are checked and rounded at a time: bounds the workspace of a read to a few MB beside the result.
TILE_ELEMENTS = 1 << 20


class Checkpoint(ABC):
    """Weights of one model. Opening reads headers only; every tensor is read, checked and rounded when asked for.

    rest_dtype: float16 or bfloat16, the checkpoint's own 16-bit type (float16 for float32 and quantized ones).
    tokenizer_path: a folder with tokenizer files, or the .gguf file that contains one, or None. No file stays open,
    and reads from several threads do not disturb each other. origin: where the weights come from, for records: a
    repository with its commit ('org/repo@0123…'), or the name of a folder or file; filled by `open_checkpoint`.
    """

    config: ModelConfig
    storage_dtype: torch.dtype
    tokenizer_path: Path | None
    origin: str = ""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identity of the content, as hexadecimal digits: equal weights, equal string, wherever they lie."""

    @abstractmethod
    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in the source's order, as flat tensors of a floating type, each about a tile."""

    @abstractmethod
    def _where(self, name: str) -> str:
        """File and tensor, for messages."""

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put the source's order of rows into ours."""
        return tensor

    def _rearranges(self, name: str) -> bool:
        """Whether `_arrange` changes this tensor."""
        return False

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical name -> shape, in the order in which a pass meets them."""
        return tensor_shapes(self.config)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, contiguous, in `rest_dtype`, in the shape that `tensor_shapes(spec)` gives.

        Each value is rounded once from the source. Raises `CheckpointError` naming file and tensor where the file
        is short or changed, or a value is not finite, before or after rounding; KeyError for a name that the
        model does not have.
        """
        out = torch.empty(self.shapes[name], dtype=self.storage_dtype)
        flat, done = out.view(-1), 0
        for piece in self._pieces(name):
            self._check_finite(name, piece)
            flat[done : done + piece.numel()].copy_(piece)
            done += piece.numel()
        assert done == flat.numel(), f"{self._where(name)}: {done} of {flat.numel()} elements"
        return self._arrange(name, out)

    def tiles(self, name: str) -> Iterator[torch.Tensor]:
        """The same values as `tensor`, flat and in order, about a tile at a time where the source's order is ours."""
        if self._rearranges(name):
            yield self.tensor(name).view(-1)
            return
        for piece in self._pieces(name):
            self._check_finite(name, piece)
            yield piece.to(self.storage_dtype)

    def verify(self) -> None:
        """Read every tensor once; raises `CheckpointError` at the first that cannot be used."""
        for name in self.shapes:
            self.tensor(name)

    def _check_finite(self, name: str, piece: torch.Tensor) -> None:
        # NaN propagates through minimum and maximum, and rounding is monotone: two numbers stand for all.
        extremes = torch.stack(torch.aminmax(piece))
        if not extremes.isfinite().all():
            raise CheckpointError(f"{self._where(name)} contains a value that is not finite; fetch the model again")
        if not extremes.to(self.storage_dtype).isfinite().all():
            largest = float(extremes.abs().max())
            raise CheckpointError(
                f"{self._where(name)} contains {largest:g}, too large for "
                f"{str(self.storage_dtype).removeprefix('torch.')}"
            )


@dataclass(frozen=True)
class ByteSource:
    """A file as it was when the checkpoint was opened; reads refuse one that has changed since."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> ByteSource:
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)

    def read(self, offset: int, size: int, what: str) -> bytearray:
        """`size` bytes from `offset`, by plain reads: the page cache is not mistaken for memory of ours."""
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                found = os.fstat(descriptor)
                if (found.st_size, found.st_mtime_ns, found.st_ino) != (self.size, self.mtime_ns, self.inode):
                    raise CheckpointError(f"{self.path} has changed since it was opened, while reading {what}")
                while done < size:
                    count = os.preadv(descriptor, [view[done:]], offset + done)
                    if count == 0:
                        raise CheckpointError(f"{self.path} ends {size - done} bytes early in {what}")
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({what}): {error.strerror}") from error
        return buffer


def tiles(rows: RowSelection, width: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each read that together bring `rows`, of `width` elements each, in order."""
    step = max(1, TILE_ELEMENTS // width)
    for repeat in range(rows.repeats):
        first = rows.first + repeat * rows.stride
        for start in range(first, first + rows.count, step):
            yield start, min(step, first + rows.count - start)


def checked_shapes(config: ModelConfig, stored: int, path: Path) -> dict[str, tuple[int, ...]]:
    """`tensor_shapes(spec)`, refused where `stored` tensors are fewer than layers: a damaged count can be billions."""
    if config.num_layers > stored:
        raise CheckpointError(f"{path} contains {stored} tensors, too few for {config.num_layers} layers")
    return tensor_shapes(config)


def half_type(bytes_by_dtype: Mapping[torch.dtype, int]) -> torch.dtype:
    """The 16-bit type that holds most bytes of a checkpoint; float16 where it has none."""
    bfloat16, float16 = bytes_by_dtype.get(torch.bfloat16, 0), bytes_by_dtype.get(torch.float16, 0)
    return torch.bfloat16 if bfloat16 > float16 else torch.float16
