"""The newest tokens of sequences whose older tokens are quantized, as they were computed, on the compute device.

Token p lies at place p mod W. A group is encoded and stored when its last token comes:

    tokens  0 … 31 | 32 … 63 | 64 …           W = residual window + group - 1
            stored    stored   this window
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec, KeysValues, NewTokens, zeros
from flexgen_helm.scheduling.sequence import CacheBlock


class ResidualWindow:
    """The windows of one cache block, in all layers: keys and values [slots, W, Hk, D]."""

    def __init__(
        self, block: CacheBlock, codec: Codec, num_layers: int, device: torch.device, heads: int, dtype: torch.dtype
    ) -> None:
        self._block, self._codec, self._device = block, codec, device
        shape = (2, block.num_slots, codec.window_tokens, heads, codec.token_elements // heads)
        self._plain = [zeros(shape, device, dtype) for _ in range(num_layers)]
        # Where tokens are quantized one by one, those of a group that is not whole yet are seen quantized too.
        self._quantized = [zeros(shape, device, dtype) for _ in range(num_layers if codec.window_copies > 1 else 0)]

    def write(self, slot: int, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the last tokens of a prompt [S, Hk, D]."""
        codec, length = self._codec, k.shape[0]
        first = max(0, length - codec.window_tokens)
        places = torch.arange(first, length, device=self._device) % codec.window_tokens
        for half, new in enumerate((k, v)):
            self._plain[layer][half, slot, places] = new[first:]
        if self._quantized:
            for half, new in enumerate(codec.round_trip(k[first:], v[first:])):
                self._quantized[layer][half, slot, places] = new

    def append(self, layer: int, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """Keep one token [B, Hk, D] of each sequence."""
        newest, slots, places = self._plain[layer], new.window_slots, new.window_places
        newest[0, slots, places], newest[1, slots, places] = k, v
        if self._quantized:
            seen = self._quantized[layer]
            seen[0, slots, places], seen[1, slots, places] = self._codec.round_trip(k, v)

    def group(self, layer: int, slots: Tensor, places: Tensor) -> KeysValues:
        """Return keys and values [n * G, Hk, D] of some slots [n] at some places [G], slot by slot."""
        keys, values = self._plain[layer][:, slots[:, None], places].flatten(1, 2)
        return keys, values

    def read(self, layer: int, seen_quantized: Tensor | None) -> KeysValues:
        """Return keys and values [B, Hk, W, D] of the block's sequences.

        seen_quantized: places [B, W] whose round trip is seen; None where no token is quantized for itself.
        """
        count = len(self._block.sequences)
        newest = self._plain[layer][:, :count]
        if seen_quantized is not None:
            newest = torch.where(seen_quantized[None, :, :, None, None], self._quantized[layer][:, :count], newest)
        return newest[0].transpose(1, 2), newest[1].transpose(1, 2)

    def read_tokens(self, slot: int, layer: int, first: int, last: int) -> KeysValues:
        """Return keys and values [1, Hk, n, D] of tokens first … last - 1 of a slot, as they were computed."""
        assert last - first <= self._codec.window_tokens
        places = torch.arange(first, last, device=self._device) % self._codec.window_tokens
        keys, values = self._plain[layer][:, slot : slot + 1, places].transpose(2, 3)
        return keys, values

    def copy_slot(self, target: int, other: ResidualWindow, source: int) -> None:
        """Make a slot a copy of another block's."""
        for own, theirs in zip((*self._plain, *self._quantized), (*other._plain, *other._quantized)):
            own[:, target] = theirs[:, source]

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        for tensor in (*self._plain, *self._quantized):
            tensor[:, target] = tensor[:, source]
