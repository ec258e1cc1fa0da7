"""Lanes of requests, whose passes the ranks of a pipeline compute in turn. No torch."""

from __future__ import annotations

from collections import abc
from dataclasses import fields, replace
from itertools import accumulate

from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.scheduling.sequence import Request
from flexgen_helm.shared_sizes import PREFILL_LANES


def into_lanes(
    requests: abc.Sequence[Request], limits: SchedulerLimits, num_ranks: int, schedule: Schedule
) -> tuple[list[list[Request]], SchedulerLimits]:
    """Return the requests of each lane, and what a pass of one lane may hold.

    Ranks have a lane each, or fewer: each lane has room for the longest request with one shared
    prefix. Of a single pass, which fills no cache, they have `PREFILL_LANES` each.
    """
    if schedule.is_single_pass:
        num_lanes = max(1, min(PREFILL_LANES * num_ranks, len(requests), limits.max_states))
    else:
        # Positions of a decode step, and of a slot without tokens: the request's, and its prefix's.
        step, slot = 1 + limits.step_overhead, 1 + limits.slot_overhead
        needs = (
            len(request.tokens) + request.original.max_fed_tokens * step for request in requests
        )
        num_fitting = limits.cache_tokens // (max(needs, default=0) + 2 * slot)
        num_lanes = max(1, min(num_ranks, len(requests), num_fitting, limits.max_sequences))
    lane_limits = replace(
        limits,
        cache_tokens=limits.cache_tokens // num_lanes,
        max_sequences=max(1, limits.max_sequences // num_lanes),
        max_states=max(1, limits.max_states // num_lanes),
    )
    return divide(requests, num_lanes), lane_limits


def divide(requests: abc.Sequence[Request], num_lanes: int) -> list[list[Request]]:
    """Return the requests of each lane: about as many tokens, and common beginnings together.

    Sorted by their prompts, requests fill the lanes one after another; each is in the lane in which
    the middle of its tokens falls.
    """
    order = sorted(range(len(requests)), key=lambda index: requests[index].tokens)
    sizes = [len(requests[index].tokens) + requests[index].original.max_tokens for index in order]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes)]
    total = max(1, sum(sizes))  # nothing is fed of an empty prompt that is scored
    # A last request of no size is at the end of the last lane, not behind it.
    lane_of = {
        index: min(num_lanes - 1, int(num_lanes * middle / total))
        for index, middle in zip(order, middles)
    }
    return [
        [request for index, request in enumerate(requests) if lane_of[index] == lane]
        for lane in range(num_lanes)
    ]


def common_limits(limits: abc.Sequence[SchedulerLimits]) -> SchedulerLimits:
    """Return limits within which a pass fits on every rank; limits: of each rank."""
    common = {}
    for field in fields(SchedulerLimits):
        pick = max if field.name.endswith("_overhead") else min
        common[field.name] = pick(getattr(rank, field.name) for rank in limits)
    return SchedulerLimits(**common)
