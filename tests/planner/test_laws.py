"""Laws that every plan keeps: feasible work is planned, best by its own prediction, and never below
what bounds it.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import EMBED, HEAD, expert_of, stage_names
from flexgen_helm.planner.placement import choose_tiers
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.schedules import PREFILL_ONLY, ZIGZAG
from flexgen_helm.planner.search import search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.request import MemoryLimits
from tests.helpers.planning_problems import config, small
from tests.helpers.shares import share_of

GIB = 1 << 30
MACHINES = ("laptop", "t4", "rtx3090", "a100", "h100", "h200")
MODELS = (
    "opt-125m",
    "opt-6.7b",
    "llama-3.1-8b",
    "phi-4",
    "mixtral-8x7b-v0.1",
    "opt-30b",
    "gpt-oss-120b",
)


def problem_of(model, machine, workload, **more):
    return planning_problem(
        config(model), load_profile(machine), Workload.uniform(*workload), **more
    )


def found_or_none(problem, **more):
    try:
        return search(problem, **more)
    except MemoryLimitError:
        return None


# --- Feasible work is planned ---


def check_scoring(model, machine, **limits):
    """5,100 scored prompts are planned wherever a single one is."""
    allowed = {"limits": MemoryLimits(**limits)} if limits else {}
    longest = min(600, config(model).max_positions - 1)
    one = found_or_none(problem_of(model, machine, (longest, 1, 1), **allowed))
    if one is None:
        return False
    many = search(problem_of(model, machine, (longest, 1, 5100), **allowed))
    assert many.prediction.feasible
    assert (
        one.prediction.latency_s
        <= many.prediction.latency_s
        < 5100 * one.prediction.latency_s * 1.01
    )
    return True


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "model, machine", [("llama-3.1-70b-instruct", "rtx3090"), ("opt-30b", "t4")]
)
def test_a_data_set_that_no_pass_can_hold_is_scored_in_blocks(model, machine):
    assert check_scoring(model, machine, cpu=64 * GIB, disk=2000 * GIB)
    assert check_scoring(model, machine, cpu=160 * GIB, disk=0), "no hidden states on the disk"


@pytest.mark.fast(1)
@pytest.mark.parametrize("machine", MACHINES)
def test_scoring_is_planned_wherever_one_sequence_fits(machine):
    names = sorted(CATALOG, key=lambda name: CATALOG[name].config.hidden_size)
    some = random.Random(machine).choice(names)
    assert any([check_scoring(model, machine) for model in ("opt-125m", names[-1], some)])


def test_a_pass_that_cannot_hold_all_is_refused_with_the_bytes_of_all():
    """Where a schedule in blocks fits; the advice is enough."""
    problem = problem_of("opt-30b", "t4", (600, 1, 5100), limits=MemoryLimits(cpu=80 * GIB, disk=0))
    with pytest.raises(
        MemoryLimitError, match="on disk, --disk allows 0 B; raise --disk"
    ) as refused:
        search(problem, PREFILL_ONLY)
    assert search(problem).schedule == ZIGZAG
    needed = int(str(refused.value).partition(" bytes)")[0].rpartition("(")[2].replace(",", ""))
    enough = replace(problem, limits={**problem.limits, "disk": 1.1 * needed})
    assert search(enough, PREFILL_ONLY).schedule == PREFILL_ONLY


# --- Latency ---


@pytest.mark.slow
@given(st.integers(40, 200), st.integers(60, 400), st.integers(1, 40), st.sampled_from([1, 2, 8]))
@settings(max_examples=15, derandomize=True)
def test_a_latency_that_is_told_to_suffice_suffices(gpu, cpu, count, output):
    problem = small(gpu, cpu, count=count, output=output)
    assume(found_or_none(problem))
    with pytest.raises(MemoryLimitError) as refused:
        search(problem, max_latency=1e-6)
    told = float(str(refused.value).partition("takes ")[2].partition(" s;")[0])
    assert search(problem, max_latency=told).prediction.block_s <= told * (1 + 1e-6)


# --- What is asked for is counted, and ranked by its time ---

problems = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(MACHINES[:4]),
    st.tuples(
        st.sampled_from([10, 100, 512, 1500]), st.sampled_from([1, 2, 8, 32]), st.integers(1, 40)
    ),
    st.sampled_from(["fp16", "4bit"]),
)
SHARES = [
    [1, 0, 1, 0, 1, 0],
    [1, 0, 0, 1, 1, 0],
    [0, 1, 0, 1, 0, 1],
    [0, 1, 1, 0, 1, 0],
    [0.5, 0.5, 0, 1, 0, 1],
]


@pytest.mark.slow
@given(problems)
@settings(max_examples=25, derandomize=True)
@example(("opt-30b", "t4", (512, 32, 3), "fp16"))
@example(("mixtral-8x7b-v0.1", "t4", (1500, 2, 9), "fp16"))
@example(("opt-6.7b", "rtx3090", (1500, 32, 17), "fp16"))  # 9 and 8 sequences
# three prompts are as many rows as packed products take
@example(("opt-6.7b", "t4", (10, 2, 50), "4bit"))
def test_no_block_shape_beats_the_searched_one_by_its_own_latency(drawn):
    model, machine, workload, precision = drawn
    problem = problem_of(model, machine, workload, precision=precision)
    best = found_or_none(problem)
    assume(best is not None)
    _, output, count = workload
    assert best.prediction.tokens_per_s == pytest.approx(output * count / best.prediction.latency_s)
    found = [getattr(best.policy, name) for name in ("wg", "wc", "cg", "cc", "hg", "hc")]
    draw = random.Random(count)
    for _ in range(60):
        batch, batches = draw.randint(1, max(1, count)), draw.choice([1, 1, 2, 3, 4, 8])
        policy = Policy(batch, batches, *draw.choice([found, *SHARES]))
        predicted = predict(problem, policy, ZIGZAG)
        if predicted.feasible:
            assert best.prediction.latency_s <= 1.03 * predicted.latency_s, policy


@given(problems, st.sampled_from(["gpu", "cpu", "disk", "link", "read", "4bit"]))
@settings(max_examples=share_of(25, 12), derandomize=True)
@example(("opt-30b", "laptop", (512, 8, 9), "fp16"), "read")
@example(("opt-30b", "laptop", (512, 8, 9), "fp16"), "cpu")
@example(("opt-30b", "t4", (512, 8, 9), "fp16"), "link")
@example(("opt-30b", "t4", (512, 8, 9), "fp16"), "gpu")
def test_more_of_a_resource_never_makes_a_plan_worse(drawn, what):
    model, machine, workload, precision = drawn
    problem = problem_of(model, machine, workload, precision=precision)
    before = found_or_none(problem)
    assume(before is not None)
    hardware = problem.hardware
    if what in ("gpu", "cpu", "disk"):
        assume(what != "gpu" or hardware.gpu is not None)
        field = "bytes" if what == "disk" else "memory_bytes"
        part = getattr(hardware, what)
        hardware = replace(hardware, **{what: replace(part, **{field: 2 * getattr(part, field)})})
        more = replace(
            problem, hardware=hardware, limits={**problem.limits, what: 2 * problem.limits[what]}
        )
    elif what == "link":
        assume(hardware.link is not None)
        rates = {
            name: 2 * rate for name, rate in vars(hardware.link).items() if name.endswith("bytes_s")
        }
        more = replace(problem, hardware=replace(hardware, link=replace(hardware.link, **rates)))
    elif what == "read":
        disk = replace(hardware.disk, read_bytes_s=2 * hardware.disk.read_bytes_s)
        more = replace(problem, hardware=replace(hardware, disk=disk))
    else:  # compression makes room
        assert found_or_none(problem_of(model, machine, workload, precision="4bit")) is not None
        return
    # To a hundredth: whole matrices may fall differently.
    assert search(more).prediction.latency_s <= before.prediction.latency_s * 1.01


# --- No prediction is below what bounds it ---


def least_seconds(problem, policy):
    """Bytes over bandwidth and operations over rate, counted by hand from where each matrix is
    placed.
    """
    config, hardware, workload = problem.config, problem.hardware, problem.workload
    placed = choose_tiers(
        problem.storage.matrices, policy.tier_fractions("weights", hardware.gpu is not None)
    )
    streamed = {"cpu": 0.0, "disk": 0.0}
    for stage in stage_names(config):
        if stage == EMBED:
            continue
        names = [name for name, shape in config.stage_tensors(stage) if len(shape) > 1]
        if stage == HEAD and config.tied_head:
            names.append("embed.tokens.weight")
        for name in names:
            if placed[name] in streamed and expert_of(name) is None:
                streamed[placed[name]] += problem.storage.matrices[name]
    blocks = -(-workload.num_sequences // policy.block_size)
    passes = blocks * round(workload.mean_output)
    seconds = [passes * streamed["disk"] / hardware.disk.read_bytes_s]
    if hardware.link is not None:
        seconds.append(passes * (streamed["cpu"] + streamed["disk"]) / hardware.link.to_gpu_bytes_s)
    tokens = workload.num_sequences * (workload.mean_computed + workload.mean_output - 1)
    heads = workload.output_tokens * config.head_flops_per_token
    rate = hardware.compute_processor.matmul_flops[problem.product_dtype].best
    seconds.append((config.linear_flops_per_token * tokens + heads) / rate)
    return max(seconds)


tenths = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(
    lambda n: (n[0] / 10, min(n[1], 10 - n[0]) / 10)
)


@given(
    st.sampled_from([*MODELS, "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "smollm2-135m"]),
    st.sampled_from(MACHINES[:4]),
    tenths,
    st.tuples(st.sampled_from([16, 300]), st.sampled_from([1, 2, 16]), st.integers(1, 30)),
    st.tuples(st.integers(1, 16), st.integers(1, 3)),
    st.sampled_from(["fp16", "4bit"]),
    st.sampled_from([1.0, 0.5, 4.0]),
)
@settings(max_examples=share_of(60, 2), derandomize=True)
@example("qwen3-30b-a3b", "t4", (0.0, 0.0), (16, 16, 8), (8, 1), "fp16", 1.0)
@example("opt-125m", "t4", (0.3, 0.0), (16, 16, 8), (8, 1), "fp16", 1.0)
@example("llama-3.1-8b", "t4", (0.1, 0.0), (16, 16, 8), (8, 1), "fp16", 1.0)
@example("llama-3.1-8b", "h100", (1.0, 0.0), (300, 16, 30), (16, 3), "fp16", 4.0)
def test_no_prediction_is_below_bytes_over_bandwidth_or_operations_over_rate(
    model, machine, weights, workload, block, precision, learnt
):
    """learnt: share of the processor's rates, above 1 where the machine was busy when it was
    measured.
    """
    problem = problem_of(model, machine, workload, precision=precision)
    machine = replace(problem.hardware, prefill_share=learnt, decode_share=learnt)
    problem = replace(problem, hardware=machine)
    policy = Policy(*block, *weights, 1, 0, 1, 0)
    found = predict(problem, policy, ZIGZAG)
    bound = least_seconds(problem, policy)
    assert found.latency_s >= bound * (1 - 1e-6)
