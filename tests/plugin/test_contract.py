"""HELM's client contract through HELM's own classes: LocalContext, AutoClient, window services,
Executor, Runner.

The engine is real, the model tiny and random; log-probabilities are compared with `transformers`.
What both clients answer to whole benchmarks, calibrated choices and perturbed data included, is in
tests/e2e/test_helm_client.py.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helm.benchmark.metrics.basic_metrics import get_num_bytes
from helm.benchmark.window_services.tokenizer_service import TokenizerService
from helm.benchmark.window_services.window_service_factory import WindowServiceFactory
from helm.common.cache import Cache, SqliteCacheConfig
from helm.common.cache_backend_config import SqliteCacheBackendConfig
from helm.common.local_context import LocalContext
from helm.common.request import Request
from helm.proxy.retry import NonRetriableException

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.plugin.context import PluginContext, set_context
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

WINDOW = 400
MODEL = "flexgen/contract"
PROMPT = "the quick brown fox: é☃🦊 jumps\n\nover"


@dataclass(frozen=True)
class Model:
    """A checkpoint without a chat template, and its model of `transformers`."""

    folder: Path
    reference: Any
    tokenizer: Tokenizer

    @torch.no_grad()
    def prompt_logprobs(self, ids):
        """Log-probabilities of all tokens but the first."""
        logprobs = self.reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return [row[token].item() for row, token in zip(logprobs, ids[1:])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract") / "model"
    reference = save_random(folder, llama_config(max_position_embeddings=WINDOW), seed=3)
    save_tokenizer(folder)
    return Model(folder, reference, Tokenizer.from_path(folder))


@pytest.fixture(scope="module")
def helm(model, tmp_path_factory):
    """HELM's context, which knows the checkpoint by its name."""
    home = tmp_path_factory.mktemp("home")
    (home / "models.yaml").write_text(yaml.safe_dump({"contract": str(model.folder)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_HELM_HOME", str(home / "home"))
        patch.setenv("FLEXGEN_HELM_MODELS", str(home / "models.yaml"))
        previous = set_context(PluginContext())
        try:
            yield LocalContext(str(home / "prod_env"), SqliteCacheBackendConfig(str(home)))
        finally:
            set_context(previous).service.close()


def request(prompt=PROMPT, **changes):
    fields = dict(model=MODEL, model_deployment=MODEL, prompt=prompt, temperature=0.0, max_tokens=5)
    return Request(**{**fields, **changes})


def ask(helm, asked):
    result = helm.make_request(asked)
    assert result.success, result.error
    return result


# Every combination of echo, length, stop strings, completions and temperature

COMBINATIONS = [
    dict(
        echo_prompt=echo,
        max_tokens=most,
        stop_sequences=stops,
        num_completions=count,
        temperature=temperature,
    )
    for echo, most, stops, count, temperature in product(
        (False, True), (0, 1, 12), ([], ["\n"], ["e", "th", "\n\n", "absent"]), (1, 3), (0.0, 1.0)
    )
]


def test_every_combination_keeps_the_contract(helm, model):
    tokenizer = model.tokenizer
    prompt_ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    expected = model.prompt_logprobs(prompt_ids)
    requests = [request(**fields, random="7") for fields in COMBINATIONS]
    # as HELM's executor asks; together they are one batch
    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(lambda asked: ask(helm, asked), requests))
    reasons = set()
    for asked, result in zip(requests, results):
        json.dumps(asdict(result), allow_nan=False)
        assert len(result.completions) == asked.num_completions
        echoed = tokenizer.token_texts(prompt_ids) if asked.echo_prompt else []
        for completion in result.completions:
            texts, logprobs = (
                zip(*((t.text, t.logprob) for t in completion.tokens))
                if completion.tokens
                else ([], [])
            )
            own, reason = texts[len(echoed) :], completion.finish_reason["reason"]
            generated = completion.text[len(PROMPT) * asked.echo_prompt :]
            reasons.add(reason)
            assert [*texts[: len(echoed)]] == echoed
            assert not any(stop in generated for stop in asked.stop_sequences)
            assert (
                len(own) == asked.max_tokens if reason == "length" else len(own) <= asked.max_tokens
            )
            assert completion.logprob == pytest.approx(sum(logprobs))
            assert "".join(own) == generated or any(text.startswith("bytes:") for text in own)
            if echoed:
                assert [*logprobs[: len(echoed)]] == pytest.approx([0.0, *expected], abs=1e-4)
        if asked.temperature == 0.0:
            assert len({completion.text for completion in result.completions}) == 1
    assert reasons >= {"length", "stop"}


def test_tokens_that_are_no_whole_characters_count_their_bytes(helm):
    """HELM's bits per byte divide by these."""
    result = ask(helm, request(echo_prompt=True, max_tokens=0))
    tokens = result.completions[0].tokens
    assert any(token.text.startswith("bytes:") for token in tokens)
    assert get_num_bytes(tokens) == len(PROMPT.encode())


# Windows


def test_the_window_at_its_exact_limits(helm, model):
    """HELM fits prompts by the window service; what just fits is computed, and one token more is
    not.
    """
    window = WindowServiceFactory.get_window_service(MODEL, TokenizerService(helm))
    assert (window.max_sequence_length, window.max_request_length) == (WINDOW, WINDOW + 1)
    for expected in (0, 1, 7):
        cut = window.truncate_from_right("fox " * 2 * WINDOW, expected)
        ids = model.tokenizer.encode(cut, add_special_tokens=False)
        assert (
            window.fits_within_context_window(cut, expected) and len(ids) + expected == WINDOW + 1
        )
        assert not window.fits_within_context_window(cut + "f", expected)
        (completion,) = ask(helm, request(cut, max_tokens=expected, echo_prompt=True)).completions
        ended = completion.finish_reason == {"reason": "endoftext"}
        assert len(completion.tokens) == len(ids) + expected or ended
        over = helm.make_request(request(cut + "f", max_tokens=expected, echo_prompt=True))
        assert not over.success and "beyond the model's window" in str(over.error)


# Errors


def test_what_cannot_be_served_is_never_retried(helm, monkeypatch):
    monkeypatch.setattr(
        "time.sleep", lambda seconds: pytest.fail(f"HELM retries after {seconds} s")
    )
    with pytest.raises(NonRetriableException, match="not valid Unicode"):
        helm.make_request(request("ab\ud800"))


# Caching, executor, runner


def test_an_answer_is_computed_once_and_again_where_anything_differs(helm):
    asked = request("cached once", temperature=1.0, random="a")
    first, again = ask(helm, asked), ask(helm, asked)
    assert (first.cached, again.cached, first.completions) == (False, True, again.completions)
    for changes in (
        {"random": "b"},
        {"temperature": 0.9},
        {"top_p": 0.9},
        {"max_tokens": 6},
        {"stop_sequences": ["z"]},
    ):
        assert not ask(helm, replace(asked, **changes)).cached, changes


def test_helms_own_cache_is_not_used(helm, tmp_path):
    """It is pickled. HELM makes its file where a client or tokenizer of ours would take the cache
    that it is given.
    """
    own = LocalContext(str(tmp_path / "prod_env"), SqliteCacheBackendConfig(str(tmp_path)))
    ask(own, request("not in a pickle"))
    window = WindowServiceFactory.get_window_service(MODEL, TokenizerService(own))
    assert window.encode(PROMPT).tokens
    assert list(tmp_path.rglob("*.sqlite")) == []
    Cache(SqliteCacheConfig(str(tmp_path / "flexgen.sqlite"))).get({"key": 1}, dict)
    assert list(tmp_path.rglob("*.sqlite")) != []
