"""`flexgen-helm run --until` on the fake engine: a random sample is scored, and the rest is
computed when asked for.
"""

from __future__ import annotations

import json
import math

import pytest

from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.scores import read_scores
from flexgen_helm.report.suite import read_suite
from tests.helpers.helm_runs import ENTRIES, Place, figures

PRECISIONS = ("--precision", "fp16,4bit")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Half of the instances in two precisions, in two blocks of each; the whole is in the suite
    `whole`.
    """
    place = Place(tmp_path_factory.mktemp("until"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_BLOCKS", "2")
        place.said = place.run("suite", "--hours", "1", *PRECISIONS)
        place.first = place.events()
    return place


def records(place):
    return [
        json.loads(file.read_text())
        for file in (place.folder / "benchmark_output/runs/s").glob("*/*_run.json")
    ]


def test_a_sample_is_scored_as_helm_scores_the_whole(place):
    assert [record["sample"] for record in records(place)] == [
        {"seed": 0, "instances": 3, "of": 6}
    ] * 4
    assert place.first["answer"] == 2 * (3 + 3 * 2) and (
        place.first["block"],
        place.first["load"],
    ) == (4, 3)
    place.run("suite", *PRECISIONS, "--suite", "whole")
    assert place.events()["answer"] == 2 * (3 + 3 * 2), "what the sample had is stored"
    sampled, whole = place.results(), place.results("whole")
    chosen = {}
    for name, (state, _) in sampled.items():
        states = {json.dumps(one, sort_keys=True) for one in state["request_states"]}
        assert states < {
            json.dumps(one, sort_keys=True) for one in whole[name][0]["request_states"]
        }
        ids = {one["instance"]["id"] for one in state["request_states"]}
        assert chosen.setdefault(name.partition(":")[0], ids) == ids, (
            "precisions have the same instances"
        )
        folder = place.folder / "benchmark_output" / "runs" / "s" / name
        rows = json.loads((folder / "per_instance_stats.json").read_text())
        values = [
            s["mean"] for row in rows for s in row["stats"] if s["name"]["name"] == "exact_match"
        ]
        assert figures(folder)["exact_match"] == pytest.approx(sum(values) / 3) and len(values) == 3
        assert {row["instance_id"] for row in rows} == ids


def test_tables_and_comparisons_say_that_it_is_a_sample(place):
    note = "Random samples of the instances: 3 of 6 of simple_mcqa, 3 of 6 of simple_mcqa_scored"
    assert note in " ".join(place.said.split())
    folder = place.folder / "benchmark_output" / "runs" / "s"
    (model,) = compare_suite(folder)
    assert any(text.startswith(note) for text in model.notes) and all(
        one.instances == 3 for one in model.comparisons
    )
    assert all(one.equivalence.decision == "not decided" for one in model.comparisons), (
        "there are more instances"
    )
    assert any(text.startswith(note) for text in read_suite(folder).notes)
    runs = [read_scores(path) for path in folder.glob("*model=*")]
    assert {run.data_size for run in runs} == {math.inf}


def test_the_totals_of_a_suite_are_of_all_blocks(place):
    record = json.loads(
        (place.folder / "benchmark_output" / "runs" / "s" / "flexgen_suite.json").read_text()
    )
    assert record["totals"]["workload"]["num_requests"] == 18


def test_skipped_are_completed_runs_and_not_samples(tmp_path, monkeypatch):
    place = Place(tmp_path)
    monkeypatch.setenv("FAKE_BLOCKS", "1")
    place.run("suite", "--until", "00:00", entries=ENTRIES[:1])
    monkeypatch.delenv("FAKE_BLOCKS")
    assert place.events()["answer"] == 2
    place.run("suite", "--skip-completed-runs")
    assert place.events()["answer"] == 6 - 2 + 12 and not any(
        record["sample"] for record in records(place)
    )
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


def decided(place, *flags):
    """The shares that were computed until a suite of 60 instances was decided, and what it
    printed.
    """
    process = place.start(
        "suite", "-r", *ENTRIES, "-m", "60", "--suite", "s", "--until-decided", *PRECISIONS, *flags
    )
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 0, output
    return [record["sample"] and record["sample"]["instances"] for record in records(place)], output


def test_a_suite_ends_when_its_pairs_are_decided(tmp_path):
    """Both precisions of the fake answer alike: 30 instances without a flip show 20 points, at a
    level of 1.25 %.
    """
    place = Place(tmp_path)
    (instances, output) = decided(place, "--margin", "20")
    assert instances == [30] * 4
    assert place.events()["answer"] == 2 * (30 + 60)
    assert "Samples grew until pairs were decided: p-values are divided by 0.25" in " ".join(
        output.split()
    )
    folder = tmp_path / "benchmark_output" / "runs" / "s"
    (model,) = compare_suite(folder, margin=0.2)
    assert {one.equivalence.decision for one in model.comparisons} == {"equivalent"}
    for one in model.comparisons:
        assert (
            one.equivalence.p_value == pytest.approx(4 * 0.8**30, rel=0.03) and one.instances == 30
        )
    assert sum(record["num_reused"] for record in records(place)) == 0
    # A smaller margin needs more instances than there are: all are computed, and the looks are
    # still paid for.
    assert decided(place, "--margin", "1")[0] == [None] * 4
    assert {record["look"] for record in records(place)} == {0.5}
    (model,) = compare_suite(folder, margin=0.01)
    assert {one.equivalence.decision for one in model.comparisons} == {"not decided"}
    # Run again without looks, it is a comparison like all others.
    place.run("suite", *PRECISIONS)
    assert {record["look"] for record in records(place)} == {None}


def test_two_models_are_a_pair_as_well(tmp_path):
    place = Place(tmp_path)
    entries = ["-r", *(f"simple_mcqa:model=flexgen/{name}" for name in ("opt-125m", "opt-350m"))]
    process = place.start(
        "suite", *entries, "-m", "60", "--suite", "s", "--until-decided", "--margin", "20"
    )
    output = process.communicate(timeout=90)[0]
    assert process.returncode == 0, output
    assert [record["sample"]["instances"] for record in records(place)] == [30, 30]


def test_completed_runs_and_no_runs_have_no_blocks(tmp_path):
    place = Place(tmp_path)
    place.run("suite", *PRECISIONS)
    place.events()
    said = place.run(
        "suite", *PRECISIONS, "--until-decided", "--hours", "1", "--skip-completed-runs"
    )
    assert "4 runs in " in said
    place.run("suite", "--hours", "1", "--models-to-run", "flexgen/gpt2")
    assert place.events()["answer"] == 0


def test_one_model_in_one_precision_has_no_pair(tmp_path):
    said = Place(tmp_path).run("suite", "--until-decided", expect=2)
    assert (
        "--until-decided compares precisions or models: give two, for example --precision fp16,4bit"
        in said
    )
    assert "--margin 70 is not between 0 and 50" in Place(tmp_path).run(
        "suite", "--until-decided", "--margin", "70", expect=2
    )
