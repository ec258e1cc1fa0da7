"""Divide the layers of a model among the ranks of a pipeline. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.constants import BLOCK_SEQUENCES
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.weight_placement import place_weights


def divide_layers(config: ModelConfig, num_ranks: int, counts: Sequence[int] | None = None) -> list[range]:
    """Return the layers of each rank: those that `counts` gives, else shares that take about as long to decode.

    The head counts by its operations, so the last rank has fewer layers. Raises `UsageError` if a rank had no layer.
    """
    layers = config.num_layers
    if counts is None:
        if layers < num_ranks:
            raise UsageError(f"{layers} layers cannot be divided among {num_ranks} ranks; start fewer processes")
        counts = _balanced(layers, num_ranks, config.head_flops_per_token * layers / config.linear_flops_per_token)
    elif len(counts) != num_ranks or sum(counts) != layers or min(counts) < 1:
        raise UsageError(
            f"--pipeline-layers {','.join(map(str, counts))} does not fit {layers} layers and {num_ranks} ranks; "
            f"give {num_ranks} numbers with the sum {layers}"
        )
    return _ranges(counts)


def divide_by_speed(seconds: Sequence[Sequence[float]]) -> list[range] | None:
    """Return the layers of each rank so that the slowest rank is as fast as possible; None if no division fits.

    seconds: for each rank those of a decode step with 1, 2, … layers, ascending; infinite where they do not fit.
    """
    num_layers = len(seconds[0]) + len(seconds) - 1  # each of the others has a layer at least
    bounds = sorted({own for rank in seconds for own in rank if own < math.inf})

    def most_layers(bound: float) -> list[int]:
        return [bisect_right(rank, bound) for rank in seconds]

    def suffices(bound: float) -> bool:
        counts = most_layers(bound)
        return min(counts) >= 1 and sum(counts) >= num_layers

    at = bisect_left(bounds, True, key=suffices)
    if at == len(bounds):
        return None
    counts = most_layers(bounds[at])
    while sum(counts) > num_layers:  # relieve the slowest
        able = [rank for rank, count in enumerate(counts) if count > 1]
        counts[max(able, key=lambda rank: seconds[rank][counts[rank] - 1])] -= 1
    return _ranges(counts)


def seconds_by_layers(problem: PlanningProblem, rank: int, num_ranks: int, policy: Policy | None) -> list[float]:
    """Predict seconds of a decode step with 1, 2, … layers of the model on this rank; infinite where they do not fit.

    problem: of the whole model on this rank's machine.
    policy: that places the weights; None for the planner's rule.
    """
    layers = problem.config.num_layers
    seconds: list[float] = []
    for count in range(1, layers - num_ranks + 2):
        first = 0 if rank == 0 else layers - count if rank == num_ranks - 1 else 1
        part = replace(problem, config=problem.config.part(range(first, first + count)), stages=1)
        seconds.append(max(_step_seconds(part, policy), seconds[-1] if seconds else 0.0))
    return seconds


def _step_seconds(problem: PlanningProblem, policy: Policy | None) -> float:
    try:
        placement = place_weights(problem.storage, problem.machine, policy)
    except MemoryLimitError:
        return math.inf
    weights, cache, hidden = (
        (fractions["gpu"], fractions["cpu"]) for fractions in (placement.shares, placement.cache, placement.activations)
    )
    placed = Policy(BLOCK_SEQUENCES, 1, *weights, *cache, *hidden)
    return predict(problem, placed, ZIGZAG, rounded=False).decode_s / (problem.workload.output - 1)


def _ranges(counts: Sequence[int]) -> list[range]:
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends)]


def _balanced(layers: int, num_ranks: int, head: float) -> list[int]:
    """Return layers by rank whose largest share is smallest; head: what the last rank has besides, in layers."""
    others = num_ranks - 1
    if not others:
        return [layers]
    last = min(range(1, layers - others + 1), key=lambda own: max(own + head, -(-(layers - own) // others)))
    share, more = divmod(layers - last, others)
    return [share + (rank < more) for rank in range(others)] + [last]
