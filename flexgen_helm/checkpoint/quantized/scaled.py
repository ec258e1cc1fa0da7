"""Weights of 8 or 4 bits times a scale per block, row, or tensor: FP8, INT8, and FP4.

value[i, j] = (code[i, j] - zero point) * scale[i // block rows, j // block columns]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch

from flexgen_helm.checkpoint.checkpoint import row_tiles
from flexgen_helm.checkpoint.quantized.logical_tensor import (
    LogicalTensor,
    half_type,
    read_all,
    read_rows,
    require_shape,
    require_type,
)
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError

_SCALE_TYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8")
# OCP Microscaling Formats 1.0, E2M1: sign, two bits of exponent, one of mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_VALUES = torch.cat([_E2M1, -_E2M1])
# The two values of each byte, the lower four bits first.
_FP4_PAIRS = torch.stack([_FP4_VALUES.repeat(16), _FP4_VALUES.repeat_interleave(16)], dim=1)


def exponents_to_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (e - 127) of bytes e in float32; 255 stands for NaN (OCP Microscaling Formats 1.0, E8M0)."""
    bits = exponents.to(torch.int32) << 23
    bits[exponents == 0] = 1 << 22  # 2 ** -127 is subnormal
    bits[exponents == 255] = 0x7FC00000
    return bits.view(torch.float32)


def read_scale(stored: StoredTensor) -> torch.Tensor:
    """Read a whole tensor of scales in float32; bytes are exponents."""
    scale = read_all(stored)
    return exponents_to_scales(scale) if scale.dtype == torch.uint8 else scale.to(torch.float32)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of bytes that hold two each, the lower four bits first: [rows, 2 * columns], float32."""
    pairs = _FP4_PAIRS.index_select(0, packed.view(torch.uint8).flatten().int())
    return pairs.view(*packed.shape[:-1], -1)


class ScaledTensor(LogicalTensor):
    """Codes with a scale for each block.

    codes: [..., rows, columns]; FP4 has two codes a byte.
    scale: one for all; one for each of the leading indices or rows; or a grid over the last two dimensions.
    """

    def __init__(
        self,
        name: str,
        codes: StoredTensor,
        scale: StoredTensor,
        dtype: str,
        *,
        fp4: bool = False,
        block: tuple[int, int] | None = None,
        global_scale: StoredTensor | None = None,
        zero_point: StoredTensor | None = None,
        factor: float = 1.0,
    ) -> None:
        """block: rows and columns that share a scale, where the scales' shape fits; None to divide evenly.

        global_scale: divides the scales.
        zero_point: of the scales' shape; None if all are zero.
        factor: multiplies the scales.
        """
        require_type(scale, *_SCALE_TYPES)
        shape = (*codes.shape[:-1], codes.shape[-1] * 2) if fp4 else codes.shape
        others = tuple(part for part in (global_scale, zero_point) if part is not None)
        super().__init__(name, shape, half_type(scale, dtype), (codes, scale, *others))
        if global_scale is not None:
            require_type(global_scale, "F32")
            require_shape(global_scale, 1)
        if zero_point is not None:
            require_type(zero_point, codes.dtype)
            require_shape(zero_point, *scale.shape)
        if len(shape) < 2:
            raise CheckpointError(f"{self.title}: a quantized tensor needs two dimensions, not {list(shape)}")
        self._decode: Callable[[torch.Tensor], torch.Tensor] = unpack_fp4 if fp4 else torch.Tensor.float
        self._codes_per_row = codes.shape[-1]
        self._grid = self._scale_grid(scale.shape)
        self._block = self._block_sizes(block)
        self._global_scale, self._zero_point, self._factor = global_scale, zero_point, factor

    def _scale_grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the scales' shape with as many dimensions as the tensor's."""
        if prod(shape) == 1:
            return (1,) * len(self.shape)
        missing = len(self.shape) - len(shape)
        leading = self.shape[: len(shape)]
        if missing and all(size in (1, own) for size, own in zip(shape, leading, strict=True)):
            return shape + (1,) * missing  # one for each row, or for each expert
        if missing or any(size not in (1, own) for size, own in zip(shape[:-2], self.shape[:-2], strict=True)):
            raise self._wrong_grid(shape)
        return shape

    def _block_sizes(self, block: tuple[int, int] | None) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        sizes = self.shape[-2:]
        # The last block of a row or column may be cut off, so the shapes alone can mislead: 24 rows in 2 blocks of 16.
        if block is not None and self._grid[-2:] == (-(-sizes[0] // block[0]), -(-sizes[1] // block[1])):
            return block
        divided = [-(-size // count) if count else 0 for size, count in zip(sizes, self._grid[-2:], strict=True)]
        exact = all(size == count * step for size, count, step in zip(sizes, self._grid[-2:], divided, strict=True))
        if exact:
            return divided[0], divided[1]
        raise self._wrong_grid(self._grid)

    def _wrong_grid(self, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(f"{self.title}: scales of shape {list(shape)} do not fit weights of {list(self.shape)}")

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        codes, scale_tensor = self.parts[:2]
        scale = read_scale(scale_tensor)
        if self._global_scale is not None:
            scale = scale / read_all(self._global_scale).flatten()[0]
        scale = self._by_matrix(scale * self._factor)
        zero = None if self._zero_point is None else self._by_matrix(read_all(self._zero_point).float())
        for start, count in row_tiles(rows, self.width):
            values = self._decode(read_rows(codes, start, count, self._codes_per_row))
            if zero is not None:
                values.sub_(self._of_rows(zero, start, count))
            yield values.mul_(self._of_rows(scale, start, count)).view(-1)

    def _by_matrix(self, grid: torch.Tensor) -> torch.Tensor:
        """Return the grids of all matrices, one below the other: [matrices * grid rows, grid columns]."""
        return grid.view(self._grid).expand(*self.shape[:-2], *self._grid[-2:]).reshape(-1, self._grid[-1])

    def _of_rows(self, grids: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Return the entry of each element of these rows: [count, width], or [count, 1] if a row shares one."""
        num_rows, (block_rows, block_columns) = self.shape[-2], self._block
        row = torch.arange(start, start + count)
        of_row = grids[row // num_rows * self._grid[-2] + row % num_rows // block_rows]
        if self._grid[-1] == 1:
            return of_row
        return of_row.repeat_interleave(block_columns, dim=1)[:, : self.width]


class TransposedTensor(LogicalTensor):
    """The matrices of another tensor, each transposed; one of them is in memory at a time."""

    def __init__(self, stored: LogicalTensor) -> None:
        shape = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2])
        super().__init__(stored.name, shape, stored.dtype, stored.parts)
        self._stored = stored

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        per_matrix, stored_rows = self.shape[-2], self.shape[-1]
        for part in rows:
            for matrix in range(part.start // per_matrix, -(-part.stop // per_matrix)):
                first = matrix * per_matrix
                of_matrix = range(matrix * stored_rows, (matrix + 1) * stored_rows)
                tiles = list(self._stored.tiles([of_matrix]))
                whole = torch.cat(tiles).view(stored_rows, per_matrix)
                begin, end = max(part.start, first) - first, min(part.stop, first + per_matrix) - first
                for start, count in row_tiles([range(begin, end)], stored_rows):
                    yield whole[:, start : start + count].t().reshape(-1)
