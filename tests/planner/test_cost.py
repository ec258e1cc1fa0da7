"""The cost model against the paper's formulas written out by hand, and its laws."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.benchmarks.paper.systems import PaperProblem
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.affine import WD, fraction_vector
from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import BlockShape, Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.schedules import PREFILL_ONLY, ROW, ZIGZAG
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16
from flexgen_helm.request import MemoryLimits
from tests.helpers.planning_problems import config

T4 = load_profile("t4")
ROOMY = {"gpu": 1e15, "cpu": 1e15, "disk": 1e15}


def opt(size):
    return resolve(f"opt-{size}").entry.config


def flexgen(size="30b", prompt=512, output=32, count=1, **more):
    """A problem for the paper's engine, whose formulas the appendix has."""
    more = {"hardware": T4, "limits": ROOMY, "endless": True, **more}
    return PaperProblem(
        opt(size),
        workload=Workload.uniform(prompt, output, count),
        precision=FP16,
        compute_bytes=2,
        **more,
    )


fractions = st.tuples(*[st.integers(0, 10)] * 6).map(
    lambda n: [
        min(n[2 * i + k], 10 - (n[2 * i] if k else 0)) / 10 for i in range(3) for k in range(2)
    ]
)


@given(fractions, st.sampled_from([1, 8, 48]), st.sampled_from([1, 3]), st.booleans())
def test_seconds_are_those_of_the_papers_formulas(shares, batch, batches, attends):
    """The appendix's terms with h1, h2 and l of OPT-30B, each divided by its rate."""
    policy = Policy(batch, batches, *shares)
    s, n, h1, h2, layers, rows = 512, 32, 7168, 28672, 48, batch * batches
    found = predict(flexgen(cpu_attention=attends), policy, ZIGZAG, rounded=False)
    head = 50272 * h1
    weights = 2 * (layers * (4 * h1**2 + 2 * h1 * h2) + head)
    link, disk = T4.link, T4.disk
    far_h, far_c = 1 - policy.hg, 1 - policy.cg
    states = 2 * rows * h1 * layers
    prefill = {
        "to_gpu": (1 - policy.wg) * weights / link.to_gpu_bytes_s + far_h * s * states / link.pageable_to_gpu_bytes_s,
        "to_cpu": (far_c * 4 * rows * s * h1 * layers + far_h * s * states) / link.pageable_to_cpu_bytes_s,
        "disk_read": (policy.wd * weights + policy.hd * s * states) / disk.read_bytes_s
        + policy.wd * 6 * layers * disk.access_s,
        "disk_write": (policy.cd * 4 * rows * s * h1 * layers + policy.hd * s * states) / disk.write_bytes_s
        + policy.cd * 2 * layers * batches * disk.access_s,
    }  # fmt: skip
    for name, seconds in prefill.items():
        assert found.seconds["prefill"][name] == pytest.approx(seconds, rel=1e-6, abs=1e-9), name
    cached = 4 * rows * (s + n / 2) * h1 * layers
    decode_in = (
        1 - policy.wg
    ) * weights / link.to_gpu_bytes_s + far_h * states / link.pageable_to_gpu_bytes_s
    decode_in += far_c * (states if attends else cached) / link.pageable_to_gpu_bytes_s
    assert found.seconds["decode"]["to_gpu"] == pytest.approx((n - 1) * decode_in, rel=1e-6)
    hosts = far_c * cached / T4.cpu.attention_bytes_s if attends else 0.0
    assert found.seconds["decode"]["host_attention"] == pytest.approx(
        (n - 1) * hosts, rel=1e-6, abs=1e-9
    )
    operations = 2 * layers * (4 * h1**2 + 2 * h1 * h2) * rows * s
    rate = T4.gpu.matmul_flops["float16"].at(1e9)
    products = (operations + 2 * head * rows) / rate + batches * layers * T4.gpu.step_s
    assert found.seconds["prefill"]["products"] == pytest.approx(products, rel=1e-6)
    squares = 4 * rows * s * s * h1 * layers / T4.gpu.attention_flops
    assert found.seconds["prefill"]["attention"] == pytest.approx(squares, rel=1e-6)


def test_what_is_between_products_takes_as_long_as_its_bytes():
    """Of OPT-30B's layer on a host: hidden states 11 times, queries and keys twice, keys and values
    twice, the MLP.
    """
    host, policy = replace(T4, gpu=None, link=None), Policy(48, 3, 0, 1, 0, 1, 0, 1)

    def products(rate):
        changed = replace(
            flexgen(), hardware=replace(host, cpu=replace(host.cpu, layer_bytes_s=rate))
        )
        found = predict(changed, policy, ZIGZAG, rounded=False)
        return [found.seconds[phase]["products"] for phase in ("prefill", "decode")]

    h1, h2, rows, layers, element = 7168, 28672, 144, 48, flexgen().compute_bytes
    of_token = element * (11 * h1 + 2 * (h1 + h1) + 2 * 2 * h1 + 3 * h2) * layers / 1e9
    (prefill, decode), (fast_prefill, fast_decode) = products(1e9), products(math.inf)
    assert prefill - fast_prefill == pytest.approx(rows * 512 * of_token, rel=1e-6)
    assert decode - fast_decode == pytest.approx(31 * rows * of_token, rel=1e-6)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_an_expert_takes_the_interpreter_of_a_host_as_long_as_a_layer(has_gpu):
    """All 128 experts in each of 48 layers, once a pass of prompts that has two batches."""
    host = load_profile("rtx3090")
    host = host if has_gpu else replace(host, gpu=None, link=None)
    lengths, policy = Workload.uniform(1024, 2, 4), Policy(2, 2, 0, 0.5, 0, 1, 0, 1)

    def seconds(step_s):
        tier = "gpu" if has_gpu else "cpu"
        changed = replace(host, **{tier: replace(getattr(host, tier), step_s=step_s)})
        limits = MemoryLimits(gpu=20 << 30, cpu=40 << 30, disk=80 << 30)
        problem = planning_problem(config("qwen3-30b-a3b"), changed, lengths, limits=limits)
        found = predict(problem, policy, ZIGZAG)
        assert found.passes == 1
        return {phase: found.seconds[phase]["products"] for phase in ("prefill", "decode")}

    (slow, fast), used = (seconds(1.0), seconds(0.0)), 128 * (1 - (1 - 8 / 128) ** 4)
    visits = {"prefill": 0.0, "decode": 0.0} if has_gpu else {"prefill": 128.0, "decode": used}
    assert slow["prefill"] - fast["prefill"] == pytest.approx(48 * (2 + visits["prefill"]))
    assert slow["decode"] - fast["decode"] == pytest.approx(48 * (3 + visits["decode"]))


def test_row_by_row_reads_the_weights_for_every_batch():
    policy = Policy(48, 3, 0, 1, 0, 1, 0, 1)
    row = predict(flexgen(), policy, ROW, rounded=False)
    one = predict(flexgen(), replace(policy, num_gpu_batches=1), ZIGZAG, rounded=False)
    assert row.prefill_s == pytest.approx(3 * one.prefill_s) and row.decode_s == pytest.approx(
        3 * one.decode_s
    )
    zigzag = predict(flexgen(), policy, ZIGZAG, rounded=False)
    assert row.seconds["decode"]["to_gpu"] > 2 * zigzag.seconds["decode"]["to_gpu"]


def test_a_shared_prefix_is_computed_once_and_seen_by_all():
    shared = Workload.of([(512, 32)] * 100, saved_tokens=99 * 400)
    assert shared.mean_computed == pytest.approx(112 + 4) and shared.mean_pairs == pytest.approx(
        116 * 512
    )
    policy = Policy(50, 2, 0.2, 0.8, 0, 1, 0, 1)
    alone = predict(flexgen(count=100), policy, ZIGZAG, rounded=False)
    together = predict(replace(flexgen(), workload=shared), policy, ZIGZAG, rounded=False)
    assert together.seconds["prefill"]["products"] < 0.3 * alone.seconds["prefill"]["products"]
    assert together.decode_s == pytest.approx(alone.decode_s)


def test_every_scored_token_passes_the_head():
    lengths, policy = [(512, 1)] * 10, Policy(10, 1, 1, 0, 1, 0, 1, 0)
    plain, scored = (
        predict(
            replace(flexgen("125m"), workload=Workload.of(lengths, scored_tokens=count)),
            policy,
            PREFILL_ONLY,
        )
        for count in (0, 10 * 511)
    )
    head = opt("125m").head_flops_per_token * 10 * 511 / T4.gpu.matmul_flops["float16"].at(1e9)
    more = scored.seconds["prefill"]["products"] - plain.seconds["prefill"]["products"]
    assert more == pytest.approx(head, rel=0.01)


def test_stages_share_the_layers_and_prefill_waits_for_the_pipeline():
    policy = Policy(16, 4, 0, 1, 0, 1, 0, 1)
    one, four = (predict(flexgen(ranks=ranks), policy, ZIGZAG, rounded=False) for ranks in (1, 4))
    # Each of four lanes has a batch. A stage reads its quarter of the weights for every lane.
    lane = predict(flexgen(), Policy(16, 1, 0, 1, 0, 1, 0, 1), ZIGZAG, rounded=False)
    assert four.prefill_s == pytest.approx(lane.prefill_s / 4 * 7)
    assert four.decode_s == pytest.approx(lane.decode_s / 4 * 4)
    row = predict(flexgen(ranks=4), policy, ROW, rounded=False)
    assert (row.prefill_s, row.decode_s) == pytest.approx((four.prefill_s, four.decode_s))
    assert four.memory["cpu"].peak < 0.3 * one.memory["cpu"].peak
    with pytest.raises(UsageError, match="48 layers"):
        flexgen(ranks=49)


def on_machine(name, model="llama-3.1-8b", prompt=512, output=32, count=64, **more):
    return planning_problem(
        config(model), load_profile(name), Workload.uniform(prompt, output, count), **more
    )


def decode_parts(problem, shape, fractions):
    times = block_costs(problem, shape, resident=True).decode
    return {name: float(form @ fractions) for name, form in times.items()}


def test_a_device_dequantizes_packed_weights_for_any_number_of_rows():
    resident = fraction_vector(Policy(1, 1, 1, 0, 1, 0, 1, 0), True)
    problem = on_machine("h100", "llama-3-70b", precision="4bit", count=64)
    rate = problem.hardware.gpu.dequantize_elements_s
    in_layers = problem.layer_elements * problem.config.num_layers
    for rows in (1, 32):
        parts = decode_parts(problem, BlockShape(rows, 1, ZIGZAG), resident)
        assert parts["convert"] == pytest.approx(in_layers / rate, rel=0.3)


def test_a_cache_in_host_memory_is_fetched_with_whole_slots():
    problem = on_machine("t4", prompt=100, output=80, cpu_attention=False)
    shape, on_host = (
        BlockShape(16, 2, ZIGZAG),
        fraction_vector(Policy(1, 1, 1, 0, 0, 1, 1, 0), True),
    )
    expected = problem.kv_elements * 32 * 180 * 2 / problem.hardware.link.to_gpu_bytes_s
    assert float(block_costs(problem, shape).decode["to_gpu"] @ on_host) == pytest.approx(
        expected, rel=0.01
    )


@pytest.mark.parametrize("ring, passes", [(1 << 20, 8), (1 << 40, 1)])
def test_a_layer_larger_than_the_ring_is_transferred_for_every_batch(ring, passes):
    class WithRing(PaperProblem):
        ring_bytes = ring

    def read_s(access_s):
        machine = replace(T4, disk=replace(T4.disk, access_s=access_s))
        problem = WithRing(
            config("llama-3.1-8b"),
            machine,
            Workload.uniform(64, 32, 64),
            FP16,
            compute_bytes=2,
            limits=ROOMY,
        )
        return block_costs(problem, BlockShape(8, 8, ZIGZAG)).decode["disk_read"][WD]

    assert read_s(1.0) - read_s(0.0) == pytest.approx(7 * 32 * passes), (
        "7 matrices of 32 layers, 8 batches"
    )
