"""In which order the batches of a pass meet the stages of the model. A schedule is data: no tensors, no torch.

Every order visits the stages of a batch in sequence. Orders differ in how often the weights of a stage are needed
anew, which is what offloading pays for.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from flexgen_helm.planner.policy import Schedule


@dataclass(frozen=True)
class WorkItem:
    """Stage `stage` (an index into the model's stages) of batch `batch` (an index into the pass)."""

    stage: int
    batch: int


def work_items(name: Schedule, num_stages: int, num_batches: int) -> list[WorkItem]:
    """Return the items of one pass in the order of a schedule.

    row: batch by batch, each through the whole model. Every weight is read once a batch; the hidden states of one
        batch are alive.
    zigzag, diagonal, prefill-only: stage by stage, each for all batches (the paper's block schedule, Algorithm 1).
        Every weight is read once a pass; the hidden states of all batches are alive. They differ in who is in a
        pass: a block that is full from its first step on (zigzag), sequences of all ages whose caches together fill
        the memory (diagonal), or the whole data set, of which no sequence needs a second token (prefill-only).
    """
    stages, batches = range(num_stages), range(num_batches)
    if name == "row":
        return [WorkItem(stage, batch) for batch in batches for stage in stages]
    return [WorkItem(stage, batch) for stage in stages for batch in batches]


@dataclass(frozen=True)
class StageVisit:
    """Uses of one stage's weights that follow each other.

    uses: None for a visit of the next pass, whose batches are not known yet.
    """

    stage: int
    uses: int | None


def stage_visits(
    items: Sequence[WorkItem], uses: Sequence[int], num_certain: int, another_pass: bool
) -> Generator[StageVisit, None, None]:
    """Yield the visits of a pass in order, for prefetching weights.

    uses: how often each item uses the weights of its stage; an item without uses makes no visit.
    num_certain: stages that every batch needs, in order: all but the head, which a shared prefix does not.
    another_pass: another pass follows for certain, so its certain visits are yielded too.
    """
    stage, count = -1, 0
    for item, num_uses in zip(items, uses):
        if item.stage != stage:
            if count:
                yield StageVisit(stage, count)
            stage, count = item.stage, 0
        count += num_uses
    if count:
        yield StageVisit(stage, count)
    if another_pass:
        yield from (StageVisit(stage, None) for stage in range(num_certain))
