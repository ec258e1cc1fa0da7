"""The planner of an engine, without an engine: `place`, `plan`, `learn`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.planner import Planner
from flexgen_helm.planner.policy import Choices, Policy
from flexgen_helm.planner.run_memory import RunSize
from flexgen_helm.planner.schedules import ROW, ZIGZAG
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16
from tests.helpers.planning_problems import LAPTOP, MIB, config

TIGHT = {"gpu": 0, "cpu": 150 * MIB, "disk": 4000 * MIB}
ROOMY = {"gpu": 0, "cpu": 4000 * MIB, "disk": 4000 * MIB}
WORKLOAD = Workload.uniform(32, 8, 24)
SIZE = RunSize(
    longest=39, prompt_tokens=24 * 32, longest_decoded=39, longest_steps=7, workload=WORKLOAD
)


@dataclass
class Known:
    """A profile that is there, or is not."""

    found: HardwareProfile | None
    pins_host_memory: bool = True

    def profile(self, measure):
        return self.found


def planner_of(limits, choices=Choices(), found=replace(LAPTOP, gpu=None, link=None)):
    return Planner(config("opt-125m"), FP16, Machine(limits, "cpu"), choices, Known(found))


def test_weights_that_fit_stay_and_nothing_is_searched():
    planner = planner_of(ROOMY)
    assert (
        planner.place("opt-125m").shares == {"gpu": 0, "cpu": 1, "disk": 0} and not planner.searches
    )
    plan = planner.plan(SIZE, ROOMY)
    assert (plan.policy, plan.schedule, plan.weights["cpu"]) == (None, ROW, 1)


def test_weights_that_do_not_fit_are_placed_by_a_search_and_so_are_runs():
    planner = planner_of(TIGHT)
    placement = planner.place("opt-125m")
    assert planner.searches and 0 < placement.shares["disk"] < 1
    plan = planner.plan(SIZE, {**TIGHT, "cpu": 60 * MIB})
    assert plan.policy is not None and plan.weights == placement.shares
    forced = planner.plan(SIZE, {**TIGHT, "cpu": 60 * MIB}, ZIGZAG)
    assert (forced.policy, forced.schedule) == (None, ZIGZAG), (
        "what all ranks must follow is not searched"
    )


def test_without_a_profile_a_rule_of_thumb_plans_and_nothing_is_learnt():
    planner = planner_of(TIGHT, found=None)
    placement = planner.place("opt-125m")
    assert planner.searches and placement.shares["disk"] > 0
    plan = planner.plan(SIZE, {**TIGHT, "cpu": 60 * MIB})
    assert (plan.policy, plan.schedule) == (None, ZIGZAG)
    assert planner.learn(plan, WORKLOAD, 24, {"latency_s": 1000.0}) is None


def test_a_choice_of_the_user_decides():
    policy = Policy(6, 2, wc=0.3)
    planner = planner_of(TIGHT, Choices(policy, ROW))
    assert (
        planner.place("opt-125m").shares["cpu"] == pytest.approx(0.3, abs=0.02)
        and not planner.searches
    )
    plan = planner.plan(SIZE, {**TIGHT, "cpu": 60 * MIB})
    assert (plan.policy, plan.schedule) == (policy, ROW)
    with pytest.raises(MemoryLimitError, match="opt-125m runs with"):
        planner_of({**TIGHT, "cpu": MIB}).place("opt-125m")


def test_what_a_run_taught_moves_the_next_prediction_to_what_was_measured():
    """The truth is a machine of the same kind that computes at 0.4 of the rate."""
    slow = replace(LAPTOP, gpu=None, link=None, prefill_share=0.4, decode_share=0.4)
    truth, planner = planner_of(ROOMY, found=slow), planner_of(ROOMY)
    for planned in (truth, planner):
        planned.place("opt-125m")
    plan = planner.plan(SIZE, ROOMY)
    measured = truth.learn(plan, WORKLOAD, 24, {"latency_s": 1.0}, is_whole=False)
    blocks = measured.latency_s / measured.block_s
    record = {"latency_s": measured.latency_s, "time_s": {"wait": 0.0}}
    record |= {f"{phase}_s": blocks * spent["compute"] for phase, spent in measured.seconds.items()}
    first = planner.learn(plan, WORKLOAD, 24, record, is_whole=False)
    assert first.latency_s < 0.6 * measured.latency_s
    assert planner.learn(plan, WORKLOAD, 24, record) == first, (
        "nothing is learnt from one rank of a pipeline"
    )
    for _ in range(6):
        last = planner.learn(plan, WORKLOAD, 24, record)
    assert last.latency_s == pytest.approx(measured.latency_s, rel=0.05)
