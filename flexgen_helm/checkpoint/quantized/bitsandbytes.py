"""Weights of bitsandbytes: codes of 4 bits that name values of a table, in blocks of their own scale."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

from flexgen_helm.checkpoint.checkpoint import row_tiles
from flexgen_helm.checkpoint.quantized.logical_tensor import (
    LogicalTensor,
    read_all,
    require_shape,
    require_type,
)
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.errors import CheckpointError

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
