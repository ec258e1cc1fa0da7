"""From the caller's requests to distinct requests, the prefixes that they share, and their
sequences. No torch.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from operator import index

from flexgen_helm.errors import ContextLengthError, RequestError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.placement import SchedulerLimits
from flexgen_helm.planner.run_plan import RunSize
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.prefix_tree import (
    PrefixCostModel,
    PrefixNode,
    Prompt,
    plan_prefixes,
    prefixes_of,
)
from flexgen_helm.scheduling.sequence import AnswerLengths, Request, Sequence, SequenceKind
from flexgen_helm.tiers import LONG_ANSWER_TOKENS, PREFILL_LANES
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
    prompts, numbers = [], []
    for number, request in enumerate(requests):
        asked = request.request
        unfinished = len(request.unfinished)
        # nothing follows: the last one is not fed
        fed = request.tokens if unfinished else request.tokens[:-1]
        prompt = Prompt(fed, asked.echo_logprobs, max(0, asked.max_tokens - 1))
        # Completions that were interrupted are prompts of their own.
        apart = request.num_resumed or (by_completion and asked.max_tokens > 1)
        count = max(1, unfinished) if apart else 1
        prompts += [prompt] * count
        numbers += [number] * count
    return plan_prefixes(prompts, cost, numbers)


def run_size(
    requests: abc.Sequence[Request],
    cost: PrefixCostModel,
    with_prefixes: bool,
    cache_format: CacheFormat | None,
) -> RunSize:
    """Return what a plan must know of a run's requests; the arguments are those of
    `planned_workload`.
    """
    decoded = [request for request in requests if request.request.max_tokens > 1]
    return RunSize(
        max(map(_positions, requests), default=1),
        sum(
            max(len(request.tokens), request.num_completions) + request.num_resumed
            for request in requests
        ),
        max((request.length_group or 0 for request in requests), default=0),
        max(map(_positions, decoded), default=0),
        max((request.request.max_tokens - 1 for request in decoded), default=0),
        decodes=bool(decoded),
        workload=planned_workload(requests, cost, with_prefixes, cache_format),
    )


def _positions(request: Request) -> int:
    """Return the positions of one completion with its prompt."""
    return len(request.tokens) + max(0, request.request.max_tokens - 1)


def planned_workload(
    requests: abc.Sequence[Request],
    cost: PrefixCostModel,
    with_prefixes: bool,
    cache_format: CacheFormat | None,
) -> Workload | None:
    """Return the lengths of all sequences and what they share, as the planner needs them; None
    without requests.

    Long answers that may end early count with the length that is expected of them.
    with_prefixes: count shared prefixes, which takes as long as planning them.
    """
    lengths = [
        (max(1, len(request.tokens) + resumed), _expected_output(request, resumed))
        for request in requests
        for resumed in [completion.num_resumed for completion in request.completions] or [0]
    ]
    if not lengths:
        return None
    multiple = 1 if cache_format is None else cache_format.prefix_multiple
    saved_tokens = 0
    if with_prefixes and multiple is not None:
        forest = shared_prefixes(
            requests, replace(cost, group_tokens=multiple), cache_format is not None
        )
        saved_tokens = sum(prefix.saved for prefix in prefixes_of(forest))
    for request in requests:
        # its completions share the whole prompt
        if cache_format is None or request.request.max_tokens <= 1:
            saved_tokens += (request.num_completions - 1) * len(request.tokens)
    return Workload.of(lengths, saved_tokens, _scored_tokens(requests, saved_tokens))


def drawn_workload(requests: abc.Sequence[Request], saved_tokens: int) -> Workload:
    """Return the lengths that all sequences came to; saved_tokens: prompt tokens that were not
    computed.
    """
    lengths = [
        (max(1, len(request.tokens) + resumed), max(1, drawn - resumed))
        for request in requests
        for drawn, resumed in [(c.num_drawn, c.num_resumed) for c in request.completions]
        or [(0, 0)]
    ]
    return Workload.of(lengths, saved_tokens, _scored_tokens(requests, saved_tokens))


def _scored_tokens(requests: abc.Sequence[Request], saved_tokens: int) -> int:
    """Return how many prompt tokens pass the head: once a request, and once for all that share a
    beginning.
    """
    scored = sum(
        max(0, len(request.tokens) - 1) for request in requests if request.request.echo_logprobs
    )
    total = sum(len(request.tokens) for request in requests)
    by_completions = sum(
        (request.num_completions - 1) * len(request.tokens) for request in requests
    )
    shared = max(0, saved_tokens - max(0, by_completions))
    return round(scored * max(0.0, 1 - shared / total)) if scored else 0


def make_sequences(
    request: Request, prefixes: tuple[Sequence, ...], limits: SchedulerLimits, shares_prompts: bool
) -> list[Sequence]:
    """Return the sequences of one request behind its shared prefixes.

    Several completions continue one prompt's cache. Those that do not fit at once are split over
    several sequences of the prompt, each of which computes it anew. One that was interrupted has
    its tokens behind the prompt.

    shares_prompts: whether a sequence can attend to all of another's cache; if not, each completion
        computes the prompt.
    Raises `RequestError` where not even one completion fits.
    """
    asked, start = request.request, sum(prefix.prompt_len for prefix in prefixes)
    tokens = request.tokens[start:]
    steps, completions = max(0, asked.max_tokens - 1), request.num_completions
    at_once = _completions_at_once(request, len(prefixes), limits, shares_prompts)
    branches = at_once > 1
    if steps or request.num_resumed:
        draws = [
            (first, min(at_once, completions - first)) for first in request.unfinished[::at_once]
        ]
    else:
        draws = [(0, completions)] if asked.max_tokens else []
    known = [request.completions[first].ids for first, _ in draws]
    prompts = [
        Sequence(
            SequenceKind.PROMPT,
            (request,),
            [*tokens, *drawn],
            len(tokens) + len(drawn),
            start,
            prefixes,
            # 1 where it branches: the last token is fed, but what follows it lives in the
            # continuations.
            max_new_tokens=1 if branches else num_draws and asked.max_tokens - len(drawn),
            num_draws=num_draws,
            first_completion=first,
            num_continuations=num_draws if branches else 0,
            continuation_tokens=steps if branches else 0,
            needs_cache=num_draws > 0 and asked.max_tokens - len(drawn) > 1,
            needs_scores=asked.echo_logprobs and number == 0,
            needs_greedy=asked.echo_greedy and number == 0,
            num_top=asked.top_logprobs,
            length_group=request.length_group,
        )
        for number, ((first, num_draws), drawn) in enumerate(
            zip(draws, known) if draws else [((0, 0), [])]
        )
    ]
    request.num_sequences += len(prompts)
    if asked.echo_logprobs:
        request.scored = (*prefixes, prompts[0])
    return prompts


def _completions_at_once(
    request: Request, num_prefixes: int, limits: SchedulerLimits, shares_prompts: bool
) -> int:
    """Return how many completions continue the cache of one prompt; with 1 each continues a prompt
    of its own.

    Raises `RequestError` where not even one completion fits.
    """
    steps, completions = max(0, request.request.max_tokens - 1), request.num_completions
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


def _expected_output(request: Request, num_resumed: int = 0) -> int:
    most, group = max(1, request.request.max_tokens - num_resumed), request.length_group
    return (
        most
        if (group or 0) <= LONG_ANSWER_TOKENS
        else round(AnswerLengths().expected_tokens(group, most))
    )


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
    known = replace(asked, prompt=None, messages=None, prompt_token_ids=ids, stop=stop, drawn=())
    return known, request.num_context


# Lanes of requests, whose passes the ranks of a pipeline compute in turn.


def into_lanes(
    requests: abc.Sequence[Request], limits: SchedulerLimits, num_ranks: int, schedule: Schedule
) -> tuple[list[list[Request]], SchedulerLimits]:
    """Return the requests of each lane, and what a pass of one may hold.

    One process alone has no use for several. Otherwise there is a lane for each rank, if each has
    room for the longest request with a prefix of its own.
    """
    if num_ranks == 1:
        return [[*requests]], limits
    if schedule.is_single_pass:
        count = max(1, min(PREFILL_LANES * num_ranks, len(requests), limits.max_states))
    else:
        step, slot = 1 + limits.step_overhead, 1 + limits.slot_overhead
        longest = (
            max(
                (len(r.tokens) + max(0, r.request.max_tokens - 1) * step for r in requests),
                default=0,
            )
            + 2 * slot
        )
        count = max(
            1, min(num_ranks, len(requests), limits.cache_tokens // longest, limits.max_sequences)
        )
    lane_limits = replace(
        limits,
        cache_tokens=limits.cache_tokens // count,
        max_sequences=max(1, limits.max_sequences // count),
        max_states=max(1, limits.max_states // count),
    )
    return divide(requests, count), lane_limits


def divide(requests: abc.Sequence[Request], lanes: int) -> list[list[Request]]:
    """Return the requests of each lane: about as many tokens, and common beginnings together."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].tokens)
    sizes = [len(requests[index].tokens) + requests[index].request.max_tokens for index in order]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes)]
    total = max(1, sum(sizes))  # nothing is fed of an empty prompt that is scored
    # A last request of no size is at the end of the last lane, not behind it.
    lane_of = {
        index: min(lanes - 1, int(lanes * middle / total)) for index, middle in zip(order, middles)
    }
    return [
        [request for i, request in enumerate(requests) if lane_of[i] == lane]
        for lane in range(lanes)
    ]


def common_limits(limits: abc.Sequence[SchedulerLimits]) -> SchedulerLimits:
    """Return limits within which a pass fits on every rank; limits: of each rank."""
    common = {}
    for field in fields(SchedulerLimits):
        pick = max if field.name.endswith("_overhead") else min
        common[field.name] = pick(getattr(rank, field.name) for rank in limits)
    return SchedulerLimits(**common)
