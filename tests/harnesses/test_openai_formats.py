"""OpenAI's bodies, against bodies written by hand."""

import math
from dataclasses import replace

import pytest
import yaml

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
from flexgen_helm.service.models import ModelArguments, ModelFacts, ModelReader
from flexgen_helm.service.service import KeyedRequest
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.chat_models import add_template
from tests.helpers.paths import ROOT

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def tokenizer(tiny, tmp_path_factory):
    folder = add_template(tiny("llama").path, tmp_path_factory.mktemp("formats") / "model")
    return Tokenizer.from_path(folder)


def requests(tokenizer, url, body, seed_text="x"):
    facts = ModelFacts("m", max_positions=96, num_parameters=0, instruct=False)
    reader = ModelReader("tests", lambda model: tokenizer, lambda model: facts)
    encoded = to_requests(parse_body(url, body), reader, ModelArguments("m", "m"), seed_text)
    return [prompt.request.request for prompt in encoded]


def ids_of(tokenizer, url, **body):
    return [request.prompt_token_ids for request in requests(tokenizer, url, body)]


def test_a_body_becomes_requests(tokenizer):
    quick, fox = (tuple(tokenizer.encode(text)) for text in ("the quick", "fox"))
    kept = dict(max_tokens=4, temperature=0.5, top_p=0.9, n=2, seed=-3)
    ignored = dict(
        model="m",
        user="me",
        stream=False,
        suffix=None,
        best_of=2,
        logit_bias={},
        frequency_penalty=0.0,
    )
    body = {"prompt": "the quick", "stop": ".", "echo": True, "logprobs": 0, **kept, **ignored}
    expected = GenerationRequest(prompt_token_ids=quick, stop=(".",), echo_logprobs=True, **kept)
    assert requests(tokenizer, TEXT, body) == [expected]
    greedy = requests(tokenizer, TEXT, {"prompt": [5, 6], "temperature": 0})
    assert greedy == [GenerationRequest(prompt_token_ids=(5, 6))]
    assert ids_of(tokenizer, TEXT, prompt=["the quick", "fox"]) == [quick, fox]
    assert ids_of(tokenizer, TEXT, prompt=[[5], [6, 7]]) == [(5,), (6, 7)]
    stops = "abcdefg"  # lm-evaluation-harness sends all that a task has, and EOS
    (plain,) = requests(tokenizer, TEXT, {"prompt": "fox", "echo": True, "stop": [*stops]})
    assert (plain.echo_logprobs, plain.stop) == (False, tuple(stops))
    rendered = tuple(tokenizer.encode("[user] the quick\n[assistant] "))
    (chat,) = requests(
        tokenizer, CHAT, {"messages": MESSAGES, "max_completion_tokens": 3, "temperature": 0}
    )
    assert (chat.prompt_token_ids, chat.max_tokens) == (rendered, 3)
    (open_end,) = requests(tokenizer, CHAT, {"messages": MESSAGES})
    assert (open_end.max_tokens, open_end.temperature) == (96 - len(rendered), 1.0)


def test_draws_depend_on_the_seed_or_on_the_line(tokenizer):
    def seeds(unseeded, **body):
        return [
            request.seed
            for request in requests(tokenizer, TEXT, {"prompt": [[5], [5]], **body}, unseeded)
        ]

    assert seeds("a") == seeds("a") and len({*seeds("a"), *seeds("b")}) == 4
    assert seeds("a", seed=-1) == seeds("a") != seeds("a", seed=-2)
    assert seeds("a", seed=7) == seeds("b", seed=7) == [7, 7]
    # so that equal ones are joined
    assert seeds("a", temperature=0) == seeds("b", temperature=0, seed=7) == [0, 0]


RESULT = GenerationResult(
    (
        Completion(" fox.", (" fox", "."), (7, 8), (-0.5, -0.25), "stop"),
        Completion("", (), (), (), "endoftext"),
    ),
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
    asked = parse_body(
        url, {"messages" if url == CHAT else "prompt": MESSAGES if url == CHAT else "x", **fields}
    )
    request = GenerationRequest(prompt_token_ids=(0, 5, 6))
    prompt = EncodedPrompt("the quick", ids, KeyedRequest(request, "key"))
    tokenizer = tokenizer or Words()
    return to_body(
        asked,
        [prompt] * prompts,
        [result] * prompts,
        tokenizer,
        {"id": "1", "created": 9, "model": "m"},
    )


def choice(index, text, logprobs=None):
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": "stop"}


def test_results_become_the_body_of_a_completion():
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 9, "model": "m"}
    assert body_of(TEXT, n=2) == {
        **head,
        "choices": [choice(0, " fox."), choice(1, "")],
        "usage": usage,
    }
    twice = body_of(TEXT, prompts=2, n=2)
    assert [choice["index"] for choice in twice["choices"]] == [0, 1, 2, 3] and twice["usage"][
        "total_tokens"
    ] == 14
    scores = [-1.0, -2.0, -0.5, -0.25]  # the first has BOS before it
    words = ["the", " quick", " fox", "."]
    tops = [{word: score} for word, score in zip(words, scores)]
    logprobs = {
        "tokens": words,
        "token_logprobs": scores,
        "top_logprobs": tops,
        "text_offset": [0, 3, 9, 13],
    }
    assert body_of(TEXT, n=2, echo=True, logprobs=0)["choices"][0] == choice(
        0, "the quick fox.", logprobs
    )
    halves = Completion(
        "ü.", ("bytes:\\xc3", "bytes:\\xbc", "."), (1, 2, 8), (-1.0, -1.0, -1.0), "length"
    )
    (cut,) = body_of(TEXT, GenerationResult((halves,), (5,)), logprobs=1, temperature=0)["choices"]
    assert cut["logprobs"]["text_offset"] == [0, 0, 1] and cut["finish_reason"] == "length"


def entry(token, logprob, *tops):
    found = {"token": token, "logprob": logprob, "bytes": [*token.encode()]}
    return {**found, "top_logprobs": [found, *tops]} if tops else found


def test_results_become_the_body_of_a_chat():
    first, second = RESULT.completions
    tops = replace(first, top_logprobs=(((7, -0.5), (5, -1.5)), ((8, -0.25), (6, -2.5))))
    body = body_of(
        CHAT, replace(RESULT, completions=(tops, second)), logprobs=True, top_logprobs=2, n=2
    )
    content = [entry(" fox", -0.5, entry("the", -1.5)), entry(".", -0.25, entry(" quick", -2.5))]
    assert (body["id"], body["object"]) == ("chatcmpl-1", "chat.completion")
    message = {"role": "assistant", "content": " fox.", "refusal": None}
    expected = {
        "index": 0,
        "message": message,
        "logprobs": {"content": content},
        "finish_reason": "stop",
    }
    assert body["choices"][0] == expected
    assert body["choices"][1]["logprobs"] == {"content": []}
    assert body_of(CHAT)["choices"][0]["logprobs"] is None
    assert (
        body_of(CHAT, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )


def test_alternatives_are_given_by_text_and_the_token_itself_is_always_among_them():
    tops = (None, ((6, -0.125), (5, -1.0)), ((7, -1.0), (8, -1.5)))
    result = replace(RESULT, prompt_token_ids=(5, 5, 6), prompt_top_logprobs=tops)
    drawn = replace(
        RESULT.completions[0], top_logprobs=(((7, -0.5), (5, -1.5)), ((5, -0.125), (6, -2.5)))
    )
    body = body_of(
        TEXT,
        replace(result, completions=(drawn,)),
        ids=(5, 5, 6),
        echo=True,
        logprobs=2,
        max_tokens=2,
    )
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
    body = body_of(
        TEXT, replace(RESULT, completions=(drawn,)), tokenizer=OneText(), logprobs=2, max_tokens=2
    )
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.125}, {"x": -0.25}]


def test_values_by_which_clients_say_none_are_none(tokenizer):
    none = {
        "seed": -1, "n": None, "stop": [], "logit_bias": {}, "logprobs": False, "top_k": -1,
        "min_tokens": 0, "tools": [], "tool_choice": "auto", "metadata": {}, "store": False,
        "suffix": "", "response_format": {"type": "text"}, "skip_special_tokens": True,
        "priority": 0, "verbosity": "medium", "return_token_ids": False,
        "safety_identifier": "someone", "prompt_cache_key": "k",
    }  # fmt: skip
    of_chats = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
    }
    for url, body, also in (
        (TEXT, {"prompt": "fox"}, {"add_special_tokens": True}),
        (CHAT, {"messages": MESSAGES}, {**of_chats, "echo": False, "best_of": 1}),
    ):
        plain = requests(tokenizer, url, body)
        assert requests(tokenizer, url, body | none | also) == plain
        (unlimited,) = requests(tokenizer, url, body | {"max_tokens": -1})
        assert unlimited.max_tokens == 96 - len(unlimited.prompt_token_ids)
    neutral = {
        "type": "text",
        "annotations": [],
        "refusal": None,
        "tool_calls": None,
        "reasoning_content": "",
    }
    assert requests(tokenizer, CHAT, {"messages": [MESSAGES[0] | neutral]}) == plain


BASE = {TEXT: {"prompt": "x"}, CHAT: {"messages": MESSAGES}}
WRITTEN = yaml.safe_load((ROOT / "tests" / "data" / "openai_refused.yaml").read_text())
REFUSED = [(url, BASE[url] | body, why) for url, rows in WRITTEN.items() for body, why in rows]
REFUSED += [
    (TEXT, {"prompt": ["x"] * 10_001}, "up to 10,000"),
    (TEXT, {"prompt": "x", "\ud800": 1}, "'\\ud800' is not supported"),
    (TEXT, {"prompt": "x", "temperature": math.nan}, "temperature is nan"),
    (TEXT, [], "body is []"),
    ("/v1/embeddings", {}, "url is '/v1/embeddings'"),
]


@pytest.mark.parametrize("url, body, why", REFUSED)
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


@pytest.mark.parametrize(
    "url, body",
    [
        (TEXT, {"prompt": "\ud800"}),
        (TEXT, {"prompt": "x", "top_p": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
        (CHAT, {"messages": [{"role": 5, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
)
def test_texts_that_cannot_be_encoded_are_refused(tokenizer, url, body):
    with pytest.raises(RequestError):
        requests(tokenizer, url, body)


def test_errors_have_the_form_of_openai():
    assert error_body(ApiError("no", "n", "c")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert error_body(ContextLengthError("long"))["error"]["code"] == "context_length_exceeded"
    assert error_body(OSError("disk"))["error"]["type"] == "server_error"
    assert [error_status(e) for e in (ApiError("", status=404), NumericalError(""), OSError())] == [
        404,
        400,
        500,
    ]
