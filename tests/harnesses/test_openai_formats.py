"""OpenAI's bodies, against bodies written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flexgen_helm.errors import ContextLengthError, NumericalError, RequestError
from flexgen_helm.harnesses.openai_formats import (
    ApiError,
    EncodedPrompt,
    error_body,
    error_status,
    parse_body,
    to_body,
    to_requests,
)
from flexgen_helm.request import Completion, Cost, GenerationRequest, GenerationResult
from flexgen_helm.service.models import PromptEncoder
from flexgen_helm.service.service import KeyedRequest
from flexgen_helm.tokenizer.chat import ChatFormat, ChatOptions
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.chat_models import add_template

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def tokenizer(tiny, tmp_path_factory):
    folder = add_template(tiny("llama").path, tmp_path_factory.mktemp("formats") / "model")
    return Tokenizer.from_path(folder)


def requests(tokenizer, url, body, unseeded="x"):
    chat = ChatFormat(tokenizer, False, "", ChatOptions())
    encoded = to_requests(parse_body(url, body), PromptEncoder(tokenizer), chat, 96, unseeded)
    return [prompt.request.request for prompt in encoded]


def test_a_body_becomes_requests(tokenizer):
    quick, fox = (tuple(tokenizer.encode(text)) for text in ("the quick", "fox"))
    body = dict(
        model="m", prompt="the quick", max_tokens=4, temperature=0.5, top_p=0.9, n=2, seed=-3, stop=".", echo=True,
        logprobs=0, user="me", stream=False, suffix=None, best_of=2, logit_bias={}, frequency_penalty=0.0,
    )  # fmt: skip
    assert requests(tokenizer, TEXT, body) == [
        GenerationRequest(
            prompt_token_ids=quick, max_tokens=4, temperature=0.5, top_p=0.9, n=2, seed=-3, stop=(".",),
            echo_logprobs=True,
        )
    ]  # fmt: skip
    greedy = dict(temperature=0)
    assert requests(tokenizer, TEXT, {"prompt": [5, 6], **greedy}) == [GenerationRequest(prompt_token_ids=(5, 6))]
    assert [r.prompt_token_ids for r in requests(tokenizer, TEXT, {"prompt": ["the quick", "fox"]})] == [quick, fox]
    assert [r.prompt_token_ids for r in requests(tokenizer, TEXT, {"prompt": [[5], [6, 7]]})] == [(5,), (6, 7)]
    assert requests(tokenizer, TEXT, {"prompt": "fox", "echo": True})[0].echo_logprobs is False
    stops = tuple("abcdefg")  # lm-evaluation-harness sends all that a task has, and EOS
    assert requests(tokenizer, TEXT, {"prompt": "fox", "stop": [*stops]})[0].stop == stops
    (chat,) = requests(tokenizer, CHAT, {"messages": MESSAGES, "max_completion_tokens": 3, **greedy})
    rendered = tuple(tokenizer.encode("[user] the quick\n[assistant] "))
    assert chat.prompt_token_ids == rendered and chat.max_tokens == 3
    (open_end,) = requests(tokenizer, CHAT, {"messages": MESSAGES})
    assert open_end.max_tokens == 96 - len(rendered) and open_end.temperature == 1.0


def test_draws_depend_on_the_seed_or_on_the_line():
    class Ids:
        tokenizer = type("T", (), {"decode": staticmethod(lambda ids: "")})

    def seeds(unseeded, **body):
        asked = parse_body(TEXT, {"prompt": [[5], [5]], **body})
        return [prompt.request.request.seed for prompt in to_requests(asked, Ids, None, 96, unseeded)]

    assert seeds("a") == seeds("a") and len({*seeds("a"), *seeds("b")}) == 4
    assert seeds("a", seed=-1) == seeds("a") != seeds("a", seed=-2)
    assert seeds("a", seed=7) == seeds("b", seed=7) == [7, 7]
    assert seeds("a", temperature=0) == seeds("b", temperature=0, seed=7) == [0, 0]  # so that equal ones are joined


RESULT = GenerationResult(
    (Completion(" fox.", (" fox", "."), (7, 8), (-0.5, -0.25), "stop"), Completion("", (), (), (), "endoftext")),
    (0, 5, 6),
    (None, -1.0, -2.0),
    cost=Cost(prompt_tokens=3, output_tokens=4),
)


class Words:
    """A tokenizer of five tokens, of which two are halves of a character."""

    words = {5: b"the", 6: b" quick", 7: b" fox", 8: b".", 1: b"\xc3", 2: b"\xbc"}

    def token_bytes(self, token):
        return self.words[token]

    def token_texts(self, ids):
        return [self.words[token].decode() for token in ids]


def body_of(url, result=RESULT, prompts=1, ids=(5, 6), tokenizer=None, **fields):
    asked = parse_body(url, {"messages" if url == CHAT else "prompt": MESSAGES if url == CHAT else "x", **fields})
    request = GenerationRequest(prompt_token_ids=(0, 5, 6))
    prompt = EncodedPrompt("the quick", ids, KeyedRequest(request, "key"))
    tokenizer = tokenizer or Words()
    return to_body(asked, [prompt] * prompts, [result] * prompts, tokenizer, {"id": "1", "created": 9, "model": "m"})


def test_results_become_the_body_of_a_completion():
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 9, "model": "m"}
    plain = [
        {"index": 0, "text": " fox.", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]
    assert body_of(TEXT, n=2) == {**head, "choices": plain, "usage": usage}
    twice = body_of(TEXT, prompts=2, n=2)
    assert [choice["index"] for choice in twice["choices"]] == [0, 1, 2, 3] and twice["usage"]["total_tokens"] == 14
    echoed = body_of(TEXT, n=2, echo=True, logprobs=0)["choices"][0]
    assert echoed == {
        "index": 0,
        "text": "the quick fox.",
        "logprobs": {
            "tokens": ["the", " quick", " fox", "."],
            "token_logprobs": [-1.0, -2.0, -0.5, -0.25],  # the first has BOS before it
            "top_logprobs": [{"the": -1.0}, {" quick": -2.0}, {" fox": -0.5}, {".": -0.25}],
            "text_offset": [0, 3, 9, 13],
        },
        "finish_reason": "stop",
    }
    halves = Completion("ü.", ("bytes:\\xc3", "bytes:\\xbc", "."), (1, 2, 8), (-1.0, -1.0, -1.0), "length")
    (cut,) = body_of(TEXT, GenerationResult((halves,), (5,)), logprobs=1, temperature=0)["choices"]
    assert cut["logprobs"]["text_offset"] == [0, 0, 1] and cut["finish_reason"] == "length"


def test_results_become_the_body_of_a_chat():
    first, second = RESULT.completions
    tops = replace(first, top_logprobs=(((7, -0.5), (5, -1.5)), ((8, -0.25), (6, -2.5))))
    body = body_of(CHAT, replace(RESULT, completions=(tops, second)), logprobs=True, top_logprobs=2, n=2)
    seconds = [
        {"token": "the", "logprob": -1.5, "bytes": [*b"the"]},
        {"token": " quick", "logprob": -2.5, "bytes": [*b" quick"]},
    ]
    fox = {"token": " fox", "logprob": -0.5, "bytes": [32, 102, 111, 120]}
    dot = {"token": ".", "logprob": -0.25, "bytes": [46]}
    assert body["id"] == "chatcmpl-1" and body["object"] == "chat.completion"
    assert body["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": " fox.", "refusal": None},
        "logprobs": {
            "content": [{**fox, "top_logprobs": [fox, seconds[0]]}, {**dot, "top_logprobs": [dot, seconds[1]]}]
        },
        "finish_reason": "stop",
    }
    assert body["choices"][1]["logprobs"] == {"content": []}
    assert body_of(CHAT)["choices"][0]["logprobs"] is None
    assert body_of(CHAT, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_alternatives_are_given_by_text_and_the_token_itself_is_always_among_them():
    tops = (None, ((6, -0.125), (5, -1.0)), ((7, -1.0), (8, -1.5)))
    result = replace(RESULT, prompt_token_ids=(5, 5, 6), prompt_top_logprobs=tops)
    drawn = replace(RESULT.completions[0], top_logprobs=(((7, -0.5), (5, -1.5)), ((5, -0.125), (6, -2.5))))
    body = body_of(TEXT, replace(result, completions=(drawn,)), ids=(5, 5, 6), echo=True, logprobs=2, max_tokens=2)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [
        None,
        {" quick": -0.125, "the": -1.0},
        {" fox": -1.0, ".": -1.5, " quick": -2.0},  # of the prompt
        {" fox": -0.5, "the": -1.5},
        {"the": -0.125, " quick": -2.5, ".": -0.25},  # drawn
    ]


def test_tokens_with_one_text_give_the_most_probable_ones_score():
    tops = (((7, -0.125), (8, -0.25)), ((8, -0.25), (7, -0.5)))

    class OneText(Words):
        words = {5: b"the", 6: b" quick", 7: b"x", 8: b"x"}

    drawn = Completion("xx", ("x", "x"), (8, 8), (-0.25, -0.25), "stop", tops)
    body = body_of(TEXT, replace(RESULT, completions=(drawn,)), tokenizer=OneText(), logprobs=2, max_tokens=2)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.125}, {"x": -0.25}]


def test_values_by_which_clients_say_none_are_none(tokenizer):
    none = {
        "seed": -1, "n": None, "stop": [], "logit_bias": {}, "logprobs": False, "top_k": -1, "min_tokens": 0,
        "tools": [], "tool_choice": "auto", "metadata": {}, "store": False, "suffix": "",
        "response_format": {"type": "text"}, "skip_special_tokens": True, "priority": 0, "verbosity": "medium",
        "return_token_ids": False, "safety_identifier": "someone", "prompt_cache_key": "k",
    }  # fmt: skip
    of_chats = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
    for url, body, also in (
        (TEXT, {"prompt": "fox"}, {"add_special_tokens": True}),
        (CHAT, {"messages": MESSAGES}, {**of_chats, "echo": False, "best_of": 1}),
    ):
        plain = requests(tokenizer, url, body)
        assert requests(tokenizer, url, body | none | also) == plain
        (unlimited,) = requests(tokenizer, url, body | {"max_tokens": -1})
        assert unlimited.max_tokens == 96 - len(unlimited.prompt_token_ids)
    neutral = {"type": "text", "annotations": [], "refusal": None, "tool_calls": None, "reasoning_content": ""}
    assert requests(tokenizer, CHAT, {"messages": [MESSAGES[0] | neutral]}) == plain


@pytest.mark.parametrize(
    "url, body, why",
    [
        ("/v1/embeddings", {}, "url is '/v1/embeddings'"),
        (TEXT, [], "body is []"),
        (TEXT, {}, "prompt is None"),
        (TEXT, {"prompt": []}, "prompt is []"),
        (TEXT, {"prompt": [True]}, "prompt is"),
        (TEXT, {"prompt": ["x"] * 10_001}, "up to 10,000"),
        (TEXT, {"prompt": "x", "max_tokenz": 1}, "by /v1/completions; did you mean max_tokens? known are model"),
        (TEXT, {"prompt": "x", "\ud800": 1}, "'\\ud800' is not supported"),
        (TEXT, {"prompt": "x", "n": 10**30}, "n is 1000"),
        (TEXT, {"prompt": "x", "n": True}, "n is True"),
        (TEXT, {"prompt": "x", "max_tokens": "4"}, "max_tokens is '4'"),
        (TEXT, {"prompt": "x", "temperature": math.nan}, "temperature is nan"),
        (TEXT, {"prompt": "x", "top_p": 1.5}, "top_p is 1.5"),
        (TEXT, {"prompt": "x", "seed": 2**64}, "seed is"),
        (TEXT, {"prompt": "x", "stop": [""]}, "stop is"),
        (TEXT, {"prompt": "x", "echo": 1}, "echo is 1"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs is True"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        (TEXT, {"prompt": "x", "best_of": 3}, "best_of is 3"),
        (TEXT, {"prompt": "x", "presence_penalty": 0.5}, "presence_penalty is 0.5"),
        (CHAT, {"prompt": "x"}, "'prompt' is not supported by /v1/chat/completions"),
        (CHAT, {"messages": []}, "messages is []"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0 has no content"),
        (CHAT, {"messages": [{**MESSAGES[0], "tool_calls": [{}]}]}, "messages.0 has 'tool_calls'"),
        (CHAT, {"messages": [{**MESSAGES[0], "type": "image"}]}, "messages.0 has 'type'"),
        (TEXT, {"prompt": "x", "max_tokens": -2}, "max_tokens is -2"),
        (TEXT, {"prompt": "x", "min_tokens": False}, "min_tokens is False"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs needs logprobs"),
        (CHAT, {"messages": MESSAGES, "tools": [{}]}, "tools is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(url, body, why):
    with pytest.raises(ApiError) as refused:
        parse_body(url, body)
    message = error_body(refused.value)["error"]["message"]
    assert why in message and len(message) < 400 and "\n" not in message
    message.encode()  # whatever the body had


@pytest.mark.parametrize(
    "body, code",  # https://platform.openai.com/docs/guides/error-codes, as its API answers
    [
        ({"max_tokenz": 1}, "unknown_parameter"),
        ({"suffix": "y"}, "unsupported_value"),
        ({"add_special_tokens": False}, "unsupported_value"),
        ({"safety_identifier": 5}, "unsupported_value"),
        ({"prompt": None}, "missing_required_parameter"),
        ({"n": "2"}, "invalid_type"),
        ({"n": 0}, "integer_below_min_value"),
        ({"logprobs": 21}, "integer_above_max_value"),
        ({"temperature": 2.5}, "decimal_above_max_value"),
        ({"top_p": -1}, "decimal_below_min_value"),
        ({"stop": [""]}, "invalid_value"),
    ],
)
def test_refusals_have_the_codes_of_openai(body, code):
    with pytest.raises(ApiError) as refused:
        parse_body(TEXT, {"prompt": "x", **body})
    assert (refused.value.code, refused.value.param) == (code, next(iter(body)))


def test_texts_that_cannot_be_encoded_are_refused(tokenizer):
    for url, body in [
        (TEXT, {"prompt": "\ud800"}),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
        (CHAT, {"messages": [{"role": 5, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (TEXT, {"prompt": "x", "top_p": 0}),
    ]:
        with pytest.raises(RequestError):
            requests(tokenizer, url, body)


def test_errors_have_the_form_of_openai():
    assert error_body(ApiError("no", "n", "c")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert error_body(ContextLengthError("long"))["error"]["code"] == "context_length_exceeded"
    assert error_body(OSError("disk"))["error"]["type"] == "server_error"
    assert [error_status(e) for e in (ApiError("", status=404), NumericalError(""), OSError())] == [404, 400, 500]
