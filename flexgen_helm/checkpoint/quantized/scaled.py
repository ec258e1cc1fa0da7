"""Weights of 8 or 4 bits times a scale per block, row, or tensor: FP8, INT8, and FP4.

value[i, j] = (code[i, j] - zero point) * scale[i // block rows, j // block columns]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

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


# Weights of bitsandbytes: codes of 4 bits that name values of a table, in blocks of their own scale.

_HALF_TYPES = {"bfloat16": "BF16", "float16": "F16"}


class TableTensor(LogicalTensor):
    """NF4 or FP4: flat codes, two a byte, the upper four bits first; value = table[code] * absmax[block].

    state: JSON with shape, type, and block sizes.
    nested: table and scales of absmax, if that is quantized too, with 8 bits.
    """

    def __init__(
        self,
        name: str,
        codes: StoredTensor,
        absmax: StoredTensor,
        table: StoredTensor,
        state: StoredTensor,
        nested: tuple[StoredTensor, StoredTensor] | None,
        dtype: str,
    ) -> None:
        require_type(state, "U8")
        try:
            settings: dict[str, Any] = json.loads(bytes(state.read(0, state.size)))
            shape = tuple(int(size) for size in settings["shape"])
            self._block = int(settings["blocksize"])
            self._nested_block = int(settings["nested_blocksize"]) if nested else 1
            self._offset = float(settings["nested_offset"]) if nested else 0.0
            dtype = _HALF_TYPES.get(str(settings["dtype"]), dtype)
            if min(self._block, self._nested_block, *shape) < 1:
                raise ValueError("a size below 1")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{state.title} is damaged: {error!r}") from error
        super().__init__(name, shape, dtype, (codes, absmax, table, state, *(nested or ())))
        blocks = -(-prod(shape) // self._block)
        if codes.size != -(-prod(shape) // 2):
            raise CheckpointError(f"{codes.title} has {codes.size} bytes, too few or too many for {list(shape)}")
        require_shape(absmax, blocks)
        require_type(absmax, "U8" if nested else "F32")
        require_type(table, "F32")
        require_shape(table, 16)
        if nested:
            for stored, size in zip(nested, (256, -(-blocks // self._nested_block)), strict=True):
                require_type(stored, "F32")
                require_shape(stored, size)

    def _scales(self) -> torch.Tensor:
        _, absmax, _, _, *nested = self.parts
        codes = read_all(absmax)
        if not nested:
            return codes
        table, scale = (read_all(part) for part in nested)
        return table[codes.long()] * scale[torch.arange(len(codes)) // self._nested_block] + self._offset

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        codes, table, absmax = self.parts[0], read_all(self.parts[2]), self._scales()
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # the two values of each byte
        for start, count in row_tiles(rows, self.width):
            begin, end = start * self.width, (start + count) * self.width
            first = begin // 2
            packed = torch.frombuffer(codes.read(first, -(-end // 2) - first), dtype=torch.uint8)
            values = pairs.index_select(0, packed.int()).view(-1)[begin - 2 * first :][: end - begin]
            blocks = slice(begin // self._block, -(-end // self._block))
            scales = absmax[blocks].repeat_interleave(self._block)[begin % self._block :][: end - begin]
            yield values.mul_(scales)


# Integers of 2, 3, 4, or 8 bits in words of 32, with scales and zero points for groups of inputs.

_FLOATS = ("F32", "F16", "BF16")
# AWQ, gemm layout: where column j of each eight begins in the word.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def spread(words: torch.Tensor, shifts: Sequence[int], bits: int, dim: int) -> torch.Tensor:
    """Return the integers of words along `dim` that begin at the bits `shifts` of each: int32."""
    by_word = torch.tensor(shifts, dtype=torch.int32).view(-1, *[1] * (words.ndim - 1 - dim))
    return ((words.unsqueeze(dim + 1) >> by_word) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def unpack(words: torch.Tensor, start: int, count: int, bits: int) -> torch.Tensor:
    """Return `count` integers from number `start` on of the bit streams along the first dimension: int32."""
    if 32 % bits == 0:
        per_word = 32 // bits
        first, skipped = start // per_word, start % per_word
        needed = words[first : -(-(start + count) // per_word)]
        return spread(needed, range(0, 32, bits), bits, 0)[skipped : skipped + count]
    begin = torch.arange(start, start + count) * bits
    wide = words.to(torch.int64) & 0xFFFFFFFF
    word, shift = begin // 32, (begin % 32).view(-1, *[1] * (words.ndim - 1))
    following = wide[(word + 1).clamp(max=len(wide) - 1)]
    return (((wide[word] | following << 32) >> shift) & ((1 << bits) - 1)).to(torch.int32)


def scale_groups(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, dim: int, group: torch.Tensor
) -> torch.Tensor:
    """Return (code - zero) * scale in float32, where the inputs along `dim` share zeros and scales by group.

    group: of each input.
    """
    num_groups, inputs = scales.shape[dim], codes.shape[dim]
    size = inputs // num_groups
    if size * num_groups == inputs and torch.equal(group, torch.arange(inputs) // size):
        parts = codes.unflatten(dim, (num_groups, size))
        values = (parts - zeros.unsqueeze(dim + 1)).float() * scales.unsqueeze(dim + 1)
        return values.flatten(dim, dim + 1)
    return (codes - zeros.index_select(dim, group)).float() * scales.index_select(dim, group)


def read_groups(g_idx: StoredTensor | None, inputs: int, num_groups: int, group_size: int) -> torch.Tensor:
    """Return the group of each input: as stored, or else runs of `group_size`.

    Raises `CheckpointError` if a group does not exist.
    """
    if g_idx is None:
        return torch.arange(inputs) // group_size
    group = read_all(g_idx).long()
    if len(group) and not 0 <= int(group.min()) <= int(group.max()) < num_groups:
        raise CheckpointError(f"{g_idx.title} names groups outside 0 to {num_groups - 1}")
    return group


def find_group_size(scales: StoredTensor, inputs: int, num_groups: int, known: Sequence[int]) -> int:
    """Return how many inputs share a scale: of the `known` sizes the first that fits, else equal parts.

    The last group may be cut off, so the number of groups alone can mislead: 96 inputs in 2 groups of 64.
    Raises `CheckpointError` if none fits.
    """
    for size in known:
        if -(-inputs // size) == num_groups:
            return size
    if num_groups < 1 or inputs % num_groups:
        raise CheckpointError(f"{scales.title} has {num_groups} groups for {inputs} inputs")
    return inputs // num_groups


class GptqTensor(LogicalTensor):
    """GPTQ: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in].

    g_idx: group of each input; None if groups are runs of equal lengths.
    """

    def __init__(
        self,
        name: str,
        qweight: StoredTensor,
        qzeros: StoredTensor,
        scales: StoredTensor,
        g_idx: StoredTensor | None,
        dtype: str,
        zero_offset: int,
        group_sizes: Sequence[int],
    ) -> None:
        for stored in (qweight, qzeros):
            require_type(stored, "I32")
        require_type(scales, *_FLOATS)
        for stored in (qweight, qzeros, scales):
            if len(stored.shape) != 2:
                raise CheckpointError(f"{stored.title} has the shape {list(stored.shape)}; expected is a matrix")
        outputs = scales.shape[1]
        self._bits = bits = qzeros.shape[1] * 32 // max(1, outputs)
        if bits not in (2, 3, 4, 8) or outputs * bits != qzeros.shape[1] * 32:
            raise CheckpointError(
                f"{qzeros.title} has {qzeros.shape[1]} words for {outputs} outputs: not 2, 3, 4 or 8 bits each"
            )
        inputs = qweight.shape[0] * 32 // bits
        super().__init__(
            name, (outputs, inputs), half_type(scales, dtype), (qweight, qzeros, scales, *([g_idx] if g_idx else []))
        )
        groups = scales.shape[0]
        self._group_size = find_group_size(scales, inputs, groups, group_sizes)
        require_shape(qweight, inputs * bits // 32, outputs)
        require_shape(qzeros, groups, outputs * bits // 32)
        if g_idx is not None:
            require_type(g_idx, "I32", "I64")
            require_shape(g_idx, inputs)
        self._zero_offset, self._g_idx = zero_offset, g_idx

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        words, zero_words, scales = (read_all(part) for part in self.parts[:3])
        group = read_groups(self._g_idx, self.width, len(scales), self._group_size)
        for start, count in row_tiles(rows, self.width):
            outputs = slice(start, start + count)
            codes = unpack(words[:, outputs], 0, self.width, self._bits)
            zeros = unpack(zero_words.t(), start, count, self._bits).t()
            zeros = (zeros + self._zero_offset) & ((1 << self._bits) - 1)
            yield scale_groups(codes, zeros, scales[:, outputs].float(), 0, group).t().reshape(-1)


class AwqTensor(LogicalTensor):
    """AWQ, gemm layout: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out], 4 bits."""

    def __init__(
        self,
        name: str,
        qweight: StoredTensor,
        qzeros: StoredTensor,
        scales: StoredTensor,
        dtype: str,
        group_sizes: Sequence[int],
    ) -> None:
        for stored in (qweight, qzeros):
            require_type(stored, "I32")
        require_type(scales, *_FLOATS)
        for stored in (qweight, scales):
            if len(stored.shape) != 2:
                raise CheckpointError(f"{stored.title} has the shape {list(stored.shape)}; expected is a matrix")
        inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
        super().__init__(name, (outputs, inputs), half_type(scales, dtype), (qweight, qzeros, scales))
        groups = scales.shape[0]
        self._group_size = find_group_size(scales, inputs, groups, group_sizes)
        require_shape(scales, groups, outputs)
        require_shape(qzeros, groups, outputs // 8)

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        words, zero_words, scales = (read_all(part) for part in self.parts)
        group = read_groups(None, self.width, len(scales), self._group_size)
        for start, count in row_tiles(rows, self.width):
            codes, zeros = (self._columns(packed, start, count) for packed in (words, zero_words))
            yield scale_groups(codes, zeros, scales[:, start : start + count].float(), 0, group).t().reshape(-1)

    @staticmethod
    def _columns(words: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Return `count` columns of integers from `start` on: [rows, count], int32."""
        first, skipped = start // 8, start % 8
        needed = words[:, first : -(-(start + count) // 8)]
        return spread(needed, _AWQ_SHIFTS, 4, 1)[:, skipped : skipped + count]


class PackedTensor(LogicalTensor):
    """compressed-tensors, pack-quantized: weight_packed [out, in * bits / 32], weight_scale [out, groups], 4 or 8 bits.

    Codes and zero points are signed and stored with 2 ** (bits - 1) added.
    zero_point: [out * bits / 32, groups]; None if all are zero.
    g_idx: group of each input; None if groups are runs of equal lengths.
    """

    def __init__(
        self,
        name: str,
        packed: StoredTensor,
        scale: StoredTensor,
        true_shape: StoredTensor,
        zero_point: StoredTensor | None,
        g_idx: StoredTensor | None,
        dtype: str,
        group_sizes: Sequence[int],
    ) -> None:
        require_type(packed, "I32")
        require_type(scale, *_FLOATS)
        require_type(true_shape, "I64", "I32")
        require_shape(true_shape, 2)
        outputs, inputs = (int(size) for size in read_all(true_shape))
        others = [part for part in (zero_point, g_idx) if part is not None]
        super().__init__(name, (outputs, inputs), half_type(scale, dtype), (packed, scale, true_shape, *others))
        fitting = [bits for bits in (4, 8) if packed.shape == (outputs, -(-inputs * bits // 32))]
        if not fitting or len(scale.shape) != 2 or scale.shape[0] not in (1, outputs):
            raise CheckpointError(
                f"{self.title}: shapes {list(packed.shape)} and {list(scale.shape)} do not fit 4 or 8 bits of "
                f"{outputs} x {inputs}"
            )
        self._bits, groups = fitting[0], scale.shape[1]
        self._group_size = find_group_size(scale, inputs, groups, group_sizes)
        if zero_point is not None:  # early files have them unpacked
            require_type(zero_point, "I32", "I8")
            packed_rows = -(-outputs * self._bits // 32)
            require_shape(zero_point, packed_rows if zero_point.dtype == "I32" else outputs, groups)
        if g_idx is not None:
            require_type(g_idx, "I32", "I64")
            require_shape(g_idx, inputs)
        self._zero_point, self._g_idx = zero_point, g_idx

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        packed = self.parts[0]
        scales, zero_points = read_all(self.parts[1]).float().expand(self.shape[0], -1), self._zero_points()
        group = read_groups(self._g_idx, self.width, scales.shape[1], self._group_size)
        for start, count in row_tiles(rows, self.width):
            words = read_rows(packed, start, count, packed.shape[1])
            codes = spread(words, range(0, 32, self._bits), self._bits, 1)[:, : self.width]
            outputs = slice(start, start + count)
            yield scale_groups(codes, zero_points[outputs], scales[outputs], 1, group).reshape(-1)

    def _zero_points(self) -> torch.Tensor:
        """Return the zero points with the codes' offset: [out, groups], int32."""
        offset, groups = 1 << (self._bits - 1), self.parts[1].shape[1]
        if self._zero_point is None:
            return torch.full((self.shape[0], groups), offset, dtype=torch.int32)
        stored = read_all(self._zero_point)
        return stored.int() + offset if stored.dtype == torch.int8 else unpack(stored, 0, self.shape[0], self._bits)
