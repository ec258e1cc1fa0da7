"""`compare`: paired statistics against direct formulas, on folders as HELM writes them, and the
command on them.
"""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from flexgen_helm import cli
from flexgen_helm.errors import UsageError
from flexgen_helm.report.comparison import compare_suite
from flexgen_helm.report.comparison_tables import (
    comparison_tables,
    comparison_to_json,
    interval_scales,
    summary_table,
)
from flexgen_helm.report.pages import comparison_page
from tests.helpers.suites import accuracies, write_run


def write_accuracies(suite, precision, right, **more):
    right = np.asarray(right)
    return write_run(
        suite, "mc:mode=a", precision, {"exact_match": right.mean()}, accuracies(right), **more
    )


def test_accuracies_are_compared_by_instance(tmp_path):
    draw = np.random.default_rng(0)
    base = (draw.random(800) < 0.6).astype(float)
    changed = np.where(draw.random(800) < 0.1, 1 - base, base)
    changed[:60] = 0.0
    write_accuracies(tmp_path, "fp16", base)
    write_accuracies(tmp_path, "4bit", changed, tokens=500, latency=0.5)
    (model,) = compare_suite(tmp_path)
    (comparison,) = model.comparisons
    lost, won = int(((base == 1) & (changed == 0)).sum()), int(((base == 0) & (changed == 1)).sum())
    assert (comparison.run, comparison.metric, comparison.precision, comparison.instances) == (
        "mc:mode=a",
        "exact_match",
        "4bit",
        800,
    )
    assert (
        comparison.change == pytest.approx(changed.mean() - base.mean())
        and comparison.kind == "difference"
    )
    assert (comparison.flips.lost, comparison.flips.won) == (lost, won)
    smaller = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1)) / 2 ** (lost + won)
    assert comparison.p_value == pytest.approx(min(1.0, 2 * smaller), rel=0.025)
    # The interval of a mean is the normal one when there are many instances.
    error = 1.96 * (changed - base).std() / math.sqrt(800)
    assert comparison.interval == pytest.approx(
        (comparison.change - error, comparison.change + error), abs=0.15 * error
    )
    speeds = {speed.label: speed.tokens_per_s for speed in model.speeds}
    assert speeds == {"fp16": 500.0, "4bit": 1000.0}


def pages(logprobs, words, tokens):
    return {
        f"id{i}": {
            "logprob": x,
            "num_words": float(w),
            "num_perplexity_tokens": float(t),
            "num_bytes": 5.0 * w,
        }
        for i, (x, w, t) in enumerate(zip(logprobs, words, tokens))
    }


def perplexities(instances):
    totals = {
        name: sum(values[name] for values in instances.values())
        for name in next(iter(instances.values()))
    }
    loss = -totals["logprob"]
    return {
        "word_perplexity": math.exp(loss / totals["num_words"]),
        "bits_per_byte": loss / totals["num_bytes"] / math.log(2),
        "token_perplexity": math.exp(loss / totals["num_perplexity_tokens"]),
    }


def test_perplexities_are_compared_as_ratios_of_the_whole(tmp_path):
    draw = np.random.default_rng(1)
    words = draw.integers(500, 5000, 62)
    tokens = words * 1.3
    losses = words * draw.normal(3.5, 0.2, 62)
    sides = {
        "fp16": pages(-losses, words, tokens),
        "4bit": pages(-losses - words * draw.normal(0.05, 0.02, 62), words, tokens),
    }
    for precision, instances in sides.items():
        write_run(tmp_path, "wikitext:", precision, perplexities(instances), instances)
    (model,) = compare_suite(tmp_path)
    changes = {comparison.metric: comparison for comparison in model.comparisons}
    expected = {precision: perplexities(instances) for precision, instances in sides.items()}
    word = changes["word_perplexity"]
    assert word.kind == "ratio" and word.run == "wikitext"
    assert word.change == pytest.approx(
        expected["4bit"]["word_perplexity"] / expected["fp16"]["word_perplexity"]
    )
    # 3.7 in 62 documents may not have been seen, and have changed by a factor of e.
    assert (
        1 - 3.7 / 62
        < word.interval[0]
        < word.change
        < word.interval[1]
        < word.change * math.exp(3.7 / 62)
    )
    assert changes["bits_per_byte"].change == pytest.approx(
        expected["4bit"]["bits_per_byte"] - expected["fp16"]["bits_per_byte"]
    )


def test_only_shared_instances_are_compared_and_the_others_noted(tmp_path):
    write_accuracies(tmp_path, "fp16", [1, 1, 0, 0])
    write_accuracies(tmp_path, "4bit", [1, 0])
    (model,) = compare_suite(tmp_path)
    (comparison,) = model.comparisons
    assert (comparison.instances, comparison.baseline, comparison.value) == (2, 1.0, 0.5)
    assert any("2 instances" in note and "fp16" in note for note in model.notes)


def test_changes_are_in_the_unit_of_their_metric(tmp_path):
    """Percentage points of shares, ratios of perplexities, differences of others; each unit has its
    scale.
    """
    for precision, right, loss in (("fp16", [1, 1, 0, 1], 10.0), ("4bit", [1, 0, 0, 1], 12.0)):
        write_accuracies(tmp_path, precision, right)
        instances = pages([-loss, -9.0, -8.0], [4, 5, 6], [5, 6, 7])
        write_run(tmp_path, "wikitext", precision, perplexities(instances), instances)
    (model,) = compare_suite(tmp_path)
    (table,) = comparison_tables(model, model.comparisons, interval_scales(model.comparisons))
    changes = dict(zip(table.cells["metric"], table.cells["change"]))
    assert (
        changes["exact_match"] == "-25.00 pp"
        and changes["word_perplexity"] == f"×{math.exp(2 / 15):.4f}"
    )
    assert changes["bits_per_byte"] == f"{2 / 75 / math.log(2):+.4f}"
    accuracy, word, token, bits = table.marks["95 % interval"]
    low, high = model.comparisons[0].interval
    # no change is in the middle
    assert accuracy.axis == ("-100", "0", "+100 pp") and low < -0.25 < 0 < high
    assert (accuracy.low, accuracy.point, accuracy.high) == pytest.approx(
        (50 + 50 * low, 37.5, 50 + 50 * high)
    )
    assert word.axis == token.axis == ("×0.333", "×1", "×3") and token.high <= word.high <= 100
    assert bits.axis == ("-2", "0", "+2") and 50 < bits.high <= 100
    assert all(mark.low <= mark.point <= mark.high for mark in (accuracy, word, token, bits))


def test_the_verdict_is_above_all_else(tmp_path):
    write_accuracies(tmp_path, "fp16", np.ones(500))
    write_accuracies(tmp_path, "4bit", np.ones(500))
    page = comparison_page(compare_suite(tmp_path), "s")
    verdict = "4bit: equivalent within 1 % or pp in mc:mode=a"
    assert page.to_text().splitlines()[:2] == ["s: fp16 and other precisions", verdict]
    html = page.to_html()
    assert f"<h1>{verdict}</h1>" in html and "verdict" not in page.facts


def test_subjects_are_also_compared_together(tmp_path):
    """The pool is one comparison over all instances that both precisions have."""
    draw = np.random.default_rng(3)
    sides = {"fp16": [], "4bit": []}
    for subject in range(4):
        for precision, right in sides.items():
            values = (draw.random(20) < 0.5).astype(float)
            name = f"mmlu:subject={subject}"
            if subject < 3:
                right.extend(values)
            elif precision == "4bit":
                continue  # in fp16 only
            write_run(tmp_path, name, precision, {"exact_match": values.mean()}, accuracies(values))
    (model,) = compare_suite(tmp_path)
    (pooled,) = model.pooled
    base, changed = map(np.array, sides.values())
    assert (pooled.run, pooled.instances, len(model.comparisons)) == ("mmlu (3 runs)", 60, 3)
    assert pooled.change == pytest.approx(changed.mean() - base.mean())
    assert pooled.flips.lost == ((base == 1) & (changed == 0)).sum()
    content = comparison_to_json([model], "s")["models"]["tiny"]
    assert len(content["pooled"]) == 1 and len(content["comparisons"]) == 3


def test_a_metric_that_is_not_a_mean_is_not_compared_over_other_instances(tmp_path):
    for precision, count in (("fp16", 5), ("4bit", 3)):
        scores = {"exact_match": 1.0, "classification_macro_f1": 0.1 * count}
        write_run(tmp_path, "boolq", precision, scores, accuracies([1] * count))
    (model,) = compare_suite(tmp_path)
    assert [comparison.metric for comparison in model.comparisons] == ["exact_match"]
    assert any("classification_macro_f1" in note and "4bit" in note for note in model.notes)


@pytest.mark.parametrize(
    "metric, scores, instances, said",
    [
        ("classification_macro_f1", (0.7, 0.6), {f"id{i}": {"classification_macro_f1": 0.1 * i} for i in range(5)},
         "none (no mean)"),
        ("exact_match", (1.0, 0.0), accuracies([1]), "none (1 instance)"),
        ("target_perplexity", (20.0, 30.0), {"id0": {"logprob": -3.0}}, "none (1 instance)"),
    ],
)  # fmt: skip
def test_what_is_no_mean_over_instances_has_no_interval(tmp_path, metric, scores, instances, said):
    for precision, score in zip(("fp16", "4bit"), scores):
        write_run(tmp_path, "boolq", precision, {metric: score}, instances)
    (model,) = compare_suite(tmp_path)
    assert model.comparisons[0].interval is None
    page = comparison_page([model], "s")
    assert said in " ".join(page.to_text().split()) and said in page.to_html()


def test_speeds_of_different_work_are_noted(tmp_path):
    write_accuracies(tmp_path, "fp16", [1, 0, 1])
    write_accuracies(tmp_path, "4bit", [1, 1, 0])
    (model,) = compare_suite(tmp_path)
    assert not model.notes and "whatever instances" in " ".join(
        comparison_page([model], "s").to_text().split()
    )
    write_accuracies(tmp_path, "paper-4bit", [1, 1])
    (model,) = compare_suite(tmp_path)
    work = (
        "fp16 has 3 instances of 1 run, 4bit has 3 instances of 1 run, paper-4bit has 2 instances "
        "of 1 run"
    )
    assert any("not of the same work" in note and work in note for note in model.notes)
    assert [speed.instances for speed in model.speeds] == [3, 3, 2]
    assert list(summary_table(model).cells["tokens/s"]) == ["500"] * 3


def test_nothing_to_compare_is_one_message(tmp_path):
    with pytest.raises(UsageError, match="no suite"):
        compare_suite(tmp_path / "absent")
    with pytest.raises(UsageError, match="no finished runs"):
        compare_suite(tmp_path)
    write_accuracies(tmp_path, "fp16", [1, 0])
    with pytest.raises(UsageError, match="tiny in fp16; run the same"):
        compare_suite(tmp_path)
    write_accuracies(tmp_path, "4bit", [1, 0], model="other")
    with pytest.raises(UsageError, match="other in 4bit"):
        compare_suite(tmp_path)


def test_the_suggested_command_is_not_refused(tmp_path):
    with pytest.raises(
        UsageError,
        match=("'foo' is no precision or model of the suite; take one of fp16, fp16-s, 8bit"),
    ) as refused:
        compare_suite(tmp_path, "foo")
    assert "--precision foo" not in str(refused.value)
    for baseline, pair in (("fp16", "fp16,4bit"), ("4bit-s", "4bit-s,4bit"), ("4bit", "4bit,fp16")):
        with pytest.raises(UsageError, match=f"--precision {pair}$"):
            compare_suite(tmp_path, baseline)


def test_models_are_compared_as_precisions_are(tmp_path, capsys):
    """Two files of one model under two names: the same numbers, with their names in place of
    precisions.
    """
    base, changed = [1, 0, 1, 1, 0, 1], [1, 0, 0, 1, 1, 1]
    for output, name in (("as-models", "b"), ("as-precisions", "a")):
        write_accuracies(tmp_path / output / "runs" / "s", "fp16", base, model="a", origin="a.gguf")
        write_accuracies(
            tmp_path / output / "runs" / "s", "fp16" if name == "b" else "4bit", changed, model=name
        )
    command = ["compare", "--suite", "s", "--json", "-o"]
    assert cli.main([*command, str(tmp_path / "as-models")]) == 2
    assert "compare models with --baseline a, or run the same" in capsys.readouterr().err
    flips = ["--baseline", "flexgen/a", "--flips", str(tmp_path / "flips.jsonl")]
    assert cli.main([*command, str(tmp_path / "as-models"), *flips]) == 0
    by_model = json.loads(capsys.readouterr().out)
    assert cli.main([*command, str(tmp_path / "as-precisions")]) == 0
    by_precision = json.loads(capsys.readouterr().out)
    renamed = json.dumps(by_precision["models"]).replace('"fp16"', '"a"').replace('"4bit"', '"b"')
    renamed = json.loads(renamed)
    assert by_model["models"]["a"].pop("costs") == {} != renamed["a"].pop("costs")
    assert by_model["models"] == renamed
    found = [json.loads(line) for line in (tmp_path / "flips.jsonl").read_text().splitlines()]
    assert {(flip["precision"], flip["direction"]) for flip in found} == {
        ("b", "lost"),
        ("b", "won"),
    }


@pytest.mark.parametrize(
    "command, file, arguments",
    [("compare", "flexgen_compare.html", ()), ("report", "flexgen_report.json", ("--json",))],
)
def test_a_page_that_cannot_be_written_does_not_hide_the_results(
    tmp_path, capsys, command, file, arguments
):
    """Even root cannot write a file over a folder."""
    suite = tmp_path / "runs" / "mine"
    write_accuracies(suite, "fp16", [1, 0, 1])
    write_accuracies(suite, "4bit", [1, 1, 0])
    (suite / file).mkdir()
    assert cli.main([command, "-o", str(tmp_path), "--suite", "mine", *arguments]) == 1
    captured = capsys.readouterr()
    assert "exact_match" in captured.out and (not arguments or json.loads(captured.out))
    assert captured.err == f"flexgen-helm: {suite / file} cannot be written: Is a directory\n"
    assert not [path for path in suite.iterdir() if path.suffix == ".tmp"]


def test_a_run_in_one_precision_only_is_named(tmp_path):
    write_accuracies(tmp_path, "fp16", [1, 0])
    write_accuracies(tmp_path, "4bit", [1, 1])
    write_run(tmp_path, "boolq", "4bit", {"exact_match": 1.0}, accuracies([1]))
    (model,) = compare_suite(tmp_path)
    assert len(model.comparisons) == 1 and any("boolq" in note for note in model.notes)


def test_the_page_is_self_contained(tmp_path):
    write_accuracies(tmp_path, "fp16", [1, 0, 1])
    write_accuracies(tmp_path, "4bit", [1, 1, 0])
    html = comparison_page(compare_suite(tmp_path), "<suite>").to_html()
    assert "&lt;suite&gt;: fp16" in html and not re.search(
        r"<(script|link|img)\b|url\(|@import|https?:", html
    )
    assert "0.6667" in html and "1.0000" in html and len(html) < 30_000
