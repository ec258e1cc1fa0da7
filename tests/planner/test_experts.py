"""Mixtures in the planner: how many experts a batch uses, where they are placed, and what a pass
reads of them.
"""

import random
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import expert_of, tensor_shapes
from flexgen_helm.planner.affine import fraction_vector
from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.expert_use import expected_experts, fitted_skew
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.placement import achieved_fractions, choose_tiers
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import BlockShape, Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.schedules import PREFILL_ONLY, ZIGZAG
from flexgen_helm.planner.search import search
from flexgen_helm.planner.staging import expert_slot_bytes, staging_sizes
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import place_weights
from flexgen_helm.planner.workload import Workload
from flexgen_helm.request import MemoryLimits
from flexgen_helm.tiers import TIERS
from tests.helpers.planning_problems import config

GIB = 1 << 30


@given(st.integers(1, 256), st.integers(1, 16), st.integers(0, 4096))
def test_even_routing_uses_as_many_experts_as_the_formula_says(count, per_token, tokens):
    per_token = min(count, per_token)
    expected = count * (1 - (1 - per_token / count) ** tokens)
    assert expected_experts(count, per_token, tokens) == pytest.approx(expected)


@pytest.mark.parametrize("count, per_token, skew", [(64, 4, 0.5), (64, 1, 1.0), (16, 8, 2.0)])
def test_skewed_routing_uses_as_many_as_drawing_does(count, per_token, skew):
    """Each expert by itself with its probability, found here by solving for the factor instead of
    by rank.
    """
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        total = sum(min(1.0, middle * (rank + 1) ** -skew) for rank in range(count))
        low, high = (middle, high) if total < per_token else (low, middle)
    shares = [min(1.0, low * (rank + 1) ** -skew) for rank in range(count)]
    draw, tokens, trials = random.Random(0), 8, 2000
    used = (
        sum(
            any(draw.random() < share for _ in range(tokens))
            for _ in range(trials)
            for share in shares
        )
        / trials
    )
    assert expected_experts(count, per_token, tokens, skew) == pytest.approx(used, rel=0.03)


@settings(max_examples=50)
@given(
    st.integers(2, 128),
    st.integers(1, 8),
    st.floats(0, 3),
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
)
def test_the_fitted_skew_explains_what_was_counted(count, per_token, skew, batches):
    per_token = min(count - 1, per_token)
    uses = 10_000
    counted = {
        tokens: (uses, round(uses * expected_experts(count, per_token, tokens, skew)))
        for tokens in set(batches)
    }
    fitted = fitted_skew(count, per_token, counted)
    again = sum(uses * expected_experts(count, per_token, tokens, fitted) for tokens in counted)
    assert again == pytest.approx(sum(used for _, used in counted.values()), rel=1e-3)


@given(
    st.tuples(*[st.integers(0, 10)] * 2), st.sampled_from(["mixtral-8x7b-v0.1", "qwen3-30b-a3b"])
)
@settings(max_examples=20)
def test_experts_are_placed_whole_behind_what_every_token_needs(shares, model):
    gpu, cpu = shares[0] / 10, min(shares[1], 10 - shares[0]) / 10
    sizes = StorageSizes(config(model)).matrices
    fractions = {"gpu": gpu, "cpu": cpu, "disk": 1 - gpu - cpu}
    placed = choose_tiers(sizes, fractions)
    of_experts, of_all = {}, []
    for name, tier in placed.items():
        if (expert := expert_of(name)) is None:
            of_all.append(TIERS.index(tier))
        else:
            assert of_experts.setdefault(expert, tier) == tier
    assert max(of_all) <= min(TIERS.index(tier) for tier in of_experts.values())
    largest = max(
        sum(sizes[name] for name in sizes if expert_of(name) == next(iter(of_experts))),
        max(sizes.values()),
    )
    for tier, achieved in achieved_fractions(sizes, placed).items():
        assert abs(achieved - fractions[tier]) * sum(sizes.values()) <= 2 * largest


@pytest.mark.parametrize("batch, batches", [(8, 1), (64, 2), (100, 5)])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_block_costs_what_is_read_and_converted_in_its_passes(batch, batches, passes):
    """Qwen3-30B-A3B in 4 bits on a GPU, all of it on the disk, matrix by matrix and pass by
    pass.
    """
    machine = load_profile("rtx3090")
    machine = replace(machine, disk=replace(machine.disk, access_s=0.0))
    lengths, limits = Workload.uniform(300, 9, 1), MemoryLimits(gpu=8 * GIB)
    one = planning_problem(
        config("qwen3-30b-a3b"), machine, lengths, precision="4bit", limits=limits, endless=True
    )
    on_disk = fraction_vector(Policy(1, 1, 0, 0, 1, 0, 1, 0), True)
    one.__dict__["offloads_only_experts"] = False  # each kind counts as offloaded, as it is
    costs = block_costs(one, BlockShape(batch, batches, ZIGZAG, passes=passes))
    tokens = batch * batches * 300 / passes
    read = seconds = 0.0
    used = 1 - (1 - 8 / 128) ** tokens
    prompt_batches = -(-tokens // min(2048, batch * 300))
    expert_rows = tokens * 8 / (128 * used)
    tiles = -(-expert_rows // 4096)
    for name, shape in tensor_shapes(one.config).items():
        if len(shape) == 1 or name.startswith("embed"):
            continue
        is_expert = expert_of(name) is not None
        read += passes * one.storage.matrices[name] * (used if is_expert else 1)
        if one.precision.format_of(name) is not None:
            times = used * tiles if is_expert else prompt_batches
            seconds += passes * times * prod(shape) / machine.gpu.dequantize_elements_s
    assert float(costs.prefill["disk_read"] @ on_disk) == pytest.approx(
        read / machine.disk.read_bytes_s, rel=1e-3
    )
    assert float(costs.prefill["convert"] @ on_disk) == pytest.approx(seconds, rel=0.02), (
        "but for routers"
    )


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(30, 900),
    st.integers(2, 40),
    st.integers(6, 24),
)
def test_a_block_takes_the_fewest_passes_whose_hidden_states_have_room(
    batch, batches, prompt, output, gib
):
    """Four hidden states of 2,048 values for each token, and one token of each sequence of earlier
    passes.
    """
    limits = MemoryLimits(gpu=gib * GIB, cpu=100 * GIB, disk=1000 * GIB)
    lengths = Workload.uniform(prompt, output, 1)
    one = planning_problem(
        config("qwen3-30b-a3b"), load_profile("rtx3090"), lengths, limits=limits, endless=True
    )
    policy, sequences = Policy(batch, batches, 0, 1, 0, 1, 1, 0), batch * batches
    found = predict(one, policy, ZIGZAG)

    def has_room(passes):
        decoding = sequences if passes > 1 else 0
        tokens = 1.02 * (sequences * prompt / passes + decoding)
        needed = 4 * 2 * 2048 * tokens + one.staging.num_bytes + one.storage.vector_bytes(2)
        workspace = found.memory["gpu"].workspace
        return needed <= min(gib * GIB, one.capacity("gpu") - workspace) * (1 + 1e-6)

    assert found.feasible == has_room(found.passes)
    assert found.passes == 1 or not has_room(found.passes - 1)


def test_a_single_pass_over_all_requests_is_not_chosen_where_experts_are_streamed():
    lengths, limits = Workload.uniform(512, 1, 1000), MemoryLimits(gpu=10 * GIB)
    one = planning_problem(
        config("gpt-oss-120b"), load_profile("rtx3090"), lengths, precision="4bit", limits=limits
    )
    assert search(one).schedule is ZIGZAG
    assert search(one, PREFILL_ONLY).prediction.passes > 1, "who asks for it has it, in parts"
    small = planning_problem(
        config("qwen3-30b-a3b"), load_profile("h100"), Workload.uniform(512, 1, 1000)
    )
    assert search(small).schedule is PREFILL_ONLY, "experts that are resident are read by nobody"


def test_an_expert_has_the_weights_of_its_tensors():
    for model in (entry.config for entry in CATALOG.values() if entry.config.experts is not None):
        shapes = tensor_shapes(model)
        first = next(expert for tensor in shapes if (expert := expert_of(tensor)) is not None)
        values = (prod(shape) for tensor, shape in shapes.items() if tensor.startswith(f"{first}."))
        assert model.expert_elements == sum(values), model


@pytest.mark.parametrize("limit", [2, 8, 64])
def test_slots_hold_the_largest_expert_several_times_and_a_ring_that_nothing_needs_is_slots(limit):
    storage = StorageSizes(config("qwen3-30b-a3b"))
    sizes = staging_sizes(storage, limit * GIB)
    slot = expert_slot_bytes(storage)
    assert slot == 3 * (2048 * 768 * 2 + 4096)
    assert 3 * slot <= sizes.experts <= max(3 * slot, 128 * slot / 4)
    limits = {"gpu": 0, "cpu": limit * GIB, "disk": 100 * GIB}
    plan = place_weights(storage, Machine(limits, "cpu"))
    if limit == 64:
        assert not plan.streams_weights
        return
    ring_needed = any(
        tier == "disk" and expert_of(name) is None for name, tier in plan.weights.items()
    )
    assert (plan.staging.ring > 0) == ring_needed == (limit == 2)
    assert plan.staging.num_bytes == sizes.num_bytes
