"""`compare --baseline MODEL`: what a baseline is at rest, and which verdicts it bears; from stored
records.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from flexgen_helm import cli
from flexgen_helm.errors import UsageError
from flexgen_helm.report.choice import costs
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.pages import comparison_page
from tests.helpers.suites import accuracies, write_run

FULL = {"BF16": 990, "F32": 10}
Q4_1 = {"Q4_1": 9_750, "F32": 250}
NOTHING_LACKS = "equivalent within 1 % or pp in mc:mode=a"
INCONCLUSIVE = "inconclusive: no full-precision baseline"


def write(suite, model, stored, precision="fp16", right=None, name="mc:mode=a", **more):
    right = np.ones(500) if right is None else right
    known = {} if stored is None else {"checkpoint_bytes": stored}
    texts = {f"id{i}": f"{name} {i}" for i in range(len(right))}
    scores = {"exact_match": float(np.mean(right))}
    return write_run(
        suite, name, precision, scores, accuracies(right), model=model, texts=texts, **known, **more
    )


def verdicts(suite, baseline):
    (model,) = compare_suite(suite, baseline)
    return {name: verdict.text for name, verdict in model.verdicts.items()}, model


def test_a_full_precision_baseline_bears_verdicts_on_other_models(tmp_path):
    write(tmp_path, "base", FULL)
    write(tmp_path, "base-q4", Q4_1)
    texts, model = verdicts(tmp_path, "base")
    assert (
        texts == {"base-q4": NOTHING_LACKS}
        and not model.remedy
        and model.baseline_run.is_full_precision
    )
    page = comparison_page([model], "s")
    assert (
        page.facts["baseline"] == "flexgen/base in fp16; at rest 99 % BF16, 1 % F32"
        and not page.next_steps[1:]
    )
    assert (
        page.facts["model"] == "flexgen/base; flexgen/base-q4"
        and page.facts["precisions"] == "fp16"
    )


@pytest.mark.parametrize(
    "stored, precision, full",
    [
        (FULL, "fp16", True),
        ({"F16": 1000}, "fp16", True),
        ({"F32": 992, "Q8_0": 8}, "fp16", True),
        ({"F32": 988, "Q8_0": 12}, "fp16", False),
        ({"F8_E4M3": 900, "BF16": 100}, "fp16", False),
        ({"awq 4-bit": 600, "F16": 400}, "fp16", False),
        (FULL, "8bit", False),
        (Q4_1, "4bit", False),
        (None, "4bit", False),
        (None, "fp16", None),
        ({}, "fp16", None),
    ],
)
def test_full_precision_is_16_bits_at_rest_and_in_use(tmp_path, stored, precision, full):
    write(tmp_path, "a", stored, precision)
    write(tmp_path, "b", FULL)
    name = "a" if precision == "fp16" else f"a-{precision}"
    texts, model = verdicts(tmp_path, name)
    assert model.baseline_run.is_full_precision is full
    # Nothing is claimed of records that do not say it.
    assert texts["b"] == (INCONCLUSIVE if full is False else NOTHING_LACKS)
    assert ("of unknown types" in model.baseline_run.at_rest) == (not stored)


def test_without_a_full_precision_model_the_page_says_how_to_add_one(tmp_path, capsys):
    suite = tmp_path / "runs" / "mine"
    for model, right in (("smollm2-135m-instruct-q4_1", np.ones(400)), ("mine-q8", np.zeros(400))):
        for name in ("mc:mode=a", "imdb"):
            write(suite, model, Q4_1, right=right, name=name, adapter={"max_eval_instances": 400})
    command = [
        "compare",
        "-o",
        str(tmp_path),
        "--suite",
        "mine",
        "--baseline",
        "smollm2-135m-instruct-q4_1",
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    remedy = (
        "flexgen-helm run -r imdb:model=flexgen/smollm2-135m-instruct "
        "mc:mode=a,model=flexgen/smollm2-135m-instruct -m 400 --suite mine"
    )
    html = (suite / "flexgen_compare.html").read_text()
    for text in (" ".join(shown.split()), html):
        assert f"mine-q8: {INCONCLUSIVE}" in text and remedy in text
        assert "flexgen/smollm2-135m-instruct-q4_1 in fp16; at rest 98 % Q4_1, 2 % F32" in text
    headings = shown.split("Verdicts and costs")[1].splitlines()[1]
    assert headings.startswith("model ") and "precision" not in headings
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]["smollm2-135m-instruct-q4_1"]
    assert found["remedy"] == remedy and found["full_precision"] is False
    assert (
        found["baseline"]
        == "flexgen/smollm2-135m-instruct-q4_1 in fp16; at rest 98 % Q4_1, 2 % F32"
    )
    assert (
        found["equivalence"]["mine-q8"]["text"] == INCONCLUSIVE
        and found["equivalence"]["mine-q8"]["worse"]
    )


def test_another_full_precision_model_of_the_suite_is_named(tmp_path):
    suite = tmp_path / "mine"
    for model, stored in (
        ("opt-q4", Q4_1),
        ("smollm2", FULL),
        ("opt", FULL),
        ("opt-q8", {"Q8_0": 1}),
    ):
        write(suite, model, stored)
    texts, model = verdicts(suite, "opt-q4")
    assert texts == dict.fromkeys(("opt", "opt-q8", "smollm2"), INCONCLUSIVE)
    assert model.remedy == "flexgen-helm compare --suite mine --baseline opt"
    assert verdicts(suite, "opt")[1].remedy == ""


def test_the_original_is_that_of_the_files_name_or_left_to_the_user(tmp_path):
    for suite, origin, original in (
        ("file", "/m/Qwen2.5-7B-Instruct-Q4_K_M.gguf", "qwen2.5-7b-instruct"),
        ("hub", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4@0123", "qwen2.5-7b-instruct"),
        ("unknown", "/m/merged-Q4_0.gguf", "ORIGINAL"),
    ):
        for entry in range(4):
            write(tmp_path / suite, "a", Q4_1, name=f"mc:e={entry}", origin=origin)
            write(tmp_path / suite, "b", Q4_1, name=f"mc:e={entry}")
        remedy = verdicts(tmp_path / suite, "a")[1].remedy
        assert remedy == f"flexgen-helm run -r ENTRY:model=flexgen/{original} -m N --suite {suite}"


def test_precisions_of_models_are_each_compared_with_the_baseline(tmp_path):
    """Every pair is that of the two runs alone: the verdict on a precision of the baseline's own
    model stays.
    """
    draw = np.random.default_rng(0)
    base = (draw.random(400) < 0.5).astype(float)
    sides = {("a", "fp16"): base}
    for side in (("a", "4bit"), ("b", "fp16"), ("b", "4bit")):
        sides[side] = np.where(draw.random(400) < 0.1, 1 - base, base)
    for (model, precision), right in sides.items():
        write(tmp_path, model, Q4_1 if model == "a" else FULL, precision, right)
    texts, model = verdicts(tmp_path, "a")
    assert [one.precision for one in model.comparisons] == ["a-4bit", "b", "b-4bit"]
    for one, right in zip(model.comparisons, list(sides.values())[1:]):
        assert (one.flips.lost, one.flips.won) == (((base > right).sum()), ((base < right).sum()))
    assert texts["b"] == texts["b-4bit"] == INCONCLUSIVE != texts["a-4bit"]
    assert model.remedy.endswith("--baseline b")
    assert [speed.label for speed in model.speeds] == ["a", "a-4bit", "b", "b-4bit"]
    assert (
        "precision"
        not in comparison_page([model], "s")
        .to_text()
        .split("Verdicts and costs")[1]
        .splitlines()[1]
    )
    assert verdicts(tmp_path, "b")[0]["a"] != INCONCLUSIVE
    assert set(verdicts(tmp_path, "b-4bit")[0].values()) >= {INCONCLUSIVE}
    assert costs(model) == {}


def test_within_a_model_the_line_about_the_baseline_suffices(tmp_path):
    """What 4 bits of the engine cost is a statement about that file, whatever its own types are."""
    for precision in ("fp16", "4bit"):
        write(tmp_path, "a-q4", Q4_1, precision)
        write(tmp_path, "old", None, precision)
    models = compare_suite(tmp_path)
    assert [list(model.verdicts.values())[0].text for model in models] == [NOTHING_LACKS] * 2
    line = "flexgen/a-q4 in fp16; at rest 98 % Q4_1, 2 % F32"
    assert (
        comparison_page(models, "s").facts["baseline"]
        == f"{line}; flexgen/old in fp16; at rest of unknown types"
    )


def test_a_run_that_knows_the_types_speaks_for_those_that_do_not(tmp_path):
    write(tmp_path, "a", None, name="imdb")
    write(tmp_path, "a", Q4_1)
    for name in ("imdb", "mc:mode=a"):
        write(tmp_path, "b", FULL, name=name)
    assert verdicts(tmp_path, "a")[0] == {"b": INCONCLUSIVE}


def test_models_without_a_shared_run_entry_ask_for_nothing(tmp_path):
    write(tmp_path, "a", Q4_1, "4bit")
    write(tmp_path, "a", Q4_1)
    write(tmp_path, "other", FULL, name="imdb")
    texts, model = verdicts(tmp_path, "a")
    assert texts == {"a-4bit": NOTHING_LACKS} and model.remedy == ""
    assert any("imdb was run in other only" in note for note in model.notes)


def test_one_model_alone_cannot_be_compared_with_itself(tmp_path):
    write(tmp_path, "a", FULL)
    with pytest.raises(
        UsageError, match=("it has a in fp16; run the same entries with another model")
    ):
        compare_suite(tmp_path, "a")
