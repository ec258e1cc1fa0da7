"""Keys and values of tokens to packed bytes and back (`CacheFormat` says which values share a scale)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.kernels import unpack_into
from flexgen_helm.quant.packed import pack
from flexgen_helm.quant.precisions import CacheFormat


class TokenCodec:
    """One layer's keys and values [tokens, Hk, D] as bytes [groups, group_bytes].

    group_tokens, tail_tokens, token_elements: `stored_tokens` and `tail_tokens` of the format, elements of a token's
    keys.
    """

    def __init__(self, form: CacheFormat, heads: int, dim: int) -> None:
        self.form, self._heads, self._dim = form, heads, dim
        self.token_elements = heads * dim
        self.group_tokens, self.tail_tokens = form.stored_tokens, form.tail_tokens
        self._parts = [self._part_bytes(part) for part in (form.keys, form.values)]
        self.group_bytes = sum(self._parts)

    def stored_before(self, position: int) -> int:
        """Tokens whose stored bytes the query at `position` sees; those behind them are in the tail."""
        return max(0, position + 1 - self.form.residual) // self.group_tokens * self.group_tokens

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Whole groups of tokens [n group_tokens, Hk, D] -> bytes [n, group_bytes]."""
        groups = k.shape[0] // self.group_tokens
        found = [self._pack(x, form).view(groups, -1) for x, form in ((k, self.form.keys), (v, self.form.values))]
        return torch.cat(found, 1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Bytes [n, group_bytes] -> keys and values [n group_tokens, Hk, D]."""
        first, groups = self._parts[0], packed.shape[0]
        parts = (packed[:, :first], self.form.keys), (packed[:, first:], self.form.values)
        k, v = (self._unpack(data, form, groups * self.group_tokens, dtype) for data, form in parts)
        return k, v

    def seen(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What packing leaves of whole groups of tokens [n token_group, Hk, D]."""
        k, v = (
            self._unpack(self._pack(x, form), form, x.shape[0], x.dtype)
            for x, form in ((k, self.form.keys), (v, self.form.values))
        )
        return k, v

    def _shape(self, form: GroupFormat, tokens: int) -> tuple[int, int]:
        """Rows and width of the matrix that is packed: a head's token is a row, or a token with all its heads."""
        if form.axis == "in":
            return tokens * self._heads, self._dim
        return tokens, self._heads * self._dim

    def _part_bytes(self, form: GroupFormat) -> int:
        return form.packed_bytes(*self._shape(form, self.group_tokens))

    def _pack(self, x: Tensor, form: GroupFormat) -> Tensor:
        return pack(x.reshape(self._shape(form, x.shape[0])), form)

    def _unpack(self, data: Tensor, form: GroupFormat, tokens: int, dtype: torch.dtype) -> Tensor:
        rows, width = self._shape(form, tokens)
        stripes = data.reshape(form.num_stripes(rows), form.stripe_bytes(width))
        out = torch.empty((rows, width), dtype=dtype, device=data.device)
        return unpack_into(stripes, form, out).view(tokens, self._heads, self._dim)
