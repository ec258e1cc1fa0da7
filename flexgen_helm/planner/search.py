"""Search the policy with the highest throughput (the paper's 'Policy Search'). No torch.

For every block shape and schedule, `planner.linear_program` finds the best fractions. The best few candidates are
rounded to whole matrices and cache blocks and evaluated again, so the prediction is for what will be placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.affine import CACHE, ONE
from flexgen_helm.planner.cost_model import BlockCosts, block_costs
from flexgen_helm.planner.infeasible import explain_infeasible
from flexgen_helm.planner.linear_program import Candidate, Solution, finish, solve
from flexgen_helm.planner.placement import TIERS, tier_fractions
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import as_placed, predict, shrunk
from flexgen_helm.planner.problem import BlockShape, PlanningProblem

# Schedules of 'auto'. 'row' is never better, and the model lacks the cost of the diagonal schedule's growing caches.
AUTOMATIC: tuple[Schedule, ...] = ("zigzag", "prefill-only")
_NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20)
_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024)
# Candidates that are rounded and evaluated again.
_ROUNDED = 12
# Shapes that would take so many times as long as the best, even with perfect overlap, are left out. Above 1, because
# the best may lose to others when its fractions are rounded to whole matrices.
_PRUNED_FROM = 1.25


def search(
    problem: PlanningProblem,
    schedules: Sequence[Schedule] = AUTOMATIC,
    *,
    max_latency: float | None = None,
    fixed: Policy | None = None,
) -> Solution:
    """Return the policy with the highest throughput.

    max_latency: seconds that a block may take.
    fixed: a policy whose weights are loaded already; the search chooses block, cache and hidden states.

    Raises `MemoryLimitError` with tier and missing bytes if nothing fits, or with the least latency if no block is
    quick enough.
    """
    candidates = _candidates(problem, schedules, max_latency, fixed, prune=True)
    solutions = [done for one in candidates[:_ROUNDED] if (done := finish(problem, one, max_latency))]
    if not solutions:  # whole matrices cost the last bytes; smaller blocks leave more
        candidates = _candidates(problem, schedules, max_latency, fixed, prune=False)
        finished = (finish(problem, candidate, max_latency) for candidate in candidates)
        solutions = list(islice((solution for solution in finished if solution is not None), _ROUNDED))
    if not solutions:
        raise MemoryLimitError(explain_infeasible(problem, schedules, max_latency))
    best = max(solutions, key=lambda done: (_rank(done.prediction.tokens_per_s), -done.policy.block_size))
    policy = as_placed(problem, best.policy)
    named = Solution(policy, best.schedule, predict(problem, policy, best.schedule))
    return named if named.prediction.feasible else best


def _candidates(
    problem: PlanningProblem,
    schedules: Sequence[Schedule],
    max_latency: float | None,
    fixed: Policy | None,
    prune: bool,
) -> list[Candidate]:
    """Solve the program of every block shape; the best first.

    prune: skip shapes that cannot be the best even with perfect overlap.
    """
    solved: list[tuple[float, Candidate]] = []
    best = np.inf
    has_gpu = problem.compute_tier == "gpu"
    for shape, resident in _shapes(problem, schedules):
        if resident and fixed and tier_fractions(fixed, "weights", has_gpu)[problem.compute_tier] < 1:
            continue
        costs = block_costs(problem, shape, resident)
        least = _least_seconds(costs) if prune else 0.0
        if least > best * _PRUNED_FROM:
            continue
        candidate = solve(problem, shape, costs, resident, max_latency, fixed)
        if candidate is not None:
            solved.append((least, candidate))
            best = min(best, candidate.seconds_per_sequence)
    # Prune again with the final best, so that the order of shapes does not matter.
    kept = [candidate for least, candidate in solved if least <= best * _PRUNED_FROM]
    return sorted(
        kept, key=lambda one: (_rank(one.seconds_per_sequence), one.shape.num_sequences, one.shape.num_gpu_batches)
    )


def _shapes(problem: PlanningProblem, schedules: Sequence[Schedule]) -> Iterator[tuple[BlockShape, bool]]:
    """Yield block shapes worth trying with resident and offloaded weights, large ones first: they prune the most.

    None has more sequences than the workload, but for those that fill its last batch.
    """
    workload = problem.workload
    most = np.inf if problem.endless else workload.num_sequences
    room = sum(map(problem.usable, TIERS))
    sequence_bytes = problem.kv_elements * problem.cache_bytes * (workload.prompt + workload.output) / 2
    resident = (True, False) if problem.stored_bytes <= problem.usable(problem.compute_tier) else (False,)
    known: set[BlockShape] = set()
    for schedule in schedules:
        if (schedule == "prefill-only") != (workload.output == 1):
            continue
        for batch_size in reversed(_BATCH_SIZES):
            for batches in (1,) if schedule == "prefill-only" else reversed(_NUM_BATCHES):
                sequences = batch_size * batches
                too_many = sequences >= 2 * most
                if too_many or (schedule != "prefill-only" and sequences * sequence_bytes > room):
                    continue
                shape = BlockShape(batch_size, batches, schedule)
                if not problem.endless:
                    shape = shrunk(shape, workload.num_sequences)
                if shape not in known:
                    known.add(shape)
                    yield from ((shape, flag) for flag in resident)


def _least_seconds(costs: BlockCosts) -> float:
    """Bound the seconds of a sequence from below: computing that no placement avoids."""
    total = 0.0
    for times, passes in ((costs.prefill, 1.0), (costs.decode, costs.decode_passes)):
        form = times["compute"]
        total += passes * float(form[ONE] + min(form[list(CACHE.values())]))
    return total / costs.sequences


def _rank(value: float) -> float:
    """Round to parts in a million, so that noise of the solver does not choose between equals."""
    return float(f"{value:.6g}")
