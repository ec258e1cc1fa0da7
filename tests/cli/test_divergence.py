"""`flexgen-helm divergence` on tiny models."""

from __future__ import annotations

import json

import pytest

from flexgen_helm import Engine, GenerationRequest, cli
from flexgen_helm.engine.exchange import Exchange
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.ranks import Rank

TEXT = "the quick brown fox jumps over the lazy dog, and runs. " * 20


def command(model, tmp_path, *more):
    (tmp_path / "text").write_text(TEXT)
    return ["divergence", str(model.path), "--text", str(tmp_path / "text"), "--window", "40", *more]


def test_precisions_against_fp16_on_one_text(tiny, tmp_path, capsys):
    model = tiny("llama")
    argv = command(model, tmp_path, "--precision", "8bit,fp16,4bit", "--rows", "50", "--json")
    assert cli.main(argv) == 0
    by_precision = {each["precision"]: each for each in json.loads(capsys.readouterr().out)["precisions"]}
    assert [*by_precision] == ["8bit", "4bit"]
    for precision, found in by_precision.items():
        plain = ["perplexity", *argv[1:6], "--json", "--precision"]
        for name, key in (("fp16", "baseline_perplexity"), (precision, "perplexity")):
            assert cli.main([*plain, name]) == 0
            expected = json.loads(capsys.readouterr().out)
            assert found[key] == pytest.approx(expected["perplexity"], rel=1e-6)
            assert found["tokens"] == expected["tokens_scored"]
        assert found["kl"]["tokens"] == 50 and 0 < found["bound_share"] < 1
        assert found["interval"][0] < found["ratio"] < found["interval"][1]
    assert 0 < by_precision["8bit"]["kl"]["mean"] < by_precision["4bit"]["kl"]["mean"] / 20
    assert by_precision["8bit"]["same_top"] > by_precision["4bit"]["same_top"]


def test_for_people_and_with_weights_from_the_disk(tiny, tmp_path, capsys):
    folder = tmp_path / "offloaded"
    argv = command(
        tiny("opt"), tmp_path, "--max-windows", "3", "--offload-dir", str(folder), "--policy", "2x1,0,0,0,100,0,100"
    )
    assert cli.main(argv) == 0
    first, perplexity, top, head, exact, least, share = capsys.readouterr().out.splitlines()
    assert first == "4bit against fp16: 117 tokens in 3 windows"
    assert perplexity.startswith("  perplexity ") and top.startswith("  same top token at ")
    assert head.split()[3:] == ["mean", "95", "%", "interval", "median", "99", "%", "largest"]
    assert exact.startswith("  117 tokens, exact") and least.startswith("  all tokens, at least")
    assert len({*map(len, (head, exact, least))}) == 1 and share.startswith("  the lower bound is ")
    assert not [*folder.glob("tmp*")]  # the rows are gone


def test_other_ranks_keep_their_logits(tiny, monkeypatch):
    monkeypatch.setattr(Exchange, "is_whole", False)
    with Engine.from_pretrained(tiny("llama").path) as engine:
        engine._exchange.rank = Rank(0, 2, 0, 2)
        with pytest.raises(UsageError, match="the model is on 2 ranks; take one process"):
            engine.run([GenerationRequest(prompt_token_ids=[5, 6])], on_logits=lambda tokens, logits: None)
        engine._exchange.rank = Rank(0, 1, 0, 1)
        monkeypatch.undo()
