"""A floating-point tensor as the model sees it, however many stored tensors hold it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from math import prod

import torch

from flexgen_helm.checkpoint.checkpoint import row_tiles
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError

# Types that a tensor can have without scales.
FLOAT_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# All types of which stored tensors are decoded.
TORCH_TYPES = {
    **FLOAT_TYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # the bytes of the exponents
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class LogicalTensor(ABC):
    """Stored tensors that are one tensor of the model.

    name: of the tensor, in the words of the unquantized checkpoint.
    shape: of the tensor.
    dtype: safetensors' name of the type to which its values belong.
    parts: the stored tensors; the first one holds the values.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, parts: tuple[StoredTensor, ...]) -> None:
        self.name, self.shape, self.dtype, self.parts = name, shape, dtype, parts

    @property
    def title(self) -> str:
        """File and tensors, for messages."""
        return ", ".join([self.parts[0].title, *(part.name for part in self.parts[1:])])

    @property
    def width(self) -> int:
        """Elements of a row: of the last dimension; one of a vector."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)

    @abstractmethod
    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        """Yield the elements of these rows in order, flat, in floating point; about a tile at a time.

        Values of quantized tensors are float32 products of code and scale, not rounded to `dtype` yet.
        Raises `CheckpointError` if a file is short or has changed.
        """


class PlainTensor(LogicalTensor):
    """A tensor that is stored as it is."""

    def __init__(self, stored: StoredTensor) -> None:
        super().__init__(stored.name, stored.shape, stored.dtype, (stored,))

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        for start, count in row_tiles(rows, self.width):
            yield read_rows(self.parts[0], start, count, self.width).view(-1)


def read_rows(stored: StoredTensor, start: int, count: int, width: int) -> torch.Tensor:
    """Read rows of `width` elements of a stored tensor: [count, width], in the stored type."""
    dtype = TORCH_TYPES[stored.dtype]
    row_bytes = width * dtype.itemsize
    if not count * row_bytes:
        return torch.empty(count, width, dtype=dtype)
    return torch.frombuffer(stored.read(start * row_bytes, count * row_bytes), dtype=dtype).view(count, width)


def read_all(stored: StoredTensor) -> torch.Tensor:
    """Read a whole stored tensor, in the stored type."""
    return read_rows(stored, 0, 1, prod(stored.shape)).view(stored.shape)


def require_type(stored: StoredTensor, *supported: str) -> None:
    """Raise `CheckpointError` if a stored tensor has another type."""
    if stored.dtype not in supported:
        raise CheckpointError(f"{stored.title} has the type {stored.dtype}; expected is {' or '.join(supported)}")


def require_shape(stored: StoredTensor, *shape: int) -> None:
    """Raise `CheckpointError` if a stored tensor has another shape."""
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.title} has the shape {list(stored.shape)}, but the tensors beside it ask for {list(shape)}"
        )


def half_type(scale: StoredTensor, otherwise: str) -> str:
    """Return the 16-bit type of values with this scale: its own, if it has 16 bits."""
    return scale.dtype if scale.dtype in ("F16", "BF16") else otherwise
