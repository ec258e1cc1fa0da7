"""Schedules: in which order the batches of a pass meet the stages of the model, and which sequences
are in a pass. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# Numbers of stages and of batches -> stage and batch of each work item of a pass.
Order = Callable[[int, int], Iterator[tuple[int, int]]]


def by_batch(num_stages: int, num_batches: int) -> Iterator[tuple[int, int]]:
    """Yield batch by batch, each through the whole model."""
    return ((stage, batch) for batch in range(num_batches) for stage in range(num_stages))


def by_stage(num_stages: int, num_batches: int) -> Iterator[tuple[int, int]]:
    """Yield stage by stage, each for all batches (the paper's block schedule, Algorithm 1)."""
    return ((stage, batch) for stage in range(num_stages) for batch in range(num_batches))


@dataclass(frozen=True)
class Schedule:
    """Who is in a pass, and in which order.

    name: that flags and files have.
    order: of the work items of a pass.
    reads_once: a pass reads each weight once, for all batches, whose hidden states are alive
        meanwhile. Otherwise it reads each weight once a batch, and the hidden states of one batch
        are alive.
    is_single_pass: one pass takes the whole data set, of which no sequence needs a second token.
    """

    name: str
    order: Order
    reads_once: bool = True
    is_single_pass: bool = False

    def __str__(self) -> str:
        return self.name


ROW = Schedule("row", by_batch, reads_once=False)
ZIGZAG = Schedule("zigzag", by_stage)
PREFILL_ONLY = Schedule("prefill-only", by_stage, is_single_pass=True)

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule for schedule in (ROW, ZIGZAG, PREFILL_ONLY)
}
# Those that a search tries unless it is told others; 'row' is never better.
AUTOMATIC = (ZIGZAG, PREFILL_ONLY)
