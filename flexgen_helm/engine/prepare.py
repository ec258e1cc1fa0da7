"""From requests to distinct running requests, and from those to families of rows."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from flexgen_helm.engine.prefix_tree import PrefixCostModel, PrefixNode, Prompt, plan_prefixes
from flexgen_helm.engine.running_request import RunningRequest
from flexgen_helm.errors import RequestError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.policy import Schedule
from flexgen_helm.request import GenerationRequest
from flexgen_helm.sequence import Admission, Sequence
from flexgen_helm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedRequests:
    """running: distinct requests, each with the places that asked for it; refused: place -> why."""

    running: list[RunningRequest]
    refused: dict[int, Exception]


def prepare(
    requests: abc.Sequence[GenerationRequest], config: ModelConfig, tokenizer: Tokenizer | None, schedule: Schedule
) -> PreparedRequests:
    """Encode, check against model and schedule, and join equal requests. A bad request is refused alone."""
    refused: dict[int, Exception] = {}
    texts: dict[str, None] = {}
    for place, request in enumerate(requests):
        try:
            request.validate()
            if tokenizer is None and (request.prompt is not None or request.stop):
                what = "a text prompt" if request.prompt is not None else "stop strings"
                raise RequestError(
                    f"this model has no tokenizer files, so {what} cannot be used; give prompt_token_ids"
                )
        except RequestError as error:
            refused[place] = error
            continue
        if request.prompt is not None:
            texts[request.prompt] = None
    encoded = _encode(list(texts), tokenizer) if tokenizer and texts else {}

    distinct: dict[tuple[object, ...], RunningRequest] = {}
    token_bytes = tokenizer.token_bytes if tokenizer else None
    for place, request in enumerate(requests):
        if place in refused:
            continue
        try:
            ids = encoded[request.prompt] if request.prompt is not None else list(request.prompt_token_ids or ())
            if isinstance(ids, RequestError):
                raise ids
            running = RunningRequest(request, *_with_context(ids, request, tokenizer), token_bytes)
            _check(running, config, schedule)
        except RequestError as error:
            refused[place] = error
            continue
        distinct.setdefault(_identity(running), running).places.append(place)
    return PreparedRequests(list(distinct.values()), refused)


def shared_prefixes(
    running: abc.Sequence[RunningRequest], rules: PrefixCostModel, branches: bool = False
) -> list[PrefixNode | int]:
    """The forest of beginnings that are worth computing once; its places are those in `running`.

    branches: continuations of one prompt cannot attend to the cache of all of it, so each is a user of its own; the
    request's place then occurs as often, one behind the other.
    """
    prompts, places = [], []
    for place, each in enumerate(running):
        request = each.request
        fed = each.tokens if request.max_tokens else each.tokens[:-1]  # nothing follows: the last one is not fed
        prompt = Prompt(fed, request.echo_logprobs, max(0, request.max_tokens - 1))
        count = each.num_branches if branches and request.max_tokens > 1 else 1
        prompts += [prompt] * count
        places += [place] * count
    forest = plan_prefixes(prompts, rules)
    return forest if len(places) == len(running) else _renumbered(forest, places)


def make_sequences(
    running: RunningRequest,
    cache_tokens: int,
    max_rows: int,
    slot_overhead: int = 0,
    step_overhead: int = 0,
    shares: bool = True,
    prefixes: tuple[Sequence, ...] = (),
) -> list[Admission]:
    """The rows of one request: its prompt behind its prefixes `parents`, and room for continuations that share the
    prompt's cache.

    Continuations that do not fit beside each other are split over several families, each with the prompt anew.
    shares: whether a row can attend to another's cache; if not, each continuation computes the prompt. cache_tokens,
    row_tokens, step_tokens: as in `BlockLimits`. Raises `RequestError` where not even one fits.
    """
    request, start = running.request, sum(parent.prompt_len for parent in prefixes)
    tokens, beside = running.tokens[start:], (1 + len(prefixes)) * slot_overhead
    if running.num_branches == 1 or request.max_tokens <= 1 or not shares:
        count, draws = 1, running.num_branches if request.max_tokens else 0
        if request.max_tokens > 1:
            count, draws = running.num_branches, 1
        rows = []
        for branch in range(count):
            row = Sequence(
                list(tokens),
                len(tokens),
                running,
                start,
                prefixes,
                request.max_tokens,
                num_draws=draws,
                completion=branch,
            )
            row.needs_scores = request.echo_logprobs and not branch
            row.needs_cache = request.max_tokens > 1
            steps = row.cache_tokens - row.prompt_len
            needed = start + row.prompt_len + steps * (1 + step_overhead) + beside
            if row.needs_cache and needed > cache_tokens:
                raise _too_large(needed, cache_tokens)
            rows.append(row)
        running.rows_left += count
        return [Admission(row) for row in rows]
    each = request.max_tokens - 1
    needed = len(running.tokens) + each * step_overhead + beside
    at_once = min(running.num_branches, (cache_tokens - needed) // each, max(1, max_rows - 1))
    if at_once < 1:
        raise _too_large(needed + each, cache_tokens)
    found = []
    for first in range(0, running.num_branches, at_once):
        count = min(at_once, running.num_branches - first)
        # max_new 1: the prompt's last token is fed, but what follows it lives in the branches.
        row = Sequence(
            list(tokens), len(tokens), running, start, prefixes, max_new_tokens=1, num_draws=count, needs_cache=True
        )
        row.completion = first
        row.needs_scores = request.echo_logprobs and first == 0
        running.rows_left += 1
        found.append(Admission(row, count, each))
    return found


def _renumbered(members: abc.Sequence[PrefixNode | int], places: abc.Sequence[int]) -> list[PrefixNode | int]:
    found: list[PrefixNode | int] = []
    for member in members:
        if isinstance(member, PrefixNode):
            member.users = [places[user] for user in member.users]
            member.members = _renumbered(member.members, places)
            found.append(member)
        else:
            found.append(places[member])
    return found


def _encode(texts: list[str], tokenizer: Tokenizer) -> dict[str, list[int] | RequestError]:
    """Token ids of every text, or why it has none (text that is not valid Unicode)."""
    try:
        return dict(zip(texts, tokenizer.encode_batch(texts)))
    except RequestError as error:
        if len(texts) == 1:
            return {texts[0]: error}
        half = len(texts) // 2
        return _encode(texts[:half], tokenizer) | _encode(texts[half:], tokenizer)


def _with_context(ids: list[int], request: GenerationRequest, tokenizer: Tokenizer | None) -> tuple[list[int], int]:
    """An empty prompt is conditioned on BOS, or on EOS where the model knows no BOS (as such models are trained)."""
    if ids or request.max_tokens == 0:
        return ids, 0
    context = None
    if tokenizer is not None:
        context = tokenizer.bos_id if tokenizer.bos_id is not None else min(tokenizer.eos_ids, default=None)
    if context is None:
        raise RequestError("the prompt is empty and the model names no token to begin a text with; give one token")
    return [context], 1


def _check(running: RunningRequest, config: ModelConfig, schedule: Schedule) -> None:
    tokens, asked = running.tokens, running.request.max_tokens
    if schedule == "prefill-only" and asked > 1:
        raise RequestError(
            f"max_tokens is {asked} and the schedule prefill-only draws one token at most; take --schedule zigzag"
        )
    # The last token is never fed, so a prompt may be scored one token beyond the window.
    if len(tokens) + asked > config.max_positions + 1:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens is {asked}, together beyond the model's window of "
            f"{config.max_positions} tokens; shorten the prompt or lower max_tokens"
        )
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise RequestError(f"token id {token} is outside the vocabulary of {config.vocab_size} tokens")


def _identity(running: RunningRequest) -> tuple[object, ...]:
    """Equal for requests whose answers are equal by definition."""
    r = running.request
    drawn = (r.top_p, r.seed) if r.temperature else ()
    return (
        tuple(running.tokens), running.context, r.max_tokens, r.temperature, drawn, tuple(r.stop), r.n,
        r.echo_logprobs, r.ignore_eos,
    )  # fmt: skip


def _too_large(needed: int, available: int) -> RequestError:
    return RequestError(
        f"the request needs a KV cache of {needed} tokens and the memory limit leaves room for {available}; "
        "raise the limit (--cpu-memory, --gpu-memory) or lower max_tokens"
    )
