"""Figures of a divergence against direct sums; its intervals cover the truth in simulations."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from flexgen_helm import cli
from flexgen_helm.errors import UsageError
from flexgen_helm.report.comparison import ModelComparison, read_divergence
from flexgen_helm.report.divergence import (
    EntryDivergence,
    ScoredTokens,
    SuiteDivergence,
    TextDivergence,
    divergence_between,
)
from flexgen_helm.report.scores import finite
from tests.helpers.suites import accuracies, write_run


def draw_tokens(draw, documents, tokens, mean):
    """Documents of random lengths with KL divergences of their own mean, and losses that change by as much."""
    document_of = np.repeat(np.arange(documents), draw.integers(tokens // 2, tokens * 3 // 2, documents))
    exact = draw.gamma(2.0, mean / 2, len(document_of)) * draw.gamma(20.0, 1 / 20, documents)[document_of]
    base = -draw.exponential(3.0, len(document_of))
    same = (draw.random(len(document_of)) < 0.9).astype(float)
    return ScoredTokens(document_of, base, base - exact, exact, same)


def test_figures_are_direct_sums():
    scored = draw_tokens(np.random.default_rng(1), 30, 40, 0.1)
    found, exact = divergence_between("fp16", "4bit", scored), scored.kl
    assert (found.tokens, found.documents, found.same_top) == (len(exact), 30, scored.same_top.sum() / len(exact))
    assert found.perplexity == pytest.approx(math.exp(-scored.logprobs.mean()))
    assert found.ratio == pytest.approx(found.perplexity / found.baseline_perplexity) == math.exp(exact.mean())
    assert found.kl.mean == pytest.approx(exact.mean()) and found.kl.tokens == len(exact)
    for key, value in asdict(found.kl).items():  # losses change by as much here
        assert getattr(found.logprob, key) == pytest.approx(value)
    ordered = np.sort(exact)
    assert found.kl.largest == ordered[-1] and found.kl.median == pytest.approx(np.median(ordered))
    assert ordered[int(0.99 * len(ordered)) - 2] <= found.kl.p99 <= ordered[-1]
    for interval, value in ((found.interval, found.ratio), (found.kl.interval, found.kl.mean)):
        assert interval[0] < value < interval[1]


def test_what_is_never_negative_has_no_negative_interval():
    scored = draw_tokens(np.random.default_rng(3), 2, 3, 0.1)
    found = divergence_between("fp16", "4bit", scored)
    assert all(0 <= of.interval[0] <= of.mean < of.interval[1] for of in (found.kl, found.logprob))


def test_a_broken_precision_has_an_infinite_perplexity():
    ones = np.ones(4)
    scored = ScoredTokens(np.arange(4), -ones, -1e4 * ones, ones, 0 * ones)
    assert divergence_between("fp16", "4bit", scored).perplexity == math.inf


def compared(models, baseline="fp16"):
    return [ModelComparison(model, baseline, 0.01, [], {}, [], [], [], []) for model in models]


def text_divergence(**changes):
    scored = draw_tokens(np.random.default_rng(1), 30, 40, 0.1)
    divergence = replace(divergence_between("fp16", "4bit", scored, (0.0, 0.25)), **changes)
    return TextDivergence("flexgen/tiny", "books/book.txt", 64, (divergence,))


def test_compare_shows_it_beside_the_verdicts(tmp_path, capsys):
    suite, file = tmp_path / "runs" / "mine", tmp_path / "kl.json"
    for precision in ("fp16", "4bit"):
        write_run(suite, "lambada", precision, {"exact_match": 0.5}, accuracies([0, 1] * 20))
    file.write_text(json.dumps(asdict(text_divergence())))
    argv = ["compare", "-o", str(tmp_path), "--suite", "mine"]
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["tiny"]["divergence"] is None
    assert cli.main([*argv, "--json", "--divergence", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)["models"]["tiny"]["divergence"]
    assert shown == json.loads(file.read_text()) and shown["precisions"][0]["layers"] == [0.0, 0.25]
    assert cli.main([*argv, "--divergence", str(file)]) == 0
    (kl,) = text_divergence().precisions
    for text in (capsys.readouterr().out, (suite / "flexgen_compare.html").read_text()):
        assert "Divergence from fp16 on book.txt, nats" in text and f"{kl.kl.mean:.5f}" in text
        assert "Relative error of hidden states, 4bit against fp16" in text and "█" * 20 in text


@pytest.mark.parametrize(
    "change, models, baseline, says",
    [
        ({"precisions": [{}]}, ["tiny"], "fp16", "is not what `flexgen-helm divergence --json` prints"),
        ({"window": "many"}, ["tiny"], "fp16", "is not what `flexgen-helm divergence --json` prints"),
        (None, ["tiny"], "fp16", "is not what `flexgen-helm divergence --json` prints"),
        ({}, ["small", "large"], "fp16", "is of the model tiny, and the suite has small, large"),
        ({}, ["tiny"], "8bit", "is from fp16, and the comparison is with 8bit"),
    ],
)
def test_another_file_is_refused(tmp_path, change, models, baseline, says):
    file = tmp_path / "kl.json"
    if change is not None:
        file.write_text(json.dumps({**asdict(text_divergence()), **change}))
    with pytest.raises(UsageError, match=says):
        read_divergence(file, compared(models, baseline), "mine")


def test_divergences_on_a_suite_are_read_back_and_belong_to_it(tmp_path):
    (kl,) = text_divergence().precisions
    found = SuiteDivergence("org/tiny", "mine", (EntryDivergence("lambada", (kl,)), EntryDivergence("mmlu", (kl, kl))))
    file = tmp_path / "kl.json"
    file.write_text(json.dumps(asdict(found)))
    assert read_divergence(file, compared(["org--tiny"]), "mine")[0].divergence == found
    with pytest.raises(UsageError, match="is of the suite mine, and the comparison is of other"):
        read_divergence(file, compared(["org--tiny"]), "other")
    for damage in ({"entries": 1}, {"entries": [{"entry": "lambada"}]}):
        file.write_text(json.dumps({**asdict(found), **damage}))
        with pytest.raises(UsageError, match="is not what `flexgen-helm divergence --json` prints"):
            read_divergence(file, compared(["org--tiny"]), "mine")


def test_infinite_figures_survive_json(tmp_path):
    found = text_divergence(perplexity=math.inf, ratio=math.inf, interval=(5.0, math.inf))
    (tmp_path / "kl.json").write_text(json.dumps(finite(asdict(found)), allow_nan=False))
    assert read_divergence(tmp_path / "kl.json", compared(["tiny"]), "mine")[0].divergence == found
