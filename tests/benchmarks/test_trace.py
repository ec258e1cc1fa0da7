"""The timeline of a pass: whole, cut where it begins and ends, adding up, and drawn."""

from __future__ import annotations

import json

import pytest

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.benchmarks import Options, load
from flexgen_helm.benchmarks.trace import events, last_pass, page, pass_seconds
from flexgen_helm.offload.transfer_stats import Span
from tests.helpers.parity import prompts


def spans_of(*rows) -> list[Span]:
    return [Span(*row) for row in rows]


def test_the_last_pass_is_cut_out_of_a_run():
    spans = spans_of(
        ("main", "stage", "embed", 0.0, 1.0),
        ("main", "stage", "layers.0", 1.0, 1.0),
        ("loader", "load_weights", "q", 1.5, 2.0),  # begins before the last pass
        ("main", "stage", "embed", 2.0, 0.5),
        ("main", "stage", "embed", 2.5, 0.5),  # of another batch
        ("main", "stage", "layers.0", 3.0, 2.0),
        ("main", "wait_weights", "q", 3.1, 0.4),
        ("loader", "load_weights", "k", 4.5, 3.0),  # ends behind it
        ("loader", "load_weights", "v", 6.0, 1.0),
    )
    cut = last_pass(spans)
    assert pass_seconds(cut) == pytest.approx(3.0)
    assert [(span.detail, span.start, span.seconds) for span in cut if span.thread == "loader"] == [
        ("q", 2.0, pytest.approx(1.5)),
        ("k", 4.5, pytest.approx(0.5)),
    ]
    assert sum(span.detail == "embed" for span in cut) == 2


def test_a_real_pass_is_traced_and_nothing_outside_of_it(tiny, tmp_path):
    requests = [GenerationRequest(prompt_token_ids=ids, max_tokens=4, ignore_eos=True) for ids in prompts(3, 9, seed=1)]
    with Engine.from_pretrained(
        tiny("llama").path, policy="3x1,0,0,0,100,0,100", offload_dir=tmp_path, schedule="zigzag"
    ) as engine:
        engine.run(requests)
        with engine.traced() as spans:
            engine.run(requests)
        engine_stages, num_spans = engine.config.num_layers + 2, len(spans)
        time_s = engine.last_run["time_s"]
        engine.run(requests)
    assert len(spans) == num_spans, "recorded after it was over"
    loads = sum(span.seconds for span in spans if span.activity == "load_weights")
    assert loads == pytest.approx(time_s["load_weights"])
    cut = last_pass(spans)
    stages = [span for span in cut if span.activity == "stage"]
    assert [span.detail for span in stages] == ["embed", *(f"layers.{n}" for n in range(engine_stages - 2)), "head"]
    # Stages follow each other, and fill the pass but for what is between them.
    assert all(first.start + first.seconds <= second.start for first, second in zip(stages, stages[1:]))
    assert {span.thread for span in spans} > {stages[0].thread}
    begin = min(span.start for span in cut)
    for event, span in zip([e for e in events(cut) if e["ph"] == "X"], cut, strict=True):
        assert event["ts"] == pytest.approx(1e6 * (span.start - begin)) and event["dur"] == 1e6 * span.seconds


def test_the_command_prints_shares_and_draws_every_span(tmp_path):
    engine = {"policy": "2x1,0,0,0,100,0,100", "offload_dir": str(tmp_path), "device": "cpu"}
    result = load("trace")(Options(engine=engine, quick=True))
    shares = {row["label"]: row["share"] for row in result["rows"]}
    assert shares["the pass"] == 1.0 and all(0 <= share <= 1 + 1e-9 for share in shares.values())
    (computing,) = [label for label in shares if label.endswith(": computing")]
    waiting = computing.replace("computing", "wait weights")
    assert 0.5 < shares[computing] + shares.get(waiting, 0.0) <= 1 + 1e-9
    assert "of weights a pass" in result["notes"][0]
    json.dumps(result)
    drawn = page(result)
    assert drawn.count("<title>") == 1 + sum(event["ph"] == "X" for event in result["traceEvents"])
    assert "layers.11 (stage)" in drawn and "<script" not in drawn


def test_a_folder_that_is_not_there_is_made(tmp_path):
    from typer.testing import CliRunner

    from flexgen_helm.cli.app import app

    folder = tmp_path / "new" / "folder"
    policy = ["--policy", "2x1,0,0,0,100,0,100", "--device", "cpu", "--offload-dir", str(folder)]
    page_file = tmp_path / "trace.html"
    done = CliRunner().invoke(app, ["bench", "trace", "--quick", *policy, "-o", str(page_file)])
    assert done.exit_code == 0, done.output
    assert (
        folder.is_dir() and not list(folder.glob("flexgen_bench.*")) and page_file.read_text().startswith("<!doctype")
    )
