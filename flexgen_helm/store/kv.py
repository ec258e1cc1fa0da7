"""The KV cache at rest: a tensor of keys and one of values per slot group and layer, claimed from the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.core.rows import Row, SlotGroup
from flexgen_helm.models.spec import ModelSpec
from flexgen_helm.store.ledger import Allocation, Ledger


@dataclass(eq=False)
class _GroupCache:
    """keys[layer] and values[layer]: [slots, Hk, capacity, D]."""

    keys: list[Tensor]
    values: list[Tensor]
    claim: Allocation


class KVCache:
    """Caches of all open slot groups on one tier."""

    def __init__(self, spec: ModelSpec, ledger: Ledger, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._ledger = ledger
        self._device = device
        self._dtype = dtype
        self._groups: dict[SlotGroup, _GroupCache] = {}

    @property
    def bytes_per_token(self) -> int:
        return self._spec.kv_bytes_per_token(self._dtype.itemsize)

    def write(self, row: Row, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [S, Hk, D] of `row`'s own tokens start … start + S - 1."""
        cache = self._open(row)
        end = start + k.shape[0]
        cache.keys[layer][row.slot, :, start:end] = k.transpose(0, 1)
        cache.values[layer][row.slot, :, start:end] = v.transpose(0, 1)

    def append(self, group: SlotGroup, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one token [B, Hk, D] for each of the group's rows, at `positions` [B] of their own tokens."""
        cache = self._open(group.rows[0])
        slots = torch.arange(len(group.rows), device=self._device)
        cache.keys[layer][slots, :, positions] = k
        cache.values[layer][slots, :, positions] = v

    def active(self, group: SlotGroup, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's rows, their first `length` positions: [B, Hk, length, D] each, not copied."""
        cache = self._groups[group]
        rows = len(group.rows)
        return cache.keys[layer][:rows, :, :length], cache.values[layer][:rows, :, :length]

    def segment(self, row: Row, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of everything `row` has computed: [Hk, computed, D] each, not copied."""
        assert row.group is not None
        cache = self._groups[row.group]
        return cache.keys[layer][row.slot, :, : row.computed], cache.values[layer][row.slot, :, : row.computed]

    def move(self, group: SlotGroup, source: int, target: int, length: int, stale: int) -> None:
        """Copy the first `length` positions of one slot over another that held `stale`, in all layers.

        What remains of the old row is cleared: a masked position still takes part in the product with weight 0, and
        0 times a value that is not finite would carry one row's fault into its neighbours.
        """
        cache = self._groups[group]
        for tensor in (*cache.keys, *cache.values):
            tensor[target, :, :length] = tensor[source, :, :length]
            tensor[target, :, length:stale] = 0

    def free(self, group: SlotGroup) -> None:
        """Give a group's memory back; harmless for one that never wrote."""
        cache = self._groups.pop(group, None)
        if cache is not None:
            self._ledger.release(cache.claim)

    def close(self) -> None:
        for group in list(self._groups):
            self.free(group)

    def _open(self, row: Row) -> _GroupCache:
        assert row.group is not None
        cache = self._groups.get(row.group)
        if cache is None:
            group, spec = row.group, self._spec
            claim = self._ledger.claim("cache", group.num_slots * group.capacity * self.bytes_per_token)
            shape = (group.num_slots, spec.num_kv_heads, group.capacity, spec.head_dim)
            tensors = [_zeros(shape, self._device, self._dtype) for _ in range(2 * spec.num_layers)]
            cache = _GroupCache(tensors[: spec.num_layers], tensors[spec.num_layers :], claim)
            self._groups[row.group] = cache
        return cache


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros, because masked positions are multiplied by 0 and must be finite.

    On the CPU they come from numpy, which leaves zeroing to the system: pages cost nothing until they are written,
    so a row that ends early never costs its whole slot. `torch.zeros` writes them all at once.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, device=device, dtype=dtype)
