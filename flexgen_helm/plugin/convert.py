"""HELM's requests in the engine's terms, and the engine's results in HELM's.

A prompt is encoded without special tokens. Where the model was trained with BOS, the request gets
BOS as a context token, so what HELM sees of an echoed prompt is exactly its own encoding:

    prompt_token_ids   [BOS]  t0     t1     t2          BOS: conditioned on, never returned
    prompt_logprobs     None  lp0    lp1    lp2
    returned tokens           t0     t1     t2          lp0 = 0.0 where t0 had no context

A plain prompt that generates goes through the chat template where its `ChatFormat` applies. A
scored prompt never does.
The ids of a `TokenRequest` are used unchanged.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helm.common.request import ErrorFlags, GeneratedOutput, Request, RequestResult, Thinking, Token
from helm.proxy.retry import NonRetriableException

from flexgen_helm.errors import NumericalError, RequestError
from flexgen_helm.request import MAX_COMPLETIONS, Completion, GenerationRequest, GenerationResult
from flexgen_helm.service.models import ModelArguments, ModelReader, PromptEncoder
from flexgen_helm.service.service import KeyedRequest, request_key
from flexgen_helm.tokenizer.chat import ChatFormat
from flexgen_helm.tokenizer.thinking import split_thinking

_UNSUPPORTED = (
    "presence_penalty frequency_penalty multimodal_prompt image_generation_parameters "
    "response_format"
)


@dataclass(frozen=True)
class PlainTextRequest(Request):
    """A request that never gets a chat template, and whose `max_tokens` is exact: the model
    continues a text.
    """


@dataclass(frozen=True)
class TokenRequest(PlainTextRequest):
    """A request by token ids, for prompts that text cannot carry: a window of a document may begin
    inside a word.

    HELM hands requests on unchanged, and writes the ids beside the prompt into its files.

    prompt: the text of the ids, for people and for HELM's token counts.
    prompt_token_ids: used unchanged, without BOS. Not in the repr, which HELM puts into error
        messages.
    """

    prompt_token_ids: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class HelmRequest(KeyedRequest):
    """A request of HELM in the engine's terms, and what its result needs to become one of HELM's.

    echo_ids: the tokens that HELM gets back if the prompt is echoed: its own encoding, without the
        context token.
    num_copies: greedy completions are identical, so one is computed and returned `num_copies`
        times.
    is_clipped: the window leaves fewer tokens than the request asks for.
    """

    echo_ids: tuple[int, ...]
    num_copies: int
    is_clipped: bool = False


def parse_request(fields: Mapping[str, Any], text_class: type[Request]) -> Request:
    """Make a request of HELM from its file; text_class: of a request without token ids."""
    if "prompt_token_ids" in fields:
        return TokenRequest(**{**fields, "prompt_token_ids": tuple(fields["prompt_token_ids"])})
    return text_class(**fields)


def may_be_rendered(request: Request) -> bool:
    """Whether a request goes through the chat template if the model's format says so."""
    generates = request.max_tokens > 0 and not request.echo_prompt
    return bool(request.messages) or (generates and not isinstance(request, PlainTextRequest))


def to_helm_request(request: Request, model: ModelArguments, models: ModelReader) -> HelmRequest:
    """Translate a request for `model`. Submitted blocks and clients both call this, so their keys
    are equal.

    Raises `NonRetriableException` for a field that is not supported.
    """
    # a broken template costs no score
    chat = models.chat(model) if may_be_rendered(request) else None
    return to_generation_request(
        request, models.encoder(model), models.facts(model).max_positions, chat
    )


def to_generation_request(
    request: Request, encoder: PromptEncoder, max_positions: int, chat: ChatFormat | None = None
) -> HelmRequest:
    """Translate a request. Raises `NonRetriableException` with one sentence for a field that is not
    supported.

    chat: renders messages and, where it applies, plain prompts; None where the request can need
        neither.
    """
    _require_supported(request)
    if chat is not None and not (request.messages or (chat.applied and may_be_rendered(request))):
        chat = None
    try:
        text, prompt_ids = _prompt(request, encoder, chat)
    except RequestError as error:  # text that is no Unicode, a template that refuses the messages
        raise NonRetriableException(str(error)) from error
    # The last token of a request is never fed, hence the + 1.
    window = max_positions + 1
    is_clippable = may_be_rendered(request)
    # A full window of running text (the later windows of language modelling) has no room for BOS
    # and starts in the middle of a document anyway.
    context = () if isinstance(request, TokenRequest) else encoder.context_tokens(prompt_ids)
    if len(context + prompt_ids) + (1 if is_clippable else request.max_tokens) > window:
        context = ()
    max_tokens, room = request.max_tokens, window - len(context + prompt_ids)
    if is_clippable and 0 < room < max_tokens:
        max_tokens = room
    greedy = request.temperature == 0
    generation = GenerationRequest(
        prompt_token_ids=context + prompt_ids,
        max_tokens=max_tokens,
        # `top_k_per_token` asks for alternatives, which no field carries; it must not restrict
        # sampling.
        temperature=float(request.temperature),
        top_p=float(request.top_p),
        seed=0 if greedy else _seed(request.random, text),
        stop=tuple(request.stop_sequences),
        n=1 if greedy else request.num_completions,
        echo_logprobs=request.echo_prompt,
        thinking=chat.thinking(text) if chat is not None and request.max_tokens else None,
    )
    _require_valid(generation, request.num_completions)
    return HelmRequest(
        request=generation,
        key=request_key(generation, chat.identity if chat is not None else None),
        echo_ids=() if request.messages else prompt_ids,
        num_copies=request.num_completions if greedy else 1,
        is_clipped=max_tokens < request.max_tokens,
    )


def _require_supported(request: Request) -> None:
    try:
        request.validate()
    except ValueError as error:
        raise NonRetriableException(str(error)) from error
    for name in _UNSUPPORTED.split():
        if getattr(request, name):
            raise NonRetriableException(
                f"flexgen models are plain text models: {name} is not supported"
            )


def _require_valid(generation: GenerationRequest, num_completions: int) -> None:
    try:
        generation.validate()
        if not 1 <= num_completions <= MAX_COMPLETIONS:
            raise RequestError(
                f"num_completions is {num_completions}; it must be 1 or more and at most "
                f"{MAX_COMPLETIONS:,}"
            )
    except RequestError as error:
        raise NonRetriableException(str(error)) from error


def _prompt(
    request: Request, encoder: PromptEncoder, chat: ChatFormat | None
) -> tuple[str, tuple[int, ...]]:
    """Return the text that identifies the prompt (for the seed), and its ids without a context
    token.

    chat: None for a request that is not rendered.
    """
    if isinstance(request, TokenRequest):
        return request.prompt, request.prompt_token_ids
    text = request.prompt
    if request.messages and (chat is None or not encoder.tokenizer.chat_template):
        raise RequestError("the request is a chat, but this model's tokenizer has no chat template")
    if chat is not None:
        text = (
            chat.render_messages(request.messages) if request.messages else chat.render_prompt(text)
        )
    return text, encoder.encode(text)


def _seed(random: str | None, prompt: str) -> int:
    """Return a function of the request alone, so that a draw does not depend on what else is in the
    batch.
    """
    digest = hashlib.sha256(json.dumps([random, prompt]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # fits a signed 64-bit integer


def to_request_result(
    request: Request,
    prepared: HelmRequest,
    result: GenerationResult,
    is_cached: bool,
    encoder: PromptEncoder,
) -> RequestResult:
    """Return the result as HELM's metrics read it: plain floats, `finish_reason` a dict, error
    flags always set.
    """
    if result.error is not None:
        # HELM scores an empty completion: no log-probability counts as 0.0, which beats every real
        # one. Only a chat that does not fit the window may have one: HELM cannot fit chats itself
        # and judges them by their text alone.
        is_too_long = isinstance(result.error, RequestError) and not isinstance(
            result.error, NumericalError
        )
        return failed_result(str(result.error), is_fatal=not (request.messages and is_too_long))
    echoed = _echoed_tokens(prepared, result, encoder) if request.echo_prompt else []
    cost = result.cost
    seconds = float(cost.prefill_s + cost.decode_s)
    return RequestResult(
        success=True,
        cached=is_cached,
        embedding=[],
        completions=[
            _output(request, prepared, echoed, completion) for completion in result.completions
        ]
        * prepared.num_copies,
        request_time=seconds,
        request_datetime=int(time.time()),
        # HELM divides the batch's time by its size ('denoised runtime'); a request knows its own
        # share of that time.
        batch_size=int(cost.batch_size),
        batch_request_time=seconds * int(cost.batch_size),
    )


def _echoed_tokens(
    prepared: HelmRequest, result: GenerationResult, encoder: PromptEncoder
) -> list[Token]:
    ids = prepared.echo_ids
    if not ids:
        return []
    logprobs = (result.prompt_logprobs or ())[-len(ids) :]  # without the context token
    if len(logprobs) != len(ids):
        raise RequestError(f"{len(ids)} prompt tokens were to be scored, {len(logprobs)} were")
    return [
        Token(text=text, logprob=0.0 if logprob is None else float(logprob))
        for text, logprob in zip(encoder.tokenizer.token_texts(ids), logprobs)
    ]


def _output(
    request: Request, prepared: HelmRequest, echoed: list[Token], completion: Completion
) -> GeneratedOutput:
    """Return a completion; what a model thought is apart, and counts in no metric of the answer."""
    thinking = None
    if prepared.request.thinking is not None:
        thinking, completion = split_thinking(completion, prepared.request.thinking)
    tokens = echoed + [
        Token(text, float(logprob)) for text, logprob in zip(completion.tokens, completion.logprobs)
    ]
    return GeneratedOutput(
        text=request.prompt + completion.text if request.echo_prompt else completion.text,
        logprob=float(sum(token.logprob for token in tokens)),
        tokens=tokens,
        finish_reason={"reason": completion.finish_reason},
        thinking=None if thinking is None else Thinking(text=thinking),
    )


def failed_result(message: str, is_fatal: bool = True) -> RequestResult:
    """Return a failed result that HELM never retries: the same engine would fail in the same
    way.
    """
    return RequestResult(
        success=False,
        cached=False,
        error=message,
        completions=[],
        embedding=[],
        error_flags=ErrorFlags(is_retriable=False, is_fatal=is_fatal),
    )
