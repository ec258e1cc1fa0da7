"""What a plan must know of a run's requests: their lengths, and what they share. No torch."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

from flexgen_helm.planner.run_memory import RunSize
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.scheduling.forecast import AnswerLengths
from flexgen_helm.scheduling.prefix_tree import PrefixCostModel, prefixes_of, shared_prefixes
from flexgen_helm.scheduling.sequence import Request
from flexgen_helm.shared_sizes import LONG_ANSWER_TOKENS


def run_size(
    requests: abc.Sequence[Request],
    cost: PrefixCostModel,
    with_prefixes: bool,
    cache_format: CacheFormat | None,
) -> RunSize:
    """Return what a plan must know of a run's requests; the arguments are those of
    `planned_workload`.
    """
    decoded = [request for request in requests if request.original.max_fed_tokens]
    return RunSize(
        longest=max(map(_positions, requests), default=1),
        prompt_tokens=sum(
            max(len(request.tokens), request.num_completions) + request.num_resumed
            for request in requests
        ),
        max_early_stop_tokens=max((request.length_group or 0 for request in requests), default=0),
        longest_decoded=max(map(_positions, decoded), default=0),
        longest_steps=max((request.original.max_fed_tokens for request in decoded), default=0),
        decodes=bool(decoded),
        workload=planned_workload(requests, cost, with_prefixes, cache_format),
    )


def _positions(request: Request) -> int:
    """Return the positions of one completion with its prompt."""
    return len(request.tokens) + request.original.max_fed_tokens


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
    saved_by_prefixes = saved_by_completions = 0
    if with_prefixes and multiple is not None:
        users = (request.prefix_users(cache_format is not None) for request in requests)
        forest = shared_prefixes(users, replace(cost, group_tokens=multiple))
        saved_by_prefixes = sum(prefix.saved for prefix in prefixes_of(forest))
    for request in requests:
        # Completions share the whole prompt; those that go on are among the users of prefixes.
        shares_all = cache_format is None or not request.original.max_fed_tokens
        if shares_all and not request.num_resumed:
            saved_by_completions += (request.num_completions - 1) * len(request.tokens)
    scored = _scored_tokens(requests, saved_by_prefixes)
    return Workload.of(lengths, saved_by_prefixes + saved_by_completions, scored)


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
    saved_by_completions = sum(
        (request.num_completions - 1) * len(request.tokens) for request in requests
    )
    scored = _scored_tokens(requests, max(0, saved_tokens - saved_by_completions))
    return Workload.of(lengths, saved_tokens, scored)


def _scored_tokens(requests: abc.Sequence[Request], saved_by_prefixes: int) -> int:
    """Return how many prompt tokens pass the head: each of a request once, and those of a shared
    beginning once for all.
    """
    scored = sum(
        max(0, len(request.tokens) - 1) for request in requests if request.original.echo_logprobs
    )
    total = sum(len(request.tokens) for request in requests)
    if not scored:
        return 0
    # Beginnings that are scored are taken to be shared as often as those that are not.
    return round(scored * max(0.0, 1 - saved_by_prefixes / total))


def _expected_output(request: Request, num_resumed: int = 0) -> int:
    """Return the output tokens to plan for: if a long answer may end early, the expected ones."""
    most, group = max(1, request.original.max_tokens - num_resumed), request.length_group
    if group is None or group <= LONG_ANSWER_TOKENS:
        return most
    return round(AnswerLengths().expected_tokens(group, most))
