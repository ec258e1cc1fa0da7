"""`perplexity` on tiny models."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from flexgen_helm import cli
from flexgen_helm.cli.perplexity import measure, windows
from flexgen_helm.engine.engine import Engine
from flexgen_helm.request import GenerationResult


@pytest.mark.parametrize("window, max_windows", [(16, 2), (7, None), (96, None)])
def test_perplexity_equals_transformers(tiny, tmp_path, capsys, window, max_windows):
    model = tiny("llama")
    text = "the quick brown fox jumps over the lazy dog. question: answer: it was\n" * 3
    (tmp_path / "text").write_text(text)
    argv = ["perplexity", str(model.path), "--text", str(tmp_path / "text"), "--window", str(window), "--json"]
    assert cli.main(argv + (["--max-windows", str(max_windows)] if max_windows else [])) == 0
    found = json.loads(capsys.readouterr().out)
    with Engine.from_pretrained(model.path) as engine:
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
    scores = []
    for row in [ids[i : i + window] for i in range(0, len(ids), window)][:max_windows]:
        logprobs = model.logprobs(row)
        scores += [logprobs[i, row[i + 1]].item() for i in range(len(row) - 1)]
    assert found["tokens_scored"] == len(scores)
    assert found["nll"] == pytest.approx(-sum(scores), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-4)


def test_the_last_window_is_kept_if_it_has_a_token_to_score():
    assert windows(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    assert windows(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert windows([0], 3) == windows([], 3) == []


@pytest.mark.parametrize(
    "content, window, why", [(b"", 8, "fewer than 2"), (b"the fox", 97, "96"), (b"\xff", 8, "UTF-8")]
)
def test_perplexity_of_what_cannot_be_scored_is_refused(tiny, tmp_path, capsys, content, window, why):
    (tmp_path / "text").write_bytes(content)
    argv = ["perplexity", str(tiny("llama").path), "--text", str(tmp_path / "text"), "--window", str(window)]
    assert cli.main(argv) == 2
    assert why in capsys.readouterr().err


def test_a_perplexity_that_no_float_holds_is_infinite():
    result = GenerationResult(prompt_logprobs=(None, -1e4))
    tokenizer = SimpleNamespace(encode=lambda text, **options: [1, 2])
    config = SimpleNamespace(max_positions=2)
    engine = SimpleNamespace(tokenizer=tokenizer, config=config, run=lambda requests: [result])
    assert measure(engine, "a b", 2) == {"tokens_scored": 1, "nll": 1e4, "perplexity": math.inf}
