"""What a plan says of a block: bytes read of the disk, and tokens a second."""

from dataclasses import replace

import pytest

from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import EMBED, EMBED_TABLE, expert_of, stage_names
from flexgen_helm.planner.plan import make_plan, planning_problem
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.workload import Workload
from tests.helpers.planning_problems import config

GB = 10**9


def problem_of(model, workload, memory=64 * GB):
    """On a machine without a GPU, whose disk has room for all."""
    known = load_profile("rtx3090")
    disk, cpu = replace(known.disk, bytes=4000 * GB), replace(known.cpu, memory_bytes=memory)
    machine = replace(known, cpu=cpu, disk=disk, gpu=None, link=None)
    return planning_problem(config(model), machine, workload, storage_dtype="bfloat16")


@pytest.mark.parametrize("model", ["opt-30b", "mixtral-8x7b-v0.1"])
def test_a_block_reads_the_matrices_that_its_tokens_need(model):
    """All weights on the disk, cache and hidden states in memory: a pass reads all that every token
    needs, and the experts that one of its tokens selects, when all select alike.
    """
    problem = problem_of(model, Workload.uniform(7, 5, 60), 500 * GB)
    made = make_plan(problem, policy=Policy(20, 1, 0, 0, 0, 1, 0, 1))
    always, experts = 0.0, 0.0
    for stage in stage_names(problem.config):
        for name, shape in problem.config.stage_tensors(stage):
            if len(shape) > 1 and stage != EMBED:
                always += 0.0 if expert_of(name) else problem.storage.matrices[name]
                experts += problem.storage.matrices[name] if expert_of(name) else 0.0
    if problem.config.tied_head:
        always += problem.storage.matrices[EMBED_TABLE]

    def read(tokens):
        moe = problem.config.experts
        return always + (experts * (1 - (1 - moe.per_token / moe.count) ** tokens) if moe else 0.0)

    # `bytes_read` is of a block: a pass of 20 prompts of 7 tokens, then four passes of a token
    # each.
    block = made.block
    assert block["prefill"]["bytes_read"] == pytest.approx(read(20 * 7), rel=1e-3)
    assert block["decode"]["bytes_read"] == pytest.approx(4 * read(20), rel=1e-3)
    prediction = made.solution.prediction
    assert block["prefill"]["tokens_per_s"] * prediction.prefill_s == pytest.approx(20 * 7)
    assert block["decode"]["tokens_per_s"] * prediction.decode_s == pytest.approx(20 * 4)
    assert made.to_json()["block"] == block


def test_scores_have_no_decoding_and_weights_in_memory_read_nothing():
    scored = make_plan(problem_of("opt-30b", Workload.uniform(100, 1, 500), 40 * GB))
    assert list(scored.block) == ["prefill"] and scored.block["prefill"]["bytes_read"] > 10 * GB
    resident = make_plan(problem_of("opt-125m", Workload.uniform(100, 10, 50))).block
    assert {phase["bytes_read"] for phase in resident.values()} == {0.0}


# --- More of a machine ---
