"""What an engine does with plans: weights, blocks, predictions beside measurements, and learning."""

import json
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.engine import machine_profile, profiler, run_record
from flexgen_helm.engine.machine_profile import SavedProfile
from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner import planner
from flexgen_helm.planner.placement import StorageSizes
from flexgen_helm.planner.plan import planning_problem, simulated_gpu
from flexgen_helm.planner.planner import corrected, corrections
from flexgen_helm.planner.policy import ZIGZAG, Policy, Workload
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.search import search
from tests.helpers.planning_problems import small


def requests(count, prompt=12, new=4):
    return [
        GenerationRequest(prompt_token_ids=[2 + (5 * i + j) % 300 for j in range(prompt)], max_tokens=new)
        for i in range(count)
    ]


def streamed_limit(path):
    """A limit that the weights exceed."""
    return int(0.9 * sum(StorageSizes(read_model_config(path)[0]).matrices.values()))


@pytest.mark.parametrize("new", [1, 4])
def test_auto_plans_weights_and_block_and_answers_the_same(tiny, tmp_path, monkeypatch, new):
    monkeypatch.setattr("flexgen_helm.planner.placement.MIN_STAGING_BYTES", 1 << 15)
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


def test_a_simulated_gpu_is_planned_with_the_hosts_memory_beside_its_limit(tiny, tmp_path, monkeypatch):
    """Command and engine have one capacity: the workspace of computing is not within the limit, as it is when run."""
    monkeypatch.setattr("flexgen_helm.planner.placement.MIN_STAGING_BYTES", 1 << 15)
    path = tiny("llama").path
    limits = MemoryLimits(gpu=streamed_limit(path), cpu=64 << 20)
    with Engine.from_pretrained(path, device="sim", limits=limits, offload_dir=tmp_path) as engine:
        assert [result.error for result in engine.run(requests(9))] == [None] * 9
        record = engine.last_run
    assert "wg" in record["policy"], "searched, not the rule of thumb"
    config, dtype = read_model_config(path)
    machine = simulated_gpu(load_profile("laptop"), None)
    problem = planning_problem(config, machine, Workload.uniform(12, 4, 9), storage_dtype=dtype, limits=limits)
    assert search(problem).prediction.feasible


@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prompt_that_completions_share_is_predicted_as_computed_once(tiny, monkeypatch, new, temperature):
    """The workload of a prediction has the prompt tokens that the run computed, whatever shares them."""
    predicted = []
    honest = planner.predict
    monkeypatch.setattr(
        planner, "predict", lambda problem, *args: predicted.append(problem.workload) or honest(problem, *args)
    )
    asked = [replace(r, n=3, temperature=temperature, echo_logprobs=True, seed=1) for r in requests(2, new=new)]
    with Engine.from_pretrained(tiny("llama").path, device="cpu") as engine:
        computed = sum(result.cost.prompt_tokens_computed for result in engine.run(asked))
    workload = predicted[-1]
    not_fed = len(asked) if new == 0 else 0  # nothing follows the last token of a prompt that is only scored
    assert workload.computed * workload.num_sequences == pytest.approx(computed + not_fed)


@pytest.mark.parametrize("new, completions", [(0, 1), (1, 1), (1, 3), (5, 1), (5, 3)])
@pytest.mark.parametrize("schedule", ["zigzag", "row"])
def test_no_run_is_predicted_to_be_faster_than_its_roofline(tiny, monkeypatch, new, completions, schedule):
    """Also where another program has slowed the product that is measured when a run begins."""
    monkeypatch.setattr(run_record, "matmul_flops", lambda *_: 1e6)
    asked = [replace(one, echo_logprobs=True, n=completions) for one in requests(9, prompt=70, new=new)]
    with Engine.from_pretrained(tiny("llama").path, device="cpu", schedule=schedule) as engine:
        engine.share_every_beginning()
        engine.run(asked)
        record = engine.last_run
    assert 0 < record["roofline_s"] <= record["predicted_latency_s"]
    assert record["roofline_s"] == pytest.approx(record["flops"] / record["hardware"]["matmul_flops"])


@pytest.mark.parametrize("policy", ["auto", Policy(64, 1, 0, 1, 0, 1, 0, 1)])
def test_a_run_is_judged_by_the_block_that_its_cache_had_room_for(tiny, monkeypatch, policy):
    """Judged by a larger one the machine seems slower than it is, and every run corrects its rates again."""
    seen = []
    honest = planner.predict
    monkeypatch.setattr(planner, "predict", lambda problem, *args: seen.append(args[0]) or honest(problem, *args))
    asked = [replace(request, ignore_eos=True) for request in requests(64, prompt=60, new=20)]
    limits = MemoryLimits(cpu=600 << 10)
    with Engine.from_pretrained(tiny("llama").path, device="cpu", limits=limits, policy=policy) as engine:
        at_once = max(result.cost.batch_size for result in engine.run(asked))
    assert 1 < at_once < 64 and seen[-1].block_size == at_once


def test_no_run_is_judged_by_the_plan_of_the_last(tiny, tmp_path, monkeypatch):
    """Scoring is planned as prefill-only; the run that follows may generate."""
    monkeypatch.setattr("flexgen_helm.planner.placement.MIN_STAGING_BYTES", 1 << 15)
    path = tiny("llama").path
    scored = [replace(request, max_tokens=0, echo_logprobs=True) for request in requests(9)]
    limits = MemoryLimits(cpu=streamed_limit(path))
    with Engine.from_pretrained(path, device="cpu", limits=limits, offload_dir=tmp_path) as engine:
        assert engine.run(scored)[0].error is None and engine.last_run["schedule"] == "prefill-only"
        assert [result.error for result in engine.run(requests(9))] == [None] * 9
        assert engine.last_run["schedule"] != "prefill-only"


def test_a_latency_that_nothing_meets_is_refused(tiny, tmp_path):
    path = tiny("llama").path
    with pytest.raises(MemoryLimitError, match="within 1e-09 s"):
        Engine.from_pretrained(path, device="cpu", offload_dir=tmp_path, max_latency=1e-9)
    with pytest.raises(UsageError, match="more than 0"):
        Engine.from_pretrained(path, device="cpu", max_latency=0.0)
    with pytest.raises(UsageError, match="for the search"):
        Engine.from_pretrained(path, device="cpu", max_latency=1.0, policy="1x1,0,100,0,100,0,100")


def test_rates_move_towards_what_was_measured():
    situation = small(200, 400)
    policy = Policy(24, 1, 0.5, 0.5, 0, 1, 0, 1)
    # Over prompts this machine computes at 0.4 of the rate that was measured, over single tokens at 0.6.
    truth = replace(situation, hardware=corrected(situation.hardware, {"prefill": 0.4, "decode": 0.6}))
    measured = predict(truth, policy, ZIGZAG)
    blocks = measured.latency_s / (measured.prefill_s + measured.decode_s)
    record = {"latency_s": measured.latency_s, "time_s": {"wait": 0.0}}
    record.update({f"{name}_s": blocks * phase["compute"] for name, phase in measured.seconds.items()})
    errors = []
    learner = situation
    for _ in range(6):
        told = predict(learner, policy, ZIGZAG)
        errors.append(abs(told.latency_s / measured.latency_s - 1))
        learner = replace(learner, hardware=corrected(learner.hardware, corrections(told, record)))
    assert errors[0] > 0.3 and errors[-1] < 0.1 and errors == sorted(errors, reverse=True)
    learnt = learner.hardware
    assert learnt.prefill_share == pytest.approx(0.4, rel=0.05) and learnt.decode_share == pytest.approx(0.6, rel=0.05)


def test_a_wait_corrects_the_channel_and_not_the_computing():
    situation = small(60, 100)
    policy = Policy(1, 1, 0.0, 0.2, 0, 1, 0, 1)
    told = predict(situation, policy, ZIGZAG)
    slow = 3 * told.latency_s
    blocks = told.latency_s / (told.prefill_s + told.decode_s)
    spent = blocks * sum(phase["compute"] for phase in told.seconds.values())
    record = {"latency_s": slow, "time_s": {"wait": 0.9 * slow}, "prefill_s": 0.0, "decode_s": 0.9 * slow + spent}
    factors = corrections(told, record)
    slowest = max(("disk_read", "to_gpu"), key=lambda name: sum(phase[name] for phase in told.seconds.values()))
    assert factors[slowest] < 0.9 and factors.get("decode", 1.0) > 0.7


def quick_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    monkeypatch.setattr(profiler, "_FILE_BYTES", 64 << 20)
    monkeypatch.setattr(profiler, "_ROWS", (1, 64, 256))
    monkeypatch.setattr(profiler, "_WIDTH", 256)


def test_this_machine_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_profile, "busy_share", lambda: 0.0)
    quick_profile(tmp_path, monkeypatch)
    honest, measured = machine_profile.measure, []

    def measure(folder):  # later ones need not be of this moment
        measured.append(honest(folder) if not measured else measured[0])
        return measured[-1]

    monkeypatch.setattr(machine_profile, "measure", measure)
    found = machine_profile.measured_profile()
    assert len(measured) == 1 and not list((tmp_path / "offload").iterdir())
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


@pytest.mark.fast(1)
@pytest.mark.parametrize("shares", [(0.6, 0.0), (0.0, 0.6)])
def test_a_profile_of_a_busy_machine_is_used_until_the_machine_is_quiet(shares, tmp_path, monkeypatch, caplog):
    quick_profile(tmp_path, monkeypatch)
    measured = []
    honest = machine_profile.measure

    def measure(folder):  # a second one has another name, and need not be of this moment
        measured.append(replace(measured[0], name="again") if measured else honest(folder))
        return measured[-1]

    monkeypatch.setattr(machine_profile, "measure", measure)
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


def test_a_profile_that_was_saved_before_profiles_were_marked_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    folder = tmp_path / "offload"
    machine_profile.save(SavedProfile(load_profile("laptop"), 0.9), folder)
    assert machine_profile.load_saved(folder).is_marked
    path = tmp_path / "profile.json"
    content = json.loads(path.read_text())
    del content["busy_share"]
    path.write_text(json.dumps(content))
    assert not machine_profile.load_saved(folder).is_marked


def test_other_programs_are_noticed():
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        busy.stdout.readline()
        share = machine_profile.busy_share()
        busy.kill()
    assert share > 0.25 / psutil.cpu_count()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_machine_that_cannot_be_measured_still_answers(tiny, tmp_path, monkeypatch, caplog, error):
    monkeypatch.delenv("FLEXGEN_HELM_HARDWARE")
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))

    def full(folder):
        raise error

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


def test_a_named_machine_that_is_unknown_is_refused_before_anything_runs(tiny, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HARDWARE", "t5")
    with pytest.raises(UsageError, match="t5"):
        Engine.from_pretrained(tiny("llama").path, device="cpu")


def test_a_named_machine_takes_the_place_of_this_one(monkeypatch):
    assert machine_profile.profile_named("t4") == load_profile("t4")
    with pytest.raises(UsageError, match="t5"):
        machine_profile.profile_named("t5")


def test_the_share_of_overlap_is_learnt_from_what_did_not_hide():
    situation = small(200, 400)
    policy = Policy(24, 1, 0.2, 0.8, 0, 1, 0, 1)
    truth = replace(situation, hardware=replace(situation.hardware, overlap=0.5))
    measured = predict(truth, policy, ZIGZAG)
    blocks = measured.latency_s / (measured.prefill_s + measured.decode_s)
    seconds = {"prefill_s": blocks * measured.prefill_s, "decode_s": blocks * measured.decode_s}
    computed = blocks * sum(phase["compute"] for phase in measured.seconds.values())
    record = {"latency_s": measured.latency_s, "time_s": {"wait": sum(seconds.values()) - computed}, **seconds}
    learner = situation
    for _ in range(6):
        told = predict(learner, policy, ZIGZAG)
        learner = replace(learner, hardware=corrected(learner.hardware, corrections(told, record)))
    assert learner.hardware.overlap == pytest.approx(0.5, abs=0.1)
    assert predict(learner, policy, ZIGZAG).latency_s == pytest.approx(measured.latency_s, rel=0.05)
    # Without overlap there is none to learn.
    still = replace(situation, overlap=False)
    assert "overlap" not in corrections(predict(still, policy, ZIGZAG), record)


def test_a_search_that_fails_does_not_take_the_placement_of_the_last_run(tiny, tmp_path, monkeypatch):
    """Its cache and hidden states go where the engine's own memory plan puts them."""
    monkeypatch.setattr("flexgen_helm.planner.placement.MIN_STAGING_BYTES", 1 << 15)
    path = tiny("llama").path
    limits = MemoryLimits(cpu=streamed_limit(path), disk=64 << 20)
    on_disk = Policy(3, 3, wg=0.0, wc=0.2, cg=0.0, cc=0.0, hg=0.0, hc=0.0)
    with Engine.from_pretrained(path, device="cpu", limits=limits, offload_dir=tmp_path) as engine:
        loaded = Policy(1, 1, wc=engine.placement.shares["cpu"])
        solved = engine._planner._search(Workload.uniform(12, 4, 9), loaded)
        monkeypatch.setattr(engine._planner, "_search", lambda *_: replace(solved, policy=on_disk, schedule=ZIGZAG))
        assert [result.error for result in engine.run(requests(9))] == [None] * 9
        assert engine.last_run["achieved_placement"]["cache"]["disk"] == 1.0
        monkeypatch.setattr(engine._planner, "_search", lambda *_: None)
        assert [result.error for result in engine.run(requests(9))] == [None] * 9
        assert engine.last_run["achieved_placement"]["cache"] == {"gpu": 0.0, "cpu": 1.0, "disk": 0.0}
        assert engine.last_run["achieved_placement"]["activations"] == {"gpu": 0.0, "cpu": 1.0, "disk": 0.0}
