"""A run's plan is a value: it follows from what is passed, and from no run before."""

from dataclasses import replace

import pytest

from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.policy import Choices, Policy
from flexgen_helm.planner.run_memory import RunSize
from flexgen_helm.planner.run_plan import RunPlan, plan_run
from flexgen_helm.planner.schedules import PREFILL_ONLY, ROW, ZIGZAG
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import place_weights
from tests.helpers.planning_problems import MIB, config

OPT = config("opt-125m")
STORAGE = StorageSizes(OPT)
LIMITS = {"gpu": 100 * MIB, "cpu": 400 * MIB, "disk": 4000 * MIB}
FREE = {"gpu": 40 * MIB, "cpu": 200 * MIB, "disk": 3000 * MIB}
RUN = RunSize(longest=40, prompt_tokens=24 * 32)


def placed(policy=None, limits=LIMITS, compute_tier="gpu", storage=STORAGE):
    return place_weights(storage, Machine(limits, compute_tier), policy)


def plan(placement=None, run=RUN, policy=None, schedule=None, solution=None):
    return plan_run(placement or placed(), run, FREE, Choices(policy, schedule), solution)


def test_a_pass_over_the_whole_data_set_spreads_its_hidden_states():
    made = plan(schedule=PREFILL_ONLY, run=RunSize(40, 100_000))
    assert made.activations["gpu"] == pytest.approx(0.1 * FREE["gpu"] / (100_000 * 768 * 4))
    assert made.activations["disk"] > 0 and sum(made.activations.values()) == pytest.approx(1)


def test_a_run_by_the_rule_of_thumb_is_predicted_as_the_closest_policy():
    made = plan(placed(limits={"gpu": 0, "cpu": 1 << 40, "disk": 0}, compute_tier="cpu"))
    assert made.comparable_policy(24) == Policy(24, 1, 0, 1, 0, 1, 0, 1)
    assert made.comparable_policy(5000) == Policy(128, 1, 0, 1, 0, 1, 0, 1)
    streamed = plan()
    closest = streamed.comparable_policy(5000)
    assert (closest.gpu_batch_size, closest.num_gpu_batches) == (1667, 3)
    assert streamed.comparable_policy(3000).block_size == 3000
    assert (closest.wg, closest.cc, closest.hg) == (placed().shares["gpu"], 1, 1)
    given = Policy(3, 1)
    assert plan(policy=given).comparable_policy(24) is given


@pytest.mark.parametrize("tier, tokens", [("cpu", 1024), ("gpu", 4096)])
def test_a_device_converts_resident_weights_once_for_more_tokens_than_a_host(tier, tokens):
    limits = {"gpu": 0, "cpu": 0, "disk": 0, tier: 1 << 40}
    assert plan(placed(limits=limits, compute_tier=tier)).limits.batch_tokens == tokens


def test_a_plan_is_described_in_one_line():
    plan = RunPlan(
        "gpu",
        None,
        ZIGZAG,
        {"gpu": 0.2, "cpu": 0.18, "disk": 0.62},
        {"gpu": 0.0, "cpu": 0.4, "disk": 0.6},
        {"gpu": 1.0, "cpu": 0.0, "disk": 0.0},
        SchedulerLimits(
            batch_tokens=4096,
            batch_sequences=48,
            max_sequences=384,
            cache_tokens=10**6,
            pass_tokens=10**6,
        ),
        {"gpu": 0, "cpu": 4 << 30, "disk": 6 << 30},
    )
    assert plan.describe(5000) == (
        "streams 18% of the weights from memory and 62% of the weights from disk, KV cache 40% in "
        "memory and 60% on disk, block of 384 in batches of 48, schedule zigzag"
    )
    in_memory = {"gpu": 0.0, "cpu": 1.0, "disk": 0.0}
    resident = replace(plan, compute_tier="cpu", schedule=ROW, weights=in_memory, cache=in_memory)
    line = resident.describe(30)
    assert line == "keeps all weights in memory, block of 30, schedule row"
