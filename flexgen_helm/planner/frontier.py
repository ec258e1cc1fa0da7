"""Throughput under limits of latency: the paper's trade-off curve. No torch."""

from __future__ import annotations

from typing import Any

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.affine import fractions_by_kind
from flexgen_helm.planner.linear_program import quickest_seconds
from flexgen_helm.planner.predict import placed_fractions
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import AUTOMATIC, search

# Rounding to whole matrices may make a block this much slower than the linear program says.
_SLACK = 0.03


def frontier_points(problem: PlanningProblem, count: int) -> list[dict[str, Any]]:
    """Search policies between the quickest block of one sequence and the best throughput.

    Returns {latency_s of one block, tokens_per_s, policy, placement, policy_flag} by latency; each has more throughput
    than the one before. placement: fractions as placed; policy_flag: the text of --policy.
    Raises `MemoryLimitError` if nothing fits.
    """
    best = search(problem)
    slowest = best.prediction.block_s
    quickest = min(slowest, quickest_seconds(problem, AUTOMATIC) or slowest)
    solutions = [best]
    # Equal steps in the logarithm, because throughput grows ever more slowly with latency.
    for number in range(count - 1):
        limit = quickest * (slowest / quickest) ** (number / (count - 1))
        try:
            solutions.append(search(problem, max_latency=limit * (1 + _SLACK)))
        except MemoryLimitError:
            continue
    points: list[dict[str, Any]] = []
    for solution in sorted(solutions, key=lambda one: (one.prediction.block_s, -one.prediction.tokens_per_s)):
        if not points or solution.prediction.tokens_per_s > points[-1]["tokens_per_s"] * (1 + 1e-6):
            policy = solution.policy
            block = {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches}
            points.append(
                {
                    "latency_s": solution.prediction.block_s,
                    "tokens_per_s": solution.prediction.tokens_per_s,
                    "policy": {**block, "schedule": solution.schedule.name, **policy.fractions},
                    "placement": fractions_by_kind(placed_fractions(problem, policy)),
                    "policy_flag": str(policy),
                }
            )
    return points
