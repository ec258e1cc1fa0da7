"""Plans of suites, against plans of workloads that are written out here."""

import math
from dataclasses import replace

import pytest

from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.plan import make_plan, planning_problem
from flexgen_helm.planner.suite_plan import EntryWorkload, plan_suite, suite_workload
from flexgen_helm.planner.workload import Workload

ENTRIES = [
    EntryWorkload("mmlu:subject=a", 50, [(400, 1, 1)] * 50),
    EntryWorkload("mmlu:subject=b", 30, [(500, 1, 1)] * 30),
    EntryWorkload("gsm", 40, [(1000, 40, 400)] * 40, saved_tokens=30_000),
]


@pytest.fixture(scope="module")
def problem():
    config, dtype = read_model_config("opt-30b")
    return planning_problem(
        config, load_profile("t4"), Workload.uniform(1, 1, 1), storage_dtype=dtype
    )


def plan_of(problem, workload):
    return make_plan(replace(problem, workload=workload)).solution.prediction.latency_s


def test_the_total_is_the_plan_of_all_sequences_and_a_scenario_that_of_its_own(problem):
    made = plan_suite(problem, ENTRIES)
    every = Workload(((400, 1, 50), (500, 1, 30), (1000, 40, 40)), 30_000)
    assert made.as_one.seconds == pytest.approx(plan_of(problem, every))
    mmlu, gsm = made.scenarios
    assert [len(mmlu.entries), len(gsm.entries)] == [2, 1]
    assert mmlu.alone.seconds == pytest.approx(
        plan_of(problem, Workload(((400, 1, 50), (500, 1, 30))))
    )
    assert gsm.alone.seconds == pytest.approx(plan_of(problem, Workload(((1000, 40, 40),), 30_000)))
    # Sharing counts: the same prompts in full take longer.
    assert gsm.alone.seconds < 0.9 * plan_of(problem, Workload.uniform(1000, 40, 40))
    # Lengths that are known have the machine's range alone: 0.8 to 1.25 for the shipped T4.
    assert mmlu.alone.low == pytest.approx(mmlu.alone.seconds / 1.25)
    assert mmlu.alone.high == pytest.approx(mmlu.alone.seconds * 1.25)
    assert (
        gsm.alone.low < 0.75 * gsm.alone.seconds / 1.25
        and gsm.alone.high > 1.5 * gsm.alone.seconds * 1.25
    )
    assert made.limit_s > made.expected.high > made.expected.seconds > made.expected.low


def test_no_suite_is_slower_than_its_scenarios_one_after_another(problem):
    """Few sequences of thousands of tokens, which leave room for few at once, beside many short
    ones.
    """
    entries = [
        EntryWorkload("long", 100, [(1900, 10, 10)] * 100),
        EntryWorkload("short", 1000, [(100, 64, 64)] * 1000),
    ]
    planned = plan_suite(problem, entries, compare=True)
    assert not planned.is_one_run and planned.as_one.seconds > planned.one_by_one.seconds
    for found in (planned, *filter(None, planned.by_precision.values())):
        alone = [scenario.alone for scenario in found.scenarios]
        for length in ("seconds", "low", "high"):
            total = getattr(found.expected, length)
            assert total <= sum(getattr(one, length) for one in alone) * (1 + 1e-9)
            assert total <= getattr(found.as_one, length)
        assert found.limit_s == pytest.approx(found.expected.seconds), "no answer may be longer"
    seconds = [planned.sample_s(share) for share in (0.01, 0.1, 0.5, 1.0)]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3] == planned.as_one.seconds


def test_a_part_has_its_share_of_all_lengths():
    whole = Workload.of([(10 + n % 50, 1 + n % 7) for n in range(1000)], 5000, 100)
    for share in (0.0001, 0.01, 0.3, 1.0):
        part = whole.part(share)
        assert part.num_sequences == -(-1000 * share // 1)
        tokens, of_all = (
            sum(prompt * count for prompt, _, count in work.groups) for work in (part, whole)
        )
        assert part.saved_tokens == 5000 * tokens // of_all
    assert (
        whole.part(0.3).mean_prompt == pytest.approx(whole.mean_prompt, rel=0.02)
        and whole.part(1.0) == whole
    )
    # few sequences are the shortest, which share less than the others
    mixed = Workload.of([(20, 5)] * 10 + [(1000, 5)] * 10, 8000)
    assert all(mixed.part(share).mean_computed > 0 for share in (0.01, 0.05, 0.3))


def test_sequences_are_added_up():
    entries = [
        EntryWorkload("a", 4, [(4, 2, 3), (4, 2, 3), (4, 2, 9), (5, 1, 1)], 6, 2),
        EntryWorkload("b", 1, [(4, 2, 2)], 30, 1),
    ]
    assert suite_workload(entries) == Workload(((4, 2, 4), (5, 1, 1)), 36, 3)
    longer = Workload(((4, 2, 1), (4, 3, 2), (4, 8, 1), (5, 1, 1)), 36, 3)
    assert suite_workload(entries, 4.0) == longer, "as long as they may be"
    assert suite_workload(entries, 0.1).mean_output == 1
    assert suite_workload(entries, math.inf).longest == 13
