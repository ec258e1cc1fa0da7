"""`report`: a suite's folder as text, JSON and a page."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.comparison_tables import comparison_to_json
from flexgen_helm.report.notes import reused_notes
from flexgen_helm.report.pages import (
    TEXT_WIDTH,
    Page,
    Section,
    comparison_page,
    scores_page,
    suite_page,
)
from flexgen_helm.report.scores import read_finished_runs, read_scores
from flexgen_helm.report.suite import read_suite, suite_to_json
from flexgen_helm.report.tables import Table
from flexgen_helm.request import Cost
from tests.helpers.suites import accuracies, add_record, write_mmlu, write_run, write_totals


@pytest.fixture
def suite(tmp_path):
    """Two entries of one model in two precisions, as `flexgen-helm run` leaves them."""
    folder = tmp_path / "runs" / "mine"
    for precision, right, seconds in (("fp16", [1, 1, 0], 4.0), ("4bit", [1, 0, 0], 1.0)):
        for name, tokens in (("mc:mode=a", 500), ("boolq:x=1", 250)):
            path = write_run(
                folder, name, precision, {"exact_match": sum(right) / 3}, accuracies(right)
            )
            cost = Cost(tokens, tokens / 2, 2, padded_prompt_tokens=tokens, padded_output_tokens=2)
            longer = Cost(
                2 * tokens, tokens, 2, padded_prompt_tokens=2 * tokens, padded_output_tokens=2
            )
            add_record(path, [cost] * 3 + [longer], seconds)
    write_totals(folder)
    return folder


def rows_of(table):
    """Rows of text, without the blanks of repeated keys."""
    return table.cells.to_numpy().tolist()


def test_scores_have_errors_counts_and_the_names_that_were_typed(suite):
    page = suite_page(read_suite(suite))
    scores = page.sections[0]
    assert scores.title == "Scores of flexgen/tiny"
    # p = 2/3 and 1/3 of three: sqrt(p (1 - p) / (n - 1)) = 1/3.
    assert rows_of(scores.tables[0]) == [
        ["boolq:x=1", "exact_match", "fp16", "0.667 ± 0.333", "3", "4"],
        ["boolq:x=1", "exact_match", "4bit", "0.333 ± 0.333", "3", "4"],
        ["mc:mode=a", "exact_match", "fp16", "0.667 ± 0.333", "3", "4"],
        ["mc:mode=a", "exact_match", "4bit", "0.333 ± 0.333", "3", "4"],
    ]
    assert "HELM scores one split of the instances only" in page.to_text()
    assert "model=flexgen_" not in page.to_text()


def test_throughput_and_usage(suite):
    report = read_suite(suite)
    _, throughputs, usage = suite_page(report).sections
    # 5 x 500 prompt tokens and 4 x 2 output tokens in 4 s, half of the prompts computed.
    assert rows_of(throughputs.tables[0])[2] == [
        "mc:mode=a",
        "fp16",
        "4",
        "2,500",
        "1,250",
        "8",
        "4.0 s",
        "627",
    ]
    rows = {row[0]: row[1:] for row in rows_of(usage.tables[0])}
    assert (
        rows["time, measured"] == ["16.0 s", "16.0 s"]
        and rows["disk to memory: weights"] == ["3 GiB"] * 2
    )
    assert rows["peak in memory"] == ["2 GiB"] * 2 and rows["limit in memory"] == ["4 GiB"] * 2
    assert "memory to GPU: weights" not in rows and "limit in GPU memory" not in rows
    json.dumps(suite_to_json(report), allow_nan=False)


def test_what_was_run_is_at_the_top(suite):
    facts = suite_page(read_suite(suite)).facts
    assert facts["model"] == "flexgen/tiny" and facts["precisions"] == "fp16, 4bit"
    assert (
        facts["machine"].startswith("cpu, A processor")
        and "2 threads, 16 GiB of memory" in facts["machine"]
    )
    assert (
        facts["limits"] == "4 GiB in memory, 50 GiB on disk" and "torch 2.10.0" in facts["versions"]
    )
    assert facts["finished"] == "2026-01-02 03:04 UTC"


def change_record(run, **changes):
    path = run / "flexgen_run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_model_that_is_not_proved_and_other_releases_are_named(suite):
    assert "NOT VERIFIED" not in suite_page(read_suite(suite)).to_text()
    first, *rest = (path.parent for path in suite.glob("*/flexgen_run.json"))
    versions = json.loads((first / "flexgen_run.json").read_text())["versions"]
    change_record(
        first, proved=False, versions={**versions, "transformers": "5.20.0", "numpy": "1.0"}
    )
    for run in rest:
        change_record(run, proved=True, versions={**versions, "transformers": "5.24.0"})
    report = read_suite(suite)
    unverified = "NOT VERIFIED: flexgen/tiny ran with --unverified"
    for notes in (
        report.notes,
        compare_suite(suite)[0].notes,
        scores_page(suite, report.runs).sections[0].notes,
    ):
        assert any(note.startswith(unverified) for note in notes)
        assert "Runs had different releases of transformers: 5.20.0, 5.24.0" in notes
        assert not any("numpy" in note for note in notes)
    assert unverified in suite_page(report).to_html(suite)


def test_runs_whose_answers_do_not_follow_the_batch_have_no_floor_of_noise(suite):
    first, *rest = (path.parent for path in suite.glob("*/flexgen_run.json"))
    for run in rest:
        change_record(run, batch_invariant=True)
    assert not any("floor of noise" in note for note in compare_suite(suite)[0].notes)
    change_record(first, batch_invariant=True)
    assert any("the floor of noise is zero" in note for note in compare_suite(suite)[0].notes)


def test_pages_link_to_each_other_and_to_the_runs(suite):
    """Links of files: each leads somewhere, and to another page only if it is there."""
    page = suite_page(read_suite(suite))
    assert "flexgen_compare.html" not in page.to_html(suite)
    (suite / "flexgen_compare.html").touch()
    targets = re.findall('href="([^"]+)"', page.to_html(suite))
    assert {unquote(target).strip("./") for target in targets} == {
        "flexgen_compare.html", *(path.name for path in suite.iterdir() if path.is_dir())
    }  # fmt: skip
    assert all((suite / unquote(target)).exists() for target in targets)


def test_many_runs_are_pooled_and_fit(tmp_path):
    """57 subjects in two precisions: the pool is over all instances, and the long table is shown on
    demand.
    """
    write_mmlu(tmp_path)
    runs = read_finished_runs(tmp_path)
    page = suite_page(read_suite(tmp_path))
    pooled, every = page.sections[0].tables
    right = np.concatenate(
        [run.instances["exact_match"] for run in runs if run.precision == "fp16"]
    )
    error = scipy.stats.sem(right)
    assert rows_of(pooled)[0] == [
        "mmlu (57 runs)", "exact_match", "fp16", f"{right.mean():.3f} ± {error:.3f}", "684", "684"
    ]  # fmt: skip
    assert len(every.cells) == 114 and every.collapsed and not pooled.collapsed
    text = page.to_text()
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    assert page.to_html().count("<details>") == 2


def test_a_run_of_another_client_is_among_the_scores_of_run(suite):
    """`flexgen-helm run` also runs other models of HELM; the report leaves them out."""
    folder = next(suite.glob("mc*"))
    (folder / "flexgen_run.json").unlink()
    folder = folder.rename(suite / "mc:mode=a,model=openai_gpt2")
    table = scores_page(suite, [read_scores(folder)]).sections[0]
    assert table.title == "Scores of openai_gpt2" and rows_of(table.tables[0])[0][:3] == [
        "mc:mode=a",
        "exact_match",
        "",
    ]
    assert len(read_suite(suite).runs) == 3


def test_scores_that_are_not_finite_are_shown(tmp_path):
    for precision, logprob in (("fp16", -3.0), ("4bit", -math.inf)):
        instances = {f"id{i}": {"logprob": logprob} for i in range(3)}
        write_run(
            tmp_path, "lambada", precision, {"target_perplexity": math.exp(-logprob)}, instances
        )
        write_run(tmp_path, "nan", precision, {"exact_match": math.nan}, accuracies([1, 0]))
    report = read_suite(tmp_path)
    page = suite_page(report)
    assert [row[-3] for row in rows_of(page.sections[0].tables[0])] == [
        "20.09 ± 0.00",
        "inf",
        "nan",
        "nan",
    ]
    compared = compare_suite(tmp_path)
    shown = comparison_page(compared, "s")
    assert "none (not finite)" in shown.to_text() and "none (not finite)" in shown.to_html()
    json.dumps(suite_to_json(report), allow_nan=False)
    json.dumps(comparison_to_json(compared, "s"), allow_nan=False)


def test_throughput_of_an_earlier_run_is_noted(suite):
    """In the report and below the scores of `run`; not if everything was computed."""
    folders = sorted(path for path in suite.iterdir() if path.is_dir())
    assert " *" not in scores_page(suite, [read_scores(folder) for folder in folders]).to_text()
    record = json.loads((folders[1] / "flexgen_run.json").read_text())
    record = {**record, "num_reused": 3, "workload": {**record["workload"], "num_unique": 3}}
    (folders[1] / "flexgen_run.json").write_text(json.dumps(record))
    runs = [read_scores(folder) for folder in folders]
    note = f"{reused_notes(runs)[0]}."
    assert note.startswith("3 of 15 answers come from earlier runs; tokens/s")
    assert note.endswith("(--disable-cache measures again).")
    text = " ".join(scores_page(suite, runs).to_text().split())
    assert note in text and "fp16 471, 4bit 1,883 *." in text
    report = read_suite(suite)
    assert report.notes == [note[:-1]] == suite_to_json(report)["notes"]
    page = suite_page(report)
    assert [row[-1].endswith(" *") for row in rows_of(page.sections[1].tables[0])] == [
        False,
        True,
        False,
        False,
    ]
    assert " ".join(page.to_text().split()).count(note) == page.to_html().count(note) == 1


def test_without_the_suites_own_file_runs_still_count(suite):
    (suite / "flexgen_suite.json").unlink()
    report = read_suite(suite)
    assert len(report.runs) == 4 and not report.notes
    assert report.models["tiny"]["time_s"]["compute"] == 12.0, "that of the block, once"
    for path in suite.glob("*/flexgen_run.json"):
        change_record(path.parent, bytes=None)  # as of runs whose answers were all stored
    assert not read_suite(suite).models


GOES_ON = "run the command that made the suite again, and it continues with what is missing"


def test_runs_that_are_missing_are_named(suite):
    """Failed runs, those without all files, and those that were never begun; not the runs of other
    models.
    """
    first, second, *_ = sorted(path.name for path in suite.iterdir() if path.is_dir())
    (suite / first / "stats.json").unlink()
    (suite / second / "flexgen_run.json").unlink()
    (suite / "mmlu:model=openai_gpt2").mkdir()
    (suite / "eval_cache").mkdir()
    (suite / "mmlu:model=flexgen_tiny").mkdir()
    failing(suite, "mmlu:model=flexgen_tiny", "imdb:model=flexgen_tiny")
    report = read_suite(suite)
    assert report.notes[:2] == [
        f"2 runs failed (mmlu of flexgen/tiny in fp16, imdb of flexgen/tiny in fp16); {GOES_ON}",
        (
            "2 runs did not finish (boolq:x=1 of flexgen/tiny in fp16, boolq:x=1 of flexgen/tiny "
            f"in 4bit); {GOES_ON}"
        ),
    ]
    assert not any("openai" in note or "eval_cache" in note for note in report.notes)
    page = suite_page(report)
    assert report.notes[0] in " ".join(page.to_text().split()) and report.notes[1] in page.to_html()


def test_a_run_that_failed_over_its_older_scores_is_named_unless_it_was_repeated(suite):
    old, new = sorted(path.name for path in suite.iterdir() if path.is_dir())[:2]
    failing(suite, old, new)
    (suite / new / "stats.json").write_text((suite / new / "stats.json").read_text())
    os.utime(suite / old / "stats.json", (1e9, 1e9))
    os.utime(suite / "flexgen_suite.json", (1.5e9, 1.5e9))
    (note,) = read_suite(suite).notes
    assert note.startswith(
        "1 run failed in the last call, so the scores are older (boolq:x=1 of flexgen/tiny in fp16)"
    )


def failing(suite, *names):
    """Write the suite's file of a call in which these runs failed."""
    content = json.loads((suite / "flexgen_suite.json").read_text())
    (suite / "flexgen_suite.json").write_text(json.dumps({**content, "failed": list(names)}))


def test_names_of_runs_break_after_commas_and_are_escaped():
    table = Table(pd.DataFrame({"run": ["mmlu:a=<b>,model=m"], "tokens": ["1,234"]}))
    made = Page("t", "s", [Section("x", [table])], {}).to_html()
    assert "mmlu:<wbr>a=&lt;b&gt;,<wbr>model=m</span></th>" in made
    assert '<td class="number" data-label="tokens"><span>1,234</span></td>' in made


def chat_record(applied=True, **settings):
    return {
        "chat_template": {
            "applied": applied,
            "reason": "auto",
            "kwargs": {},
            "system_prompt": None,
            **settings,
        }
    }


def test_how_prompts_were_sent_and_which_answers_had_no_room(tmp_path):
    folder = tmp_path / "runs" / "chats"
    cost = [Cost(10, 10, 2)] * 4

    def write(model, **more):
        path = write_run(
            folder, "mc:mode=a", "fp16", {"exact_match": 0.5}, accuracies([1, 0, 1, 0]), model
        )
        add_record(path, cost, 1.0, **more)

    write("one", **chat_record(), unfinished_thinking=3, num_clipped=0)
    write_totals(folder)
    page = suite_page(read_suite(folder))
    assert page.facts["prompts"] == "through the chat template"
    assert [note for note in page.notes if "Models differ" in note] == []
    scored = write_run(
        folder, "scored", "fp16", {"exact_match": 0.5}, accuracies([1, 0, 1, 0]), "one"
    )
    add_record(scored, cost, 1.0, chat_template=None)  # as a run that asks for no text is recorded
    write_totals(folder)
    assert (
        suite_page(read_suite(folder)).facts["prompts"]
        == "through the chat template; scored ones unchanged"
    )
    shutil.rmtree(scored)
    assert any(
        note.startswith("3 of 4 answers of mc:mode=a of flexgen/one ended while still thinking")
        for note in page.notes
    )
    settings = {"kwargs": {"enable_thinking": False}, "system_prompt": "s", "thinking_budget": 1000}
    write("two", **chat_record(**settings))
    write("three", **chat_record(False), num_clipped=2)
    write_totals(folder)
    notes = suite_page(read_suite(folder)).notes
    assert (
        "Models differ in how prompts were sent: flexgen/one through the chat template; "
        "flexgen/three unchanged; flexgen/two through the chat template, with "
        "enable_thinking=false, a system prompt, a thinking budget of 1,000"
    ) in notes
    assert any(
        "2 of 4 answers of mc:mode=a of flexgen/three had less room" in note for note in notes
    )


def test_ties_of_scored_choices_are_counted(tmp_path):
    """A head of zeros finds all references equally probable: half of two is no accuracy."""
    method = {"method": "multiple_choice_separate_original"}
    write_run(
        tmp_path,
        "mcqa",
        "fp16",
        {"exact_match": 0.6},
        accuracies([0.5, 0.5, 1, 1, 0]),
        adapter=method,
    )
    write_run(tmp_path, "joint", "fp16", {"exact_match": 0.5}, accuracies([0.5, 0.5]))
    page = suite_page(read_suite(tmp_path)).to_text()
    assert (
        "2 of 5 choices of mcqa of flexgen/tiny are ties" in " ".join(page.split())
        and "of joint" not in page
    )
