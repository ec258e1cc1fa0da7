"""HELM requests to the engine's and results to HELM's: every field honoured or refused, as HELM's
metrics read them.
"""

from dataclasses import replace

import pytest
from helm.common.media_object import MediaObject, MultimediaObject
from helm.common.request import Request
from helm.common.response_format import ResponseFormat
from helm.proxy.retry import NonRetriableException

from flexgen_helm.errors import RequestError
from flexgen_helm.plugin.convert import (
    PlainTextRequest,
    TokenRequest,
    to_generation_request,
    to_request_result,
)
from flexgen_helm.request import Completion, GenerationResult, ThinkingFormat
from flexgen_helm.service.models import PromptEncoder
from flexgen_helm.tokenizer.chat import ChatOptions, chat_format
from tests.helpers.fake_engine import MAX_POSITIONS, POISON, FakeTokenizer, answer

PLAIN = Request(
    model="flexgen/x",
    model_deployment="flexgen/x",
    prompt="Is 2 even?",
    temperature=0,
    max_tokens=8,
)
SCORE = replace(PLAIN, echo_prompt=True, max_tokens=0)


def prepared(request, tokenizer=None, choice=None, **options):
    encoder = PromptEncoder(tokenizer or FakeTokenizer())
    chat = chat_format(encoder.tokenizer, ChatOptions(choice, **options), "x", False)
    return to_generation_request(request, encoder, MAX_POSITIONS, chat)


def rendered(request, chat_template="yes", **options):
    """As `prepared`, by a format that applies."""
    return prepared(request, FakeTokenizer(chat_template=chat_template), "auto", **options)


def converted(request, asked, answered, tokenizer=None):
    return to_request_result(
        request, asked, answered, False, PromptEncoder(tokenizer or FakeTokenizer())
    )


def result(request, tokenizer=None):
    asked = prepared(request, tokenizer)
    return converted(request, asked, answer(asked.request), tokenizer)


def ids_of(asked):
    return list(asked.request.prompt_token_ids)


# The engine's requests


def test_top_k_per_token_does_not_restrict_sampling():
    warm = prepared(replace(PLAIN, temperature=1.0, top_p=0.9))
    assert warm == prepared(replace(PLAIN, temperature=1.0, top_p=0.9, top_k_per_token=5))
    assert (warm.request.top_p, warm.request.temperature) == (0.9, 1.0)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        (
            {"prompt": "", "multimodal_prompt": MultimediaObject([MediaObject("text/plain", "a")])},
            "multimodal_prompt",
        ),
        ({"response_format": ResponseFormat(json_schema={})}, "response_format"),
        ({"prompt": "", "messages": [{"role": "user", "content": "Hi"}]}, "no chat template"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "Exactly one of"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"num_completions": 0}, "num_completions is 0"),
        ({"num_completions": 10**9, "temperature": 1.0}, "n is 1000000000"),
        ({"stop_sequences": [""]}, "stop string"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change, says):
    with pytest.raises(NonRetriableException, match=says):
        prepared(replace(PLAIN, **change))


# HELM's results


@pytest.mark.parametrize(
    "adds_bos, prompt, max_tokens",
    [
        (True, "Is 2 even?", 0),
        (False, "é☃", 3),
        (True, "\x01Is 2 even?", 3),
        (True, "", 0),
        (False, "", 3),
    ],
)
def test_echo_returns_exactly_the_prompts_own_tokens(adds_bos, prompt, max_tokens):
    tokenizer = FakeTokenizer(adds_bos)
    request = replace(SCORE, prompt=prompt, max_tokens=max_tokens)
    plain, ids = (
        tokenizer.encode(prompt, add_special_tokens=False),
        ids_of(prepared(request, tokenizer)),
    )
    assert ids == [tokenizer.bos_id] * (adds_bos and not prompt.startswith("\x01")) + plain
    output = result(request, tokenizer).completions[0]
    assert [token.text for token in output.tokens[: len(plain)]] == tokenizer.token_texts(plain)
    assert len(output.tokens) == len(plain) + max_tokens
    assert output.text.startswith(prompt)
    if plain:
        # else BOS conditions it
        assert (output.tokens[0].logprob == 0.0) == (len(ids) == len(plain))
        assert all(token.logprob < 0 for token in output.tokens[1:])


@pytest.mark.parametrize("slack", [0, 1])
def test_a_full_window_leaves_no_room_for_bos(slack):
    tokenizer = FakeTokenizer(adds_bos=True)
    request = replace(SCORE, prompt="a" * (MAX_POSITIONS + 1 - slack))
    assert len(ids_of(prepared(request, tokenizer))) == len(request.prompt) + slack
    assert result(request, tokenizer).success


def test_a_score_that_is_incomplete_is_never_returned():
    short = replace(answer(prepared(SCORE).request), prompt_logprobs=(None, -1.0))
    with pytest.raises(RequestError, match="were to be scored"):
        converted(SCORE, prepared(SCORE), short)


CHAT = replace(PLAIN, prompt="", messages=[{"role": "user", "content": "a" * MAX_POSITIONS}])


LONG = "a" * (MAX_POSITIONS + 2)


@pytest.mark.parametrize(
    "request_, fatal",
    [
        (replace(PLAIN, prompt=LONG), True),
        (replace(SCORE, prompt=LONG), True),
        (replace(PLAIN, prompt=POISON), True),
        (CHAT, False),  # HELM fits no chats, and an empty answer is judged by its text alone
        (replace(CHAT, messages=[{"role": "user", "content": POISON}]), True),
    ],
)
def test_errors_always_say_whether_they_are_fatal_and_are_never_retried(request_, fatal):
    got = result(request_, FakeTokenizer(chat_template="yes"))
    assert not got.success and got.error and not got.completions
    assert (got.error_flags.is_retriable, got.error_flags.is_fatal) == (False, fatal)


# Chat templates


def text_of(asked):
    return "".join(map(chr, ids_of(asked)))


def test_plain_prompts_that_generate_are_a_users_turn_and_no_others():
    assert text_of(rendered(PLAIN)) == "<user>Is 2 even?<assistant>"
    for untouched in (
        SCORE,
        replace(SCORE, max_tokens=3),
        replace(PLAIN, max_tokens=0),
        PlainTextRequest(**vars(PLAIN)),
        TokenRequest(**vars(PLAIN), prompt_token_ids=(7, 8)),
    ):
        assert rendered(untouched) == prepared(untouched)  # key and all
    assert rendered(PLAIN, chat_template=None) == prepared(PLAIN)


def test_keys_tell_settings_of_the_template_apart():
    settings = [
        {},
        {"system_prompt": "s"},
        *({"chat_template_kwargs": {"a": value}} for value in (1, 2)),
    ]
    keys = [prepared(PLAIN).key, *(rendered(PLAIN, **options).key for options in settings)]
    assert len(set(keys)) == len(keys)
    # The ids alone do not decide: another template may lead to the same ones.
    spelt, again = prepared(replace(PLAIN, prompt=text_of(rendered(PLAIN)))), rendered(PLAIN)
    assert spelt.request == again.request and spelt.key != again.key == rendered(PLAIN).key


@pytest.mark.parametrize("prompt_tokens", [MAX_POSITIONS - 5, MAX_POSITIONS])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_what_the_window_leaves_is_generated(prompt_tokens, adds_bos):
    # the last token is never fed
    tokenizer, room = FakeTokenizer(adds_bos), MAX_POSITIONS + 1 - prompt_tokens
    plain = replace(PLAIN, prompt="a" * (prompt_tokens - adds_bos), max_tokens=MAX_POSITIONS)
    clipped, fits = prepared(plain, tokenizer), prepared(replace(plain, max_tokens=room), tokenizer)
    assert clipped.is_clipped and not fits.is_clipped
    assert clipped.request == fits.request and clipped.request.max_tokens == room
    assert len(ids_of(clipped)) == prompt_tokens
    # no shorter than asked for
    for exact in (PlainTextRequest(**vars(plain)), replace(plain, echo_prompt=True)):
        kept = prepared(exact, tokenizer)
        assert kept.request.max_tokens == MAX_POSITIONS and not kept.is_clipped
    full = prepared(replace(PLAIN, prompt="a" * (MAX_POSITIONS + 1)), tokenizer)
    assert full.request.max_tokens == PLAIN.max_tokens  # and refused by the engine


def test_thinking_is_no_part_of_the_answer():
    asked = rendered(PLAIN, chat_template="{{ '</think>' }}")
    assert asked.request.thinking == ThinkingFormat(False, None, tuple(map(ord, "\n</think>\n\n")))
    assert rendered(PLAIN).request.thinking is None  # no thinking model
    assert rendered(SCORE, chat_template="</think>").request.thinking is None

    def output(text):
        completion = Completion(
            text, tuple(text), tuple(map(ord, text)), (-0.5,) * len(text), "length"
        )
        answered = GenerationResult((completion,), asked.request.prompt_token_ids)
        return converted(PLAIN, asked, answered).completions[0]

    thought, unfinished = output("<think>\nWhy.\n</think>\n\nYes."), output("<think>\nWhy")
    assert (thought.text, thought.thinking.text, thought.logprob) == ("Yes.", "Why.", -2.0)
    assert [token.text for token in thought.tokens] == list("Yes.")
    assert (unfinished.text, unfinished.tokens, unfinished.thinking.text) == ("", [], "Why")
    assert (unfinished.finish_reason, unfinished.logprob) == ({"reason": "length"}, 0.0)
    assert output("Yes.").thinking is None
