"""What a plan says of a block: bytes read of the disk, and tokens a second.

Mixtures of up to a trillion parameters on small machines: more memory or a faster disk never makes their plans slower.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import EMBED, EMBED_TABLE, expert_of, stage_names
from flexgen_helm.planner.plan import make_plan, planning_problem
from flexgen_helm.planner.policy import Policy, Workload
from flexgen_helm.planner.search import search
from tests.helpers.planning_problems import config

MIXTURES = ("glm-5.2", "deepseek-v3.2", "kimi-k2-instruct", "minimax-m2", "gpt-oss-120b")
GB = 10**9


def machine(cpu=64 * GB, gpu=0.0, read=2.4 * GB, base="rtx3090"):
    """A machine with one disk, which has room for all; gpu: bytes of its GPU, 0 for none."""
    known = load_profile(base)
    disk = replace(known.disk, bytes=4000 * GB, read_bytes_s=read)
    known = replace(known, cpu=replace(known.cpu, memory_bytes=int(cpu)), disk=disk)
    return replace(known, gpu=None, link=None) if not gpu else replace(known, gpu=replace(known.gpu, memory_bytes=gpu))


def problem_of(model, hardware, workload, **more):
    return planning_problem(config(model), hardware, workload, storage_dtype="bfloat16", **more)


# --- Bytes and tokens ---


@pytest.mark.parametrize("model", ["opt-30b", "mixtral-8x7b-v0.1"])
def test_a_block_reads_the_matrices_that_its_tokens_need(model):
    """All weights on the disk, cache and hidden states in memory: a pass reads all that every token needs, and the
    experts that one of its tokens selects, when all select alike."""
    problem = problem_of(model, machine(cpu=500 * GB), Workload.uniform(7, 5, 60))
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

    # `bytes_read` is of a block: a pass of 20 prompts of 7 tokens, then four passes of a token each.
    block = made.block
    assert block["prefill"]["bytes_read"] == pytest.approx(read(20 * 7), rel=1e-3)
    assert block["decode"]["bytes_read"] == pytest.approx(4 * read(20), rel=1e-3)
    prediction = made.solution.prediction
    assert block["prefill"]["tokens_per_s"] * prediction.prefill_s == pytest.approx(20 * 7)
    assert block["decode"]["tokens_per_s"] * prediction.decode_s == pytest.approx(20 * 4)
    assert made.to_json()["block"] == block


def test_scores_have_no_decoding_and_weights_in_memory_read_nothing():
    scored = make_plan(problem_of("opt-30b", machine(cpu=40 * GB), Workload.uniform(100, 1, 500)))
    assert list(scored.block) == ["prefill"] and scored.block["prefill"]["bytes_read"] > 10 * GB
    resident = make_plan(problem_of("opt-125m", machine(), Workload.uniform(100, 10, 50))).block
    assert {phase["bytes_read"] for phase in resident.values()} == {0.0}


# --- More of a machine ---


def check_more(model, draw):
    """Plan for a machine, and for one with more of one thing: the second plan takes no longer."""
    workload = Workload.uniform(draw.choice([100, 400, 1200]), draw.choice([1, 30, 200]), draw.choice([300, 2000]))
    had = {"cpu": draw.uniform(48, 200) * GB, "gpu": draw.choice([0.0, draw.uniform(12, 80) * GB])}
    had["read"] = draw.uniform(1, 8) * GB
    what = draw.choice([name for name in had if had[name]])
    more = {**had, what: had[what] * draw.choice([1.05, 1.3, 2])}
    plans = [
        search(problem_of(model, machine(**kept), workload, precision=precision)).prediction.latency_s
        for precision in [draw.choice(["fp16", "8bit", "4bit"])]
        for kept in (had, more)
    ]
    assert plans[1] <= plans[0] * (1 + 1e-6), (what, had, more, workload)


@pytest.mark.parametrize("model", ["minimax-m2", "gpt-oss-120b"])
def test_more_memory_or_a_faster_disk_is_never_slower(model):
    check_more(model, random.Random(f"{model} once"))


@pytest.mark.slow
@pytest.mark.parametrize("model", MIXTURES)
def test_more_memory_or_a_faster_disk_is_never_slower_in_many_cases(model):
    draw = random.Random(model)
    for _ in range(5):
        check_more(model, draw)
