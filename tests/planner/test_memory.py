"""The sizes of a cache, and what of the free memory a pass may hold."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import SCORE_TOKENS, tensor_shapes
from flexgen_helm.planner import workspace
from flexgen_helm.planner.placement import ACTIVATIONS_SHARE, MAX_PENDING_STORE_BYTES, CacheSizes, Machine, StorageSizes
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import PREFILL_ONLY, ZIGZAG, Policy, Workload
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import BlockShape
from flexgen_helm.planner.run_plan import RunMemory, RunSize
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.planner.workspace import Workspace
from tests.helpers import planning_problems
from tests.helpers.planning_problems import small

NEAR = {"gpu": 1.0, "cpu": 0.0, "disk": 0.0}
HOST = {"gpu": 0.0, "cpu": 1.0, "disk": 0.0}
FREE = {"gpu": 1_000_000, "cpu": 100_000_000, "disk": 0}
ASKED = RunSize(longest=20, prompt_tokens=1600)


def limits(policy, plan, host_attends=True, schedule=ZIGZAG, free=FREE, window_bytes=0, asked=ASKED):
    cache = CacheSizes(1200, 100, window_bytes, host_attends=host_attends)
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


def test_what_the_cache_needs_is_left_to_it(plan):
    policy = Policy(30, 1, 0, 1, 1, 0, 1, 0)  # 30 x 20 x 1200 bytes of cache
    found = limits(policy, replace(plan, cache=NEAR))
    assert found.pass_tokens == (1_000_000 - 720_000) // 500
    assert found.cache_tokens >= 600


@pytest.mark.parametrize("sequences", [30, 60])
def test_a_planned_block_that_keeps_no_cache_is_let_in_whole(plan, sequences):
    """Each sequence draws one token: its cache is never made, and shared prefixes have what the block leaves."""
    scored = RunSize(longest=20, prompt_tokens=16_000, decodes=False)
    found = limits(Policy(sequences, 1, 0, 1, 1, 0, 1, 0), replace(plan, cache=NEAR), asked=scored)
    assert found.pass_tokens == sequences * 20
    assert found.cache_tokens == (1_000_000 - sequences * 20 * 500) // 1200


def test_newest_tokens_of_a_packed_cache_keep_their_room(plan):
    """30 rows of 20 positions, and 10,000 bytes each beside the computing."""
    policy = Policy(30, 1, 0, 1, 1, 0, 1, 0)
    near = replace(plan, cache=NEAR)
    found = limits(policy, near, free={**FREE, "gpu": 1_300_000}, window_bytes=10_000)
    assert found.pass_tokens == (1_300_000 - 720_000 - 300_000) // 500
    assert found.cache_tokens >= 30 * (20 + 10_000 // 1200)


def test_where_all_prompts_are_under_way_prefixes_keep_their_room(plan):
    policy = Policy(30, 1, 0, 1, 1, 0, 1, 0)
    found = limits(policy, replace(plan, cache=NEAR), schedule=PREFILL_ONLY)
    assert found.cache_tokens == int((1 - ACTIVATIONS_SHARE) * 1_000_000 / 1200)


def test_groups_that_the_host_attends_to_need_no_staging(plan):
    policy = Policy(100, 1, 0, 1, 0, 1, 1, 0)
    tight = {**FREE, "gpu": 800_000}
    pair = [limits(policy, plan, attends, free=tight).pass_tokens for attends in (True, False)]
    assert pair == [1600, (800_000 - 2 * 32 * 21 * 100) // 500]


def test_prompts_beyond_one_batch_wait_even_in_a_block_of_one():
    """A planner that counted only one token a row filled the gpu with weights, and the block came in eight pieces."""
    problem = small(200, 400)
    rows = problem.workload.num_sequences
    tokens = rows * problem.workload.computed
    bound = replace(problem, max_batch_tokens=int(tokens) - 1)
    policy = Policy(rows, 1, 0, 1, 0, 1, 1, 0)
    found = [predict(each, policy, ZIGZAG).memory["gpu"].peak for each in (problem, bound)]
    assert found[1] - found[0] >= 0.9 * (tokens - rows) * problem.config.hidden_size * problem.compute_bytes


@pytest.mark.parametrize("precision, fetched", [("fp16", False), ("4bit", True)])
def test_a_plan_stages_what_the_host_does_not_attend_to(precision, fetched):
    """A quantized cache in host memory is brought to the gpu even where the host may attend."""
    policy = Policy(24, 1, 0, 1, 0, 1, 1, 0)
    peaks = [
        predict(small(200, 400, precision=precision, cpu_attention=attends), policy, ZIGZAG).memory["gpu"].peak
        for attends in (True, False)
    ]
    assert (peaks[0] == peaks[1]) == fetched


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("name", ["opt-125m", "opt-30b"])
def test_the_workspace_holds_what_a_product_brings_to_the_compute_dtype(monkeypatch, name, on_device):
    """The largest tile that `offload.linear` makes of any of the model's matrices; on the CPU twice."""
    import torch

    from flexgen_helm.offload import linear

    tiles = []
    monkeypatch.setattr(
        linear, "_tile_memory", lambda rows, width, x: tiles.append(rows * width) or x.new_empty(rows, width)
    )
    monkeypatch.setattr(linear, "linear", lambda x, tile, bias: x.new_empty((1, len(tile))))
    monkeypatch.setattr(linear, "upcast_elements", lambda elements, _: workspace.upcast_elements(elements, on_device))
    config = planning_problems.config(name)
    with torch.device("meta"):
        for shape in tensor_shapes(config).values():
            if len(shape) > 1:
                linear.tiled_linear(torch.empty(1, shape[1]), torch.empty(shape, dtype=torch.float16), None)
    with_weights = Workspace(config, 2, "gpu" if on_device else "cpu")
    monkeypatch.setattr(workspace, "upcast_elements", lambda *_: 0)
    rest = Workspace(config, 2, "gpu" if on_device else "cpu")
    counted = [with_weights.layer(7, 7, 7) - rest.layer(7, 7, 7), with_weights.head(7, 7) - rest.head(7, 7)]
    needed = 2 * max(tiles) * (1 if on_device else 2)
    assert all(needed <= each <= 1.1 * needed for each in counted)


@pytest.mark.parametrize("precision, dtype, converts", [("fp16", "float16", 0), ("4bit", "float16", 1)])
def test_only_weights_of_another_dtype_are_brought_to_the_compute_dtype(precision, dtype, converts):
    """Llama-8B in 16 bits on a T4 needs no tile: its largest matrix, which half of a gigabyte bounds, was counted."""
    machine = load_profile("t4")
    problem = planning_problem(
        planning_problems.config("llama-3.1-8b"), machine, Workload.uniform(512, 32, 8), precision=precision,
        storage_dtype=dtype,
    )  # fmt: skip
    tile = 2 * workspace.upcast_elements(max(prod(s) for s in tensor_shapes(problem.config).values()), True)
    own = Workspace(problem.config, 2, "gpu", problem.precision.cache, converts=False)
    shape = BlockShape(4, 2, ZIGZAG)
    bare = max(own.layer(2048, 512, 0), own.layer(4, 1, 4 * 544)) + 4 * MAX_PENDING_STORE_BYTES
    assert problem.workspace_bytes(shape, 8) == bare + converts * tile


def test_attention_without_a_fused_kernel_holds_a_score_matrix():
    config, prompt = planning_problems.config("llama-3.1-8b"), 2048
    fused, formula = (Workspace(config, 2, "gpu", has_fused_attention=fused) for fused in (True, False))
    scores = 4 * config.num_heads * min(prompt, SCORE_TOKENS) * prompt
    assert formula.layer(prompt, prompt, 0) - fused.layer(prompt, prompt, 0) >= 4 * scores
    odd = replace(config, head_dim=100)  # 200 bytes are no multiple of 16
    assert Workspace(odd, 2, "gpu").layer(prompt, prompt, 0) == Workspace(
        odd, 2, "gpu", has_fused_attention=False
    ).layer(prompt, prompt, 0)
    assert Workspace(odd, 4, "cpu").layer(prompt, prompt, 0) < Workspace(odd, 4, "gpu").layer(prompt, prompt, 0) * 2
