"""Throughput under limits of latency: the paper's trade-off curve. No torch."""

from __future__ import annotations

from typing import Any

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.linear_program import Solution, quickest_seconds
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import AUTOMATIC, search

# What whole matrices may cost a block that is exactly as quick as the linear program allows.
_SLACK = 0.03


def frontier_points(situation: PlanningProblem, count: int) -> list[dict[str, Any]]:
    """Policies between the quickest block of one sequence and the best throughput, none worse than another in both.

    Each is {latency_s, tokens_per_s, policy}; latency_s is of one block. Raises `MemoryLimitError` where nothing fits.
    """
    best = search(situation)
    found = [best]
    latency = _block_seconds(best)
    least = min(latency, quickest_seconds(situation, AUTOMATIC) or latency)
    # Equal steps in the logarithm: what is gained falls off as fast.
    for number in range(count - 1):
        limit = least * (latency / least) ** (number / (count - 1))
        try:
            found.append(search(situation, max_latency=limit * (1 + _SLACK)))
        except MemoryLimitError:
            continue
    kept: list[Solution] = []
    for each in sorted(found, key=lambda each: (_block_seconds(each), -each.prediction.tokens_per_s)):
        if not kept or each.prediction.tokens_per_s > kept[-1].prediction.tokens_per_s * (1 + 1e-6):
            kept.append(each)
    return [_point(each) for each in kept]


def _block_seconds(found: Solution) -> float:
    return found.prediction.prefill_s + found.prediction.decode_s


def _point(found: Solution) -> dict[str, Any]:
    policy = found.policy
    names = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")
    return {
        "latency_s": _block_seconds(found),
        "tokens_per_s": found.prediction.tokens_per_s,
        "policy": {
            "gpu_batch_size": policy.gpu_batch_size,
            "num_gpu_batches": policy.num_gpu_batches,
            "schedule": found.schedule,
            **{name: getattr(policy, name) for name in names},
        },
    }
