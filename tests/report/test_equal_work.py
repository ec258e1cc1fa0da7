"""Only equal work is compared, and only disjoint instances are pooled; what differs is said."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.errors import UsageError
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.pages import scores_page, suite_page
from flexgen_helm.report.pools import pool_by_scenario
from flexgen_helm.report.run_folder import read_instances, read_states
from flexgen_helm.report.scores import read_finished_runs
from flexgen_helm.report.suite import read_suite
from tests.helpers.suites import accuracies, request_state, write_run

WAYS = ("", "max_train_instances=4", "max_train_instances=3")


def write_ways(suite, of_its_own=0, precisions=("fp16", "4bit")):
    """Three runs of the same 20 questions, each with `of_its_own` questions that the others do not
    have.
    """
    draw = np.random.default_rng(0)
    for precision in precisions:
        for way in WAYS:
            right = draw.random(20) < 0.5
            texts = {f"id{i}": f"{way if i < of_its_own else 'shared'} {i}" for i in range(20)}
            write_run(
                suite,
                f"mcqa:{way}",
                precision,
                {"exact_match": right.mean()},
                accuracies(right),
                texts=texts,
            )


def test_runs_of_the_same_instances_are_not_pooled(tmp_path):
    write_ways(tmp_path)
    runs = read_finished_runs(tmp_path)
    assert [run.num_runs for run in pool_by_scenario(runs)] == [1] * 6
    (model,) = compare_suite(tmp_path)
    note = "The 3 runs of mcqa share instances, so they have no row together"
    assert model.pooled == [] and len(model.comparisons) == 3 and note in model.notes
    report = read_suite(tmp_path)
    for page in (suite_page(report), scores_page(tmp_path, runs)):
        assert "(3 runs)" not in page.to_text() and note in " ".join(page.to_text().split())


def test_disjoint_runs_are_pooled_and_have_the_error_of_all_their_instances(tmp_path):
    """The inverse; the ids of the instances are the same."""
    write_ways(tmp_path, of_its_own=20)
    (base, quantized) = pool_by_scenario(read_finished_runs(tmp_path))
    assert (base.entry, base.num_scored, len(base.digests)) == ("mcqa (3 runs)", 60, 60)
    mean = base.scores["exact_match"]
    assert base.standard_errors["exact_match"] == pytest.approx(math.sqrt(mean * (1 - mean) / 59))
    (model,) = compare_suite(tmp_path)
    assert [one.instances for one in model.pooled] == [60] and not model.notes


def test_runs_without_texts_are_not_pooled(tmp_path):
    write_ways(tmp_path, of_its_own=20)
    next(tmp_path.glob("*/scenario_state.json")).write_text("{")
    assert [run.num_runs for run in pool_by_scenario(read_finished_runs(tmp_path))].count(3) == 1
    (model,) = compare_suite(tmp_path)
    assert model.pooled == []
    assert any("do not say which instances they have" in note for note in model.notes)
    assert any("is paired by ids of instances alone" in note for note in model.notes)


@pytest.mark.parametrize("shared, num_pools", [(0, 1), (1, 1), (2, 0)])
def test_a_question_that_two_data_sets_have_keeps_the_pool(tmp_path, shared, num_pools):
    """One of 300 instances in two subjects is no matter, two are; within a run a repetition is the
    data set's.
    """
    for subject in range(3):
        texts = {
            f"id{i}": f"{subject if subject != 1 or i >= shared else 0} {i}" for i in range(100)
        }
        texts["id99"] = texts["id98"]
        write_run(
            tmp_path,
            f"mmlu:subject={subject}",
            "fp16",
            {"exact_match": 1.0},
            accuracies([1] * 100),
            texts=texts,
        )
    assert [run.num_runs for run in pool_by_scenario(read_finished_runs(tmp_path))].count(
        3
    ) == num_pools


def write_pair(suite, texts=None, **quantized):
    right = [1, 1, 0, 0]
    for precision in ("fp16", "4bit"):
        more = {"texts": texts, **quantized} if precision == "4bit" else {}
        write_run(suite, "mc:mode=a", precision, {"exact_match": 0.5}, accuracies(right), **more)
    return compare_suite(suite)


def test_instances_of_other_texts_are_not_compared(tmp_path):
    (model,) = write_pair(tmp_path, {"id1": "another passage"})
    assert [one.instances for one in model.comparisons] == [3]
    note = (
        "1 of 4 instances of mc:mode=a ask something else in 4bit than in fp16 under the same id "
        "and are left out: the data has changed between the runs"
    )
    assert model.notes[0] == note


def test_a_changed_data_file_leaves_nothing_to_compare(tmp_path):
    with pytest.raises(UsageError, match="nothing to compare"):
        write_pair(tmp_path, {f"id{i}": f"other {i}" for i in range(4)})


@pytest.mark.parametrize(
    "base, quantized, note",
    [
        (
            {"adapter": {"num_train_trials": 1, "model": "tiny"}},
            {"adapter": {"num_train_trials": 3, "model": "tiny-4bit", "max_eval_instances": 7}},
            "mc:mode=a has other settings in 4bit: -t 1 in fp16 and 3 in 4bit",
        ),
        (
            {"origin": "/models/one"},
            {"origin": "/models/other"},
            "flexgen/tiny means /models/one in fp16 and /models/other in 4bit, so the difference "
            "is not that of the precision alone",
        ),
        (
            {"chat_template": {"applied": False}},
            {"chat_template": {"applied": True}},
            "Prompts were sent unchanged in fp16 and through the chat template in 4bit",
        ),
        # a record of an earlier release
        ({}, {"origin": "/models/other", "chat_template": {"applied": True}}, None),
    ],
)
def test_what_differs_besides_is_said(tmp_path, base, quantized, note):
    for precision, more in (("fp16", base), ("4bit", quantized)):
        write_run(
            tmp_path, "mc:mode=a", precision, {"exact_match": 0.5}, accuracies([1, 1, 0, 0]), **more
        )
    (model,) = compare_suite(tmp_path)
    assert model.notes == ([note] if note else [])


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


@given(
    st.lists(
        st.tuples(st.sampled_from(["id0", "id1", "id2"]), _TEXTS, _TEXTS, st.booleans()), max_size=6
    )
)
def test_files_are_read_as_a_parser_reads_them(tmp_path_factory, drawn):
    """Places are found by bytes; whatever texts contain, the same instances and answers are
    found.
    """
    folder = tmp_path_factory.mktemp("run")
    states = [request_state(key, text, answer) for key, text, answer, _ in drawn]
    for state, (*_, is_perturbed) in zip(states, drawn):
        state["instance"] |= {"perturbation": {"name": "typos"}} if is_perturbed else {}
    (folder / "scenario_state.json").write_text(
        json.dumps({"adapter_spec": {}, "request_states": states}, indent=2)
    )
    plain = [state for state in states if "perturbation" not in state["instance"]]
    assert list(read_states(folder)) == plain
    assert set(read_instances(folder)) == {state["instance"]["id"] for state in plain}
    assert list(read_states(folder, {"id1"})) == [
        state for state in plain if state["instance"]["id"] == "id1"
    ]
