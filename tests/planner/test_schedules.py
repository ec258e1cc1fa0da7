"""Schedules are records: their orders are complete, and no other module of the package knows one by
its name.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.config import EngineConfig
from flexgen_helm.planner.schedules import AUTOMATIC, SCHEDULES
from flexgen_helm.scheduling.stage_visits import WorkItem, work_items


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=20)
def test_an_order_takes_every_batch_through_all_stages_in_sequence(
    schedule, num_stages, num_batches
):
    items = list(schedule.order(num_stages, num_batches))
    for batch in range(num_batches):
        assert [stage for stage, visited in items if visited == batch] == list(range(num_stages))
    for stage in range(num_stages):  # a later batch may attend to a shared prefix in an earlier one
        assert [batch for visited, batch in items if visited == stage] == list(range(num_batches))
    assert len(items) == num_stages * num_batches
    assert work_items(schedule, num_stages, num_batches) == [WorkItem(*item) for item in items]
    # Runs of items at one stage are what the weights are read for.
    reads = 1 + sum(before[0] != after[0] for before, after in zip(items, items[1:]))
    if num_stages > 1:
        assert reads == num_stages * (1 if schedule.reads_once else num_batches)


def test_users_name_them():
    assert list(SCHEDULES) == [schedule.name for schedule in SCHEDULES.values()]
    for name, schedule in SCHEDULES.items():
        assert EngineConfig(schedule=name).fixed_schedule is schedule and str(schedule) == name
    assert EngineConfig().fixed_schedule is None
    assert all(schedule.reads_once for schedule in AUTOMATIC)
