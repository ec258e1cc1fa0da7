"""Lanes of requests, whose passes the ranks of a pipeline compute in turn. No torch."""

from __future__ import annotations

from collections import abc
from dataclasses import fields, replace
from itertools import accumulate

from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.scheduling.sequence import Request
from flexgen_helm.tiers import PREFILL_LANES


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
        needs = (
            len(request.tokens) + request.original.max_fed_tokens * step for request in requests
        )
        num_fitting = limits.cache_tokens // (max(needs, default=0) + 2 * slot)
        count = max(1, min(num_ranks, len(requests), num_fitting, limits.max_sequences))
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
    sizes = [len(requests[index].tokens) + requests[index].original.max_tokens for index in order]
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
