"""Chats and thinking through a real engine."""

import math

import pytest

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.errors import UsageError
from tests.helpers.chat_models import add_template

CHAT = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A tiny model whose tokenizer has a template."""
    return add_template(tiny("llama").path, tmp_path_factory.mktemp("chat") / "model")


def test_a_template_that_is_missing_is_refused_before_weights_are_loaded(tiny):
    with pytest.raises(UsageError, match="has no chat template"):
        Engine.from_pretrained(tiny("llama").path, apply_chat_template=True)


@pytest.mark.parametrize("temperature, n", [(0.0, 1), (1.0, 3)])
def test_a_budget_ends_thinking_with_the_models_own_probabilities(tiny, folder, temperature, n):
    request = GenerationRequest(
        messages=CHAT,
        max_tokens=40,
        temperature=temperature,
        n=n,
        ignore_eos=True,
        stop=("\n</think>",),
    )
    options = {"chat_template_kwargs": {"think": True}}
    with Engine.from_pretrained(folder, thinking_budget=3, **options) as engine:
        end = engine.tokenizer.encode("\n</think>\n\n")
        (result,) = engine.run([request])
    with Engine.from_pretrained(folder, **options) as engine:
        (free,) = engine.run([request])
    assert len({c.token_ids for c in result.completions}) == n
    for completion, unlimited in zip(result.completions, free.completions):
        ids = list(completion.token_ids)
        assert ids[:3] == list(unlimited.token_ids[:3])
        assert ids[3 : 3 + len(end)] == end != list(unlimited.token_ids[3 : 3 + len(end)])
        assert len(ids) == 40 and completion.finish_reason == "length"
        logprobs = tiny("llama").logprobs([*result.prompt_token_ids, *ids])
        for step, token in enumerate(ids):
            want = logprobs[len(result.prompt_token_ids) - 1 + step, token].item()
            assert math.isclose(completion.logprobs[step], want, abs_tol=1e-3)
