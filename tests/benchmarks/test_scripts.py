"""Each benchmark runs: with tiny models in this process, or with what other programs would have
left.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flexgen_helm.benchmarks import (
    ablation,
    accelerate_task,
    accuracy,
    clients,
    engine_task,
    llama_cpp,
    offload,
    packed,
    peers,
)
from flexgen_helm.benchmarks import policy as policies
from flexgen_helm.benchmarks.common import report
from flexgen_helm.benchmarks.helm_runs import HELM, HelmRun
from flexgen_helm.benchmarks.paper import rows, tables
from flexgen_helm.benchmarks.paper.page import page, table
from flexgen_helm.benchmarks.reference import SAMPLE_TEXTS, export, same_tokens
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.data_sets import PAGES
from tests.helpers.paths import ROOT
from tests.helpers.scripts import load as script


@pytest.fixture
def in_this_process(monkeypatch):
    """Measurements run here, on the machine that a shipped profile describes."""
    monkeypatch.setenv("FLEXGEN_HELM_HARDWARE", "laptop")
    monkeypatch.setattr(
        engine_task,
        "in_own_process",
        lambda function, block: function(**json.loads(json.dumps(block))),
    )


def stored(result, out):
    """Return a result as it is stored, and its rows by label."""
    report(result, out)
    result = json.loads(out.read_text())
    assert {"name", "date", "hardware", "versions", "ratios", "notes"} <= result.keys()
    assert all({"label", "median", "min", "max", "n"} <= row.keys() for row in result["rows"])
    return result, {row["label"]: row for row in result["rows"]}


def test_ablation(tiny, tmp_path, monkeypatch, in_this_process):
    monkeypatch.setattr(ablation, "GPU_BYTES", 1e14)
    workload = ablation.Workload(str(tiny("opt").path), batch_rows=2, batches=2, output=3)
    result, found = stored(
        ablation.measure(workload, 1, load_profile("laptop")), tmp_path / "out.json"
    )
    assert result["ratios"]["all techniques"] == 1 and len(found) == 7
    assert (
        found["no overlap"]["paper"] == 5.86 / 7.32 and found["half on the disk"]["paper"] is None
    )
    assert found["half on the disk"]["bytes"]["disk_to_cpu"]["weights"] > 0
    assert found["no cpu attention"]["bytes"]["cpu_to_gpu"]["cache"] > 0
    assert found["all techniques"]["bytes"]["cpu_to_gpu"]["cache"] == 0


def test_offload(tiny, tmp_path, monkeypatch, in_this_process, small_ring):
    monkeypatch.setattr(accelerate_task, "missing", lambda: "left out by the test")
    sizes = {
        "prompt": 6,
        "output": 3,
        "rows": 5,
        "row_batches": 2,
        "weights_share": 2.5,
        "repeats": 2,
    }
    workload = offload.Workload(str(tiny("opt").path), **sizes)
    measured = offload.measure(workload, 1e9, tmp_path)
    peers.measure(workload, tmp_path, measured)
    packed.measure(workload, tmp_path, measured, packed.CASES[:2])
    result, found = stored(measured, tmp_path / "out.json")
    assert len(found) == 13 and found["in memory"]["n"] == 2 and found["in memory"]["read_gb"] == 0
    assert 0 < found["offloaded"]["read_gb"] < found["row by row"]["read_gb"]
    ratios = result["ratios"]
    assert (
        found["in memory"]["median"] / found["offloaded"]["median"]
        == ratios["offloaded_to_in_memory"]
    )
    labels = ("fp16, behind 0.25 GB/s", "4bit, behind 0.25 GB/s")
    assert ratios["packed_link"] == found[labels[0]]["median"] / found[labels[1]]["median"]
    assert "Accelerate is left out: left out by the test" in result["notes"]


def test_policy(tmp_path, monkeypatch):
    cases = policies.parse("sim zigzag 4x1,0,100,0,100,0,100\nsim zigzag 2x2,50,50,0,100,0,100")
    assert str(cases[1]) == "sim zigzag 2x2,50,50,0,100,0,100"
    monkeypatch.setattr(
        policies,
        "run_case",
        lambda _, case, repeats: [{"latency_s": 3.0 - (case == cases[0])}] * repeats,
    )
    monkeypatch.setattr(policies, "corrected_profile", lambda workload, profile, case: profile)
    for name in ("SPREAD", "GRID"):
        monkeypatch.setattr(policies, name, cases)
    workload = policies.Workload(prompt=6, output=3, sequences=4)
    result, found = stored(
        policies.measure(workload, 1, load_profile("laptop")), tmp_path / "out.json"
    )
    assert result["ratios"]["chosen_to_best_of_grid"] in (1.0, 1.5)
    assert all(
        row["of_prediction"] == row["median"] / row["predicted_s"]
        for row in found.values()
        if "predicted_s" in row
    )


RECORD = {
    "latency_s": 4.0, "padded_throughput": 3.0, "actual_throughput": 2.7,
    "hardware": {"device": "cpu"},
    "workload": {"prompt_tokens": 10, "prompt_tokens_computed": 7.0, "output_tokens": 2},
}  # fmt: skip
GREEDY = {
    "max_tokens": 1,
    "echo_prompt": False,
    "temperature": 0.0,
    "num_completions": 1,
    "stop_sequences": [],
}


def test_clients(tiny, tmp_path, monkeypatch):
    def helm_run(entries, instances, folder, configs, threads, program):
        texts = ["a", "b" if threads is None else "c"]
        requests = [{"prompt": f"the same beginning {text}", **GREEDY} for text in texts]
        if "pattern" in entries[0]:  # it is scored
            requests[0]["echo_prompt"] = True
        seconds = 12.0 if program == HELM else 10.0
        scores = {"exact_match": 0.5, "logprob": -1.0 if threads is None else 0.0}
        return HelmRun(seconds + 10 * (threads or 0), texts, 1.0, scores, [RECORD], requests, 3.0)

    def serve(file, prompts, requests, slots, log):
        encode = Tokenizer.from_path(checkpoint.tokenizer_path).encode
        assert prompts == [
            encode(request["prompt"], add_special_tokens=False) for request in requests
        ]
        return HelmRun(40.0 / slots, ["a", "x"], ready_s=1.0)

    checkpoint = open_checkpoint(tiny("llama").path)
    for name, function in (
        ("helm_run", helm_run),
        ("_prepare", lambda scratch, checkpoint: None),
        ("open_checkpoint", lambda name: checkpoint),
        ("fetch", lambda name: tmp_path / "model.gguf"),
    ):
        monkeypatch.setattr(clients, name, function)
    for name, function in (("missing", lambda: None), ("serve", serve)):
        monkeypatch.setattr(llama_cpp, name, function)
    clients.main(tmp_path / "out.json", tasks="natural,pattern_match", repeats=2)
    result, found = stored(json.loads((tmp_path / "out.json").read_text()), tmp_path / "again.json")
    assert result["ratios"] == {
        "natural_huggingface": 2.2,
        "natural_huggingface_after_start_up": 19 / 7,
        "natural_llama.cpp": 0.5,
        "natural_llama.cpp_after_start_up": 4 / 7,
        "pattern_match_huggingface": 2.2,
        "pattern_match_huggingface_after_start_up": 19 / 7,
    }
    assert "pattern_match: llama.cpp's server, 1 slots" not in found
    assert "  against huggingface -n 1: 1 of 2 completions equal" in result["notes"]
    assert any("dividing by a temperature" in note for note in result["notes"])
    assert result["tasks"][0]["prompts"]["efficiency"] == pytest.approx(0.9)
    for wrong in ({"tasks": "other"}, {"peers": "other"}):
        with pytest.raises(UsageError, match="'other' is not known; take "):
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
    theirs = {
        "max_prob": 1.0,
        "logprob": -2.0,
        "exact_match": 0.0,
        "num_bytes": 9.0,
        "perplexity": 2.0001,
    }
    assert [
        line["metric"] for line in clients.differences(ours, theirs) if line["why"] is None
    ] == [
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
    found = llama_cpp.serve(
        tmp_path / "model.gguf", [[i, 1] for i in range(40)], asked, 8, tmp_path / "log"
    )
    assert found.texts == [str(i + 1) for i in range(40)] and 0 < found.ready_s < found.seconds
    assert "log-probabilities" in str(
        llama_cpp.unsupported([*asked, {**GREEDY, "echo_prompt": True}])
    )


def test_accuracy(tmp_path, monkeypatch, wheel_model):
    """The harness and HELM leave their files as they do; both have the same texts."""
    passages, changed = ["one passage", "déjà vu"], {}
    monkeypatch.setattr(accuracy.lambada, "read_passages", lambda: passages)
    monkeypatch.setattr(accuracy.wikitext, "read_pages", lambda: PAGES[:1])
    monkeypatch.setattr(
        accuracy, "export_checked", lambda checkpoint, folder: Tokenizer.from_path(wheel_model)
    )
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
            json.loads(line)["text"]
            for line in (written / "lambada_openai_test.jsonl").read_text().splitlines()
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
        lines = [
            json.dumps({"doc_id": i, "filtered_resps": [answer]})
            for i, answer in enumerate(answers)
        ]
        (log.parent / f"samples_{task}_local_2026.jsonl").write_text("\n".join(lines))
        names = {"acc": "exact_match", "perplexity": "target_perplexity"}
        metrics = {
            f"{key},none": figures[names.get(key, key)]
            for key in (*names, "word_perplexity", "byte_perplexity", "bits_per_byte")
        }
        (log.parent / "results_2026.json").write_text(
            json.dumps({"results": {f"{task}_local": metrics}})
        )
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
    assert table("ssd") in written and "| FlexGen (c) opt-175b, block of 1 |" in table("frontier")
    with pytest.raises(UsageError, match="'petals'.*techniques"):
        table("petals")


def test_a_table_is_printed_with_its_errors(capsys):
    tables.main(rows.PAPER / "other_machines.csv")
    printed = capsys.readouterr().out
    assert "FlexGen opt-30b 48x1 0/100 100/0 100/0" in printed and "21.97" in printed
    assert "FlexGen on a6000: median error" in printed and "17 rows took" in printed


def test_tables_agree_with_the_paper_as_far_as_their_notes_say():
    found = {name: function() for name, function in rows.TABLES.items()}
    # each technique helps: in the paper, the model and the measurement
    for row in found["techniques"]:
        assert max(row["paper"], row["predicted"], row["measured"] or 0) < 1, row
    for row in found["frontier"] + found["data_wrangling"]:
        assert row["predicted"] == pytest.approx(row["paper"], rel=0.4), row
    for row in found["subscenarios"]:  # the paper's minutes have more in them
        assert row["paper"] * 0.4 <= row["predicted"] <= row["paper"], row
    shares = [row["predicted"] for row in found["breakdown"] if row["label"].endswith("all parts")]
    assert shares == pytest.approx([1, 1], abs=0.05)
