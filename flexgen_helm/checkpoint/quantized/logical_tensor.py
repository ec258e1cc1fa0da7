"""A floating-point tensor as the model sees it, however many stored tensors hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod

import torch

from flexgen_helm.checkpoint.published import filler
from flexgen_helm.checkpoint.stored_tensors import PublishedTensor, StoredTensor
from flexgen_helm.concurrency import computed_ahead
from flexgen_helm.errors import CheckpointError
from flexgen_helm.kernels.team import use_one_thread
from flexgen_helm.quant.block_products import decode_into

# Types that a tensor can have without scales.
FLOAT_TYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
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
# Elements that are checked and rounded at a time: the workspace of a read is a few MB beyond its
# result.
TILE_ELEMENTS = 1 << 20
MOST_THREADS = 4  # that read a tensor; each holds a tile
# Returns `count` rows from `start` on, in floating point.
ReadRows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class LogicalTensor:
    """Stored tensors that are one tensor of the model.

    name: of the tensor, in the words of the unquantized checkpoint.
    shape: of the tensor.
    dtype: safetensors' name of the type to which its values belong.
    parts: the stored tensors; the first one holds the values.
    published: the same as blocks of a format; None where there is none.
    read: reads what all rows need, such as scales, and returns what reads rows; None for one in
        blocks, or plain.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...]
    published: PublishedTensor | None = field(default=None, repr=False)
    read: Callable[[], ReadRows] | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        """File and tensors, for messages."""
        return title_of(self.parts)

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is stored as it is."""
        return self.published is None and self.read is None

    @property
    def width(self) -> int:
        """Elements of a row: of the last dimension; one of a vector."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        """Yield the elements of these rows in order, flat, in floating point; about a tile at a
        time.

        Values of quantized tensors are float32 products of code and scale, not rounded to `dtype`
        yet.
        Raises `CheckpointError` if a file is short or has changed.
        """
        read, parts = self.reader(), [*row_tiles(rows, self.width)]
        if self.is_plain or (self.published is not None and self.published.transposed):
            yield from (read(*part).reshape(-1) for part in parts)
        else:
            yield from computed_ahead(
                lambda part: read(*part).reshape(-1), parts, MOST_THREADS, use_one_thread
            )

    def reader(self) -> ReadRows:
        """Read what all rows need; return what reads rows."""
        if self.published is not None:
            return self._decoded(self.published)
        return (
            partial(read_rows, self.parts[0], width=self.width)
            if self.read is None
            else self.read()
        )

    def _decoded(self, published: PublishedTensor) -> ReadRows:
        fill, fmt = filler(published, self.title), published.fmt

        def rows(start: int, count: int, width: int = self.width) -> torch.Tensor:
            packed = torch.empty(count, fmt.stripe_bytes(width), dtype=torch.uint8)
            fill(start, packed)
            return decode_into(packed, fmt, torch.empty(count, width, dtype=torch.float32))

        if not published.transposed:
            return rows
        inputs, outputs = self.shape[-2:]

        @lru_cache(maxsize=1)  # one of the matrices is in memory at a time
        def matrix(index: int) -> torch.Tensor:
            return rows(index * outputs, outputs, inputs).t()

        def columns(start: int, count: int) -> torch.Tensor:
            indices = range(start // inputs, -(-(start + count) // inputs))
            return torch.cat(
                [
                    matrix(i)[max(0, start - i * inputs) : start + count - i * inputs]
                    for i in indices
                ]
            )

        return columns


def plain_tensor(stored: StoredTensor) -> LogicalTensor:
    """Return a tensor that is stored as it is."""
    return LogicalTensor(stored.name, stored.shape, stored.dtype, (stored,))


def title_of(parts: tuple[StoredTensor, ...]) -> str:
    """Return file and names of stored tensors, for messages."""
    return ", ".join([parts[0].title, *(part.name for part in parts[1:])])


def read_rows(stored: StoredTensor, start: int, count: int, width: int) -> torch.Tensor:
    """Read rows of `width` elements of a stored tensor: [count, width], in the stored type."""
    dtype = TORCH_TYPES[stored.dtype]
    row_bytes = width * dtype.itemsize
    if not count * row_bytes:
        return torch.empty(count, width, dtype=dtype)
    return torch.frombuffer(stored.read(start * row_bytes, count * row_bytes), dtype=dtype).view(
        count, width
    )


def read_all(stored: StoredTensor) -> torch.Tensor:
    """Read a whole stored tensor, in the stored type."""
    return read_rows(stored, 0, 1, prod(stored.shape)).view(stored.shape)


def require(
    stored: StoredTensor, types: tuple[str, ...], shape: tuple[int, ...] | None = None
) -> None:
    """Raise `CheckpointError` if a stored tensor has another type, or another shape where one is
    given.
    """
    if stored.dtype not in types:
        raise CheckpointError(
            f"{stored.title} has the type {stored.dtype}; expected is {' or '.join(types)}"
        )
    if shape is not None and stored.shape != shape:
        raise CheckpointError(
            f"{stored.title} has the shape {list(stored.shape)}, but the tensors beside it ask for "
            f"{list(shape)}"
        )


def row_tiles(parts: Iterable[range], width: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of each read of about a tile; width: elements per row."""
    step = max(1, TILE_ELEMENTS // max(1, width))
    for rows in parts:
        for start in range(rows.start, rows.stop, step):
            yield start, min(step, rows.stop - start)
