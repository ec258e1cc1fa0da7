"""Flips: which answers changed, read from the files that HELM writes, and the page and file that
list them.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from flexgen_helm import cli
from flexgen_helm.report.comparison import compare_runs, compare_suite
from flexgen_helm.report.flips import flip_groups, read_answers
from flexgen_helm.report.pages import comparison_page
from flexgen_helm.report.scores import read_finished_runs
from tests.helpers.suites import accuracies, request_state, write_run

HOSTILE = '<script>alert("1")</script> & </pre></details> {{ 7 * 7 }} \u202e'


def write_answers(suite, name, sides, model="tiny", **more):
    """sides: precision -> a score, an answer and its log-probability for each instance."""
    for precision, answers in sides.items():
        states = [
            request_state(f"id{i}", f"question {i}", text, logprob)
            for i, (_, text, logprob) in enumerate(answers)
        ]
        scores = [score for score, *_ in answers]
        mean = {"exact_match": float(np.mean(scores))}
        write_run(suite, name, precision, mean, accuracies(scores), model, states=states, **more)


def groups(suite, **more):
    return list(flip_groups(compare_suite(suite), **more))


def test_flips_have_both_answers_by_direction(tmp_path):
    write_answers(
        tmp_path,
        "boolq",
        {
            "fp16": [
                (1, "yes", -0.1),
                (0, "no", -0.2),
                (0, "a", -0.3),
                (1, "same", -0.4),
                (1, "yes", -0.5),
            ],
            "4bit": [
                (0, "no", -1.1),
                (1, "yes", -1.2),
                (0, "b", -1.3),
                (1, "same", -1.4),
                (0, "", -1.5),
            ],
        },
    )
    lost, won, changed = groups(tmp_path)
    assert [(group.direction, group.count, len(group.flips)) for group in (lost, won, changed)] == [
        ("lost", 2, 2), ("won", 1, 1), ("changed", 1, 1)
    ]  # fmt: skip
    first = lost.flips[0]
    assert (first.instance, first.run, first.precision, first.metric) == (
        "id0",
        "boolq",
        "4bit",
        "exact_match",
    )
    assert (first.baseline_answer, first.answer, first.baseline_logprob, first.logprob) == (
        "yes",
        "no",
        -0.1,
        -1.1,
    )
    assert (first.baseline_score, first.score, first.prompt) == (1.0, 0.0, "Question: question 0")
    assert list(first.references) == ["right id0"]
    assert (won.flips[0].instance, changed.flips[0].instance, lost.flips[1].answer) == (
        "id1",
        "id2",
        "",
    )
    (model,) = compare_suite(tmp_path)
    flips = model.comparisons[0].flips
    assert (flips.lost, flips.won, flips.changed) == (2, 1, 1)


def test_flips_of_every_metric_are_listed_once(tmp_path):
    """A flip of F1 alone is there, with its metric; one of both metrics is that of the first."""
    sides = {
        "fp16": [(1, 1.0), (1, 1.0), (0, 0.5), (1, 1.0)],
        "4bit": [(0, 0.0), (1, 0.8), (0, 0.6), (1, 1.0)],
    }
    for precision, values in sides.items():
        instances = {f"id{i}": {"exact_match": x, "f1_score": f} for i, (x, f) in enumerate(values)}
        states = [request_state(key, key, precision) for key in instances]
        scores = {
            name: np.mean([one[name] for one in instances.values()])
            for name in ("exact_match", "f1_score")
        }
        write_run(tmp_path, "qa", precision, scores, instances, states=states)
    found = {
        group.direction: [(f.instance, f.metric, f.score) for f in group.flips]
        for group in groups(tmp_path)
    }
    assert found["lost"] == [("id0", "f1_score", 0.0), ("id1", "f1_score", 0.8)]
    assert found["won"] == [("id2", "f1_score", 0.6)] and found["changed"] == [
        ("id3", "f1_score", 1.0)
    ]
    assert "f1_score 0.8)" in comparison_page(compare_suite(tmp_path), "s").to_html()


def pieces(spelling, text):
    """A text's tokens; of characters alone, "é" is two of bytes, as HELM spells them."""
    return re.findall(
        spelling,
        text if spelling.startswith(r"\w") else text.replace("é", "bytes:\\xc3bytes:\\xa9"),
    )


def choice_states(count, spelling):
    """Two references per instance, each scored with the tokens of the question before it."""
    states = []
    for i in range(count):
        for index, text in enumerate((f"café id{i}", "wrong")):
            tokens = [{"text": t, "logprob": -9.0} for t in ("Question: ", f"{i} ")]
            tokens += [{"text": part, "logprob": -0.5 - index} for part in pieces(spelling, text)]
            states.append(
                request_state(
                    f"id{i}",
                    f"question {i}",
                    reference_index=index,
                    request_mode="original",
                    request={"prompt": f"Question: {i} {text}", "echo_prompt": True},
                    result={"completions": [{"text": "", "logprob": -99.0, "tokens": tokens}]},
                )  # fmt: skip
            )
            states[-1]["instance"]["references"][0]["output"]["text"] = f"café id{i}"
        states.append({**states[-1], "request_mode": "calibration"})
        states.append({**states[-2], "train_trial_index": 1})
    return states


@pytest.mark.parametrize("spelling", [r"\w+ ?", r"bytes:\\x..|."])
def test_of_scored_answers_the_chosen_one_is_shown_with_its_own_log_probability(tmp_path, spelling):
    sides = {"fp16": [1, 1, 0], "4bit": [1, 0, 0]}
    for precision, right in sides.items():
        instances = {
            f"id{i}": {"exact_match": float(x), "predicted_index": 1.0 - x}
            for i, x in enumerate(right)
        }
        write_run(
            tmp_path, "mcqa", precision, {"exact_match": float(np.mean(right))}, instances,
            states=choice_states(len(right), spelling),
            adapter={"method": "multiple_choice_separate_original"},
        )  # fmt: skip
    (lost,) = groups(tmp_path)
    (flip,) = lost.flips
    assert (flip.instance, flip.baseline_answer, flip.answer) == ("id1", "café id1", "wrong")
    assert flip.prompt == "Question: 1 " and list(flip.references) == ["café id1"]
    counts = [len(pieces(spelling, text)) for text in ("café id1", "wrong")]
    assert (flip.baseline_logprob, flip.logprob) == pytest.approx(
        (-0.5 * counts[0], -1.5 * counts[1])
    )


def test_letters_are_shown_with_what_they_stand_for(tmp_path):
    mapping = {"A": "wrong", "B": "right id0"}
    for precision, letter in (("fp16", " B"), ("4bit", " A")):
        states = [request_state("id0", "q", letter, output_mapping=mapping)]
        states.append(request_state("id1", "q", "C", output_mapping=mapping))
        right = [letter == " B", 0]
        write_run(
            tmp_path,
            "mmlu",
            precision,
            {"exact_match": np.mean(right)},
            accuracies(right),
            states=states,
        )
    (lost,) = groups(tmp_path)
    assert (lost.flips[0].baseline_answer, lost.flips[0].answer) == (" B: right id0", " A: wrong")
    assert list(lost.flips[0].references) == ["B: right id0"]
    run = next(run for run in read_finished_runs(tmp_path) if run.precision == "fp16")
    assert read_answers(run, {"id1"})["id1"].text == "C"


def test_perplexities_and_unknown_answers_have_no_flips_to_list(tmp_path):
    for precision, loss in (("fp16", -3.0), ("4bit", -4.0)):
        instances = {f"id{i}": {"logprob": loss} for i in range(12)}
        write_run(
            tmp_path, "lambada", precision, {"target_perplexity": float(np.exp(-loss))}, instances
        )
    assert groups(tmp_path) == [] and compare_suite(tmp_path)[0].comparisons[0].flips is None
    write_answers(
        tmp_path, "boolq", {"fp16": [(1, "a", -1.0), (1, "b", -1.0)], "4bit": [(0, "b", -1.0)] * 2}
    )
    next(tmp_path.glob("boolq*4bit/scenario_state.json")).write_text("{")
    boolq = compare_suite(tmp_path)[0].comparisons[0].flips
    assert (boolq.lost, boolq.won, boolq.changed) == (2, 0, None)
    (lost,) = groups(tmp_path)
    assert (lost.flips[0].baseline_answer, lost.flips[0].answer, lost.flips[0].logprob) == (
        "a",
        "",
        None,
    )


def test_the_page_lists_flips_escaped_and_with_links_that_lead_somewhere(tmp_path):
    suite = tmp_path / "s"
    write_answers(
        suite,
        "boolq:x=#%?",
        {"fp16": [(1, HOSTILE, -0.1), (0, " \n", -2.0)], "4bit": [(0, "no", -1.1), (1, "", -2.0)]},
    )
    runs = read_finished_runs(suite)
    made = comparison_page(compare_runs(runs), "s").to_html(suite)
    assert (
        made.index("<h1>")
        < made.index("<b>Next:")
        < made.index("<h2>flexgen/tiny</h2>")
        < made.index("<h2>Flips</h2>")
    )
    assert "<script" not in made and html.escape("<script>alert(") in made and "{{ 7 * 7 }}" in made
    assert "<dt>expected</dt>" in made and "<dt>right</dt>" not in made, "right is no side"
    assert "only white space" in made and ">empty<" in made and "log-probability -0.10" in made
    links = set(re.findall(r'href="(\./[^"]*scenario_state\.json)"', made))
    assert len(links) == 2 and all((suite / unquote(link)).is_file() for link in links)
    # Text and markdown have the counts alone.
    assert "alert" not in comparison_page(compare_runs(runs), "s").to_text()


def test_thousands_of_flips_make_a_page_that_stays_small(tmp_path):
    """Long prompts lose their middle; the rest is in the file."""
    count = 1200
    sides = {"fp16": [(1, "yes", -1.0)] * count, "4bit": [(0, "no", -1.0)] * count}
    for precision, answers in sides.items():
        prompts = [
            {"prompt": (f"begin {'x' * (40_000 if i < 150 else 10)} end{i}?")} for i in range(count)
        ]
        states = [
            request_state(f"id{i}", f"q{i}", a[1], request=prompts[i])
            for i, a in enumerate(answers)
        ]
        right = [a[0] for a in answers]
        write_run(
            tmp_path,
            "boolq",
            precision,
            {"exact_match": np.mean(right)},
            accuracies(right),
            states=states,
        )
    runs = read_finished_runs(tmp_path)
    made = comparison_page(compare_runs(runs), "s").to_html(tmp_path)
    assert made.count('<article class="flip">') == 1000 and "The first 1,000 are here" in made
    assert len(made) < 4_000_000 and "end999?" in made and "[… 38," in made
    # Parts that are out of sight are not laid out, and a long list is folded.
    assert "content-visibility: auto" in made and "<details open>" not in made


def test_every_flip_is_a_line_for_programs(tmp_path, capsys):
    suite = tmp_path / "runs" / "mine"
    write_answers(
        suite,
        "boolq",
        {"fp16": [(1, "é", -0.1), (1, "b", -9.0)], "4bit": [(0, "no", -np.inf), (1, "c", -9)]},
    )
    file = tmp_path / "flips.jsonl"
    assert cli.main(["compare", "-o", str(tmp_path), "--suite", "mine", "--flips", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["direction"], line["baseline_answer"], line["answer"]) for line in lines] == [
        ("lost", "é", "no"), ("changed", "b", "c")
    ]  # fmt: skip
    assert lines[0]["logprob"] is None and (suite / lines[0]["folder"]).is_dir()
    assert "1 : 0 : 1" in capsys.readouterr().out
    assert (
        cli.main(
            ["compare", "-o", str(tmp_path), "--suite", "mine", "--flips", str(Path("/absent/x"))]
        )
        == 1
    )
    assert "/absent/x cannot be written" in capsys.readouterr().err
