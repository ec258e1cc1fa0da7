"""States of layers that keep one of a sequence instead of its keys and values, on the compute device.

A state takes in each token once. A pass that breaks off is run again, and its layers must not take in a token twice. So
there are two versions, and a pass writes the one that it does not read:

    pass        reads   writes
    1           A       B
    2 breaks    B       A
    2 again     B       A
    3           A       B
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from flexgen_helm.kv_cache.tensors import zeros
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence


class BlockStates:
    """The states of one cache block: for each layer that has them two versions, [2, slots, elements] in float32."""

    def __init__(self, block: CacheBlock, elements: SequenceOf[int], device: torch.device, one_layer: bool) -> None:
        """elements: of each layer, 0 for one without states.

        one_layer: all layers share one tensor (`KVCache`).
        """
        self._block, self._one_layer = block, one_layer
        sizes = [max(elements)] if one_layer else elements
        self._layers = [zeros((2, block.num_slots, size), device, torch.float32) if size else None for size in sizes]
        self._elements = elements
        self._read = [0] * len(sizes)  # the version that the last pass read
        self._pass: list[tuple[Sequence, int] | None] = [None] * len(sizes)  # that pass, by what was to come

    def begin(self, layer: int, slot: int, state: Tensor) -> None:
        """Store the state [1, elements] behind a prompt, in both versions."""
        self._tensor(layer)[:, slot] = state

    def newest(self, layer: int, slot: int) -> Tensor:
        """Return the state [1, elements] of a sequence that does not decode."""
        return self._tensor(layer)[0, slot : slot + 1]

    def before(self, layer: int) -> Tensor:
        """Return the states [B, elements] before the next token; the same for the same token."""
        first, number = self._block.sequences[0], self._number(layer)
        now = first, first.num_computed
        if self._pass[number] != now:
            self._read[number], self._pass[number] = 1 - self._read[number], now
        return self._tensor(layer)[self._read[number], : len(self._block.sequences)]

    def write(self, layer: int, states: Tensor) -> None:
        """Store the states [B, elements] behind the token that `before` was asked for."""
        self._tensor(layer)[1 - self._read[self._number(layer)], : len(states)] = states

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        for tensor in self._layers:
            if tensor is not None:
                tensor[:, target] = tensor[:, source]

    def copy_slot(self, target: int, other: BlockStates, source: int) -> None:
        """Make a slot a copy of another block's, as its last pass left it."""
        for own, theirs, read in zip(self._layers, other._layers, other._read):
            if own is not None and theirs is not None:
                own[:, target] = theirs[1 - read, source]

    def _number(self, layer: int) -> int:
        return 0 if self._one_layer else layer

    def _tensor(self, layer: int) -> Tensor:
        tensor = self._layers[self._number(layer)]
        assert tensor is not None
        return tensor[..., : self._elements[layer]]
