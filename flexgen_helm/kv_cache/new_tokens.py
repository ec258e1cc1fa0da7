"""Where the new tokens of a decode step go in a cache block, known on the host and on the compute device.

A step's places are the same in all layers. They are made once a batch, from lists on the host that reach the device
with the batch's other small tensors. So no layer copies an index, and none waits for the device.

Shapes: B sequences of the block, n slots, G tokens of a group, W tokens of a residual window.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec
from flexgen_helm.scheduling.sequence import CacheBlock


@dataclass(frozen=True, eq=False)
class UnitPlaces:
    """One unit in each of some slots.

    on_host, on_device: slots [n] and the number of the unit in each [n].
    """

    on_host: tuple[Tensor, Tensor]
    on_device: tuple[Tensor, Tensor]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return slots and units as tensors of this device."""
        return self.on_host if device.type == "cpu" else self.on_device


@dataclass(frozen=True, eq=False)
class CompleteGroup:
    """A group that the new tokens complete in some slots.

    units: where it is stored.
    window_places: [G], of its tokens in the residual window.
    """

    units: UnitPlaces
    window_places: Tensor


@dataclass(frozen=True, eq=False)
class NewTokens:
    """One new token of each sequence of a block.

    units: of the storage, where a unit is a token; None where groups are stored.
    window_slots, window_places: [B] each, in the residual window, if there is one.
    groups: that the tokens complete.
    """

    units: UnitPlaces | None
    window_slots: Tensor
    window_places: Tensor
    groups: tuple[CompleteGroup, ...] = ()


def new_token_lists(block: CacheBlock, codec: Codec) -> list[list[int]]:
    """Return the numbers that `new_tokens` needs on both sides of the link: slots and units in turn."""
    counts = [sequence.num_computed for sequence in block.sequences]
    lists = [[*range(len(counts))], counts]
    for last, slots in _complete_groups(counts, codec):
        lists += [slots, [last // codec.group_tokens] * len(slots)]
    return lists


def new_tokens(
    block: CacheBlock, codec: Codec, on_host: SequenceOf[Tensor], on_device: SequenceOf[Tensor]
) -> NewTokens:
    """Place the next tokens of a block's sequences; on_host, on_device: the lists of `new_token_lists` as tensors."""
    slots, positions = on_device[:2]
    if not codec.window_tokens:
        return NewTokens(UnitPlaces((on_host[0], on_host[1]), (slots, positions)), slots, positions)
    counts, groups = [sequence.num_computed for sequence in block.sequences], []
    for number, (last, _) in enumerate(_complete_groups(counts, codec), 1):
        host_slots, host_units = on_host[2 * number : 2 * number + 2]
        device_slots, device_units = on_device[2 * number : 2 * number + 2]
        tokens = torch.arange(last - codec.group_tokens + 1, last + 1, device=positions.device) % codec.window_tokens
        groups.append(CompleteGroup(UnitPlaces((host_slots, host_units), (device_slots, device_units)), tokens))
    return NewTokens(None, slots, positions % codec.window_tokens, tuple(groups))


def _complete_groups(counts: SequenceOf[int], codec: Codec) -> Iterator[tuple[int, list[int]]]:
    """Yield the last token of each group that the next tokens complete, and its slots: those that began together."""
    slots: dict[int, list[int]] = {}
    for slot, count in enumerate(counts):
        if codec.window_tokens and (count + 1) % codec.group_tokens == 0:
            slots.setdefault(count, []).append(slot)
    yield from slots.items()
