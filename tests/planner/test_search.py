"""The search against a grid of policies, and its laws: limits hold, more memory never hurts, order
means nothing.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.hardware.device_profile import simulated_gpu
from flexgen_helm.planner import search as search_module
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.plan import make_plan, planning_problem
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.schedules import PREFILL_ONLY
from flexgen_helm.planner.search import search
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import leaving_room, place_weights
from flexgen_helm.planner.workload import Workload
from flexgen_helm.request import MemoryLimits
from tests.helpers.planning_problems import LAPTOP, MIB, config, small


@given(
    st.integers(30, 600),
    st.integers(20, 900),
    st.integers(1, 64),
    st.integers(1, 200),
    st.integers(1, 40),
)
@settings(max_examples=8)
def test_what_is_found_fits_and_sums_to_one(gpu, cpu, count, prompt, output):
    problem = small(gpu, cpu, prompt=prompt, output=output, count=count)
    try:
        found = search(problem)
    except MemoryLimitError as error:
        assert "bytes more" in str(error)
        return
    policy = found.policy
    for parts in (
        (policy.wg, policy.wc, policy.wd),
        (policy.cg, policy.cc, policy.cd),
        (policy.hg, policy.hc, policy.hd),
    ):
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0
    assert found.prediction.feasible
    for tier, peak in found.prediction.memory.items():
        assert peak.peak <= problem.limits[tier] * (1 + 1e-6) + 1
    again = predict(problem, policy, found.schedule)
    assert again == found.prediction  # what is told is what the policy costs


@given(st.integers(30, 400), st.integers(60, 600), st.booleans())
@settings(max_examples=8)
def test_an_engine_can_load_the_weights_as_searched(mib, host_mib, has_gpu):
    """Vectors, staging and copies in the compute dtype included: the engine refuses what exceeds a
    tier.
    """
    problem = small(mib, host_mib)
    if not has_gpu:
        limits = MemoryLimits(cpu=mib * MIB, disk=4000 * MIB)
        problem = planning_problem(
            config("opt-125m"), LAPTOP, Workload.uniform(32, 8, 24), limits=limits
        )
    try:
        policy = search(problem).policy
    except MemoryLimitError:
        return
    place_weights(problem.storage, problem.machine, policy)


def test_weights_that_a_gpu_has_no_room_for_go_to_the_host():
    storage = StorageSizes(config("opt-125m"))
    total = sum(storage.matrices.values())
    machine = Machine({"gpu": int(0.6 * total), "cpu": 2 * total, "disk": 0}, "gpu")
    policy = leaving_room(Policy(8, 2, 0.55, 0.45, 0, 1, 1, 0), storage, machine)
    assert policy.wg < 0.5 and policy.wg + policy.wc == pytest.approx(1)
    place_weights(storage, machine, policy)


def test_a_latency_is_kept_and_costs_throughput():
    problem = small(64, 150, count=200)
    free = search(problem)
    latency = (free.prediction.prefill_s + free.prediction.decode_s) / 3
    bound = search(problem, max_latency=latency)
    assert bound.prediction.prefill_s + bound.prediction.decode_s <= latency * (1 + 1e-6)
    assert bound.prediction.tokens_per_s < free.prediction.tokens_per_s
    with pytest.raises(
        MemoryLimitError, match="within 1e-06 s: the quickest takes .* s; raise --max-latency"
    ):
        search(problem, max_latency=1e-6)


@pytest.mark.parametrize(
    "gpu, cpu, disk, flag", [(2, 2000, 4000, "--gpu-memory"), (100, 20, 10, "--(disk|cpu-memory)")]
)
def test_what_is_needed_is_told_in_bytes(gpu, cpu, disk, flag):
    with pytest.raises(
        MemoryLimitError, match=(rf"needs [^;]* \([\d,]+ bytes\) [^;]*, {flag} allows .*; raise --")
    ):
        search(small(gpu, cpu, disk))


GIB = 1 << 30


def thirty_billion(
    memory_gib, disk_gib, precision="fp16", gpu_bytes=None, name="measured", **limits
):
    """OPT-30B (60 GB in FP16, 17 GB in 4 bits) on a machine without a gpu, or with a simulated one;
    limits in GiB.
    """
    cpu = replace(LAPTOP.cpu, memory_bytes=memory_gib * GIB)
    disk = replace(LAPTOP.disk, bytes=disk_gib * GIB)
    machine = replace(LAPTOP, name=name, cpu=cpu, disk=disk, gpu=None, link=None)
    if gpu_bytes is not None:
        machine = simulated_gpu(machine, None)
    allowed = MemoryLimits(gpu=gpu_bytes, **{tier: gib * GIB for tier, gib in limits.items()})
    workload = Workload.uniform(512, 32, 1)
    return planning_problem(
        config("opt-30b"), machine, workload, precision=precision, limits=allowed, endless=True
    )


ROOM = "make room on the disk or name another folder with --offload-dir"
LESS = "take a lower --precision or a smaller model"


@pytest.mark.parametrize(
    "machine, more, told, remedies, enough",
    [
        # A limit beyond what there is gives nothing, and raising it is no way out.
        ((18, 20), {"disk": 500}, "on disk, this machine has 20 GiB", ROOM, ((18, 60), {})),
        ((18, 20), {"name": "laptop"}, "laptop has 19", LESS, None),
        ((18, 100), {"disk": 20}, "--disk allows 20 GiB", "raise --disk", ((18, 100), {"disk": 80})),
        # Of two tiers the one that misses most.
        ((18, 45), {"cpu": 1, "disk": 15}, "--disk allows 15 GiB", "raise --disk", None),
        ((18, 35), {"cpu": 1}, "on disk, this machine has 34", ROOM, None),
        # What no limit would give is no advice: a machine keeps a margin.
        ((18, 43), {"cpu": 15}, "on disk, this machine has 42", ROOM, None),
        # A simulated gpu is as large as the flag says; a machine's own memory is not.
        ((18, 200), {"gpu_bytes": 10 << 20}, "--gpu-memory allows 10 MiB", "raise --gpu-memory",
         ((18, 200), {"gpu_bytes": 4 * GIB})),
        ((1, 200), {"cpu": 500}, "in memory, this machine has 1 GiB", LESS, None),
    ],
)  # fmt: skip
def test_missing_bytes_and_the_flag_are_told(machine, more, told, remedies, enough):
    """enough: a machine on which the advice was taken."""
    with pytest.raises(MemoryLimitError) as refused:
        search(thirty_billion(*machine, **more))
    missing, _, advice = str(refused.value).partition("; ")
    assert missing.startswith("does not fit: needs ") and told in missing
    assert advice == remedies
    assert enough is None or search(thirty_billion(*enough[0], **enough[1])).prediction.feasible


def test_matrices_that_cannot_be_cut_are_no_missing_zero_bytes():
    """All bytes fit three full tiers, but no tier holds a part of a matrix."""
    words = (
        r"up to 73\.6 MiB \(77,217,792 bytes\) more, because a matrix is never split; raise "
        r"--gpu-memory"
    )
    with pytest.raises(MemoryLimitError, match=words):
        search(small(30, 116, 120))


def test_of_equal_costs_the_one_in_memory_is_taken(monkeypatch):
    """A disk that takes no time: what has room in memory stays there all the same."""
    problem = small(100, 800)
    disk = replace(problem.hardware.disk, read_bytes_s=1e18, write_bytes_s=1e18, access_s=0.0)
    problem = replace(problem, hardware=replace(problem.hardware, disk=disk))
    found = search(problem)
    assert (found.policy.wd, found.policy.cd, found.policy.hd) == (0, 0, 0)
    monkeypatch.setattr(search_module, "_PREFERS_MEMORY", 0.0)
    assert search(problem).policy.wd > 0.5, "the solver has no preference of its own"


def test_scoring_goes_through_the_model_once():
    assert search(small(64, 150, output=1, count=500)).schedule == PREFILL_ONLY


def test_a_plan_says_why_and_what_would_help():
    made = make_plan(small(64, 150))
    assert made.why.startswith("Bound by the ") and "twice as fast" in made.why
    told = made.to_json()
    assert told["feasible"] and set(told["policy"]) >= {
        "gpu_batch_size",
        "wd",
        "cd",
        "hd",
        "schedule",
        "precision",
    }
    refused = make_plan(small(64, 150), policy=Policy(4, 1, 1.0, 0.0))
    assert "Does not fit: needs" in refused.why and not refused.to_json()["feasible"]
