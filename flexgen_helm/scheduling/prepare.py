"""From the caller's requests to distinct requests, the prefixes that they share, and their
sequences. No torch.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import index
from typing import NamedTuple

from flexgen_helm.errors import ContextLengthError, RequestError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.prefix_tree import (
    PrefixCostModel,
    PrefixNode,
    Prompt,
    plan_prefixes,
    with_numbers,
)
from flexgen_helm.scheduling.sequence import Request, Sequence, SequenceKind
from flexgen_helm.tokenizer.chat import ChatFormat
from flexgen_helm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedRequests:
    """Distinct requests, each with the indices of those that asked for it, and those that cannot be
    served.

    refused: index -> why.
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

    schedule: None where it follows from the requests.
    chat: renders messages, and plain prompts that generate if it applies; None without a tokenizer.
    """
    refused: dict[int, Exception] = {}
    texts: dict[int, str] = {}
    rendered: set[int] = set()
    for number, request in enumerate(requests):
        try:
            _require_texts(request, tokenizer, chat)
            if chat is not None and (text := chat.render(request)) is not None:
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


def shared_prefixes(
    requests: abc.Sequence[Request], cost: PrefixCostModel, by_completion: bool = False
) -> list[PrefixNode | int]:
    """Return the forest of prompt beginnings that are worth computing once; its leaves are indices
    in `requests`.

    by_completion: continuations of one prompt cannot attend to the cache of all of it, so each
        completion is a user of its own; the request's index then occurs as often.
    """
    prompts, indices = [], []
    for index_of_request, request in enumerate(requests):
        asked = request.request
        num_unfinished = len(request.unfinished)
        # nothing follows: the last one is not fed
        fed = request.tokens if num_unfinished else request.tokens[:-1]
        prompt = Prompt(fed, asked.echo_logprobs, asked.max_fed_tokens)
        # Completions that were interrupted are prompts of their own.
        apart = request.num_resumed or (by_completion and asked.max_fed_tokens)
        count = max(1, num_unfinished) if apart else 1
        prompts += [prompt] * count
        indices += [index_of_request] * count
    return with_numbers(plan_prefixes(prompts, cost), indices)


class _Draw(NamedTuple):
    """Completions that continue one prompt.

    first, num_completions: index of the first, and how many.
    known_ids: tokens that an interrupted run has drawn of the first.
    """

    first: int
    num_completions: int
    known_ids: list[int]


def make_sequences(
    request: Request, prefixes: tuple[Sequence, ...], limits: SchedulerLimits, shares_prompts: bool
) -> list[Sequence]:
    """Return the sequences of one request behind its shared prefixes; the request learns of them.

    Several completions continue one prompt's cache. Those that do not fit at once are split over
    several sequences of the prompt, each of which computes it anew. One that was interrupted has
    its tokens behind the prompt.

    shares_prompts: whether a sequence can attend to all of another's cache; if not, each completion
        computes the prompt.
    Raises `RequestError` where not even one completion fits.
    """
    asked, num_completions = request.request, request.num_completions
    at_once = _completions_at_once(request, len(prefixes), limits, shares_prompts)
    draws: list[_Draw] = []
    if asked.max_fed_tokens or request.num_resumed:
        for first in request.unfinished[::at_once]:
            draw_count = min(at_once, num_completions - first)
            draws.append(_Draw(first, draw_count, request.completions[first].ids))
    elif asked.max_tokens:
        draws.append(_Draw(0, num_completions, request.completions[0].ids))
    prompts = [
        _prompt_sequence(request, prefixes, draw, branches=at_once > 1, is_first=number == 0)
        for number, draw in enumerate(draws or [_Draw(0, 0, [])])
    ]
    request.num_sequences += len(prompts)
    if asked.echo_logprobs:
        request.scored = (*prefixes, prompts[0])
    return prompts


def _prompt_sequence(
    request: Request, prefixes: tuple[Sequence, ...], draw: _Draw, branches: bool, is_first: bool
) -> Sequence:
    """Return the sequence of a prompt.

    branches: its completions are continuations, sequences of their own.
    is_first: of the request's prompts, which is the one that is scored.
    """
    asked, start = request.request, sum(prefix.prompt_len for prefix in prefixes)
    tokens = [*request.tokens[start:], *draw.known_ids]
    left = asked.max_tokens - len(draw.known_ids) if draw.num_completions else 0
    return Sequence(
        SequenceKind.PROMPT,
        (request,),
        tokens,
        len(tokens),
        start,
        prefixes,
        # 1 where it branches: the last token is fed, but what follows it lives in continuations.
        max_new_tokens=1 if branches else left,
        num_draws=draw.num_completions,
        first_completion=draw.first,
        num_continuations=draw.num_completions if branches else 0,
        continuation_tokens=asked.max_fed_tokens if branches else 0,
        needs_cache=left > 1,
        needs_scores=asked.echo_logprobs and is_first,
        needs_greedy=asked.echo_greedy and is_first,
        num_top=asked.top_logprobs,
        length_group=request.length_group,
    )


def _completions_at_once(
    request: Request, num_prefixes: int, limits: SchedulerLimits, shares_prompts: bool
) -> int:
    """Return how many completions continue the cache of one prompt; with 1 each continues a prompt
    of its own.

    Raises `RequestError` where not even one completion fits.
    """
    steps, completions = request.request.max_fed_tokens, request.num_completions
    room, slots = limits.cache_tokens, 1 + num_prefixes
    needed = len(request.tokens) + steps * (1 + limits.step_overhead) + slots * limits.slot_overhead
    if steps and needed > room:
        raise RequestError(
            f"the request needs a KV cache of {needed} tokens and the memory limit leaves room for "
            f"{room}; raise the limit (--cpu-memory, --gpu-memory) or lower max_tokens"
        )
    if completions == 1 or not steps or not shares_prompts or request.num_resumed:
        return 1
    reserved = min(steps, limits.page_tokens or steps) + limits.slot_overhead
    have_room = 1 + (room - needed - limits.slot_overhead) // reserved
    return max(1, min(completions, have_room, limits.max_sequences - 1, limits.max_states - slots))


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
    tokens, max_tokens = request.tokens, request.request.max_tokens
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
    if request.request.top_logprobs > config.vocab_size:
        raise RequestError(
            f"top_logprobs is {request.request.top_logprobs}; the vocabulary has "
            f"{config.vocab_size} tokens"
        )
    drawn = (token for completion in request.request.drawn for token, *_ in completion)
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
    asked = request.request
    if not asked.temperature:
        asked = replace(asked, top_p=1.0, seed=0)
    ids, stop = tuple(request.tokens), tuple(asked.stop)
    content = replace(asked, prompt=None, messages=None, prompt_token_ids=ids, stop=stop, drawn=())
    return content, request.num_context
