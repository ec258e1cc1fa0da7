"""The work items of a pass in the order of a schedule, and the visits to weights that follow from
it. No torch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from flexgen_helm.planner.schedules import Schedule


@dataclass(frozen=True)
class WorkItem:
    """Stage `stage` (an index into the model's stages) of batch `batch` (an index into the
    pass).
    """

    stage: int
    batch: int


def work_items(schedule: Schedule, num_stages: int, num_batches: int) -> list[WorkItem]:
    """Return the items of one pass in the order of a schedule."""
    return [WorkItem(stage, batch) for stage, batch in schedule.order(num_stages, num_batches)]


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
    num_certain: stages that every batch needs, in order: all but the head, which a shared prefix
        does not.
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
