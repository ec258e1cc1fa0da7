"""Orders over one stream of work items. A schedule is data: it names stages and batches and contains no tensors.

An item says: take this batch through this stage now. Every order below visits the stages of a batch in sequence;
they differ in how often a stage's weights are needed again, which is what offloading pays for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexgen_helm.planner.policy import Schedule


@dataclass(frozen=True)
class WorkItem:
    """Stage `stage` (an index into the model's stages) of batch `batch` (an index into the pass)."""

    stage: int
    batch: int


def work_items(name: Schedule, num_stages: int, num_batches: int) -> Iterator[WorkItem]:
    """The items of one pass.

    row: batch by batch, each through the whole model; one batch's hidden states are alive, every weight is read once
    a batch. All others: stage by stage, each for all batches (the paper's block schedule); every weight is read once
    a pass and the hidden states of all batches are alive. They differ in who is in a pass: a block that is full from
    its first step on (zigzag), rows of all ages whose caches together fill the memory (diagonal), or the whole data
    set in one pass, of which no row needs a second token (prefill-only).
    """
    stages: Sequence[int] = range(num_stages)
    if name == "row":
        for batch in range(num_batches):
            for stage in stages:
                yield WorkItem(stage, batch)
    else:
        for stage in stages:
            for batch in range(num_batches):
                yield WorkItem(stage, batch)
