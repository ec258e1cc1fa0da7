"""The sizes of a cache, and what of the free memory a pass may hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.cache_sizes import CacheSizes
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.run_memory import RunMemory, RunSize
from flexgen_helm.planner.schedules import PREFILL_ONLY, ROW, ZIGZAG
from flexgen_helm.planner.staging import StagingSizes
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.shared_sizes import ACTIVATIONS_SHARE, STREAMED_BATCH_TOKENS
from flexgen_helm.tiers import UNLIMITED
from tests.helpers import planning_problems
from tests.helpers.planning_problems import small

NEAR = {"gpu": 1.0, "cpu": 0.0, "disk": 0.0}
HOST = {"gpu": 0.0, "cpu": 1.0, "disk": 0.0}
FREE = {"gpu": 1_000_000, "cpu": 100_000_000, "disk": 0}
ASKED = RunSize(longest=20, prompt_tokens=1600)


def limits(
    policy, plan, host_attends=True, schedule=ZIGZAG, free=FREE, window_bytes=0, asked=ASKED
):
    cache, machine = (
        CacheSizes(1200, 100, window_bytes),
        replace(plan.machine, cpu_attention=host_attends),
    )
    plan = replace(plan, machine=machine)
    return RunMemory(plan, policy, schedule, asked, free, cache, hidden_bytes=500).limits()


@pytest.fixture
def plan():
    model, machine = StorageSizes(planning_problems.config("opt-125m")), Machine(FREE, "gpu")
    return Placement(
        model,
        machine,
        {},
        cache=HOST,
        activations=NEAR,
        staging=StagingSizes(1),
        compute_copies=False,
    )


def test_a_planned_block_is_let_in_whole(plan):
    """Its hidden states may take what the block's cache leaves, here everything: 1600 x 500 bytes
    of a million.
    """
    policy = Policy(100, 1, 0, 1, 0, 1, 1, 0)
    assert limits(policy, plan).pass_tokens == 1600
    assert limits(None, plan).pass_tokens == ACTIVATIONS_SHARE * 1_000_000 // 500  # nobody counted


@pytest.mark.parametrize("sequences", [30, 60])
def test_a_planned_block_that_keeps_no_cache_is_let_in_whole(plan, sequences):
    """Each sequence draws one token: its cache is never made, and shared prefixes have what the
    block leaves.
    """
    scored = RunSize(longest=20, prompt_tokens=16_000, decodes=False)
    found = limits(Policy(sequences, 1, 0, 1, 1, 0, 1, 0), replace(plan, cache=NEAR), asked=scored)
    assert found.pass_tokens == sequences * 20
    assert found.cache_tokens == (1_000_000 - sequences * 20 * 500) // 1200


@given(
    st.sampled_from([ROW, ZIGZAG, PREFILL_ONLY]),
    st.sampled_from(
        [None, Policy(4, 1), Policy(3, 8, 0, 1, 1, 0, 1, 0), Policy(8, 4, 0, 1, 0.5, 0.5, 0, 1)]
    ),
    st.builds(RunSize, st.integers(1, 60), st.integers(1, 20_000), decodes=st.booleans()),
    st.integers(50_000, 20_000_000),
    st.sampled_from(["cpu", "gpu"]),
)
def test_tokens_whose_experts_are_computed_together_have_room(
    schedule, policy, size, num_bytes, tier
):
    """Two hidden states of each (of equations) where is computed, and in a single pass those of all
    that wait there.
    """
    share = 1.0 if policy is None else policy.cg if tier == "gpu" else policy.cg + policy.cc
    cache = {"gpu": 0.0, "cpu": 0.0, "disk": 0.0, tier: share}
    cache["cpu"] += 1.0 - share
    free, hidden = {"gpu": 0, "cpu": 10**9, "disk": 0, tier: num_bytes}, 500
    model, machine = StorageSizes(planning_problems.config("opt-125m")), Machine(free, tier)
    at_rest = {"gpu": 0.0, "cpu": 0.0, "disk": 0.0, tier: 1.0}
    placement = Placement(model, machine, {}, cache, at_rest, StagingSizes(1, 1), False)
    memory = RunMemory(placement, policy, schedule, size, free, CacheSizes(120, 10), hidden)
    try:
        limits = memory.limits()
    except MemoryLimitError:
        assert num_bytes < hidden * size.longest
        return
    if schedule is ROW:  # one batch at a time, which is workspace
        assert memory.expert_tokens == UNLIMITED
        return
    beside = memory.expert_tokens  # the first batch is workspace
    copies = 2 * hidden * beside
    if schedule.is_single_pass:
        copies += memory.activation_fractions()[tier] * hidden * size.prompt_tokens
    assert copies + share * limits.cache_tokens * 120 <= num_bytes + 1
    assert 2 * hidden * beside >= min(2 * hidden * size.prompt_tokens, 0.1 * num_bytes) - 5 * hidden
    if schedule is ZIGZAG:
        together = beside + STREAMED_BATCH_TOKENS // 2
        assert limits.pass_tokens <= together
        running = min(limits.max_sequences, together // 2) if size.decodes else 0
        waits = together < size.prompt_tokens
        assert not waits or limits.pass_tokens == 1 or limits.pass_tokens + running <= together + 1
    resident = RunMemory(
        replace(placement, staging=StagingSizes(1)),
        policy,
        schedule,
        size,
        free,
        CacheSizes(120, 10),
        hidden,
    )
    assert resident.expert_tokens == UNLIMITED


def test_prompts_beyond_one_batch_wait_even_in_a_block_of_one():
    """A planner that counted only one token a row filled the gpu with weights, and the block came
    in eight pieces.
    """
    problem = small(200, 400)
    rows = problem.workload.num_sequences
    tokens = rows * problem.workload.mean_computed
    bound = replace(problem, max_batch_tokens=int(tokens) - 1)
    policy = Policy(rows, 1, 0, 1, 0, 1, 1, 0)
    found = [predict(case, policy, ZIGZAG).memory["gpu"].peak for case in (problem, bound)]
    assert (
        found[1] - found[0]
        >= 0.9 * (tokens - rows) * problem.config.hidden_size * problem.compute_bytes
    )
