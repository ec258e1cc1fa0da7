"""OpenAI's completions and chat completions: a body becomes requests of ours, and their results a
body. No torch.

    parse_body(url, body)                    check every field; what is not known is refused by name
    to_requests(parsed, reader, model, …)    prompts and messages as ids, one request a prompt
    to_body(parsed, prompts, results, …)     choices with text or message, log-probabilities, usage

What makes an answer random is in the request alone: `seed`, or where it is left out a text that the
caller gives.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.request import (
    MAX_COMPLETIONS,
    MAX_TOP_LOGPROBS,
    Completion,
    GenerationRequest,
    GenerationResult,
    TopLogprobs,
)
from flexgen_helm.service.service import KeyedRequest, request_key
from flexgen_helm.suggestions import question

if TYPE_CHECKING:
    from flexgen_helm.service.models import ModelArguments, ModelReader
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

Json = dict[str, Any]
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
# More than any evaluation sends in one line; each is a request.
MAX_PROMPTS = 10_000


class ApiError(RequestError):
    """A request in OpenAI's format cannot be served; its answer has the error in OpenAI's form.

    Next: Change the field that the message names.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
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


_Values = Mapping[str, tuple[Any, ...]]
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]


class RequestBody(BaseModel):
    """A checked body; descriptions are what messages say of a field.

    max_tokens: None for all that the window has room for. seed: None where the body has none.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    model: str | None = Field(None, description="a string")
    max_tokens: int | None = Field(None, ge=0, description="a whole number, 0 or more")
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(1.0, ge=0, le=1, description="a number from 0 to 1")
    n: int = Field(
        1, ge=1, le=MAX_COMPLETIONS, description=f"a whole number, from 1 to {MAX_COMPLETIONS:,}"
    )
    # Seeds of OpenAI are 64-bit numbers.
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - 1,
        description=f"a whole number, from {-(2**63):,} to {2**63 - 1:,}",
    )
    stop: _Text | list[_Text] = Field([], description="a text or a list of texts")
    user: str | None = Field(None, description="a string")
    ignore_eos: bool = Field(False, description="true or false")
    stream: bool = Field(False, description="true or false")
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = Field(
        {}, description="an object with include_usage, true or false"
    )

    @property
    def prompts(self) -> Sequence[Any]:
        """Texts or token ids; of a chat its messages alone."""
        raise NotImplementedError

    @property
    def num_alternatives(self) -> int | None:
        """How many of the most probable tokens are wanted at each position; None without
        log-probabilities.
        """
        raise NotImplementedError


class CompletionBody(RequestBody):
    """A body of /v1/completions."""

    max_tokens: int | None = Field(COMPLETION_TOKENS, ge=0, description="a whole number, 0 or more")
    prompt: (
        str | _Ids | Annotated[list[str | _Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description=f"a text, a list of token ids, or a list of up to {MAX_PROMPTS:,} such")
    echo: bool = Field(False, description="true or false")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number, from 0 to {MAX_TOP_LOGPROBS}"
    )
    best_of: int | None = Field(None, ge=1, description="a whole number, 1 or more")

    @property
    def prompts(self) -> Sequence[Any]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return (self.prompt,) if is_one else self.prompt

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


class ChatBody(RequestBody):
    """A body of /v1/chat/completions."""

    messages: list[Json]
    max_completion_tokens: int | None = Field(None, ge=0, description="a whole number, 0 or more")
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number, from 0 to {MAX_TOP_LOGPROBS}"
    )

    @property
    def prompts(self) -> Sequence[Any]:
        return (self.messages,)

    @property
    def num_alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


ENDPOINTS: Mapping[str, type[CompletionBody | ChatBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}


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


def parse_body(url: str, body: Any, *, may_stream: bool = False) -> RequestBody:
    """Return a checked body. Raises `ApiError` with one sentence that names the field."""
    kind = ENDPOINTS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise ApiError(f"url is {_shown(url)}; it must be {' or '.join(ENDPOINTS)}", "url")
    if not isinstance(body, dict):
        raise ApiError(f"body is {_shown(body)}; it must be an object", "body")
    fields_given = {
        name: value
        for name, value in body.items()
        if value is not None and not _is_among(value, _LEFT_OUT.get(name))
    }
    if body.get("max_tokens") == -1:
        fields_given["max_tokens"] = None  # left out, it is 16 for a completion
    streaming = () if may_stream else ("stream", "stream_options")
    known = [name for name in kind.model_fields if name not in streaming]
    _drop_neutral(fields_given, known, {**_NEUTRAL, **_NEUTRAL_OF[url]}, url)
    if kind is ChatBody:
        fields_given["messages"] = _checked_messages(fields_given.get("messages"))
    try:
        parsed = kind.model_validate(fields_given)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        name, code = str(wrong[0]["loc"][0]), _CODES.get(wrong[-1]["type"], "invalid_type")
        if any(detail["type"] == "string_unicode" for detail in wrong):
            raise ApiError(f"{name} is not valid Unicode", name, "invalid_value") from None
        expected, shown = kind.model_fields[name].description, _shown(fields_given.get(name))
        if kind.model_fields[name].annotation is float:
            code = code.replace("integer", "decimal")
        raise ApiError(f"{name} is {shown}; it must be {expected}", name, code) from None
    if fields_given.get("best_of", parsed.n) != parsed.n:
        more = (
            f"best_of is {fields_given['best_of']}, and as many as n, {parsed.n}, are drawn; leave "
            "best_of out"
        )
        raise ApiError(more, "best_of", "unsupported_value")
    if fields_given.get("top_logprobs") and not fields_given.get("logprobs"):
        raise ApiError("top_logprobs needs logprobs", "top_logprobs", "invalid_value")
    return parsed


def _drop_neutral(fields_given: Json, known: Sequence[str], neutral: _Values, url: str) -> None:
    """Remove fields that change nothing. Raises `ApiError` for others that are not known."""
    for name in [name for name in fields_given if name not in known]:
        if name not in neutral and name not in _IDENTIFIERS:
            meant = f"{question(name, known)}known are {', '.join(known)}"
            text = f"{_shown(name)} is not supported by {url}; {meant}"
            raise ApiError(text, name[:60], "unknown_parameter")
        value = fields_given.pop(name)
        is_neutral = (
            isinstance(value, str) if name in _IDENTIFIERS else _is_among(value, neutral[name])
        )
        if not is_neutral:
            text = f"{name} is {_shown(value)}, which is not supported; leave it out"
            raise ApiError(text, name, "unsupported_value")


def to_requests(
    parsed: RequestBody, reader: ModelReader, model: ModelArguments, seed_text: str
) -> list[EncodedPrompt]:
    """Return the prompts of a body, encoded for a model.

    seed_text: what random draws depend on where no seed is given.
    Raises `RequestError` for a text that cannot be encoded, and messages that the template refuses.
    """
    encoded = []
    encoder, max_positions = reader.encoder(model), reader.facts(model).max_positions
    chat = reader.chat(model) if isinstance(parsed, ChatBody) else None
    max_tokens = parsed.max_completion_tokens if isinstance(parsed, ChatBody) else None
    max_tokens = parsed.max_tokens if max_tokens is None else max_tokens
    for index, prompt in enumerate(parsed.prompts):
        thinking = None
        if chat is not None:
            text = chat.render_messages(prompt)
            ids, thinking = encoder.encode(text), chat.thinking(text)
            fed = (*encoder.context_tokens(ids), *ids)
        elif isinstance(prompt, str):
            text, ids = prompt, encoder.encode(prompt)
            fed = (*encoder.context_tokens(ids), *ids)
        else:
            text, ids = encoder.tokenizer.decode(prompt), tuple(prompt)
            fed = ids
        request = GenerationRequest(
            prompt_token_ids=fed,
            max_tokens=max(1, max_positions - len(fed)) if max_tokens is None else max_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            seed=_seed(parsed, f"{seed_text}/{index}"),
            stop=(parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop),
            n=parsed.n,
            echo_logprobs=isinstance(parsed, CompletionBody)
            and parsed.echo
            and parsed.logprobs is not None,
            ignore_eos=parsed.ignore_eos,
            thinking=thinking,
            top_logprobs=parsed.num_alternatives or 0,
        )
        request.validate()
        identity = chat.identity if thinking is not None and chat is not None else None
        encoded.append(
            EncodedPrompt(text, ids, KeyedRequest(request, request_key(request, identity)))
        )
    return encoded


def _seed(parsed: RequestBody, seed_text: str) -> int:
    """Return the seed of a body, or what follows from `seed_text`; 0 where nothing is random."""
    if not parsed.temperature:
        return 0
    if parsed.seed is not None:
        return parsed.seed
    return int.from_bytes(
        hashlib.sha256(seed_text.encode("utf-8", "surrogatepass")).digest()[:4], "big"
    )


# From results to body


def to_body(
    parsed: RequestBody,
    prompts: Sequence[EncodedPrompt],
    results: Sequence[GenerationResult],
    tokenizer: Tokenizer,
    head: Json,
) -> Json:
    """Return the body of a successful response.

    results: of the prompts, in order. head: `id`, `created` and `model` as they are given back;
        `id` gets a prefix.
    """
    is_chat = isinstance(parsed, ChatBody)
    choices: list[Json] = []
    for prompt, result in zip(prompts, results, strict=True):
        for completion in result.completions:
            if isinstance(parsed, CompletionBody):
                choice = _completion_choice(parsed, prompt, result, completion, tokenizer)
            else:
                choice = _chat_choice(parsed, completion, tokenizer)
            finish_reason = "length" if completion.finish_reason == "length" else "stop"
            choices.append({"index": len(choices), **choice, "finish_reason": finish_reason})
    prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    completion_tokens = sum(result.cost.output_tokens for result in results)
    return {
        **head,
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{head['id']}",
        "object": "chat.completion" if is_chat else "text_completion",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _chat_choice(parsed: RequestBody, completion: Completion, tokenizer: Tokenizer) -> Json:
    """Return the message of a chat's choice, and its log-probabilities."""
    logprobs = None
    if parsed.num_alternatives is not None:
        tokens = [*zip(completion.tokens, completion.token_ids, completion.logprobs)]
        tops = completion.top_logprobs or [()] * len(tokens)
        logprobs = {
            "content": [
                {
                    **_token_entry(text, token, logprob, tokenizer),
                    "top_logprobs": [
                        _token_entry(_text_of(id_, tokenizer), id_, value, tokenizer)
                        for id_, value in top
                    ],
                }
                for (text, token, logprob), top in zip(tokens, tops, strict=True)
            ]
        }
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    return {"message": message, "logprobs": logprobs}


def _token_entry(text: str, token: int, logprob: float, tokenizer: Tokenizer) -> Json:
    """Return a token of a chat as the API has it."""
    # a stop string may have cut the last one
    is_whole = text == _text_of(token, tokenizer)
    shown = tokenizer.token_bytes(token) if is_whole else text.encode()
    return {"token": text, "logprob": logprob, "bytes": list(shown)}


def _text_of(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_texts((token,))[0]


def _completion_choice(
    parsed: CompletionBody,
    prompt: EncodedPrompt,
    result: GenerationResult,
    completion: Completion,
    tokenizer: Tokenizer,
) -> Json:
    """Return the text of a completion's choice, and its log-probabilities; with `echo` both of the
    prompt, too.
    """
    text = prompt.text + completion.text if parsed.echo else completion.text
    if parsed.num_alternatives is None:
        return {"text": text, "logprobs": None}
    ids, tokens = [*completion.token_ids], [*completion.tokens]
    scores: list[float | None] = [*completion.logprobs]
    tops: list[TopLogprobs | None] = [*(completion.top_logprobs or [()] * len(ids))]
    if parsed.echo:
        ids, tokens = [*prompt.ids, *ids], [*tokenizer.token_texts(prompt.ids), *tokens]
        first = len(result.prompt_token_ids) - len(prompt.ids)  # behind the BOS in front
        scores = [*(result.prompt_logprobs or ())[first:], *scores]
        tops = [*(result.prompt_top_logprobs or [()] * len(result.prompt_token_ids))[first:], *tops]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": scores,
        "top_logprobs": [
            None if score is None else _logprobs_by_text(text, score, top or (), tokenizer)
            for text, score, top in zip(tokens, scores, tops, strict=True)
        ],
        "text_offset": _offsets(ids, tokenizer),
    }
    return {"text": text, "logprobs": logprobs}


def _logprobs_by_text(
    text: str, logprob: float, top: TopLogprobs, tokenizer: Tokenizer
) -> dict[str, float]:
    """Return log-probabilities by text, of the token itself too; of tokens with one text the most
    probable one's.
    """
    logprobs: dict[str, float] = {}
    for token, value in top:
        logprobs.setdefault(_text_of(token, tokenizer), value)
    logprobs.setdefault(text, logprob)
    return logprobs


def to_events(parsed: RequestBody, body: Json) -> list[Json]:
    """Return the events of a stream that sends a body in one piece, and its usage in a last one
    where it is asked.
    """
    with_usage = parsed.stream_options.get("include_usage", False)
    is_chat = isinstance(parsed, ChatBody)
    common = {name: body[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    common |= {"usage": None} if with_usage else {}
    events = []
    for choice in body["choices"]:
        if is_chat:
            message = {
                name: value for name, value in choice["message"].items() if value is not None
            }
            choice = {name: value for name, value in choice.items() if name != "message"} | {
                "delta": message
            }
        events.append({**common, "choices": [choice]})
    return [*events, {**common, "choices": [], "usage": body["usage"]}] if with_usage else events


def _offsets(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return where in the text each token begins; one that continues a character begins where that
    does.
    """
    decoder, offsets, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in ids:
        offsets.append(length)
        length += len(decoder.decode(tokenizer.token_bytes(token)))
    return offsets


# Fields


def _shown(value: Any) -> str:
    """Return a value as messages show it: its first characters, in ASCII."""
    return repr(value)[:60].encode("ascii", "backslashreplace").decode()


# Values by which clients leave a field out.
_LEFT_OUT: _Values = {
    "seed": (-1,),
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "logprobs": (False,),
}
# Fields that change nothing at these values, and are refused at others.
_NEUTRAL: _Values = {
    **dict.fromkeys(
        ("stream", "store", "use_beam_search", "early_stopping", "include_stop_str_in_output"),
        (False,),
    ),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    # What vLLM takes where they are left out.
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), (True,)
    ),
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "min_p", "min_tokens", "priority"), (0,)
    ),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("logit_bias", "metadata", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "suffix": ("",),
    "top_k": (-1, 0),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
}
_NEUTRAL_OF: Mapping[str, _Values] = {
    "/v1/completions": {"add_special_tokens": (True,)},
    "/v1/chat/completions": {
        **dict.fromkeys(("add_special_tokens", "continue_final_message", "echo"), (False,)),
        **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
        "best_of": (1,),
        "chat_template_content_format": ("auto",),
    },
}
# Texts by which services tell their users and requests apart.
_IDENTIFIERS = ("prompt_cache_key", "request_id", "safety_identifier")
# OpenAI's codes by pydantic's types of errors; for all others the type is wrong.
_CODES = {
    "greater_than_equal": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
    "missing": "missing_required_parameter",
    **dict.fromkeys(
        ("string_too_short", "too_short", "too_long", "literal_error"), "invalid_value"
    ),
}
# Keys of messages: answers are sent back with all that they came with.
_NEUTRAL_KEYS: _Values = {
    **dict.fromkeys(("annotations", "tool_calls"), ([],)),
    **dict.fromkeys(("refusal", "reasoning", "reasoning_content"), ("",)),
    "type": ("text", "message"),
}


def _is_among(value: Any, candidates: tuple[Any, ...] | None) -> bool:
    """Return whether a JSON value is one of these, of the same type: 0 is not false.

    candidates: None for none.
    """
    return any(
        value == candidate and isinstance(value, bool) == isinstance(candidate, bool)
        for candidate in candidates or ()
    )


def _checked_messages(messages: Any) -> list[Json]:
    """Return messages without keys that say nothing. Raises `ApiError` for others."""
    if not isinstance(messages, list) or not messages:
        text = f"messages is {_shown(messages)}; it must be a list of at least one message"
        code = "missing_required_parameter" if messages is None else "invalid_type"
        raise ApiError(text, "messages", code)
    cleaned = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            text = f"messages.{index} is {_shown(message)}; it must be an object"
            raise ApiError(text, "messages", "invalid_type")
        message = {
            name: value
            for name, value in message.items()
            if value is not None and not _is_among(value, _NEUTRAL_KEYS.get(name))
        }
        if unknown := sorted(set(message) - {"role", "content", "name"}):
            text = f"messages.{index} has {_shown(unknown[0])}, which is not supported"
            raise ApiError(text, "messages", "unknown_parameter")
        if "content" not in message:
            text = f"messages.{index} has no content"
            raise ApiError(text, "messages", "missing_required_parameter")
        cleaned.append(message)
    return cleaned
