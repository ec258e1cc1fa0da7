"""Keys and values of tokens to packed bytes and back (`CacheFormat` says which values share a scale)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.quant.arithmetic import NotQuantizableError, largest_value
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.kernels import dequantize_into
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import CacheFormat


class TokenCodec:
    """One layer's keys and values [tokens, Hk, D] as bytes [groups, group_bytes], first the keys of a group.

    dtype: of keys and values, as they are computed. group_tokens, tail_tokens, token_elements: `stored_tokens` and
    `tail_tokens` of the format, elements of a token's keys. key_bytes: of a group.
    """

    def __init__(self, fmt: CacheFormat, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.cache_format, self._heads, self._dim, self._dtype = fmt, heads, dim, dtype
        self.token_elements = heads * dim
        self.group_tokens, self.window_tokens = fmt.stored_group_tokens, fmt.window_tokens
        self.key_bytes = self._part_bytes(fmt.keys)
        self.group_bytes = self.key_bytes + self._part_bytes(fmt.values)

    @property
    def fetched_bytes(self) -> int:
        """Of a group that every query takes: with sparse attention the keys, whose scores name the values."""
        return self.key_bytes if self.cache_format.is_sparse else self.group_bytes

    def num_stored(self, position: int) -> int:
        """Tokens whose stored bytes the query at `position` sees; those behind them are in the tail."""
        return max(0, position + 1 - self.cache_format.residual_window) // self.group_tokens * self.group_tokens

    def quantize(self, k: Tensor, v: Tensor) -> Tensor:
        """Whole groups of tokens [n group_tokens, Hk, D] -> bytes [n, group_bytes]."""
        groups = k.shape[0] // self.group_tokens
        found = [
            self._pack(x, fmt).view(groups, -1)
            for x, fmt in ((k, self.cache_format.keys), (v, self.cache_format.values))
        ]
        return torch.cat(found, 1)

    def dequantize_keys(self, packed: Tensor) -> Tensor:
        """Bytes of groups [B, n, at least key_bytes] -> keys [B, n group_tokens, Hk, D]."""
        return self._unpack_groups(packed[:, :, : self.key_bytes], self.cache_format.keys)

    def dequantize_values(self, packed: Tensor) -> Tensor:
        """Bytes of groups [B, n, group_bytes] -> values [B, n group_tokens, Hk, D]."""
        return self._unpack_groups(packed[:, :, self.key_bytes :], self.cache_format.values)

    def select_values(self, packed: Tensor, tokens: Tensor) -> Tensor:
        """Of bytes [B, n, group_bytes] those of the values of single tokens [B, Hk, k] -> [B, Hk, k, value_bytes].

        For formats that pack the values of every token and head by themselves.
        """
        rows, groups = packed.shape[:2]
        each = packed[:, :, self.key_bytes :].unflatten(-1, (self.group_tokens, self._heads, -1))
        row = torch.arange(rows, device=packed.device)[:, None, None]
        head = torch.arange(self._heads, device=packed.device)[None, :, None]
        return each[row, tokens // self.group_tokens, tokens % self.group_tokens, head]

    def dequantize_selected(self, picked: Tensor) -> Tensor:
        """Bytes [B, Hk, k, value_bytes] -> values [B, Hk, k, D]."""
        count = picked.shape[:-1].numel()
        return self._unpacked(picked, self.cache_format.values, count, self._dim).view(*picked.shape[:-1], self._dim)

    def round_trip(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What packing leaves of whole groups of tokens [n token_group, Hk, D]."""
        k, v = (
            x if fmt is None else self._unpack(self._pack(x, fmt), fmt, x.shape[0])
            for x, fmt in ((k, self.cache_format.keys), (v, self.cache_format.values))
        )
        return k, v

    def _shape(self, fmt: GroupFormat | None, tokens: int) -> tuple[int, int]:
        """Rows and width of the matrix that is packed: a head's token is a row, or a token with all its heads."""
        if fmt is None or fmt.axis == "in":
            return tokens * self._heads, self._dim
        return tokens, self._heads * self._dim

    def _part_bytes(self, fmt: GroupFormat | None) -> int:
        rows, width = self._shape(fmt, self.group_tokens)
        return rows * width * self._dtype.itemsize if fmt is None else fmt.packed_bytes(rows, width)

    def _pack(self, x: Tensor, fmt: GroupFormat | None) -> Tensor:
        if fmt is None:
            return x.contiguous().view(torch.uint8)
        x = x.reshape(self._shape(fmt, x.shape[0]))
        try:
            return quantize(x, fmt)
        except NotQuantizableError:
            # The row fails by its hidden states, which show what is not finite, and its neighbours go on.
            return quantize(torch.nan_to_num(x, nan=0.0).clamp(-largest_value(fmt), largest_value(fmt)), fmt)

    def _unpack_groups(self, data: Tensor, fmt: GroupFormat | None) -> Tensor:
        rows, groups = data.shape[:2]
        return self._unpack(data, fmt, rows * groups * self.group_tokens).unflatten(0, (rows, -1))

    def _unpack(self, data: Tensor, fmt: GroupFormat | None, tokens: int) -> Tensor:
        return self._unpacked(data, fmt, *self._shape(fmt, tokens)).view(tokens, self._heads, self._dim)

    def _unpacked(self, data: Tensor, fmt: GroupFormat | None, rows: int, width: int) -> Tensor:
        if not rows:  # behind a window nothing is picked
            return torch.empty((0, width), dtype=self._dtype, device=data.device)
        if fmt is None:
            return data.reshape(rows, -1).view(self._dtype)
        stripes = data.reshape(fmt.num_stripes(rows), fmt.stripe_bytes(width))
        return dequantize_into(stripes, fmt, torch.empty((rows, width), dtype=self._dtype, device=data.device))
