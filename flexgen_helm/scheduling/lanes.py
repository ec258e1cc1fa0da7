"""Divide the requests of a run into lanes, whose passes the ranks of a pipeline compute in turn. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate

from flexgen_helm.planner.placement import PREFILL_LANES, SchedulerLimits
from flexgen_helm.planner.policy import Schedule
from flexgen_helm.scheduling.sequence import Request


def into_lanes(
    requests: Sequence[Request], limits: SchedulerLimits, num_ranks: int, schedule: Schedule
) -> tuple[list[list[Request]], SchedulerLimits]:
    """Return the requests of each lane, and what a pass of one may hold. One process alone has no use for several."""
    lanes = divide(requests, _num_lanes(requests, limits, num_ranks, schedule))
    return lanes, _lane_limits(limits, len(lanes))


def _num_lanes(requests: Sequence[Request], limits: SchedulerLimits, num_ranks: int, schedule: Schedule) -> int:
    """Return how many lanes there are: one for each rank, if each has room for the longest request."""
    if schedule.is_single_pass:
        return max(1, min(PREFILL_LANES * num_ranks, len(requests), limits.max_windows))
    longest = max((_positions(request, limits) for request in requests), default=1)
    return max(1, min(num_ranks, len(requests), limits.cache_tokens // longest, limits.max_sequences))


def _lane_limits(limits: SchedulerLimits, lanes: int) -> SchedulerLimits:
    """Return what a pass of one lane may hold, beside the caches of the others."""
    return replace(
        limits,
        cache_tokens=limits.cache_tokens // lanes,
        max_sequences=max(1, limits.max_sequences // lanes),
        max_windows=max(1, limits.max_windows // lanes),
    )


def divide(requests: Sequence[Request], lanes: int) -> list[list[Request]]:
    """Return the requests of each lane: about as many tokens in each, and common beginnings together."""
    order = sorted(range(len(requests)), key=lambda place: requests[place].tokens)
    sizes = [len(requests[place].tokens) + requests[place].request.max_tokens for place in order]
    before = [end - size / 2 for end, size in zip(accumulate(sizes), sizes)]
    total = max(1, sum(sizes))  # nothing is fed of an empty prompt that is scored
    # A last request of no size is at the end of the last lane, not behind it.
    lane_of = {place: min(lanes - 1, int(lanes * middle / total)) for place, middle in zip(order, before)}
    return [[request for place, request in enumerate(requests) if lane_of[place] == lane] for lane in range(lanes)]


def common_limits(limits: Sequence[SchedulerLimits]) -> SchedulerLimits:
    """Return limits within which a pass fits on every rank; limits: of each rank."""
    overheads = "slot_overhead", "step_overhead"
    values = {field.name: [getattr(own, field.name) for own in limits] for field in fields(SchedulerLimits)}
    return SchedulerLimits(**{name: max(own) if name in overheads else min(own) for name, own in values.items()})


def _positions(request: Request, limits: SchedulerLimits) -> int:
    """Return the cache that one completion of a request needs, with a prefix of its own."""
    steps = max(0, request.request.max_tokens - 1)
    return len(request.tokens) + steps * (1 + limits.step_overhead) + 2 * (1 + limits.slot_overhead)
