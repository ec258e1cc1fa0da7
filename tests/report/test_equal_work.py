"""Only equal work is compared, and only disjoint instances are pooled; what differs is said."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.errors import UsageError
from flexgen_helm.report.answers import design_effect, read_instances, read_states
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.pages import scores_page, suite_page
from flexgen_helm.report.scores import by_scenario, read_finished_runs
from flexgen_helm.report.suite import read_suite
from tests.helpers.suites import accuracies, request_state, write_run

WAYS = ("", "max_train_instances=4", "max_train_instances=3")


def write_ways(suite, of_its_own=0, precisions=("fp16", "4bit")):
    """Three runs of the same 20 questions, each with `of_its_own` questions that the others do not have."""
    draw = np.random.default_rng(0)
    for precision in precisions:
        for way in WAYS:
            right = draw.random(20) < 0.5
            texts = {f"id{i}": f"{way if i < of_its_own else 'shared'} {i}" for i in range(20)}
            write_run(suite, f"mcqa:{way}", precision, {"exact_match": right.mean()}, accuracies(right), texts=texts)


def test_runs_of_the_same_instances_are_not_pooled(tmp_path):
    write_ways(tmp_path)
    runs = read_finished_runs(tmp_path)
    assert [run.num_runs for run in by_scenario(runs)] == [1] * 6
    (model,) = compare_suite(tmp_path)
    note = "The 3 runs of mcqa share instances, so they have no row together"
    assert model.pooled == [] and len(model.comparisons) == 3 and note in model.notes
    report = read_suite(tmp_path)
    for page in (suite_page(report), scores_page(tmp_path, runs)):
        assert "(3 runs)" not in page.to_text() and note in " ".join(page.to_text().split())


def test_disjoint_runs_are_pooled_and_have_the_error_of_all_their_instances(tmp_path):
    """The inverse; the ids of the instances are the same."""
    write_ways(tmp_path, of_its_own=20)
    (base, other) = by_scenario(read_finished_runs(tmp_path))
    assert (base.entry, base.num_scored, len(base.digests)) == ("mcqa (3 runs)", 60, 60)
    mean = base.scores["exact_match"]
    assert base.standard_errors["exact_match"] == pytest.approx(math.sqrt(mean * (1 - mean) / 59))
    (model,) = compare_suite(tmp_path)
    assert [each.instances for each in model.pooled] == [60] and not model.notes


def test_runs_without_texts_are_not_pooled(tmp_path):
    write_ways(tmp_path, of_its_own=20)
    next(tmp_path.glob("*/scenario_state.json")).write_text("{")
    assert [run.num_runs for run in by_scenario(read_finished_runs(tmp_path))].count(3) == 1
    (model,) = compare_suite(tmp_path)
    assert model.pooled == []
    assert any("do not say which instances they have" in note for note in model.notes)
    assert any("is paired by ids of instances alone" in note for note in model.notes)


def test_a_question_that_two_data_sets_have_keeps_the_pool(tmp_path):
    """57 subjects of 100 questions; five of them are in two subjects."""
    runs = [{f"id{i}": f"{subject} {i}" for i in range(100)} for subject in range(57)]
    assert design_effect(runs) == 1.0
    for i in range(5):
        runs[i + 1]["id0"] = f"0 {i}"
    assert 1.0 < design_effect(runs) < 1.01
    assert design_effect([{"id0": "a", "id1": "a"}]) == 1.0  # within a run a repetition is the data set's
    assert design_effect([runs[0]] * 3) == 3.0


@pytest.mark.parametrize("runs, shared", [(3, 20), (4, 7), (2, 0)])
def test_the_design_effect_is_that_of_a_simulation(runs, shared):
    """Shared instances have equal values in every run; the variance of the pooled mean, against disjoint runs."""
    draw = np.random.default_rng(1)
    digests = [{i: f"{0 if i < shared else run} {i}" for i in range(20)} for run in range(runs)]
    own = draw.normal(size=(40_000, runs, 20))
    own[:, :, :shared] = own[:, :1, :shared]
    assert own.mean((1, 2)).var() * runs * 20 == pytest.approx(design_effect(digests), rel=0.04)


def test_instances_are_told_by_their_texts(tmp_path):
    """As HELM writes them: perturbed ones share the id; quotes and braces in texts are no structure."""
    states = [
        request_state("id0", 'a "instance": { "request": { b \\'),
        request_state("id0", "perturbed"),
        request_state("id1", "Straße ☃"),
        request_state("id1", "Straße ☃"),
    ]
    states[1]["instance"]["perturbation"] = {"name": "typos"}
    content = json.dumps({"adapter_spec": {}, "request_states": states}, indent=2)
    (tmp_path / "scenario_state.json").write_text(content)
    first = read_instances(tmp_path)
    assert set(first) == {"id0", "id1"} and len(set(first.values())) == 2
    states[0]["instance"]["references"][0]["output"]["text"] = "another"
    (tmp_path / "scenario_state.json").write_text(json.dumps({"request_states": states}, indent=2))
    second = read_instances(tmp_path)
    assert second["id0"] != first["id0"] and second["id1"] == first["id1"]
    assert read_instances(tmp_path / "absent") == {}
    (tmp_path / "scenario_state.json").write_text("")
    assert read_instances(tmp_path) == {}


def write_pair(suite, texts=None, **other):
    right = [1, 1, 0, 0]
    for precision in ("fp16", "4bit"):
        more = {"texts": texts, **other} if precision == "4bit" else {}
        write_run(suite, "mc:mode=a", precision, {"exact_match": 0.5}, accuracies(right), **more)
    return compare_suite(suite)


def test_instances_of_other_texts_are_not_compared(tmp_path):
    (model,) = write_pair(tmp_path, {"id1": "another passage"})
    assert [each.instances for each in model.comparisons] == [3]
    note = (
        "1 of 4 instances of mc:mode=a ask something else in 4bit than in fp16 under the same id and are left out: "
        "the data has changed between the runs"
    )
    assert model.notes[0] == note


def test_a_changed_data_file_leaves_nothing_to_compare(tmp_path):
    with pytest.raises(UsageError, match="nothing to compare"):
        write_pair(tmp_path, {f"id{i}": f"other {i}" for i in range(4)})


def test_other_settings_are_said(tmp_path):
    adapter = {"num_train_trials": 3, "model": "tiny-4bit", "max_eval_instances": 7}
    (model,) = write_pair(tmp_path, adapter=adapter)
    assert model.notes == ["mc:mode=a has other settings in 4bit: -t 1 in fp16 and 3 in 4bit"]


def test_another_model_of_the_same_name_is_said(tmp_path):
    (model,) = write_pair(tmp_path, origin="/models/other")
    assert model.notes == []  # a record of an earlier release
    record = tmp_path / "mc:mode=a,model=flexgen_tiny" / "flexgen_run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "origin": "/models/one"}))
    (model,) = compare_suite(tmp_path)
    assert model.notes == [
        "flexgen/tiny means /models/one in fp16 and /models/other in 4bit, so the difference is not that of the "
        "precision alone"
    ]


def test_other_prompts_are_said(tmp_path):
    (model,) = write_pair(tmp_path, chat_template={"applied": True})
    assert model.notes == []
    record = tmp_path / "mc:mode=a,model=flexgen_tiny" / "flexgen_run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "chat_template": {"applied": False}}))
    (model,) = compare_suite(tmp_path)
    assert "were sent unchanged in fp16 and through the chat template in 4bit" in model.notes[0]


def test_a_run_that_was_killed_over_an_older_one_is_unfinished_everywhere(tmp_path):
    """As a SIGKILL leaves it after the first file: `stats.json` is that of the earlier call."""
    write_pair(tmp_path)
    killed = tmp_path / "mc:mode=a,model=flexgen_tiny-4bit"
    (killed / "per_instance_stats.json").unlink()
    report = read_suite(tmp_path)
    assert [run.precision for run in report.runs] == ["fp16"]
    assert "1 run did not finish (mc:mode=a of flexgen/tiny in 4bit)" in report.notes[0]
    with pytest.raises(UsageError, match="nothing to compare"):
        compare_suite(tmp_path)


_TEXTS = st.text(st.sampled_from('"instance": {}request\\\n[],é☃'), max_size=30)


@given(st.lists(st.tuples(st.sampled_from(["id0", "id1", "id2"]), _TEXTS, _TEXTS, st.booleans()), max_size=6))
def test_files_are_read_as_a_parser_reads_them(tmp_path_factory, drawn):
    """Places are found by bytes; whatever texts contain, the same instances and answers are found."""
    folder = tmp_path_factory.mktemp("run")
    states = [request_state(key, text, answer) for key, text, answer, _ in drawn]
    for state, (*_, is_perturbed) in zip(states, drawn):
        state["instance"] |= {"perturbation": {"name": "typos"}} if is_perturbed else {}
    (folder / "scenario_state.json").write_text(json.dumps({"adapter_spec": {}, "request_states": states}, indent=2))
    plain = [state for state in states if "perturbation" not in state["instance"]]
    assert list(read_states(folder)) == plain
    assert set(read_instances(folder)) == {state["instance"]["id"] for state in plain}
    assert list(read_states(folder, {"id1"})) == [state for state in plain if state["instance"]["id"] == "id1"]
