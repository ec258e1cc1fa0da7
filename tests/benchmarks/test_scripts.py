"""Each benchmark runs: with tiny models in this process, or with what other programs would have left."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen_helm.benchmarks import (
    ablation,
    accelerate_task,
    accuracy,
    clients,
    engine_task,
    kernels,
    llama_cpp,
    offload,
)
from flexgen_helm.benchmarks import policy as policies
from flexgen_helm.benchmarks.helm_runs import HelmRun
from flexgen_helm.benchmarks.llama_cpp import PeerRun
from flexgen_helm.benchmarks.paper import rows
from flexgen_helm.benchmarks.paper.page import TABLES, page
from flexgen_helm.benchmarks.reference import SAMPLE_TEXTS, export, same_tokens
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.policy import Policy
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.data_sets import PAGES
from tests.helpers.paths import ROOT
from tests.helpers.scripts import load as script


@pytest.fixture
def in_this_process(monkeypatch):
    """Measurements run here, and the machine's profile is a known one."""
    monkeypatch.setattr(
        engine_task, "in_own_process", lambda function, block: function(**json.loads(json.dumps(block)))
    )
    for module in (ablation, policies):
        monkeypatch.setattr(module, "measured_profile", lambda **given: load_profile("laptop"))


def result_in(out: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a result, and its rows by label."""
    result = json.loads(out.read_text())
    assert {"name", "date", "hardware", "versions", "ratios", "notes"} <= result.keys()
    assert all({"label", "median", "min", "max", "n"} <= row.keys() for row in result["rows"])
    return result, {row["label"]: row for row in result["rows"]}


def test_kernels(tmp_path):
    kernels.main(tmp_path / "out.json", quick=True)
    assert {"loop_to_plain_4bit", "packed_overhead_8_tokens"} <= result_in(tmp_path / "out.json")[0]["ratios"].keys()


def test_ablation(tiny, tmp_path, monkeypatch, in_this_process):
    monkeypatch.setattr(ablation, "GPU_BYTES", 1e14)
    ablation.main(tmp_path / "out.json", quick=True, model=str(tiny("opt").path))
    result, found = result_in(tmp_path / "out.json")
    assert result["ratios"]["all_techniques"] == 1 and len(found) == 7
    assert found["no overlap"]["paper"] == 5.86 / 7.32 and "paper" not in found["half on the disk"]
    assert found["half on the disk"]["bytes"]["disk_to_cpu"]["weights"] > 0
    assert found["no cpu attention"]["bytes"]["cpu_to_gpu"]["cache"] > 0
    assert found["all techniques"]["bytes"]["cpu_to_gpu"]["cache"] == 0


def test_offload(tiny, tmp_path, monkeypatch, in_this_process, small_ring):
    monkeypatch.setattr(accelerate_task, "missing", lambda: "left out by the test")
    sizes = {"prompt": 6, "output": 3, "rows": 5, "row_batches": 2, "weights_share": 1.6, "repeats": 2}
    workload = offload.Workload(str(tiny("opt").path), **sizes, packed=())
    offload.report(offload.measure(workload, load_profile("laptop"), tmp_path), tmp_path / "out.json")
    result, found = result_in(tmp_path / "out.json")
    assert len(found) == 9 and found["in memory"]["n"] == 2 and found["in memory"]["read_gb"] == 0
    assert 0 < found["offloaded"]["read_gb"] < found["row by row"]["read_gb"]
    assert found["in memory"]["median"] / found["offloaded"]["median"] == result["ratios"]["offloaded_to_in_memory"]
    assert any("Accelerate" in note for note in result["notes"])
    # 160 Gflop/s and 0.8 GB/s: a parameter of 2 bytes arrives in 2.5 ns, in which 400 operations are 200 rows' work.
    assert offload.break_even_rows(160e9, 2, 0.8e9) == pytest.approx(200)


def test_policy(tmp_path, monkeypatch, in_this_process):
    cases = [
        policies.Case("sim", Policy.parse(text), policies.ZIGZAG)
        for text in ("4x1,0,100,0,100,0,100", "2x2,50,50,0,100,0,100")
    ]

    def run(workload, case, repeats):
        return [{"latency_s": 2.0 if case == cases[0] else 3.0}] * repeats

    monkeypatch.setattr(policies, "run_case", run)
    monkeypatch.setattr(policies, "corrected_profile", lambda workload, profile, case: profile)
    for cases_of in ("spread_cases", "grid_cases"):
        monkeypatch.setattr(policies, cases_of, lambda: cases)
    policies.main(tmp_path / "out.json", quick=True)
    result, found = result_in(tmp_path / "out.json")
    assert result["ratios"]["chosen_to_best_of_grid"] in (1.0, 1.5)
    assert all(
        row["of_prediction"] == row["median"] / row["predicted_s"] for row in found.values() if "predicted_s" in row
    )


RECORD = {
    "latency_s": 4.0, "padded_throughput": 3.0, "actual_throughput": 2.7, "hardware": {"device": "cpu"},
    "workload": {"prompt_tokens": 10, "prompt_tokens_computed": 7.0, "output_tokens": 2},
}  # fmt: skip
GREEDY = {"max_tokens": 1, "echo_prompt": False, "temperature": 0.0, "num_completions": 1, "stop_sequences": []}


def test_clients(tiny, tmp_path, monkeypatch):
    def helm_run(entries, instances, folder, configs, threads, program):
        is_ours, texts = threads is None, ["a", "b" if threads is None else "c"]
        requests = [{"prompt": f"the same beginning {text}", **GREEDY} for text in texts]
        run = HelmRun(10.0 + 10 * (threads or 0), 1.0, {"exact_match": 0.5}, texts, [RECORD] * is_ours, requests, 3.0)
        is_scored = "pattern" in entries[0]
        return dataclasses.replace(run, requests=[{**requests[0], "echo_prompt": True}]) if is_scored else run

    def serve(file, prompts, requests, slots, log):
        encode = Tokenizer.from_path(checkpoint.tokenizer_path).encode
        assert prompts == [encode(request["prompt"], add_special_tokens=False) for request in requests]
        return PeerRun(40.0 / slots, 1.0, ["a", "x"])

    checkpoint = open_checkpoint(tiny("llama").path)
    monkeypatch.setattr(clients, "helm_run", helm_run)
    monkeypatch.setattr(clients, "_prepare", lambda scratch, checkpoint: None)
    monkeypatch.setattr(clients, "open_checkpoint", lambda name: checkpoint)
    monkeypatch.setattr(clients, "fetch", lambda name: tmp_path / "model.gguf")
    for name, function in (("missing", lambda: None), ("version", lambda: "9999"), ("serve", serve)):
        monkeypatch.setattr(llama_cpp, name, function)
    out = tmp_path / "out.json"
    clients.main(out, tasks="natural,pattern_match", peers="llama.cpp", repeats=2)
    clients.main(out, tasks="natural", peers="huggingface")  # is added to what the file has
    result, found = result_in(out)
    assert [(part["name"], part["peer"]) for part in result["tasks"]] == [
        ("natural", "llama.cpp"),
        ("natural", "huggingface"),
    ]
    assert result["ratios"]["natural_against_llama_cpp"] == 0.5 and result["ratios"]["natural_end_to_end"] == 2.0
    assert result["ratios"]["natural_after_the_first_request"] == 17 / 7
    assert [part["scores"]["equal_completions"] for part in result["tasks"]] == [1, 1]
    assert result["tasks"][0]["prompts"]["efficiency"] == pytest.approx(0.9)
    out.write_text('{"tasks": [{"name": "natural"}]}')  # of an older version
    for wrong in ({"out": out}, {"tasks": "other"}, {"peers": "other"}):
        with pytest.raises(UsageError, match="name a new file|known are"):
            clients.main(**wrong)


def test_only_known_defects_explain_a_difference():
    ours = {
        "max_prob": 0.3,
        "logprob": -1.0,
        "exact_match": 1.0,
        "ece_10_bin": 0.2,
        "num_bytes": 5.0,
        "perplexity": 2.0,
    }
    theirs = {"max_prob": 1.0, "logprob": -2.0, "exact_match": 0.0, "num_bytes": 9.0, "perplexity": 2.0001}
    assert [line["metric"] for line in clients.differences(ours, theirs) if line["why"] is None] == [
        "exact_match",
        "logprob",
    ]


# Answers with the sum of the ids; the first look at its health is too early.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
looks = []
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        looks.append(self.path)
        self.reply(503 if len(looks) < 3 else 200, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["n_predict"] == body["prompt"][0] + 1 and body["stop"] == ["\\n"] and not body["temperature"]
        self.reply(200, {"content": str(sum(body["prompt"]))})
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


def test_the_server_of_llama_cpp_is_asked_as_helm_asks(tmp_path, monkeypatch):
    """By a program that speaks its protocol; answers come in the order of the requests."""
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = [{**GREEDY, "max_tokens": 1 + i, "stop_sequences": ["\n"]} for i in range(40)]
    found = llama_cpp.serve(tmp_path / "model.gguf", [[i, 1] for i in range(40)], asked, 8, tmp_path / "log")
    assert found.texts == [str(i + 1) for i in range(40)] and 0 < found.ready_s < found.seconds
    assert "log-probabilities" in str(llama_cpp.unsupported([*asked, {**GREEDY, "echo_prompt": True}]))


def test_accuracy(tmp_path, monkeypatch, wheel_model):
    """The harness and HELM leave their files as they do; both have the same texts."""
    passages, changed = ["one passage", "déjà vu"], {}
    monkeypatch.setattr(accuracy.lambada, "read_passages", lambda: passages)
    monkeypatch.setattr(accuracy.wikitext, "read_pages", lambda: PAGES[:1])
    monkeypatch.setattr(accuracy, "export_checked", lambda checkpoint, folder: Tokenizer.from_path(wheel_model))
    figures = {
        "exact_match": 0.5,
        "target_perplexity": 20.0,
        "word_perplexity": 30.0,
        "byte_perplexity": 1.9,
        "bits_per_byte": 0.93,
    }

    def helm_run(entries, amount, folder, variables):
        written = Path(variables["FLEXGEN_HELM_DATA"])
        assert [
            json.loads(line)["text"] for line in (written / "lambada_openai_test.jsonl").read_text().splitlines()
        ] == passages
        instances = [
            {"instance_id": f"id{i}", "stats": [{"name": {"name": "logprob"}, "sum": -5.0 - i}]}
            for i in reversed(range(amount))
        ]
        (folder / "output/runs/bench/run").mkdir(parents=True)
        (folder / "output/runs/bench/run/per_instance_stats.json").write_text(json.dumps(instances))
        return SimpleNamespace(
            stats={f"{name} test": value for name, value in {**figures, **changed}.items()},
            seconds=1.0,
            records=[RECORD],
        )

    def run_logged(command, log, name, env):
        (task,) = (word.removesuffix("_local") for word in command if word.endswith("_local"))
        answers = [["-5.0", "False"], ["-6.0001", "True"]] if task == "lambada_openai" else ["-5.0"]
        lines = [json.dumps({"doc_id": i, "filtered_resps": [answer]}) for i, answer in enumerate(answers)]
        (log.parent / f"samples_{task}_local_2026.jsonl").write_text("\n".join(lines))
        names = {"acc": "exact_match", "perplexity": "target_perplexity"}
        metrics = {
            f"{key},none": figures[names.get(key, key)]
            for key in (*names, "word_perplexity", "byte_perplexity", "bits_per_byte")
        }
        (log.parent / "results_2026.json").write_text(json.dumps({"results": {f"{task}_local": metrics}}))
        return 1.0

    monkeypatch.setattr(accuracy, "helm_run", helm_run)
    monkeypatch.setattr(accuracy, "run_logged", run_logged)
    accuracy.main(tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["equal"] and len(result["rows"]) == 5
    assert result["agreement"] == {"lambada_openai": pytest.approx(1e-4), "wikitext": 0.0}
    changed["word_perplexity"] = 30.04
    accuracy.main(tmp_path / "out.json")
    assert not json.loads((tmp_path / "out.json").read_text())["equal"]


@pytest.mark.parametrize("variant", ["llama-untied-biases", "llama3-rope"])
def test_the_reference_copy_is_our_model(tiny, tmp_path, variant):
    from transformers import AutoModelForCausalLM

    model = tiny(variant)
    tokenizer = export(open_checkpoint(model.path), tmp_path)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(copy(torch.tensor([[*range(5, 45)]])).logits[0], dim=-1)
    assert torch.allclose(logprobs, model.logprobs([*range(5, 45)]), atol=1e-5)
    assert same_tokens(tmp_path, tokenizer, SAMPLE_TEXTS)


def test_the_papers_page_and_pictures_are_up_to_date():
    written = (ROOT / "docs" / "paper.md").read_text()
    assert written == page(), "run `make pages`"
    for name, text in script(ROOT / "docs" / "paper_charts.py").charts().items():
        assert (ROOT / "docs" / "images" / name).read_text() == text, "run `make pages`"
    with pytest.raises(UsageError, match="'petals'.*techniques"):
        page("petals")


def test_tables_agree_with_the_paper_as_far_as_their_notes_say():
    found = {table.name: table.rows() for table in TABLES}
    for row in found["techniques"]:  # each technique helps: in the paper, the model and the measurement
        assert max(row["paper"], row["predicted"], row["measured"] or 0) < 1, row
    for row in found["frontier"] + found["data_wrangling"]:
        assert row["predicted"] == pytest.approx(row["paper"], rel=0.4), row
    for row in found["subscenarios"]:  # the paper's minutes have more in them
        assert row["paper"] * 0.4 <= row["predicted"] <= row["paper"], row
    shares = [row["predicted"] for row in found["breakdown"] if row["label"].endswith("all parts")]
    assert shares == pytest.approx([1, 1], abs=0.05)


def test_tables_have_no_measurements_where_results_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    assert {row["measured"] for row in rows.throughput() + rows.techniques() + rows.mixed_lengths()} == {None}
    (tmp_path / "gpu_x.json").write_text(
        json.dumps(
            {"date": "2026-11-01", "hardware": {"device": "X"}, "rows": [{"label": "opt", "tokens_per_s": 1234.5}]}
        )
    )
    assert rows.throughput()[-1] == rows.row("X: opt", measured=1234.0)
