"""Check and encode the caller's requests, and join equal ones. No torch."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import index

from flexgen_helm.errors import ContextLengthError, RequestError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.sequence import Request
from flexgen_helm.tokenizer.chat import ChatFormat
from flexgen_helm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedRequests:
    """Requests of a run that can be served, equal ones once, and the others.

    distinct: each with the indices, in the caller's list, of those that are equal to it.
    refused: index in the caller's list -> why it cannot be served.
    """

    distinct: list[Request]
    refused: Mapping[int, Exception]


def prepare(
    requests: abc.Sequence[GenerationRequest],
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    schedule: Schedule | None = None,
    chat: ChatFormat | None = None,
) -> EncodedRequests:
    """Encode requests, check them against model and schedule, and join equal ones; a bad request
    fails alone.

    schedule: None where the planner chooses one that these requests can have.
    chat: renders messages, and plain prompts that generate if it applies; None without a tokenizer.
    """
    refused: dict[int, Exception] = {}
    texts: dict[int, str] = {}
    rendered: set[int] = set()
    for number, request in enumerate(requests):
        try:
            _require_texts(request, tokenizer, chat)
            # a score is of the text itself
            generates = request.max_tokens and not request.echo_logprobs
            to_render = request.prompt if generates else None
            if chat is not None and (text := chat.render(request.messages, to_render)) is not None:
                texts[number] = text
                rendered.add(number)
            elif request.prompt is not None:
                texts[number] = request.prompt
        except RequestError as error:
            refused[number] = error
    encoded = _encode(texts, tokenizer) if tokenizer else {}
    distinct: dict[tuple[object, ...], Request] = {}
    for number, request in enumerate(requests):
        if number in refused:
            continue
        if chat is not None and number in rendered:
            request = replace(request, thinking=chat.thinking(texts[number]))
        try:
            prepared = _prepare_one(
                request, encoded.get(number, request.prompt_token_ids), tokenizer
            )
            _check(prepared, config, schedule)
        except RequestError as error:
            refused[number] = error
            continue
        distinct.setdefault(_identity(prepared), prepared).indices.append(number)
    return EncodedRequests(list(distinct.values()), refused)


def _require_texts(
    request: GenerationRequest, tokenizer: Tokenizer | None, chat: ChatFormat | None
) -> None:
    """Raise `RequestError` for a request that is not valid, or has texts that this model cannot
    encode.
    """
    request.validate()
    if tokenizer is None and (request.prompt_token_ids is None or request.stop):
        what = "stop strings" if request.prompt_token_ids is not None else "a text prompt"
        raise RequestError(
            f"this model has no tokenizer files, so {what} cannot be used; give prompt_token_ids"
        )
    if chat is None and request.messages is not None:
        raise RequestError("this model has no chat template; send a prompt instead of messages")


def _prepare_one(
    request: GenerationRequest,
    ids: abc.Iterable[int] | RequestError | None,
    tokenizer: Tokenizer | None,
) -> Request:
    """Make the request of a run; ids: of the prompt, or why its text has none."""
    if isinstance(ids, RequestError):
        raise ids
    try:  # any library's integers, such as an array's
        tokens = [index(token) for token in ([] if ids is None else ids)]
    except TypeError:
        raise RequestError(
            f"the prompt has {repr(ids)[:60]} as its ids, of which one is no token id"
        ) from None
    token_bytes = tokenizer.token_bytes if tokenizer else None
    prepared = Request(request, *_with_context(tokens, request, tokenizer), token_bytes)
    if not request.ignore_eos and (request.stop or (tokenizer is not None and tokenizer.eos_ids)):
        prepared.length_group = request.max_tokens
    return prepared


def _encode(texts: Mapping[int, str], tokenizer: Tokenizer) -> dict[int, list[int] | RequestError]:
    """Return the token ids of the text at every index, or why it has none (text that is not valid
    Unicode).
    """
    encoded: dict[int, list[int] | RequestError] = {}
    try:
        encoded.update(zip(texts, tokenizer.encode_batch([*texts.values()]) if texts else ()))
    except RequestError as error:
        if len(texts) == 1:
            return dict.fromkeys(texts, error)
        for number, text in texts.items():
            encoded |= _encode({number: text}, tokenizer)
    return encoded


def _with_context(
    ids: list[int], request: GenerationRequest, tokenizer: Tokenizer | None
) -> tuple[list[int], int]:
    """Condition an empty prompt on BOS, or on EOS where the model knows no BOS (as such models are
    trained).
    """
    if ids or request.max_tokens == 0:
        return ids, 0
    if tokenizer is None or (context := tokenizer.first_id) is None:
        raise RequestError(
            "the prompt is empty and the model names no token to begin a text with; give one token"
        )
    return [context], 1


def _check(request: Request, config: ModelConfig, schedule: Schedule | None) -> None:
    tokens, max_tokens = request.tokens, request.original.max_tokens
    if schedule is not None and schedule.is_single_pass and max_tokens > 1:
        raise RequestError(
            f"max_tokens is {max_tokens} and the schedule {schedule} draws one token at most; take "
            "--schedule zigzag"
        )
    # The last token is never fed, so a prompt may be scored one token beyond the window.
    if len(tokens) + max_tokens > config.max_positions + 1:
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens and max_tokens is {max_tokens}, together beyond "
            f"the model's window of {config.max_positions} tokens{config.context_end}; shorten the "
            "prompt or lower max_tokens"
        )
    if request.original.top_logprobs > config.vocab_size:
        raise RequestError(
            f"top_logprobs is {request.original.top_logprobs}; the vocabulary has "
            f"{config.vocab_size} tokens"
        )
    drawn = (token for completion in request.original.drawn for token, *_ in completion)
    for token in chain(tokens, drawn):
        if not 0 <= token < config.vocab_size:
            raise RequestError(
                f"token id {token} is outside the vocabulary of {config.vocab_size} tokens"
            )
    if (refusal := token_refusal(tokens, config)) is not None:
        raise refusal


def token_refusal(tokens: abc.Sequence[int], config: ModelConfig) -> RequestError | None:
    """Return the error of a text with a token that a text cannot have; None for others."""
    for token, does in config.refused_ids.items():
        if token in tokens:
            return RequestError(
                f"the prompt or its answer has token {token}, which {does} in this model; leave it "
                "out, or take a smaller max_tokens"
            )
    return None


def _identity(request: Request) -> tuple[object, ...]:
    """Return what is equal for requests whose answers are equal by definition."""
    original = request.original
    if not original.temperature:  # nothing is random
        original = replace(original, top_p=1.0, seed=0)
    ids, stop = tuple(request.tokens), tuple(original.stop)
    content = replace(
        original, prompt=None, messages=None, prompt_token_ids=ids, stop=stop, drawn=()
    )
    return content, request.num_context
