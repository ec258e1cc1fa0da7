"""HELM requests to the engine's and results to HELM's: every field honoured or refused, as HELM's metrics read them."""

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

PLAIN = Request(model="flexgen/x", model_deployment="flexgen/x", prompt="Is 2 even?", temperature=0, max_tokens=8)
SCORE = replace(PLAIN, echo_prompt=True, max_tokens=0)


def encoder(tokenizer=None):
    return PromptEncoder(tokenizer or FakeTokenizer())


def prepared(request, tokenizer=None):
    own = encoder(tokenizer)
    return to_generation_request(request, own, MAX_POSITIONS, chat_format(own.tokenizer, ChatOptions(), "x", False))


def result(request, tokenizer=None):
    engine_request = prepared(request, tokenizer)
    return to_request_result(request, engine_request, answer(engine_request.request), False, encoder(tokenizer))


# The engine's requests


def test_top_k_per_token_does_not_restrict_sampling():
    warm = replace(PLAIN, temperature=1.0, top_p=0.9)
    assert prepared(warm) == prepared(replace(warm, top_k_per_token=5))
    assert prepared(warm).request.top_p == 0.9
    assert prepared(warm).request.temperature == 1.0


@pytest.mark.parametrize(
    "change, says",
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "", "multimodal_prompt": MultimediaObject([MediaObject("text/plain", "a")])}, "multimodal_prompt"),
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
    [(True, "Is 2 even?", 0), (False, "é☃", 3), (True, "\x01Is 2 even?", 3), (True, "", 0), (False, "", 3)],
)
def test_echo_returns_exactly_the_prompts_own_tokens(adds_bos, prompt, max_tokens):
    tokenizer = FakeTokenizer(adds_bos)
    request = replace(SCORE, prompt=prompt, max_tokens=max_tokens)
    engine_request = prepared(request, tokenizer)
    ids = list(engine_request.request.prompt_token_ids or ())
    plain = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids == ([tokenizer.bos_id] if adds_bos and not prompt.startswith("\x01") else []) + plain
    output = result(request, tokenizer).completions[0]
    assert [token.text for token in output.tokens[: len(plain)]] == tokenizer.token_texts(plain)
    assert len(output.tokens) == len(plain) + max_tokens
    assert output.text.startswith(prompt)
    if plain:
        conditioned = len(ids) > len(plain)
        assert (output.tokens[0].logprob == 0.0) != conditioned
        assert all(token.logprob < 0 for token in output.tokens[1:])


@pytest.mark.parametrize("slack, context", [(0, 0), (1, 1)])
def test_a_full_window_leaves_no_room_for_bos(slack, context):
    tokenizer = FakeTokenizer(adds_bos=True)
    request = replace(SCORE, prompt="a" * (MAX_POSITIONS + 1 - slack))
    assert len(prepared(request, tokenizer).request.prompt_token_ids or ()) == len(request.prompt) + context
    assert result(request, tokenizer).success


def test_a_score_that_is_incomplete_is_never_returned():
    short = replace(answer(prepared(SCORE).request), prompt_logprobs=(None, -1.0))
    with pytest.raises(RequestError, match="were to be scored"):
        to_request_result(SCORE, prepared(SCORE), short, False, encoder())


CHAT = replace(PLAIN, prompt="", messages=[{"role": "user", "content": "a" * MAX_POSITIONS}])


@pytest.mark.parametrize(
    "request_, fatal",
    [
        (replace(PLAIN, prompt="a" * (MAX_POSITIONS + 2)), True),
        (replace(SCORE, prompt="a" * (MAX_POSITIONS + 2)), True),
        (replace(PLAIN, prompt=POISON), True),
        (CHAT, False),  # HELM fits no chats, and an empty answer is judged by its text alone
        (replace(CHAT, messages=[{"role": "user", "content": POISON}]), True),
    ],
)
def test_errors_always_say_whether_they_are_fatal_and_are_never_retried(request_, fatal):
    got = result(request_, FakeTokenizer(chat_template="yes"))
    assert not got.success and got.error and not got.completions
    assert got.error_flags is not None
    assert (got.error_flags.is_retriable, got.error_flags.is_fatal) == (False, fatal)


# Chat templates


def rendered(request, chat_template="yes", **options):
    """As `prepared`, by a format that applies."""
    own = encoder(FakeTokenizer(chat_template=chat_template))
    return to_generation_request(
        request, own, MAX_POSITIONS, chat_format(own.tokenizer, ChatOptions("auto", **options), "x", False)
    )


def text_of(prepared):
    return "".join(map(chr, prepared.request.prompt_token_ids or ()))


def test_plain_prompts_that_generate_are_a_users_turn_and_no_others():
    assert text_of(rendered(PLAIN)) == "<user>Is 2 even?<assistant>"
    untouched = [
        SCORE,
        replace(SCORE, max_tokens=3),
        replace(PLAIN, max_tokens=0),
        PlainTextRequest(**vars(PLAIN)),
        TokenRequest(**vars(PLAIN), prompt_token_ids=(7, 8)),
    ]
    for request in untouched:
        assert rendered(request) == prepared(request)  # key and all
    assert rendered(PLAIN, chat_template=None) == prepared(PLAIN)


def test_keys_tell_settings_of_the_template_apart():
    settings = [
        {}, {"system_prompt": "s"}, {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 2}},
    ]  # fmt: skip
    keys = [prepared(PLAIN).key, *(rendered(PLAIN, **options).key for options in settings)]
    assert len(set(keys)) == len(keys)
    # The ids alone do not decide: another template may lead to the same ones.
    spelt = prepared(replace(PLAIN, prompt=text_of(rendered(PLAIN))))
    assert spelt.request == rendered(PLAIN).request and spelt.key != rendered(PLAIN).key
    assert rendered(PLAIN).key == rendered(PLAIN).key


@pytest.mark.parametrize("prompt_tokens", [MAX_POSITIONS - 5, MAX_POSITIONS])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_what_the_window_leaves_is_generated(prompt_tokens, adds_bos):
    tokenizer = FakeTokenizer(adds_bos)
    length = prompt_tokens - adds_bos
    clipped = prepared(replace(PLAIN, prompt="a" * length, max_tokens=MAX_POSITIONS), tokenizer)
    assert clipped.request.max_tokens == MAX_POSITIONS + 1 - prompt_tokens  # the last token is never fed
    assert clipped.is_clipped and len(clipped.request.prompt_token_ids or ()) == prompt_tokens
    fits = prepared(replace(PLAIN, prompt="a" * length, max_tokens=MAX_POSITIONS + 1 - prompt_tokens), tokenizer)
    assert fits.request == clipped.request and not fits.is_clipped
    for exact in (PlainTextRequest(**vars(PLAIN)), replace(SCORE)):  # neither may be shorter than it asks for
        kept = prepared(replace(exact, prompt="a" * length, max_tokens=MAX_POSITIONS), tokenizer)
        assert kept.request.max_tokens == MAX_POSITIONS and not kept.is_clipped
    full = prepared(replace(PLAIN, prompt="a" * (MAX_POSITIONS + 1)), tokenizer)
    assert full.request.max_tokens == PLAIN.max_tokens  # and refused by the engine


def test_thinking_is_no_part_of_the_answer():
    asked = rendered(PLAIN, chat_template="{{ '</think>' }}")
    assert asked.request.thinking == ThinkingFormat(False, None, tuple(map(ord, "\n</think>\n\n")))
    assert rendered(PLAIN).request.thinking is None  # no thinking model
    assert rendered(SCORE, chat_template="</think>").request.thinking is None

    def output(text):
        ids = tuple(map(ord, text))
        completion = Completion(text, tuple(text), ids, (-0.5,) * len(text), "length")
        answered = GenerationResult((completion,), asked.request.prompt_token_ids or ())
        return to_request_result(PLAIN, asked, answered, False, encoder()).completions[0]

    thought = output("<think>\nWhy.\n</think>\n\nYes.")
    assert (thought.text, thought.thinking.text, thought.logprob) == ("Yes.", "Why.", -2.0)
    assert [token.text for token in thought.tokens] == list("Yes.")
    unfinished = output("<think>\nWhy")
    assert (unfinished.text, unfinished.tokens, unfinished.thinking.text) == ("", [], "Why")
    assert unfinished.finish_reason == {"reason": "length"} and unfinished.logprob == 0.0
    assert output("Yes.").thinking is None
