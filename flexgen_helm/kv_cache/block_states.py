"""States of layers that keep one of each sequence, instead of its keys and values."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import zeros
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence


class BlockStates:
    """States of layers that keep one of a sequence instead of its keys and values, on the compute
    device.

    A token changes the state, and a pass that broke off is made again from the state before it. So
    a layer has two versions, [2, slots, elements] in float32: a pass reads one and writes the
    other, the next pass does the reverse.

        pass of token     5   5 again   6   7
        reads version     1   1         0   1
        writes version    0   0         1   0

    Behind a prompt both versions are the same.
    """

    def __init__(
        self, block: CacheBlock, elements: SequenceOf[int], device: torch.device, one_layer: bool
    ) -> None:
        """elements: of each layer, 0 for one without states.

        one_layer: all layers share one tensor, in which the next one's states take the place of the
            last one's.
        """
        self._block, self._one_layer = block, one_layer
        sizes = [max(elements)] if one_layer else elements
        self._layers = [
            zeros((2, block.num_slots, size), torch.float32, device) if size else None
            for size in sizes
        ]
        self._elements = elements
        # Of the last pass through each layer the version that it read, and which pass it was: its
        # first sequence, and how many tokens of that were computed.
        self._version_read = [0] * len(sizes)
        self._last_pass: list[tuple[Sequence, int] | None] = [None] * len(sizes)

    def write_prompt(self, layer: int, slot: int, state: Tensor) -> None:
        """Store the state [1, elements] behind a prompt."""
        self._versions(layer)[:, slot] = state

    def read_prompt(self, layer: int, slot: int) -> Tensor:
        """Return the state [1, elements] behind the prompt of a sequence that does not decode."""
        return self._versions(layer)[0, slot : slot + 1]

    def read(self, layer: int) -> Tensor:
        """Return the states [B, elements] before the next token; the same again where the pass is
        made again.
        """
        first, number = self._block.sequences[0], self._number(layer)
        this_pass = first, first.num_computed
        if self._last_pass[number] != this_pass:
            self._last_pass[number] = this_pass
            self._version_read[number] = 1 - self._version_read[number]
        return self._versions(layer)[self._version_read[number], : len(self._block.sequences)]

    def write(self, layer: int, states: Tensor) -> None:
        """Store the states [B, elements] behind the token before which `read` returned them."""
        self._versions(layer)[1 - self._version_read[self._number(layer)], : len(states)] = states

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        for versions in self._layers:
            if versions is not None:
                versions[:, target] = versions[:, source]

    def copy_slot(self, target: int, states: BlockStates, source: int) -> None:
        """Make a slot a copy of another block's, as its last pass left it."""
        for new, old, read in zip(self._layers, states._layers, states._version_read):
            if new is not None and old is not None:
                new[:, target] = old[1 - read, source]

    def _number(self, layer: int) -> int:
        return 0 if self._one_layer else layer

    def _versions(self, layer: int) -> Tensor:
        versions = self._layers[self._number(layer)]
        assert versions is not None
        return versions[..., : self._elements[layer]]
