"""A pass under way: the order of its items, how far each batch is, and the seconds charged to
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexgen_helm.engine.attention_metadata import AttentionBackend
from flexgen_helm.scheduling.sequence import Batch
from flexgen_helm.scheduling.stage_visits import WorkItem

if TYPE_CHECKING:
    from flexgen_helm.engine.executor import BatchOutput


@dataclass(eq=False)
class BatchState:
    """A batch of T tokens on its way through the stages.

    attention: attends for the batch, in every layer.
    hidden: [T, H]; None while the activation store keeps it.
    rotary: what `LayerDecoder.rotary` returned; None together with `hidden`, because those of many
        batches would be large.
    layers_checked: layers of the whole model, from the first one on, that `nonfinite_layer` covers.
    sums: [T] of each layer after those, the sums of its hidden states: finite where all elements
        are.
    nonfinite_layer: [T], the first layer after which a value was not finite; -1 while all are.
    seconds: charged to the batch so far.
    launched_s: seconds in which the host has launched its items since then.
    """

    attention: AttentionBackend
    layers_checked: int
    hidden: Tensor | None = None
    rotary: Any = None
    sums: list[Tensor] = field(default_factory=list)
    nonfinite_layer: Tensor | None = None
    seconds: float = 0.0
    launched_s: float = 0.0

    def check_finite(self) -> Tensor:
        """Bring `nonfinite_layer` up to the newest layer, and return it."""
        if self.sums:
            is_bad = ~torch.isfinite(torch.stack(self.sums))
            first = torch.where(is_bad.any(0), is_bad.byte().argmax(0) + self.layers_checked, -1)
            before = self.nonfinite_layer
            self.nonfinite_layer = (
                first if before is None else torch.where(before < 0, first, before)
            )
            self.layers_checked += len(is_bad)
            self.sums.clear()
        assert self.nonfinite_layer is not None
        return self.nonfinite_layer


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass to compute.

    items: its order (the paper's Algorithm 1 for the block schedules).
    on_batch: called with its output as soon as a batch has passed its last stage.
    on_item: called with its batch before every item.
    should_stop: whether to end, called before every item, and between experts.
    another_follows: another pass is certain to follow, so its first weights may be prefetched.
    states: of the batches that have begun and not passed the last stage, by number.
    """

    batches: Sequence[Batch]
    items: Sequence[WorkItem]
    on_batch: Callable[[BatchOutput], None]
    on_item: Callable[[Batch], None]
    should_stop: Callable[[], bool]
    another_follows: bool = False
    states: dict[int, BatchState] = field(default_factory=dict)

    @cached_property
    def following(self) -> Mapping[WorkItem, WorkItem]:
        """Item -> the next one."""
        return dict(zip(self.items, self.items[1:]))

    def ends_layer(self, item: WorkItem) -> bool:
        """Return whether all batches have passed the layer of an item that was computed, and none
        the next one.
        """
        following = self.following.get(item)
        if following is None or following.stage == item.stage or item.stage == 0:  # the embedding
            return False
        return len(self.states) == len(self.batches)


def share_launch(step: list[WorkItem], current: Pass, seconds: float) -> None:
    """Divide the seconds of launching a step among its batches, by their tokens."""
    num_tokens = sum(current.batches[item.batch].num_tokens for item in step)
    for item in step:
        share = current.batches[item.batch].num_tokens / num_tokens
        current.states[item.batch].launched_s += seconds * share


def charge(states: Iterable[BatchState], since: float) -> float:
    """Charge the seconds since `since` to batches, in proportion to the time in which their items
    were launched; return the time now.

    On a device an item is computed after the host has launched it, so only when the host has waited
    for the device, as it has now, is the time known that all items took together.
    """
    states, now = list(states), time.perf_counter()
    launched_s = sum(state.launched_s for state in states)
    for state in states:
        state.seconds += (now - since) * state.launched_s / launched_s
        state.launched_s = 0.0
    return now
