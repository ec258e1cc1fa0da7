"""`bench precisions`: its rows from what was measured, and LAMBADA's last words by a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flexgen_helm import Engine
from flexgen_helm.benchmarks import Options, precisions, texts
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.errors import UsageError
from flexgen_helm.report.divergence import Divergence, Spread

SPREAD = Spread(400, 0.1, (0.05, 0.15), 0.08, 0.7, 1.5)
FOUND = Divergence("fp16", "8bit", 1000, 4, 20.0, 22.0, 1.1, (1.05, 1.15), 0.9, SPREAD)
WORDS = {"fp16": [(1, 2), (3,), (9,), (4,)], "8bit": [(1, 2), (5,), (8,), (6,)], "4bit": [(7, 7), (3,), (9,), (6,)]}
WANTED = [(1, 2), (3,), (7,), (6,)]


def test_rows_have_sizes_speeds_divergences_and_flips(monkeypatch):
    def timed(model, config, scratch, repeats, case, tell):
        assert repeats == 3 and [side.name for side in case.sides] == ["fp16", *precisions.MEASURED]
        row = {"min": 1.0, "max": 9.0, "n": 3, "seconds": [], "policy": ""}
        return [row | {"median": 8.0 / number} for number in range(1, len(case.sides) + 1)]

    def evaluated(model, text, passages, windows, scratch, options):
        assert (text, passages, windows) == ("text", ["a", "b"], 12)
        answers = {name: [texts.LastWord(*pair) for pair in zip(words, WANTED)] for name, words in WORDS.items()}
        names = precisions.MEASURED
        return {**dict.fromkeys(names, answers["8bit"]), **answers}, {
            name: replace(FOUND, precision=name) for name in names
        }

    monkeypatch.setattr(precisions, "case_rows", timed)
    monkeypatch.setattr(precisions, "evaluate", evaluated)
    monkeypatch.setattr(precisions, "wikitext_and_lambada", lambda name: ("text", ["a", "b", "c"]))
    result = precisions.run(Options(instances=2))
    rows = {row["label"]: row for row in result["rows"]}
    assert [*rows] == ["fp16", *precisions.MEASURED]
    fp16, eight, four = rows["fp16"], rows["8bit"], rows["4bit"]
    assert (fp16["perplexity"], fp16["accuracy"], fp16["times_faster"], fp16["of_fp16"]) == (20.0, 0.5, 1.0, 1.0)
    assert (eight["perplexity"], eight["kl"], eight["kl_p99"], eight["times_faster"]) == (22.0, 0.1, 0.7, 2.0)
    assert (eight["accuracy"], eight["lost"], eight["won"], eight["changed"]) == (0.5, 1, 1, 1)
    assert (four["accuracy"], four["lost"], four["won"], four["changed"]) == (0.5, 1, 1, 0)
    assert result["ratios"]["4bit_weights_link"] == 3.0
    json.dumps(result, allow_nan=False)


def test_sizes_count_tables_and_scales():
    config = read_model_config(precisions.MODEL)[0]
    sizes = {name: precisions.sizes(name, config) for name in ("fp16", *precisions.MEASURED)}
    assert sizes["8bit"]["of_fp16"] == pytest.approx(8.5 / 16, rel=1e-3)
    table, whole = config.vocab_size * config.hidden_size, sizes["fp16"]["weights_mb"] * 1e6 / 2
    assert sizes["4bit"]["of_fp16"] == pytest.approx((4.5 * (whole - table) + 16 * table) / (16 * whole), rel=1e-3)
    assert sizes["4bit-cache"]["of_fp16"] == 1 and sizes["4bit-weights"]["cache_bits"] == 32
    assert sizes["4bit"]["cache_bits"] == sizes["4bit-cache"]["cache_bits"] == 4.5


def test_last_words_are_what_the_model_draws(tiny):
    passages = ["the quick brown fox", "the lazy dog runs over the fox"]
    with Engine.from_pretrained(tiny("llama").path) as engine:
        answers = texts.last_words(engine, passages)
        encode = engine.tokenizer.encode
    for passage, answer in zip(passages, answers):
        before = encode(passage.rpartition(" ")[0])
        assert [*before, *answer.wanted] == encode(passage) and not answer.is_right
        ids = list(before)
        for token in answer.drawn:
            assert int(tiny("llama").logprobs(ids)[-1].argmax()) == token
            ids.append(token)


def test_texts_that_are_not_here_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(texts, "data_dir", lambda: tmp_path)
    with pytest.raises(UsageError, match="bench precisions needs FLEXGEN_HELM_DATA to name a folder with wikitext-2"):
        texts.wikitext_and_lambada("precisions")


def test_answers_and_divergences_come_from_one_engine_a_precision(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(precisions, "WINDOW", 40)
    monkeypatch.setattr(precisions, "MEASURED", ("8bit", "4bit"))
    said = []
    passages = ["the quick brown fox", "the lazy dog runs over the fox"]
    text = "the quick brown fox jumps over the lazy dog, and runs. " * 20
    model = str(tiny("llama").path)
    answers, found = precisions.evaluate(model, text, passages, 3, tmp_path, Options(tell=said.append))
    assert [*answers] == ["fp16", "8bit", "4bit"] and [*found] == ["8bit", "4bit"]
    assert [found[name].documents for name in found] == [3, 3] and found["8bit"].kl.mean < found["4bit"].kl.mean
    with Engine.from_pretrained(model, precision="4bit") as engine:
        assert texts.last_words(engine, passages) == answers["4bit"]
    assert sum("LAMBADA: {'accuracy'" in line for line in said) == 3
