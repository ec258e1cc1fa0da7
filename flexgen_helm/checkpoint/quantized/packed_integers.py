"""Integers of 2, 3, 4, or 8 bits in words of 32, with scales and zero points for groups of inputs.

    weight[out, in] = scale[group of in, out] * (code[in, out] - zero[group of in, out])

Words hold their integers from the lowest bit on; of 3 bits, an integer may begin in one word and end in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
# AWQ, gemm layout: column j of each eight is in this place of the word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words: torch.Tensor, positions: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers at these positions of the bit streams along the first dimension: [positions, ...], int32."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    begin = positions * bits
    word, shift = begin // 32, (begin % 32).view(-1, *[1] * (words.ndim - 1))
    following = wide[(word + 1).clamp(max=len(wide) - 1)]
    return (((wide[word] | following << 32) >> shift) & ((1 << bits) - 1)).to(torch.int32)


def _num_groups(scales: StoredTensor, inputs: int) -> int:
    groups = scales.shape[0]
    if groups < 1 or groups > inputs:
        raise CheckpointError(f"{scales.title} has {groups} groups for {inputs} inputs")
    return groups


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
        groups = _num_groups(scales, inputs)
        require_shape(qweight, inputs * bits // 32, outputs)
        require_shape(qzeros, groups, outputs * bits // 32)
        if g_idx is not None:
            require_type(g_idx, "I32", "I64")
            require_shape(g_idx, inputs)
        self._group_size = -(-inputs // groups)
        self._zero_offset = zero_offset

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        qweight, qzeros, scales, *g_idx = self.parts
        words, zero_words, scale = read_all(qweight), read_all(qzeros).t(), read_all(scales).float()
        inputs = torch.arange(self.shape[1])
        group = read_all(g_idx[0]).long() if g_idx else inputs // self._group_size
        if len(group) and not 0 <= int(group.min()) <= int(group.max()) < len(scale):
            raise CheckpointError(f"{g_idx[0].title} names groups outside 0 to {len(scale) - 1}")
        for start, count in row_tiles(rows, self.width):
            outputs = slice(start, start + count)
            codes = unpack(words[:, outputs], inputs, self._bits)
            zeros = unpack(zero_words, torch.arange(start, start + count), self._bits).t()
            zeros = (zeros + self._zero_offset) & ((1 << self._bits) - 1)
            values = (codes - zeros[group]).float() * scale[group, outputs]
            yield values.t().reshape(-1)


class AwqTensor(LogicalTensor):
    """AWQ, gemm layout: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out], 4 bits."""

    def __init__(
        self, name: str, qweight: StoredTensor, qzeros: StoredTensor, scales: StoredTensor, dtype: str
    ) -> None:
        for stored in (qweight, qzeros):
            require_type(stored, "I32")
        require_type(scales, *_FLOATS)
        for stored in (qweight, scales):
            if len(stored.shape) != 2:
                raise CheckpointError(f"{stored.title} has the shape {list(stored.shape)}; expected is a matrix")
        inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
        super().__init__(name, (outputs, inputs), half_type(scales, dtype), (qweight, qzeros, scales))
        groups = _num_groups(scales, inputs)
        require_shape(scales, groups, outputs)
        require_shape(qzeros, groups, outputs // 8)
        self._group_size = -(-inputs // groups)

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        words, zero_words, scale = (read_all(stored) for stored in self.parts)
        group = torch.arange(self.shape[1]) // self._group_size
        places = torch.tensor(_AWQ_PLACES)
        for start, count in row_tiles(rows, self.width):
            output = torch.arange(start, start + count)
            shift = places[output % 8] * 4
            codes = (words[:, output // 8] >> shift) & 0xF
            zeros = (zero_words[:, output // 8] >> shift) & 0xF
            values = (codes - zeros[group]).float() * scale.float()[group, start : start + count]
            yield values.t().reshape(-1)


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
        if zero_point is not None:  # early files have them unpacked
            require_type(zero_point, "I32", "I8")
            packed_rows = -(-outputs * self._bits // 32)
            require_shape(zero_point, packed_rows if zero_point.dtype == "I32" else outputs, groups)
        if g_idx is not None:
            require_type(g_idx, "I32", "I64")
            require_shape(g_idx, inputs)
        self._zero_point, self._g_idx, self._group_size = zero_point, g_idx, -(-inputs // max(1, groups))

    def tiles(self, rows: Iterable[range]) -> Iterator[torch.Tensor]:
        packed, scale_tensor, *_ = self.parts
        scale, inputs = read_all(scale_tensor).float().expand(self.shape[0], -1), torch.arange(self.shape[1])
        zero_points = self._zero_points()
        group = inputs // self._group_size if self._g_idx is None else read_all(self._g_idx).long()
        if len(group) and not 0 <= int(group.min()) <= int(group.max()) < scale.shape[1]:
            raise CheckpointError(f"{self.title}: groups of inputs outside 0 to {scale.shape[1] - 1}")
        for start, count in row_tiles(rows, self.width):
            words = read_rows(packed, start, count, packed.shape[1])
            codes = unpack(words.t(), inputs, self._bits).t()
            codes -= zero_points[start : start + count, group]
            yield (codes.float() * scale[start : start + count, group]).reshape(-1)

    def _zero_points(self) -> torch.Tensor:
        """Return the zero points with the codes' offset: [out, groups], int32."""
        offset, groups = 1 << (self._bits - 1), self.parts[1].shape[1]
        if self._zero_point is None:
            return torch.full((self.shape[0], groups), offset, dtype=torch.int32)
        stored = read_all(self._zero_point)
        return (
            stored.int() + offset
            if stored.dtype == torch.int8
            else unpack(stored, torch.arange(self.shape[0]), self._bits)
        )
