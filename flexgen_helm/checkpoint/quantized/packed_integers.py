"""Integers of 2, 3, 4, or 8 bits in words of 32, with scales and zero points for groups of inputs.

    weight[out, in] = scale[group of in, out] * (code[in, out] - zero[group of in, out])

Words hold their integers from the lowest bit on; of 3 bits, an integer may begin in one word and end in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
