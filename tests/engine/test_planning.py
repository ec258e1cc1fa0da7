"""What an engine does with plans: weights, blocks, predictions beside measurements, and
learning.
"""

from dataclasses import replace

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.engine import machine_profile, profiler, run_record
from flexgen_helm.engine.machine_profile import SavedProfile
from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.hardware.device_profile import simulated_gpu
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner import planner
from flexgen_helm.planner.corrections import corrected, corrections
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.search import search
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.workload import Workload
from tests.helpers.planning_problems import small


def requests(count, prompt=12, new=4):
    return [
        GenerationRequest(
            prompt_token_ids=[2 + (5 * i + j) % 300 for j in range(prompt)], max_tokens=new
        )
        for i in range(count)
    ]


def streamed_limit(path):
    """A limit that the weights exceed."""
    return int(0.9 * sum(StorageSizes(read_model_config(path)[0]).matrices.values()))


@pytest.mark.parametrize("new", [1, 4])
def test_auto_plans_weights_and_block_and_answers_the_same(tiny, tmp_path, monkeypatch, new):
    monkeypatch.setattr("flexgen_helm.planner.staging.MIN_STAGING_BYTES", 1 << 15)
    path = tiny("llama").path
    asked = requests(9, new=new)
    with Engine.from_pretrained(path, device="cpu") as near:
        expected = [result.completions[0].token_ids for result in near.run(asked)]
        assert near.last_run["predicted_latency_s"] > 0 and near.last_run["schedule"] == "row"
    limits = MemoryLimits(cpu=streamed_limit(path))
    with Engine.from_pretrained(path, device="cpu", limits=limits, offload_dir=tmp_path) as engine:
        assert [result.completions[0].token_ids for result in engine.run(asked)] == expected
        record = engine.last_run
    assert record["schedule"] == ("prefill-only" if new == 1 else record["schedule"])
    assert record["achieved_placement"]["weights"]["disk"] > 0
    assert record["policy"]["gpu_batch_size"] >= 1 and record["predicted"]["latency_s"] > 0
    planned = record["policy"]["wc"]
    assert record["achieved_placement"]["weights"]["cpu"] == pytest.approx(planned, abs=0.02)


def test_a_simulated_gpu_is_planned_with_the_hosts_memory_beside_its_limit(
    tiny, tmp_path, monkeypatch
):
    """Command and engine have one capacity: the workspace of computing is not within the limit, as
    it is when run.
    """
    monkeypatch.setattr("flexgen_helm.planner.staging.MIN_STAGING_BYTES", 1 << 15)
    path = tiny("llama").path
    limits = MemoryLimits(gpu=streamed_limit(path), cpu=64 << 20)
    with Engine.from_pretrained(path, device="sim", limits=limits, offload_dir=tmp_path) as engine:
        assert [result.error for result in engine.run(requests(9))] == [None] * 9
        record = engine.last_run
    assert "wg" in record["policy"], "searched, not the rule of thumb"
    config, dtype = read_model_config(path)
    machine = simulated_gpu(load_profile("laptop"), None)
    problem = planning_problem(
        config, machine, Workload.uniform(12, 4, 9), storage_dtype=dtype, limits=limits
    )
    assert search(problem).prediction.feasible


@pytest.mark.parametrize("new, temperature", [(0, 0.8), (1, 0.0), (3, 0.8)])
def test_a_prompt_that_completions_share_is_predicted_as_computed_once(
    tiny, monkeypatch, new, temperature
):
    """The workload of a prediction has the prompt tokens that the run computed, whatever shares
    them.
    """
    predicted = []
    honest = planner.predict
    monkeypatch.setattr(
        planner,
        "predict",
        lambda problem, *args: predicted.append(problem.workload) or honest(problem, *args),
    )
    asked = [
        replace(r, n=3, temperature=temperature, echo_logprobs=True, seed=1)
        for r in requests(2, new=new)
    ]
    with Engine.from_pretrained(tiny("llama").path, device="cpu") as engine:
        computed = sum(result.cost.prompt_tokens_computed for result in engine.run(asked))
    workload = predicted[-1]
    # nothing follows the last token of a prompt that is only scored
    not_fed = len(asked) if new == 0 else 0
    assert workload.mean_computed * workload.num_sequences == pytest.approx(computed + not_fed)


@pytest.mark.parametrize(
    "new, completions, schedule", [(0, 1, "row"), (1, 3, "zigzag"), (5, 1, "row")]
)
def test_no_run_is_predicted_to_be_faster_than_its_roofline(
    tiny, monkeypatch, new, completions, schedule
):
    """Also where another program has slowed the product that is measured when a run begins."""
    monkeypatch.setattr(run_record, "matmul_flops", lambda *_: 1e6)
    asked = [
        replace(one, echo_logprobs=True, n=completions) for one in requests(9, prompt=70, new=new)
    ]
    with Engine.from_pretrained(tiny("llama").path, device="cpu", schedule=schedule) as engine:
        engine.share_every_beginning()
        engine.run(asked)
        record = engine.last_run
    assert 0 < record["roofline_s"] <= record["predicted_latency_s"]
    assert record["roofline_s"] == pytest.approx(
        record["flops"] / record["hardware"]["matmul_flops"]
    )


@pytest.mark.parametrize("policy", ["auto", Policy(64, 1, 0, 1, 0, 1, 0, 1)])
def test_a_run_is_judged_by_the_block_that_its_cache_had_room_for(tiny, monkeypatch, policy):
    """Judged by a larger one the machine seems slower than it is, and every run corrects its rates
    again.
    """
    seen = []
    honest = planner.predict
    monkeypatch.setattr(
        planner, "predict", lambda problem, *args: seen.append(args[0]) or honest(problem, *args)
    )
    asked = [replace(request, ignore_eos=True) for request in requests(64, prompt=60, new=20)]
    limits = MemoryLimits(cpu=600 << 10)
    with Engine.from_pretrained(
        tiny("llama").path, device="cpu", limits=limits, policy=policy
    ) as engine:
        at_once = max(result.cost.batch_size for result in engine.run(asked))
    assert 1 < at_once < 64 and seen[-1].block_size == at_once


def test_a_latency_that_nothing_meets_is_refused(tiny, tmp_path):
    path = tiny("llama").path
    # of the requests of a run, which may be shorter than any that are typical
    with (
        Engine.from_pretrained(
            path, device="cpu", offload_dir=tmp_path, max_latency=1e-9
        ) as engine,
        pytest.raises(MemoryLimitError, match="within 1e-09 s"),
    ):
        engine.run([GenerationRequest(prompt_token_ids=[1, 2], max_tokens=2)])
    with pytest.raises(UsageError, match="more than 0"):
        Engine.from_pretrained(path, device="cpu", max_latency=0.0)
    with pytest.raises(UsageError, match="for the search"):
        Engine.from_pretrained(path, device="cpu", max_latency=1.0, policy="1x1,0,100,0,100,0,100")


def test_the_overlap_moves_towards_what_was_measured():
    """`tests/planner/test_planner.py` has the rates of computing."""
    policy, wrong, learner = Policy(24, 1, 0.2, 0.8, 0, 1, 0, 1), {"overlap": 0.5}, small(200, 400)
    learner = replace(learner, hardware=replace(learner.hardware, overlap=1.0))
    truth = corrected(learner.hardware, wrong)
    measured = predict(replace(learner, hardware=truth), policy, ZIGZAG)
    blocks = measured.latency_s / measured.block_s
    record = {f"{name}_s": blocks * getattr(measured, f"{name}_s") for name in measured.seconds}
    computed = blocks * sum(phase["compute"] for phase in measured.seconds.values())
    record |= {"latency_s": measured.latency_s, "time_s": {"wait": sum(record.values()) - computed}}
    errors = []
    for _ in range(6):
        told = predict(learner, policy, ZIGZAG)
        errors.append(abs(told.latency_s / measured.latency_s - 1))
        learner = replace(learner, hardware=corrected(learner.hardware, corrections(told, record)))
    assert errors[0] > 0.1 > errors[-1] and errors == sorted(errors, reverse=True)
    assert learner.hardware.overlap == pytest.approx(truth.overlap, rel=0.2)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A quick profile of this machine, and the folder in which it was measured."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_FILE_BYTES": 64 << 20, "_ROWS": (1, 64, 256), "_WIDTH": 256}.items():
            patch.setattr(profiler, name, value)
        return machine_profile.measure(folder), folder


@pytest.fixture
def measured(first, tmp_path, monkeypatch):
    """The profiles that are measured in a new home: the first one, and the same by other names."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    profiles = []

    def measure(folder):
        profiles.append(replace(first[0], name=f"{first[0].name}{len(profiles) or ''}"))
        return profiles[-1]

    monkeypatch.setattr(machine_profile, "measure", measure)
    return profiles


def test_this_machine_is_measured_once(first, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_profile, "busy_share", lambda: 0.0)
    found = machine_profile.measured_profile()
    assert len(measured) == 1 and not list(first[1].iterdir())
    assert found.cpu.matmul_flops["float32"].best > 1e8 and found.disk.read_bytes_s > 1e6
    assert 0.5 <= found.disk.duplex <= 1 and 0 <= found.overlap <= 1
    assert machine_profile.measured_profile() == found and len(measured) == 1
    kept = tmp_path / "profile.json"
    kept.write_text(kept.read_text().replace('"cores"', '"horses"'))  # another machine
    machine_profile.measured_profile()
    assert len(measured) == 2
    kept.write_text("{")
    machine_profile.measured_profile()
    assert len(measured) == 3


@pytest.mark.parametrize("shares", [(0.6, 0.0), (0.0, 0.6)])
def test_a_profile_of_a_busy_machine_is_used_until_the_machine_is_quiet(
    shares, measured, monkeypatch, caplog
):
    readings = iter(shares)
    monkeypatch.setattr(machine_profile, "busy_share", lambda: next(readings))
    first = machine_profile.measured_profile()
    assert "60%" in caplog.text and "flexgen-helm profile" in caplog.text
    monkeypatch.setattr(machine_profile, "busy_share", lambda: 0.6)
    assert machine_profile.measured_profile() == first and len(measured) == 1
    monkeypatch.setattr(machine_profile, "busy_share", lambda: 0.0)
    assert machine_profile.measured_profile() != first and len(measured) == 2
    machine_profile.measured_profile()
    assert len(measured) == 2, "one of a quiet machine stays"


def test_a_machine_that_cannot_be_measured_still_answers(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("FLEXGEN_HELM_HARDWARE")
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))

    def full(folder):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(machine_profile, "measure", full)
    monkeypatch.setattr(planner, "_MEASURE_FROM_S", 0.0)
    with Engine.from_pretrained(tiny("llama").path, device="cpu") as engine:
        assert all(result.error is None for result in engine.run(requests(3)))
        assert engine.last_run["predicted_latency_s"] is None
        engine.run(requests(3))
    assert sum("cannot be measured" in record.message for record in caplog.records) == 1


def test_the_machine_is_not_measured_for_the_prediction_of_a_short_run(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("FLEXGEN_HELM_HARDWARE")
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    monkeypatch.setattr(machine_profile, "measure", lambda folder: pytest.fail("measured"))
    with Engine.from_pretrained(tiny("llama").path, device="cpu") as engine:
        engine.run(requests(3))
        assert engine.last_run["predicted_latency_s"] is None
        machine_profile.save(SavedProfile(load_profile("laptop"), 0.0), tmp_path / "offload")
        engine.run(requests(3))
        assert engine.last_run["predicted_latency_s"] > 0


def test_a_folder_that_cannot_be_written_is_refused_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine_profile, "measure", lambda folder: pytest.fail("it was measured"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        machine_profile.measured_profile(folder=tmp_path / "file")
