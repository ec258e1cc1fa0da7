"""`bench clients` without its measurements: the reference copy, HELM's entries, what is compared."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.benchmarks import KNOWN, Options, clients, helm_runs, llama_cpp, load, summary
from flexgen_helm.benchmarks.llama_cpp import PeerRun
from flexgen_helm.benchmarks.reference import SAMPLE_TEXTS, export, same_tokens
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "variant", ["llama", "llama-untied-biases", "llama-wide-heads", "llama3-rope", "llama-linear-rope"]
)
def test_the_reference_copy_is_our_model(tiny, tmp_path, variant):
    from transformers import AutoModelForCausalLM

    model = tiny(variant)
    export(open_checkpoint(model.path), tmp_path)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert copy.dtype == torch.float32
    prompt = list(range(5, 45))
    with torch.no_grad():
        logprobs = torch.log_softmax(copy(torch.tensor([prompt])).logits[0], dim=-1)
    assert torch.allclose(logprobs, model.logprobs(prompt), atol=1e-5)
    with Engine.from_pretrained(model.path) as engine:
        result = engine.run([GenerationRequest(prompt_token_ids=prompt, max_tokens=0, echo_logprobs=True)])[0]
        assert same_tokens(tmp_path, engine.tokenizer, ["the quick  brown\nfox", "naïve 🙂", ""])
    for i, score in enumerate(result.prompt_logprobs[1:]):
        assert abs(score - logprobs[i, prompt[i + 1]].item()) < 1e-4


def test_the_wheel_models_copy_has_our_tokenizer(wheel_model, tmp_path):
    from flexgen_helm.benchmarks.reference import _export_tokenizer

    tokenizer = Tokenizer.from_path(wheel_model)
    _export_tokenizer(tokenizer, wheel_model, tmp_path)
    assert same_tokens(tmp_path, tokenizer, SAMPLE_TEXTS)


def test_another_architecture_is_refused(tiny, tmp_path):
    with pytest.raises(UsageError, match="Llama"):
        export(open_checkpoint(tiny("opt").path), tmp_path)


def stat(name, mean, **rest):
    return {"name": {"name": name, "split": "valid", **rest}, "mean": mean, "count": 1}


def test_only_scores_are_compared():
    found = helm_runs.scores(
        [
            stat("exact_match", 0.5),
            stat("inference_runtime", 3.0),
            stat("flexgen_efficiency", 1.0),
            stat("empty", None),
            stat("exact_match", 0.25, perturbation={"name": "typos"}),
        ]
    )
    assert found == {"exact_match valid": 0.5, "exact_match valid typos": 0.25}


def test_differences_follow_the_definition_of_equal_scores():
    ours = {"exact_match": 0.5, "logprob": -1.0, "perplexity": 2.0, "only_ours": 1.0, "f1": 0.1}
    ours |= {"target_perplexity test": 20.0}
    theirs = {"exact_match": 0.5, "logprob": -1.00005, "perplexity": 2.1, "f1": 0.1000001}
    theirs |= {"target_perplexity test": 20.001}
    found = clients.differences(ours, theirs)
    assert [(line["metric"], line["why"]) for line in found] == [
        ("f1", None),
        ("only_ours", None),
        ("perplexity", None),
    ]


def test_only_known_defects_explain_a_difference():
    ours = {
        "logprob_per_byte test": -0.2,
        "max_prob": 0.3,
        "logprob": -1.0,
        "finish_reason_stop": 1.0,
        "exact_match": 1.0,
        "ece_10_bin": 0.2,
        "num_bytes": 5.0,
        "num_bytes test": 7.0,
    }
    theirs = {
        "logprob_per_byte test": 0.0,
        "max_prob": 1.0,
        "logprob": -2.0,
        "finish_reason_stop": 0.0,
        "exact_match": 0.0,
        "num_bytes": 9.0,
        "num_bytes test": 5.0,
    }
    unexplained = [line["metric"] for line in clients.differences(ours, theirs) if line["why"] is None]
    of_a_suite = [{f"mmlu:subject=a: {name}": value for name, value in side.items()} for side in (ours, theirs)]
    in_a_suite = [line["metric"] for line in clients.differences(*of_a_suite) if line["why"] is None]
    assert in_a_suite == [f"mmlu:subject=a: {name}" for name in unexplained]
    assert unexplained == ["exact_match", "logprob", "num_bytes test"]


GREEDY = {"max_tokens": 1, "echo_prompt": False, "temperature": 0.0, "num_completions": 1, "stop_sequences": []}


def write_run(folder, texts, record=None, began=None):
    folder.mkdir(parents=True)
    states = [
        {
            "result": {"request_time": 0.5, "request_datetime": began, "completions": [{"text": text}]},
            "request": {"prompt": f"the same beginning {text}", **GREEDY},
        }
        for text in texts
    ]
    (folder / "scenario_state.json").write_text(json.dumps({"request_states": states}))
    (folder / "stats.json").write_text(json.dumps([stat("exact_match", 0.5)]))
    if record:
        (folder / "flexgen_run.json").write_text(json.dumps(record))
        os.utime(folder / "flexgen_run.json", (1009.0, 1009.0))


RECORD = {
    "flops": 4e9,
    "latency_s": 4.0,
    "padded_throughput": 3.0,
    "actual_throughput": 2.7,
    "workload": {"prompt_tokens": 10, "prompt_tokens_computed": 7.0, "output_tokens": 2},
    "wall_s": {"generate": 5.0, "metrics": 1.0},
    "hardware": {"matmul_flops": 2e9, "library_flops": 1e9, "device": "cpu"},
}


def test_a_suite_is_ready_when_generation_starts(tmp_path):
    """Its runs come later, and only fetch their answers."""
    write_run(tmp_path / "a", ["a"], {**RECORD, "wall_s": {"generate": 0.0, "metrics": 0.5}})
    assert helm_runs.read_runs([tmp_path / "a"], 10.0, 1000.0).ready_s == pytest.approx(8.5)
    (tmp_path / "flexgen_suite.json").write_text(json.dumps({"wall_s": {"finish": 1.5, "generate": 5.0}}))
    os.utime(tmp_path / "flexgen_suite.json", (1010.0, 1010.0))
    assert helm_runs.read_runs([tmp_path / "a"], 10.0, 1000.0).ready_s == pytest.approx(3.5)


@pytest.fixture
def tiny_checkpoint(tiny):
    return open_checkpoint(tiny("llama").path)


def test_a_tasks_result(monkeypatch, tmp_path):
    """One command has two runs: their records add up, and the first that was ready counts."""
    write_run(tmp_path / "a,model=ours", ["a", "b"], RECORD)
    write_run(tmp_path / "b:model=ours", ["a"], {**RECORD, "wall_s": {"generate": 1.0, "metrics": 1.0}})
    write_run(tmp_path / "a,model=theirs", ["a", "c"], began=1010)
    write_run(tmp_path / "b:model=theirs", ["a"], began=1020)
    ours, theirs = ([tmp_path / f"{name}model={side}" for name in ("a,", "b:")] for side in ("ours", "theirs"))
    runs = {
        "flexgen-helm run": [helm_runs.read_runs(ours, seconds, 1000.0) for seconds in (10.0, 12.0, 11.0)],
        "helm-run with flexgen": [helm_runs.read_runs(ours, 13.0, 1000.0)],
        "huggingface -n 1": [helm_runs.read_runs(theirs, seconds, 1000.0) for seconds in (22.0, 23.0, 21.0)],
        "huggingface -n 4": [helm_runs.read_runs(theirs, 44.0, 1000.0)],
    }
    monkeypatch.setattr(llama_cpp, "version", lambda: "9999")
    served = {8: [PeerRun(33.0, 3.0, ["a", "b", "a"])]}
    found, other = clients._parts(clients.Task("task", ("entry",), 2), runs, served, load=2.0)
    assert [row["median"] for row in found["rows"]] == [11.0, 13.0, 22.0, 44.0]
    assert [row["median"] for row in other["rows"]] == [11.0, 13.0, 33.0]
    assert (found["peer"], other["peer"], other["scores"]["equal_completions"]) == ("huggingface", "llama.cpp", 3)
    assert {"label", "median", "min", "max", "n"} <= set(found["rows"][0])
    # Ours was ready 3 s after the process began; theirs had answered at second 11.5, in whole seconds rounded up.
    assert found["ratios"] == {
        "end_to_end": 2.0,
        "after_the_first_request": pytest.approx((22 - 11.5) / (11 - 3)),
    }
    assert all("busy machine (load 2.0)" in part["notes"][-1] for part in (found, other))
    assert other["ratios"]["against_llama_cpp"] == 3.0
    assert found["scores"] == {"compared": 2, "differing": [], "equal_completions": 2}
    prompts = found["prompts"]
    assert (prompts["asked"], prompts["computed"], prompts["output"]) == (20, 14.0, 4)
    assert prompts["efficiency"] == pytest.approx(0.9)
    whole = clients._joined([], [found, other], ["a note"])
    assert [row["median"] for row in whole["rows"]] == [11.0, 13.0, 22.0, 44.0, 33.0]
    assert {"name", "hardware", "versions", "rows", "ratios"} <= set(whole)
    assert whole["ratios"]["task_end_to_end"] == 2.0 and whole["notes"][-1] == "a note"
    json.dumps(whole, allow_nan=False)


OF_AN_OLDER_VERSION = '{"name": "clients", "tasks": [{"name": "natural"}]}'
OF_ANOTHER = '{"name": "offload", "tasks": [{"name": "natural", "peer": "huggingface"}]}'


def test_what_cannot_be_added_to_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    from flexgen_helm import cli

    def measure(*arguments, **rest):
        raise AssertionError("measured")

    monkeypatch.setattr(clients, "helm_run", measure)
    monkeypatch.setattr(clients, "_prepare", measure)
    out = tmp_path / "result.json"
    command = ["bench", "clients", "--tasks", "natural", "-o", str(out)]
    for content in ("[]", "not JSON", OF_AN_OLDER_VERSION, OF_ANOTHER):
        out.write_text(content)
        assert cli.main(command) == 2 and out.read_text() == content
    assert cli.main(["bench", "clients", "--tasks", "natural,"]) == 2
    assert cli.main(["bench", "kernels", "--peers", "llama.cpp"]) == 2


def test_tasks_and_peers_are_chosen_by_name(monkeypatch):
    monkeypatch.delenv("FLEXGEN_HELM_DATA", raising=False)
    tasks, notes = clients._tasks(Options(tasks=("long_answers", "natural")))
    assert [task.name for task in tasks] == ["natural", "long_answers"] and not notes
    for options in (Options(tasks=("other",)), Options(tasks=("natural",), peers=("other",))):
        with pytest.raises(UsageError, match="no (task|peer) 'other'; known are"):
            clients.run(options)
    with pytest.raises(UsageError, match="exclude each other"):
        clients._tasks(Options(entry="a:b=c", tasks=("natural",)))


@pytest.fixture
def without_processes(monkeypatch, tmp_path, tiny_checkpoint):
    """Runs of HELM and answers of llama.cpp's server are made up; returns the threads of each run."""
    for name, record in (("ours", RECORD), ("theirs", None)):
        write_run(tmp_path / f"a,model={name}", ["a", "b"], record, began=1010)
    threads_used = []

    def run(entries, instances, folder, configs, threads, program):
        threads_used.append(threads)
        name = "ours" if threads is None else "theirs"
        found = helm_runs.read_runs([tmp_path / f"a,model={name}"], 10.0 + (threads or 0), 1000.0)
        scored = [{**found.requests[0], "max_tokens": 0, "echo_prompt": True}]
        return dataclasses.replace(found, requests=scored) if "pattern" in entries[0] else found

    monkeypatch.setattr(clients, "helm_run", run)
    monkeypatch.setattr(clients, "_prepare", lambda scratch, checkpoint: None)
    monkeypatch.setattr(clients, "open_checkpoint", lambda name: tiny_checkpoint)
    monkeypatch.setattr(clients, "fetch", lambda name: tmp_path / "model.gguf")
    monkeypatch.setattr(llama_cpp, "missing", lambda: None)
    monkeypatch.setattr(llama_cpp, "version", lambda: "9999")
    return threads_used


def test_llama_cpp_gets_the_prompts_of_each_task_that_it_can_answer(without_processes, monkeypatch, tiny_checkpoint):
    asked = []

    def serve(file, prompts, requests, slots, log):
        assert file.suffix == ".gguf" and [len(requests), log.parent.is_dir()] == [2, True]
        asked.append((slots, prompts))
        return PeerRun(40.0 / slots, 1.0, ["a", "x"])

    monkeypatch.setattr(llama_cpp, "serve", serve)
    found = clients.run(Options(tasks=("natural", "pattern_match"), peers=("llama.cpp",), repeats=2))
    encode = Tokenizer.from_path(tiny_checkpoint.tokenizer_path).encode
    prompts = [encode(f"the same beginning {text}", add_special_tokens=False) for text in "ab"]
    assert asked == [(1, prompts), (8, prompts)] * 2, "sides are measured in alternation"
    (part,) = found["tasks"]
    assert (part["name"], part["peer"], part["versions"]["llama.cpp"]) == ("natural", "llama.cpp", "9999")
    assert found["ratios"]["natural_against_llama_cpp"] == 0.5 and part["settings"]["slots"] == [1, 8]
    assert part["scores"] == {"equal_completions": 1, "completions": 2}
    refused = "pattern_match is not compared with llama.cpp: llama.cpp's server gives no log-probabilities of a prompt"
    assert found["notes"].count(refused) == 1
    json.dumps(found, allow_nan=False)


def test_a_call_runs_the_chosen_peers_alone(without_processes, monkeypatch):
    monkeypatch.setattr(llama_cpp, "serve", lambda *arguments: PeerRun(40.0, 1.0, ["a", "x"]))
    found = clients.run(Options(tasks=("natural",), peers=("llama.cpp",), repeats=1))
    assert [(p["name"], p["peer"]) for p in found["tasks"]] == [("natural", "llama.cpp")]
    assert without_processes == [None, None]
    found = clients.run(Options(tasks=("natural",), peers=("huggingface",), repeats=1, earlier=found))
    assert [(p["name"], p["peer"]) for p in found["tasks"]] == [("natural", "llama.cpp"), ("natural", "huggingface")]
    assert without_processes[2:] == [None, None, 1, 4]
    assert found["tasks"][1]["settings"]["threads"] == [1, 4]
    assert found["ratios"]["natural_against_llama_cpp"] == 4.0
    monkeypatch.setattr(llama_cpp, "serve", lambda *arguments: PeerRun(30.0, 1.0, ["a", "x"]))
    found = clients.run(Options(tasks=("natural",), peers=("llama.cpp",), repeats=1, earlier=found))
    assert len(found["tasks"]) == 2 and found["ratios"]["natural_against_llama_cpp"] == 3.0, "measured again: replaced"
    for options in (Options(quick=True, tasks=("natural",), earlier=found), Options(entry="a:b=c", earlier=found)):
        with pytest.raises(UsageError, match="add nothing to it"):
            clients.run(options)
    with pytest.raises(UsageError, match="no chosen task is compared|not compared with llama.cpp"):
        clients.run(Options(tasks=("pattern_match",), peers=("llama.cpp",), repeats=1))


def test_a_task_without_its_data_is_left_out_with_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))
    tasks, notes = clients._tasks(Options(quick=True))
    assert [task.name for task in tasks] == ["natural", "pattern_match", "long_answers"]
    assert tasks[0].instances == 5
    assert len(notes) == 2 and "no folder with mmlu" in notes[0]
    (tmp_path / "mmlu").mkdir()
    assert [task.name for task in clients._tasks(Options())[0]] == ["mmlu", "natural", "pattern_match", "long_answers"]
    (task,) = clients._tasks(Options(entry="a:b=c"))[0]
    assert (task.name, task.entries, task.instances) == ("a", ("a:b=c",), 50)


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch):
    script = tmp_path / "helm-run"
    script.write_text("#!/bin/sh\necho $FLEXGEN_HELM_HOME\necho the model is gone\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "real"))
    (tmp_path / "real" / "models").mkdir(parents=True)
    (tmp_path / "real" / "journal").mkdir()
    monkeypatch.setattr(helm_runs, "_script", lambda name: str(script))
    (tmp_path / "data" / "mmlu").mkdir(parents=True)
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path / "data"))
    with pytest.raises(FlexgenError, match="ended with 3(.|\n)*the model is gone"):
        helm_runs.helm_run(["entry"], 1, tmp_path / "run")
    placed = tmp_path / "run" / "output" / "scenarios" / "mmlu" / "data"
    assert placed.resolve() == tmp_path / "data" / "mmlu"
    assert (tmp_path / "run" / "home" / "models").resolve() == tmp_path / "real" / "models"
    assert not (tmp_path / "run" / "home" / "journal").exists()


def test_known_benchmarks_exist_and_others_do_not():
    for name in KNOWN:
        assert callable(load(name))
    with pytest.raises(UsageError, match="clients"):
        load("os")


def test_the_command_passes_options_on_and_writes_the_result(monkeypatch, tmp_path):
    from flexgen_helm import cli

    seen = []
    result = {"name": "clients", "rows": [{"label": "ours", **summary([1.0, 2.0])}], "ratios": {"end_to_end": 1.5}}
    monkeypatch.setattr(clients, "run", lambda options: seen.append(options) or {**result, "notes": []})
    out = tmp_path / "result.json"
    assert cli.main(["bench", "clients", "-m", "7", "--repeats", "2", "-o", str(out)]) == 0
    assert (seen[0].instances, seen[0].repeats, seen[0].quick) == (7, 2, False)
    assert json.loads(out.read_text())["ratios"] == {"end_to_end": 1.5}
    assert cli.main(["bench", "clients", "-o", str(tmp_path / "missing" / "x.json")]) == 2
