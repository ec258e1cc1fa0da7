"""What runs and suites cost, over several calls."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from flexgen_helm.plugin.convert import HelmRequest
from flexgen_helm.plugin.usage import HelmRun, local_files, requests_usage, suite_usage
from flexgen_helm.request import (
    Completion,
    Cost,
    GenerationRequest,
    GenerationResult,
    ThinkingFormat,
)
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import Response
from tests.helpers.paths import ROOT


def test_a_repetition_counts_its_tokens_and_costs_nothing():
    cost = Cost(10, 8.0, 4, 11.0, 5.0, 100.0, 1.0, 1.0, 2)
    once, twice = (requests_usage(keys, {"a": cost}) for keys in (["a"], ["a", "a", "failed"]))
    assert (once["latency_s"], twice["latency_s"]) == (2.0, 2.0)
    assert (once["padded_throughput"], once["actual_throughput"]) == (8.0, 7.0)
    assert (once["efficiency"], twice["efficiency"]) == (14 / 16, pytest.approx(28 / 30))
    workload = twice["workload"]
    assert (
        workload["prompt_tokens_computed"],
        workload["num_requests"],
        workload["num_unique"],
    ) == (8.0, 2, 1)


def run_of(folder, name, tokens, block, fingerprint="a"):
    """A run of one request, as it stands after HELM has executed it."""
    model = ModelArguments("m", "opt-125m")
    run = HelmRun(name, folder / name, model, block=block, fingerprint=fingerprint, keys=[name])
    result = GenerationResult(cost=Cost(tokens, tokens, 2, tokens + 1, 3, 100.0, 1.0, 1.0, 1))
    run.responses = {name: Response(result, is_cached=not block)}
    run.folder.mkdir(parents=True, exist_ok=True)
    run.write()
    return run


def block(seconds, peak, predicted):
    times = {"compute": seconds, "wait": 0.5}
    return {"bytes": {"disk_to_cpu": {"weights": 3}}, "time_s": times, "peak_bytes": {"cpu": peak, "gpu": 0},
            "predicted_latency_s": predicted, "schedule": f"s{peak}"}  # fmt: skip


def test_what_is_added_up_over_the_calls_of_a_suite(tmp_path):
    file = tmp_path / "flexgen_suite.json"

    def call(name, tokens, block, failed=(), **changes):
        run = run_of(tmp_path, name, tokens, block, **changes)
        content = suite_usage(tmp_path, [run.name, *failed], failed)
        file.write_text(json.dumps(content))
        return content, content["models"]["m"]

    first, _ = call("one", 10, block(4.0, 7, 3.0), failed=("two",))
    second, found = call("two", 30, block(1.0, 5, 2.0))
    assert (first["failed"], second["failed"], second["runs"]) == (["two"], [], ["one", "two"])
    assert found["bytes"] == {"disk_to_cpu": {"weights": 6}} and found["time_s"] == {
        "compute": 5.0,
        "wait": 1.0,
    }
    assert (found["peak_bytes"]["cpu"], found["predicted_latency_s"]) == (7, 5.0)
    assert found["workload"]["prompt_tokens"] == second["totals"]["workload"]["prompt_tokens"] == 40
    assert (
        found["padded_throughput"] == pytest.approx((40 + 2 + 6) / 4)
        and found["efficiency"] == 44 / 48
    )
    assert call("one", 10, {})[1] == found
    # A new run whose answers are all stored: its work counts, and nothing more was moved.
    content, stored = call("four", 5, {})
    assert (
        stored["workload"] == content["totals"]["workload"] and stored["time_s"] == found["time_s"]
    )
    assert call("three", 5, block(1.0, 5, None))[1]["predicted_latency_s"] is None
    # Of one block, which counts once.
    same = call("five", 5, block(1.0, 5, None))[1]
    assert (same["time_s"]["compute"], same["workload"]["num_requests"]) == (6.0, 5)
    # Other weights of the same name.
    new = block(9.0, 5, 1.0) | {"finished_at": "2026-01-02T03:04:05+00:00"}
    _, other = call("three", 5, new, fingerprint="b")
    assert other["time_s"]["compute"] == 9.0 and other["workload"]["num_requests"] == 1


def test_a_run_of_stored_answers_says_what_was_not_computed(tmp_path):
    """Every key that the docs promise is there; null where this suite computed nothing."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps({"model_type": "opt"}))
    save_file(
        {"a": np.ones((4, 2), np.float16), "b": np.ones(3, np.float32)},
        weights / "model.safetensors",
    )
    page = (
        (ROOT / "docs/reference/files.md")
        .read_text()
        .split("## flexgen_run.json")[1]
        .split("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    promised = {key for row in rows for key in re.findall(r"`(\w+)`", row)} - {"workers"}
    run = HelmRun("one", tmp_path / "one", ModelArguments("m", str(weights)), fingerprint="a")
    run.folder.mkdir()

    def written(block):
        run.block = block
        run.write()
        return json.loads((run.folder / "flexgen_run.json").read_text())

    record = written({})
    assert set(record) >= promised and len(promised) > 30
    assert record["origin"] == str(weights) and record["checkpoint_bytes"] == {"F16": 16, "F32": 12}
    assert record["bytes"] is record["policy"] is record["hardware"] is record["time_s"] is None
    # What an earlier call computed of the same answers stays.
    kept = {"policy": {"gpu_batch_size": 3}, "origin": "org/repo@0"}
    written({"bytes": {}, **kept})
    assert written({}).items() >= kept.items()


def test_where_weights_are_from_is_known_without_the_network(tmp_path):
    assert local_files(ModelArguments("m", str(tmp_path / "absent"))) == {}
    assert local_files(ModelArguments("m", "opt-66b")) == {}


def test_requests_without_room_and_thinking_without_an_end_are_counted(tmp_path):
    def response(text):
        return Response(
            GenerationResult((Completion(text, (text,), (1,), (-1.0,), "length"),)), is_cached=False
        )

    inside, thinks = ThinkingFormat(begins_inside=True), ThinkingFormat()
    cases = {  # key: how its prompt ends, what came
        "done": (inside, "so\n</think>\n\n"), "half": (inside, "so"), "answers": (thinks, "Yes."),
        "begun": (thinks, "<think>so"), "plain": (None, "<think>"), "failed": (inside, None),
    }  # fmt: skip
    requests = [
        HelmRequest(
            GenerationRequest(prompt_token_ids=(1,), thinking=cases[key][0]),
            key,
            (),
            1,
            key == "done",
        )
        for key in [*cases, "half"]
    ]
    responses = {key: response(text) for key, (_, text) in cases.items() if text}
    block = SimpleNamespace(keys=[request.key for request in requests], responses=lambda: responses)
    service = SimpleNamespace(loading_s=lambda *args: 0.0, loaded=lambda model: None)
    run = HelmRun("r", tmp_path, ModelArguments("m", "opt-125m"))
    run.record_block(service, block, requests)
    record = run.as_json()
    assert (record["num_clipped"], record["unfinished_thinking"]) == (1, 3)
