"""OpenAI's completions and chat completions: a body becomes requests of ours, and their results a body. No torch.

    parse_body(url, body)                    check every field; what is not known is refused by name
    to_requests(asked, encoder, chat, …)     prompts and messages as token ids, one request for each prompt
    to_body(asked, prompts, results, …)      choices with text or message, log-probabilities, usage

What makes an answer random is in the request alone: `seed`, or where it is left out a text that the caller gives.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.files import question
from flexgen_helm.request import (
    MAX_COMPLETIONS,
    MAX_TOP_LOGPROBS,
    Completion,
    GenerationRequest,
    GenerationResult,
    TopLogprobs,
)
from flexgen_helm.service.service import KeyedRequest, request_key

if TYPE_CHECKING:
    from flexgen_helm.service.prompt_encoder import PromptEncoder
    from flexgen_helm.tokenizer.chat import ChatFormat
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

Json = dict[str, Any]
Endpoint = Literal["completions", "chat"]
ENDPOINTS: Mapping[str, Endpoint] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
# More than any evaluation sends in one line; each is a request.
MAX_PROMPTS = 10_000


class ApiError(RequestError):
    """A request in OpenAI's format cannot be served; its answer has the error in OpenAI's form.

    Next: Change the field that the message names.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def error_status(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, ApiError):
        return error.status
    return 400 if isinstance(error, RequestError | UsageError) else 500


def error_body(error: Exception) -> Json:
    """Return the body of a response that is an error."""
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    kind = "invalid_request_error" if error_status(error) < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A checked body.

    prompts: texts or token ids; of a chat its messages alone.
    max_tokens: None for all that the window has room for.
    logprobs: how many of the most probable tokens are wanted at each place; None without log-probabilities.
    seed: None where the body has none.
    """

    endpoint: Endpoint
    model: str | None
    prompts: tuple[Any, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    n: int
    seed: int | None
    stop: tuple[str, ...]
    echo: bool
    logprobs: int | None
    ignore_eos: bool


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as it is computed.

    text: what `echo` gives back. ids: its tokens without the BOS that was put in front.
    """

    text: str
    ids: tuple[int, ...]
    request: KeyedRequest


# From body to requests


def parse_json(content: bytes, what: str, encoding: str | None = None) -> Any:
    """Return what JSON says.

    what: names it in messages. encoding: None where its first bytes tell.
    Raises `ApiError` for what is no JSON, and for NaN and infinities.
    """
    try:
        text = content if encoding is None else content.decode(encoding)
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"{what} is not JSON: {why}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def parse_body(url: str, body: Any) -> Asked:
    """Return a checked body. Raises `ApiError` with one sentence that names the field."""
    endpoint = ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is None:
        raise ApiError(f"url is {_short(url)}; it must be {' or '.join(ENDPOINTS)}", "url")
    if not isinstance(body, dict):
        raise ApiError(f"body is {_short(body)}; it must be an object", "body")
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = endpoint == "chat"
    known = {**_FIELDS, **(_CHAT_FIELDS if is_chat else _TEXT_FIELDS)}
    for name, value in given.items():
        if name in known:
            known[name](name, value)
        elif name not in _NEUTRAL:
            meant = question(name, known)
            raise ApiError(f"{_short(name)} is not supported by {url}; {meant}known are {', '.join(known)}", name[:60])
        elif not any(value == neutral and type(value) is not bool or value is neutral for neutral in _NEUTRAL[name]):
            raise ApiError(f"{name} is {_short(value)}, which is not supported; leave it out", name)
    temperature = float(given.get("temperature", 1.0))
    n, echo = given.get("n", 1), given.get("echo", False)
    if given.get("best_of", n) != n:
        raise ApiError(f"best_of is {given['best_of']}, which is not supported beyond n; leave it out", "best_of")
    alternatives = given.get("top_logprobs" if is_chat else "logprobs", 0)
    if alternatives and not given.get("logprobs"):
        raise ApiError("top_logprobs needs logprobs", "top_logprobs")
    if is_chat:
        prompts: tuple[Any, ...] = (_messages(given),)
    else:
        prompts = _prompts(given.get("prompt"))
    default = None if is_chat else COMPLETION_TOKENS
    return Asked(
        endpoint,
        given.get("model"),
        prompts,
        given.get("max_completion_tokens", given.get("max_tokens", default)),
        temperature,
        float(given.get("top_p", 1.0)),
        n,
        given.get("seed"),
        _stops(given.get("stop", ())),
        echo,
        None if given.get("logprobs", False) is False else alternatives,
        given.get("ignore_eos", False),
    )


def to_requests(
    asked: Asked, encoder: PromptEncoder, chat: ChatFormat | None, max_positions: int, unseeded: str
) -> list[EncodedPrompt]:
    """Return the prompts of a body, encoded.

    chat: renders messages; needed for a chat only. unseeded: what random draws depend on where no seed is given.
    Raises `RequestError` for a text that cannot be encoded, and messages that the template refuses.
    """
    encoded = []
    for place, prompt in enumerate(asked.prompts):
        thinking = None
        if asked.endpoint == "chat":
            assert chat is not None
            text = chat.render_messages(prompt)
            ids, thinking = encoder.encode(text), chat.thinking(text)
            fed = (*encoder.context_tokens(ids), *ids)
        elif isinstance(prompt, str):
            text, ids = prompt, encoder.encode(prompt)
            fed = (*encoder.context_tokens(ids), *ids)
        else:
            text, ids = encoder.tokenizer.decode(prompt), prompt
            fed = ids
        max_tokens = max(1, max_positions - len(fed)) if asked.max_tokens is None else asked.max_tokens
        request = GenerationRequest(
            prompt_token_ids=fed,
            max_tokens=max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=_seed(asked, f"{unseeded}/{place}"),
            stop=asked.stop,
            n=asked.n,
            echo_logprobs=asked.echo and asked.logprobs is not None,
            ignore_eos=asked.ignore_eos,
            thinking=thinking,
            top_logprobs=asked.logprobs or 0,
        )
        request.validate()
        identity = chat.identity if thinking is not None and chat is not None else None
        encoded.append(EncodedPrompt(text, ids, KeyedRequest(request, request_key(request, identity))))
    return encoded


def _seed(asked: Asked, unseeded: str) -> int:
    if not asked.temperature:
        return 0
    if asked.seed is not None:
        return asked.seed
    return int.from_bytes(hashlib.sha256(unseeded.encode("utf-8", "surrogatepass")).digest()[:4], "big")


# From results to body


def to_body(
    asked: Asked,
    prompts: Sequence[EncodedPrompt],
    results: Sequence[GenerationResult],
    tokenizer: Tokenizer,
    *,
    model: str,
    identity: str,
    created: int,
) -> Json:
    """Return the body of a successful response.

    results: of the prompts, in order. model: the name that is given back. identity: ends the body's `id`.
    """
    is_chat = asked.endpoint == "chat"
    choices: list[Json] = []
    for prompt, result in zip(prompts, results, strict=True):
        for completion in result.completions:
            choice = _message(asked, completion, tokenizer) if is_chat else _text(asked, prompt, result, completion,
                                                                                 tokenizer)  # fmt: skip
            finish_reason = "length" if completion.finish_reason == "length" else "stop"
            choices.append({"index": len(choices), **choice, "finish_reason": finish_reason})
    prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    completion_tokens = sum(result.cost.output_tokens for result in results)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{identity}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _message(asked: Asked, completion: Completion, tokenizer: Tokenizer) -> Json:
    logprobs = None
    if asked.logprobs is not None:
        tokens = [*zip(completion.tokens, completion.token_ids, completion.logprobs)]
        tops = completion.top_logprobs or [()] * len(tokens)
        logprobs = {
            "content": [
                {
                    **_token(text, token, logprob, tokenizer),
                    "top_logprobs": [
                        _token(_text_of(other, tokenizer), other, value, tokenizer) for other, value in top
                    ],
                }
                for (text, token, logprob), top in zip(tokens, tops, strict=True)
            ]
        }
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    return {"message": message, "logprobs": logprobs}


def _token(text: str, token: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}


def _text_of(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_texts((token,))[0]


def _text(
    asked: Asked, prompt: EncodedPrompt, result: GenerationResult, completion: Completion, tokenizer: Tokenizer
) -> Json:
    text = prompt.text + completion.text if asked.echo else completion.text
    if asked.logprobs is None:
        return {"text": text, "logprobs": None}
    ids, tokens = [*completion.token_ids], [*completion.tokens]
    scores: list[float | None] = [*completion.logprobs]
    tops: list[TopLogprobs | None] = [*(completion.top_logprobs or [()] * len(ids))]
    if asked.echo:
        length = len(prompt.ids)
        ids, tokens = [*prompt.ids, *ids], [*tokenizer.token_texts(prompt.ids), *tokens]
        first = len(result.prompt_token_ids) - length
        scores = [*(result.prompt_logprobs or ())[first:], *scores]
        tops = [*(result.prompt_top_logprobs or [()] * (first + length))[first:], *tops]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": scores,
        "top_logprobs": [
            None if score is None else _top(text, score, top or (), tokenizer)
            for text, score, top in zip(tokens, scores, tops, strict=True)
        ],
        "text_offset": _offsets(ids, tokenizer),
    }
    return {"text": text, "logprobs": logprobs}


def _top(text: str, logprob: float, top: TopLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Return log-probabilities by text, of the token itself too; of tokens with one text the most probable one's."""
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(_text_of(token, tokenizer), value)
    found.setdefault(text, logprob)
    return found


def to_events(asked: Asked, body: Json, with_usage: bool) -> list[Json]:
    """Return the events of a stream that sends a body in one piece; with_usage: and its usage in a last one."""
    is_chat = asked.endpoint == "chat"
    common = {name: body[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    common |= {"usage": None} if with_usage else {}
    events = []
    for choice in body["choices"]:
        if is_chat:
            message = {name: value for name, value in choice["message"].items() if value is not None}
            choice = {name: value for name, value in choice.items() if name != "message"} | {"delta": message}
        events.append({**common, "choices": [choice]})
    return [*events, {**common, "choices": [], "usage": body["usage"]}] if with_usage else events


def _offsets(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return where in the text each token begins; one that continues a character begins where that does."""
    decoder, offsets, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in ids:
        offsets.append(length)
        length += len(decoder.decode(tokenizer.token_bytes(token)))
    return offsets


# Fields


def _short(value: Any) -> str:
    return repr(value)[:60].encode("ascii", "backslashreplace").decode()


def _whole(low: int, high: float = math.inf) -> Callable[[str, Any], None]:
    bounds = f"{low} or more" if high == math.inf else f"from {low:,} to {high:,}"

    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ApiError(f"{name} is {_short(value)}; it must be a whole number, {bounds}", name)

    return check


def _number(low: float, high: float) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high:
            raise ApiError(f"{name} is {_short(value)}; it must be a number from {low:g} to {high:g}", name)

    return check


def _flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ApiError(f"{name} is {_short(value)}; it must be true or false", name)


def _string(name: str, value: Any) -> None:
    if type(value) is not str:
        raise ApiError(f"{name} is {_short(value)}; it must be a string", name)


def _anything(name: str, value: Any) -> None:
    """Leave the check to what takes the field."""


# Whatever a deployment asks of the engine; seeds of OpenAI are 64-bit numbers.
_FIELDS: Mapping[str, Callable[[str, Any], None]] = {
    "model": _string,
    "max_tokens": _whole(0),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "n": _whole(1, MAX_COMPLETIONS),
    "seed": _whole(-(2**63), 2**63 - 1),
    "stop": _anything,
    "user": _string,
    "ignore_eos": _flag,
}
_TEXT_FIELDS: Mapping[str, Callable[[str, Any], None]] = {
    "prompt": _anything,
    "echo": _flag,
    "logprobs": _whole(0, MAX_TOP_LOGPROBS),
    "best_of": _whole(1),
}
_CHAT_FIELDS: Mapping[str, Callable[[str, Any], None]] = {
    "messages": _anything,
    "max_completion_tokens": _whole(0),
    "logprobs": _flag,
    "top_logprobs": _whole(0, MAX_TOP_LOGPROBS),
}
# What changes nothing at these values, and is refused at others.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "top_k": (-1, 0),
    "min_p": (0,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(f"stop is {_short(stop)}; it must be a text or a list of texts", "stop")
    return tuple(stops)


def _prompts(prompt: Any) -> tuple[Any, ...]:
    """Return texts and ids of a prompt: a text, a list of ids, or a list of texts or of lists of ids."""
    wrong = ApiError(
        f"prompt is {_short(prompt)}; it must be a text, a list of token ids, or a list of up to {MAX_PROMPTS:,} such",
        "prompt",
    )
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise wrong
    if all(type(token) is int for token in prompt):
        return (tuple(prompt),)
    prompts = [tuple(part) if isinstance(part, list) else part for part in prompt]
    for part in prompts:
        is_ids = isinstance(part, tuple) and part and all(type(token) is int for token in part)
        if not isinstance(part, str) and not is_ids:
            raise wrong
    if len(prompts) > MAX_PROMPTS:
        raise wrong
    return tuple(prompts)


def _messages(given: Mapping[str, Any]) -> list[Json]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(f"messages is {_short(messages)}; it must be a list of at least one message", "messages")
    cleaned = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ApiError(f"messages.{place} is {_short(message)}; it must be an object", "messages")
        message = {name: value for name, value in message.items() if value is not None}
        if unknown := sorted(set(message) - {"role", "content", "name"}):
            raise ApiError(f"messages.{place} has {_short(unknown[0])}, which is not supported", "messages")
        if "content" not in message:
            raise ApiError(f"messages.{place} has no content", "messages")
        cleaned.append(message)
    return cleaned
