"""Keys and values of tokens to packed bytes and back (`CacheFormat` says which values share a scale)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.quant.arithmetic import CannotPack, reach
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.kernels import unpack_into
from flexgen_helm.quant.packed import pack
from flexgen_helm.quant.precisions import CacheFormat


class TokenCodec:
    """One layer's keys and values [tokens, Hk, D] as bytes [groups, group_bytes], first the keys of a group.

    dtype: of keys and values, as they are computed. group_tokens, tail_tokens, token_elements: `stored_tokens` and
    `tail_tokens` of the format, elements of a token's keys. key_bytes: of a group.
    """

    def __init__(self, form: CacheFormat, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.form, self._heads, self._dim, self._dtype = form, heads, dim, dtype
        self.token_elements = heads * dim
        self.group_tokens, self.tail_tokens = form.stored_tokens, form.tail_tokens
        self.key_bytes = self._part_bytes(form.keys)
        self.group_bytes = self.key_bytes + self._part_bytes(form.values)

    @property
    def taken_bytes(self) -> int:
        """Of a group that every query takes: with sparse attention the keys, whose scores name the values."""
        return self.key_bytes if self.form.is_sparse else self.group_bytes

    def stored_before(self, position: int) -> int:
        """Tokens whose stored bytes the query at `position` sees; those behind them are in the tail."""
        return max(0, position + 1 - self.form.residual) // self.group_tokens * self.group_tokens

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Whole groups of tokens [n group_tokens, Hk, D] -> bytes [n, group_bytes]."""
        groups = k.shape[0] // self.group_tokens
        found = [self._pack(x, form).view(groups, -1) for x, form in ((k, self.form.keys), (v, self.form.values))]
        return torch.cat(found, 1)

    def unpack_keys(self, packed: Tensor) -> Tensor:
        """Bytes of groups [B, n, at least key_bytes] -> keys [B, n group_tokens, Hk, D]."""
        return self._unpack_groups(packed[:, :, : self.key_bytes], self.form.keys)

    def unpack_values(self, packed: Tensor) -> Tensor:
        """Bytes of groups [B, n, group_bytes] -> values [B, n group_tokens, Hk, D]."""
        return self._unpack_groups(packed[:, :, self.key_bytes :], self.form.values)

    def pick_values(self, packed: Tensor, tokens: Tensor) -> Tensor:
        """Of bytes [B, n, group_bytes] those of the values of single tokens [B, Hk, k] -> [B, Hk, k, value_bytes].

        For formats that pack the values of every token and head by themselves.
        """
        rows, groups = packed.shape[:2]
        each = packed[:, :, self.key_bytes :].unflatten(-1, (self.group_tokens, self._heads, -1))
        row = torch.arange(rows, device=packed.device)[:, None, None]
        head = torch.arange(self._heads, device=packed.device)[None, :, None]
        return each[row, tokens // self.group_tokens, tokens % self.group_tokens, head]

    def unpack_picked(self, picked: Tensor) -> Tensor:
        """Bytes [B, Hk, k, value_bytes] -> values [B, Hk, k, D]."""
        count = picked.shape[:-1].numel()
        return self._unpacked(picked, self.form.values, count, self._dim).view(*picked.shape[:-1], self._dim)

    def seen(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What packing leaves of whole groups of tokens [n token_group, Hk, D]."""
        k, v = (
            x if form is None else self._unpack(self._pack(x, form), form, x.shape[0])
            for x, form in ((k, self.form.keys), (v, self.form.values))
        )
        return k, v

    def _shape(self, form: GroupFormat | None, tokens: int) -> tuple[int, int]:
        """Rows and width of the matrix that is packed: a head's token is a row, or a token with all its heads."""
        if form is None or form.axis == "in":
            return tokens * self._heads, self._dim
        return tokens, self._heads * self._dim

    def _part_bytes(self, form: GroupFormat | None) -> int:
        rows, width = self._shape(form, self.group_tokens)
        return rows * width * self._dtype.itemsize if form is None else form.packed_bytes(rows, width)

    def _pack(self, x: Tensor, form: GroupFormat | None) -> Tensor:
        if form is None:
            return x.contiguous().view(torch.uint8)
        x = x.reshape(self._shape(form, x.shape[0]))
        try:
            return pack(x, form)
        except CannotPack:
            # The row fails by its hidden states, which show what is not finite, and its neighbours go on.
            return pack(torch.nan_to_num(x, nan=0.0).clamp(-reach(form), reach(form)), form)

    def _unpack_groups(self, data: Tensor, form: GroupFormat | None) -> Tensor:
        rows, groups = data.shape[:2]
        return self._unpack(data, form, rows * groups * self.group_tokens).unflatten(0, (rows, -1))

    def _unpack(self, data: Tensor, form: GroupFormat | None, tokens: int) -> Tensor:
        return self._unpacked(data, form, *self._shape(form, tokens)).view(tokens, self._heads, self._dim)

    def _unpacked(self, data: Tensor, form: GroupFormat | None, rows: int, width: int) -> Tensor:
        if not rows:  # behind a window nothing is picked
            return torch.empty((0, width), dtype=self._dtype, device=data.device)
        if form is None:
            return data.reshape(rows, -1).view(self._dtype)
        stripes = data.reshape(form.num_stripes(rows), form.stripe_bytes(width))
        return unpack_into(stripes, form, torch.empty((rows, width), dtype=self._dtype, device=data.device))
