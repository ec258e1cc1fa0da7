"""`flexgen-helm divergence` on tiny models."""

from __future__ import annotations

import json

import pytest

from flexgen_helm import cli
from flexgen_helm.engine.divergence import ComparedPrompts
from flexgen_helm.plugin import run_answers
from tests.helpers.suites import accuracies, write_run

TEXT = "the quick brown fox jumps over the lazy dog, and runs. " * 20


def command(model, tmp_path, *more):
    (tmp_path / "text").write_text(TEXT)
    return ["divergence", str(model.path), "--text", str(tmp_path / "text"), "--window", "40", *more]


def test_precisions_against_fp16_on_one_text(tiny, tmp_path, capsys):
    model = tiny("llama")
    argv = command(model, tmp_path, "--precision", "8bit,fp16,4bit", "--rows", "50", "--json")
    assert cli.main(argv) == 0
    by_precision = {row["precision"]: row for row in json.loads(capsys.readouterr().out)["precisions"]}
    assert [*by_precision] == ["8bit", "4bit"]
    for precision, found in by_precision.items():
        plain = ["perplexity", *argv[1:6], "--json", "--precision"]
        for name, key in (("fp16", "baseline_perplexity"), (precision, "perplexity")):
            assert cli.main([*plain, name]) == 0
            expected = json.loads(capsys.readouterr().out)
            assert found[key] == pytest.approx(expected["perplexity"], rel=1e-6)
            assert found["tokens"] == expected["tokens_scored"]
        assert found["kl"]["tokens"] == 50
        assert found["interval"][0] < found["ratio"] < found["interval"][1]
    assert 0 < by_precision["8bit"]["kl"]["mean"] < by_precision["4bit"]["kl"]["mean"] / 20
    assert by_precision["8bit"]["same_top"] > by_precision["4bit"]["same_top"]


def test_for_people_and_with_weights_from_the_disk(tiny, tmp_path, capsys):
    folder = tmp_path / "offloaded"
    argv = command(
        tiny("opt"), tmp_path, "--max-windows", "3", "--offload-dir", str(folder), "--policy", "2x1,0,0,0,100,0,100"
    )
    assert cli.main(argv) == 0
    first, perplexity, top, head, exact = capsys.readouterr().out.splitlines()
    assert first == "4bit against fp16: 117 tokens in 3 windows"
    assert perplexity.startswith("  perplexity ") and top.startswith("  same top token at ")
    assert head.split()[3:] == ["mean", "95", "%", "interval", "median", "99", "%", "largest"]
    assert exact.startswith("  117 tokens, exact") and len(head) == len(exact)
    assert not [*folder.glob("tmp*")]  # the rows are gone


def test_a_run_entry_without_a_token_is_left_out_and_named(tiny, tmp_path, monkeypatch, capsys):
    model = tiny("llama")
    compared = {
        "answered": ComparedPrompts([(5, 6, 7, 8), (9, 8, 7)], [range(2, 4), range(1, 3)], ["a", "b"]),
        "silent": ComparedPrompts([], [], []),
    }
    monkeypatch.setattr(run_answers, "read_compared_prompts", lambda run: compared[run.entry])
    for entry in compared:
        write_run(tmp_path / "runs" / "s", entry, "fp16", {"exact_match": 0.5}, accuracies([0, 1]), model="small")
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.json"))
    (tmp_path / "models.json").write_text(json.dumps({"small": {"path": str(model.path)}}))
    argv = ["divergence", "small", "--suite", "s", "-o", str(tmp_path), "--rows", "3"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    assert "silent: no answer has a token to compare, so it is left out" in shown.err
    assert shown.out.startswith("answered: 4bit against fp16: 4 tokens in 2 instances") and "silent" not in shown.out
    assert "  3 tokens, exact" in shown.out
    compared["answered"] = compared["silent"]
    assert cli.main(argv) == 2 and "no answer of small in " in capsys.readouterr().err
