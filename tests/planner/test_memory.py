"""The sizes of a cache, and what of the free memory a pass may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_helm.planner.placement import ACTIVATIONS_SHARE, CacheSizes, Machine, StorageSizes
from flexgen_helm.planner.policy import ZIGZAG, Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.run_plan import RunMemory, RunSize
from flexgen_helm.planner.weight_placement import Placement
from tests.helpers import planning_problems
from tests.helpers.planning_problems import small

NEAR = {"gpu": 1.0, "cpu": 0.0, "disk": 0.0}
HOST = {"gpu": 0.0, "cpu": 1.0, "disk": 0.0}
FREE = {"gpu": 1_000_000, "cpu": 100_000_000, "disk": 0}
ASKED = RunSize(longest=20, prompt_tokens=1600)


def limits(policy, plan, host_attends=True, schedule=ZIGZAG, free=FREE, window_bytes=0, asked=ASKED):
    cache, machine = CacheSizes(1200, 100, window_bytes), replace(plan.machine, cpu_attention=host_attends)
    plan = replace(plan, machine=machine)
    return RunMemory(plan, policy, schedule, asked, free, cache, hidden_bytes=500).limits()


@pytest.fixture
def plan() -> Placement:
    model, machine = StorageSizes(planning_problems.config("opt-125m")), Machine(FREE, "gpu")
    return Placement(model, machine, {}, cache=HOST, activations=NEAR, staging_bytes=1, compute_copies=False)


def test_a_planned_block_is_let_in_whole(plan):
    """Its hidden states may take what the block's cache leaves, here everything: 1600 x 500 bytes of a million."""
    policy = Policy(100, 1, 0, 1, 0, 1, 1, 0)
    assert limits(policy, plan).pass_tokens == 1600
    assert limits(None, plan).pass_tokens == ACTIVATIONS_SHARE * 1_000_000 // 500  # nobody counted


@pytest.mark.parametrize("sequences", [30, 60])
def test_a_planned_block_that_keeps_no_cache_is_let_in_whole(plan, sequences):
    """Each sequence draws one token: its cache is never made, and shared prefixes have what the block leaves."""
    scored = RunSize(longest=20, prompt_tokens=16_000, decodes=False)
    found = limits(Policy(sequences, 1, 0, 1, 1, 0, 1, 0), replace(plan, cache=NEAR), asked=scored)
    assert found.pass_tokens == sequences * 20
    assert found.cache_tokens == (1_000_000 - sequences * 20 * 500) // 1200


def test_prompts_beyond_one_batch_wait_even_in_a_block_of_one():
    """A planner that counted only one token a row filled the gpu with weights, and the block came in eight pieces."""
    problem = small(200, 400)
    rows = problem.workload.num_sequences
    tokens = rows * problem.workload.computed
    bound = replace(problem, max_batch_tokens=int(tokens) - 1)
    policy = Policy(rows, 1, 0, 1, 0, 1, 1, 0)
    found = [predict(case, policy, ZIGZAG).memory["gpu"].peak for case in (problem, bound)]
    assert found[1] - found[0] >= 0.9 * (tokens - rows) * problem.config.hidden_size * problem.compute_bytes
