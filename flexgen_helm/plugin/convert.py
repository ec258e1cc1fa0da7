"""HELM's Request to a question for the engine, and the engine's answer to HELM's RequestResult.

A prompt is encoded here, without special tokens, and the context token (BOS) is put in front where the model
was trained with one. So what HELM sees of an echoed prompt is exactly its own encoding:

    prompt_token_ids   [BOS]  t0     t1     t2          BOS: conditioned on, never returned, never doubled
    prompt_logprobs     None  lp0    lp1    lp2
    returned tokens           t0     t1     t2          lp0 = 0.0 where t0 had no context

The ids of a `TokenRequest` are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from helm.common.request import (
    EMBEDDING_UNAVAILABLE_REQUEST_RESULT,
    ErrorFlags,
    GeneratedOutput,
    Request,
    RequestResult,
    Token,
)
from helm.proxy.retry import NonRetriableException

from flexgen_helm.errors import FlexgenError, NumericalError, RequestError
from flexgen_helm.plugin.token_request import TokenRequest
from flexgen_helm.request import Completion, GenerationRequest, GenerationResult


class TokenizerLike(Protocol):
    """What conversion needs of `flexgen_helm.tokenizer.tokenizer.Tokenizer`."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def chat_template(self) -> Any: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]: ...
    def token_texts(self, ids: Sequence[int]) -> Sequence[str]: ...
    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str: ...


@dataclass(frozen=True)
class PreparedRequest:
    """One HELM request in the engine's terms. Filled by `ask`.

    key: equal for requests whose answers must be equal, whatever run, file or process they come from.
    copies: greedy completions are identical, so one is computed and `copies` are returned.
    """

    request: GenerationRequest
    key: str
    copies: int


def to_generation_request(request: Request, tokenizer: TokenizerLike, max_positions: int) -> PreparedRequest:
    """Translate; raises NonRetriableException with one sentence where a field cannot be honoured."""
    _refuse_unsupported(request)
    try:
        ids, source = _prompt_ids(request, tokenizer, max_positions)
    except RequestError as error:  # text that is no Unicode, a template that refuses the messages
        raise NonRetriableException(str(error)) from error
    greedy = request.temperature == 0
    wanted = GenerationRequest(
        prompt_token_ids=ids,
        max_tokens=request.max_tokens,
        # `top_k_per_token` asks for alternatives, which no field carries; it must not restrict sampling.
        temperature=float(request.temperature),
        top_p=float(request.top_p),
        seed=0 if greedy else _seed(request.random, source),
        stop=tuple(request.stop_sequences),
        n=1 if greedy else request.num_completions,
        echo_logprobs=request.echo_prompt,
    )
    try:
        wanted.validate()
        if request.num_completions < 1:
            raise RequestError(f"num_completions is {request.num_completions}; it must be 1 or more")
    except RequestError as error:
        raise NonRetriableException(str(error)) from error
    return PreparedRequest(wanted, _request_key(wanted), request.num_completions if greedy else 1)


def _refuse_unsupported(request: Request) -> None:
    try:
        request.validate()
    except ValueError as error:
        raise NonRetriableException(str(error)) from error
    refused = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "multimodal_prompt": request.multimodal_prompt,
        "image_generation_parameters": request.image_generation_parameters,
        "response_format": request.response_format,
    }
    for name, value in refused.items():
        if value:
            raise NonRetriableException(f"flexgen models are plain text models: {name} is not supported")


def _prompt_ids(request: Request, tokenizer: TokenizerLike, max_positions: int) -> tuple[tuple[int, ...], str]:
    """Token ids to condition on, and the text that identifies the prompt for the seed."""
    if request.messages:
        if not tokenizer.chat_template:
            raise NonRetriableException("the request is a chat, but this model's tokenizer has no chat template")
        # A template spells its own BOS.
        text = tokenizer.apply_chat_template(request.messages)
        return tuple(tokenizer.encode(text, add_special_tokens=False)), text
    ids = _own_ids(request, tokenizer)
    if isinstance(request, TokenRequest):
        return ids, request.prompt
    # The last token asked for is never fed, hence the + 1. A full window of running text (the later windows of
    # language modelling) has no room for BOS and starts in the middle of a document anyway.
    room = len(ids) + request.max_tokens < max_positions + 1
    if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != (tokenizer.bos_id,) and room:
        ids = (tokenizer.bos_id, *ids)
    return ids, request.prompt


def _own_ids(request: Request, tokenizer: TokenizerLike) -> tuple[int, ...]:
    """The tokens that HELM gets back where the prompt is echoed."""
    if isinstance(request, TokenRequest):
        return request.prompt_token_ids
    return tuple(tokenizer.encode(request.prompt, add_special_tokens=False))


def _seed(random: str | None, prompt: str) -> int:
    """A function of the request alone, so that a draw does not depend on what else is in the batch."""
    digest = hashlib.sha256(json.dumps([random, prompt]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # fits a signed 64-bit integer


def _request_key(request: GenerationRequest) -> str:
    fields = [
        list(request.prompt_token_ids or ()),
        request.max_tokens,
        request.temperature,
        request.top_p,
        request.seed,
        list(request.stop),
        request.n,
        request.echo_logprobs,
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def to_request_result(
    request: Request, question: PreparedRequest, result: GenerationResult, reused: bool, tokenizer: TokenizerLike
) -> RequestResult:
    """The answer as HELM's metrics read it: plain floats, `finish_reason` a dict, error flags always explicit."""
    if result.error is not None:
        return failed_result(str(result.error), fatal=not _harmless(request, result.error))
    echoed = _echoed_tokens(request, result, tokenizer) if request.echo_prompt else []
    outputs = [_output(request, echoed, completion) for completion in result.completions]
    cost = result.cost
    seconds = float(cost.prefill_s + cost.decode_s)
    return RequestResult(
        success=True,
        cached=reused,
        embedding=[],
        completions=outputs * question.copies,
        request_time=seconds,
        request_datetime=int(time.time()),
        # HELM divides the batch's time by its size ('denoised runtime'); a request knows its own share of that time.
        batch_size=int(cost.batch_size),
        batch_request_time=seconds * int(cost.batch_size),
    )


def _echoed_tokens(request: Request, result: GenerationResult, tokenizer: TokenizerLike) -> list[Token]:
    ids = _own_ids(request, tokenizer)
    if not ids:
        return []
    logprobs = (result.prompt_logprobs or ())[-len(ids) :]  # drops the context token
    if len(logprobs) != len(ids):
        raise RequestError(f"{len(ids)} prompt tokens were to be scored, {len(logprobs)} were")
    return [
        Token(text=text, logprob=0.0 if logprob is None else float(logprob))
        for text, logprob in zip(tokenizer.token_texts(ids), logprobs)
    ]


def _output(request: Request, echoed: list[Token], completion: Completion) -> GeneratedOutput:
    new = [Token(text, float(logprob)) for text, logprob in zip(completion.tokens, completion.logprobs)]
    tokens = echoed + new
    return GeneratedOutput(
        text=request.prompt + completion.text if request.echo_prompt else completion.text,
        logprob=float(sum(token.logprob for token in tokens)),
        tokens=tokens,
        finish_reason={"reason": completion.finish_reason},
    )


def _harmless(request: Request, error: Exception) -> bool:
    """Whether an empty completion may stand for the answer.

    HELM scores it: no log-probability counts as 0.0, which beats every real one. Only a chat that does not fit
    the window is safe, because HELM cannot fit chats itself and judges them by their text alone.
    """
    return bool(request.messages) and isinstance(error, RequestError) and not isinstance(error, NumericalError)


def failed_result(message: str, fatal: bool = True) -> RequestResult:
    """A failed request: never retried, because the same engine would fail the same way again."""
    return RequestResult(
        success=False,
        cached=False,
        error=message,
        completions=[],
        embedding=[],
        error_flags=ErrorFlags(is_retriable=False, is_fatal=fatal),
    )


def no_embedding() -> RequestResult:
    return failed_result(EMBEDDING_UNAVAILABLE_REQUEST_RESULT.error or "embeddings are not available")


def describe_error(error: BaseException) -> str:
    """One sentence for the user: our own errors speak for themselves, others name their type."""
    return str(error) if isinstance(error, FlexgenError) else f"{type(error).__name__}: {error}"
