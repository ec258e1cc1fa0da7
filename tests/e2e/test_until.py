"""`flexgen-helm run --until` on the fake engine: a random sample is scored, and the rest is computed when asked for."""

from __future__ import annotations

import json

import pytest

from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.scores import read_scores
from flexgen_helm.report.suite import read_suite
from tests.helpers.helm_runs import ENTRIES, Place, figures

PRECISIONS = ("--precision", "fp16,4bit")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Half of the instances in two precisions, in two blocks of each; the whole is in the suite `whole`."""
    place = Place(tmp_path_factory.mktemp("until"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_BLOCKS", "2")
        place.said = place.run("suite", "--hours", "1", *PRECISIONS)
        place.first = place.events()
    return place


def records(place):
    return [json.loads(file.read_text()) for file in (place.folder / "benchmark_output/runs/s").glob("*/*_run.json")]


def test_a_sample_is_scored_as_helm_scores_the_whole(place):
    assert [record["sample"] for record in records(place)] == [{"seed": 0, "instances": 3, "of": 6}] * 4
    assert place.first["answer"] == 2 * (3 + 3 * 2) and (place.first["block"], place.first["load"]) == (4, 3)
    place.run("suite", *PRECISIONS, "--suite", "whole")
    assert place.events()["answer"] == 2 * (3 + 3 * 2), "what the sample had is stored"
    sampled, whole = place.results(), place.results("whole")
    chosen = {}
    for name, (state, _) in sampled.items():
        states = {json.dumps(one, sort_keys=True) for one in state["request_states"]}
        assert states < {json.dumps(one, sort_keys=True) for one in whole[name][0]["request_states"]}
        ids = {one["instance"]["id"] for one in state["request_states"]}
        assert chosen.setdefault(name.partition(":")[0], ids) == ids, "precisions have the same instances"
        folder = place.folder / "benchmark_output" / "runs" / "s" / name
        rows = json.loads((folder / "per_instance_stats.json").read_text())
        values = [s["mean"] for row in rows for s in row["stats"] if s["name"]["name"] == "exact_match"]
        assert figures(folder)["exact_match"] == pytest.approx(sum(values) / 3) and len(values) == 3
        assert {row["instance_id"] for row in rows} == ids


def test_tables_and_comparisons_say_that_it_is_a_sample(place):
    note = "Random samples of the instances: 3 of 6 of simple_mcqa, 3 of 6 of simple_mcqa_scored"
    assert note in " ".join(place.said.split())
    folder = place.folder / "benchmark_output" / "runs" / "s"
    (model,) = compare_suite(folder)
    assert any(text.startswith(note) for text in model.notes) and all(one.instances == 3 for one in model.comparisons)
    assert all(one.equivalence.decision == "not decided" for one in model.comparisons), "there are more instances"
    assert any(text.startswith(note) for text in read_suite(folder).notes)
    runs = [read_scores(path) for path in folder.glob("*model=*")]
    assert not any(run.has_all_instances for run in runs)


def test_the_totals_of_a_suite_are_of_all_blocks(place):
    record = json.loads((place.folder / "benchmark_output" / "runs" / "s" / "flexgen_suite.json").read_text())
    assert record["totals"]["workload"]["num_requests"] == 18
    assert not (place.folder / "benchmark_output" / "runs" / "s" / "flexgen_blocks.json").exists()


def test_skipped_are_completed_runs_and_not_samples(tmp_path, monkeypatch):
    place = Place(tmp_path)
    monkeypatch.setenv("FAKE_BLOCKS", "1")
    place.run("suite", "--until", "00:00", entries=ENTRIES[:1])
    monkeypatch.delenv("FAKE_BLOCKS")
    assert place.events()["answer"] == 2
    place.run("suite", "--skip-completed-runs")
    assert place.events()["answer"] == 6 - 2 + 12 and not any(record["sample"] for record in records(place))
    place.run("suite", "--skip-completed-runs")
    assert place.events()["answer"] == 0
    sixth = place.results()
    place.run("suite", "--hours", "9")  # there is time for all
    assert place.results() == sixth


def test_what_cannot_be_is_said_before_anything_is_read(tmp_path):
    place = Place(tmp_path)
    for flags, said in (
        (["--until", "7"], "--until '7' is no time of day; write for example --until 07:00"),
        (["--hours", "-1"], "--hours -1 is no duration"),
        (["--hours", "1", "--until", "7:00"], "both say when the suite ends"),
        (["--hours", "1", "--disable-cache"], "leave --disable-cache out"),
        (["--hours", "1", "--server-url", "http://a"], "leave --server-url out"),
    ):
        assert said in place.run("suite", *flags, expect=2)
    assert "the time was too short for one instance of each run entry" in place.run(
        "suite", "--hours", "1e-9", expect=2
    )
    assert place.events()["answer"] == 0
