"""Where the new tokens of a decode step go in a cache block. Their tensors exist once the batch's
`Uploads` are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_helm.kv_cache.codec import Codec, SlotIndex
from flexgen_helm.offload.uploads import Uploaded, Uploads
from flexgen_helm.scheduling.sequence import CacheBlock


@dataclass(frozen=True, eq=False)
class CompleteGroup:
    """A group that the new tokens complete in some slots.

    units: where it is stored.
    window_index: [G], where its tokens are in the residual window.
    """

    units: SlotIndex
    window_index: Uploaded


@dataclass(frozen=True, eq=False)
class NewTokens:
    """One new token of each sequence of a block.

    target: where they go: to the residual window, or to the storage if there is none; a unit is a
        token then.
    groups: that the tokens complete in the window.
    """

    target: SlotIndex
    groups: Sequence[CompleteGroup] = ()


def place_new_tokens(block: CacheBlock, codec: Codec, uploads: Uploads) -> NewTokens:
    """Place the next tokens of a block's sequences."""
    counts = [sequence.num_computed for sequence in block.sequences]
    slots = uploads.add(range(len(counts)))
    if not codec.window_tokens:
        return NewTokens(SlotIndex(slots, uploads.add(counts)))
    complete: dict[int, list[int]] = {}  # the last token of a group -> its slots
    for slot, count in enumerate(counts):
        if (count + 1) % codec.group_tokens == 0:
            complete.setdefault(count, []).append(slot)
    groups = []
    for last, ending in complete.items():
        units = SlotIndex(
            uploads.add(ending), uploads.add([last // codec.group_tokens] * len(ending))
        )
        tokens = range(last - codec.group_tokens + 1, last + 1)
        groups.append(
            CompleteGroup(units, uploads.add([token % codec.window_tokens for token in tokens]))
        )
    return NewTokens(
        SlotIndex(slots, uploads.add([count % codec.window_tokens for count in counts])), groups
    )
