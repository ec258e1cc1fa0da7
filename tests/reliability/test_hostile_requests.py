"""Requests that no test of quality would send: random bytes, no Unicode, endless prompts, counts
and stop lists.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.errors import RequestError
from tests.helpers.hostile import contained
from tests.helpers.tiny_models import VOCABULARY

GOOD = GenerationRequest(prompt="the quick fox", max_tokens=3, echo_logprobs=True)


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine.from_pretrained(tiny("llama").path) as engine:
        engine.run([GOOD])
        yield engine


def run_beside_a_good_one(engine: Engine, *requests: GenerationRequest) -> list[Any]:
    """Results of the requests; the good one beside them must get its answer."""
    with contained() as caught:
        *results, good = engine.run([*requests, GOOD])
    assert not caught, caught
    assert good.error is None and len(good.completions[0].token_ids) == 3
    return results


BYTES = random.Random(1).randbytes(60)
TEXTS = {
    "bytes": BYTES.decode("latin-1"),
    "zero bytes": "\0" * 60,
    "right to left": "\u202e" * 15,
    "private use": "\ue000\uf8ff\U0010ffff",
    "a special token's text": "<|endoftext|><|pad|>",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_text_is_a_prompt(engine, text):
    (result,) = run_beside_a_good_one(
        engine, GenerationRequest(prompt=text, max_tokens=2, echo_logprobs=True)
    )
    assert isinstance(result.error, (RequestError, type(None)))
    if result.error is not None:
        assert "window" in str(result.error)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "lone surrogate": ({"prompt": "ab\ud800"}, "not valid Unicode"),
    "surrogate to stop at": ({"prompt": "a", "stop": ["\ud800"]}, "not valid Unicode"),
    "100,000 tokens of text": ({"prompt": "fox " * 100_000}, "beyond the model's window"),
    "100,000 ids": ({"prompt_token_ids": [5] * 100_000}, "beyond the model's window"),
    "2^62 to generate": ({"prompt": "a", "max_tokens": 2**62}, "beyond the model's window"),
    "10^9 completions": ({"prompt": "a", "n": 10**9}, "at most"),
    "id outside": ({"prompt_token_ids": [VOCABULARY]}, "outside the vocabulary"),
    "negative id": ({"prompt_token_ids": [-1]}, "outside the vocabulary"),
    "id is a text": ({"prompt_token_ids": ["a"]}, "no token id"),
    "ids are a text": ({"prompt_token_ids": "78"}, ""),
    "ids are floats": ({"prompt_token_ids": np.array([7.0, 8.0])}, ""),
    "ids are an iterator": ({"prompt_token_ids": iter([7])}, "a list of token ids"),
    "ids are nested": ({"prompt_token_ids": [[7, 8]]}, ""),
    "prompt and ids": ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
    "nothing to be drawn from": ({"prompt": "a", "top_p": 0.0}, "top_p"),
    "no completion": ({"prompt": "a", "n": 0}, "n"),
    "less than no token": ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    "stop is an array": ({"prompt": "a", "stop": np.array(["b", "c"])}, ""),
    "stop is an iterator": ({"prompt": "a", "stop": iter("bc")}, ""),
    "messages without a template": (
        {"messages": [{"role": "user", "content": "a"}]},
        "no chat template",
    ),
    "temperature is no number": ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    "empty stop string": ({"prompt": "a", "stop": [""]}, "non-empty"),
    "stop is a number": ({"prompt": "a", "stop": [3]}, "non-empty"),
    "messages without a role": ({"messages": [{}]}, "no role"),
    "messages of pictures": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ""),
    "nothing at all": ({}, "exactly one"),
}


@pytest.mark.parametrize("given_, message", REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_served_fails_alone(engine, given_, message):
    (result,) = run_beside_a_good_one(engine, GenerationRequest(**given_))
    assert isinstance(result.error, RequestError) and message in str(result.error)


def test_ten_thousand_stop_strings(engine):
    """Each may begin anywhere in the newest text; the last one of them is met."""
    asked = GenerationRequest(
        prompt="the fox", max_tokens=30, ignore_eos=True, temperature=9.0, seed=1
    )
    (plain,) = run_beside_a_good_one(engine, asked)
    met = next(character for character in plain.completions[0].text[3:] if character.isalnum())
    stops = [f"never {i} " * 5 for i in range(10_000)] + [met]
    (result,) = run_beside_a_good_one(engine, replace(asked, stop=stops))
    assert result.completions[0].finish_reason == "stop" and met not in result.completions[0].text


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
    st.lists(st.integers(), max_size=3), st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
fields = st.fixed_dictionaries(
    {"prompt_token_ids": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)},
    optional={
        name: anything
        for name in (
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "stop",
            "n",
            "echo_logprobs",
            "ignore_eos",
        )
    },
)


@settings(max_examples=60)
@given(fields)
def test_any_value_in_any_field_fails_alone_or_works(engine, values):
    (result,) = run_beside_a_good_one(engine, GenerationRequest(**values))
    assert result.error is None or isinstance(result.error, RequestError)
