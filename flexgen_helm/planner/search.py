"""Search the policy with the highest throughput (the paper's 'Policy Search'). No torch.

For every block shape and schedule, `planner.linear_program` finds the best fractions. The best few candidates are
rounded to whole matrices and cache blocks and evaluated again, so the prediction is for what will be placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations

import numpy as np

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.affine import CACHE, ONE
from flexgen_helm.planner.cost_model import BlockCosts, block_costs
from flexgen_helm.planner.infeasible import explain_infeasible
from flexgen_helm.planner.linear_program import LATENCY_TOLERANCE, Candidate, Solution, finish, solve
from flexgen_helm.planner.placement import TIERS, tier_fractions
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import as_placed, predict, shrunk, workload_seconds
from flexgen_helm.planner.problem import BlockShape, PlanningProblem
from flexgen_helm.planner.schedules import AUTOMATIC, Schedule

_NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20)
_NUM_BLOCKS = range(1, 7)
_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024)
# Candidates that are rounded and evaluated again, and how many are tried for them.
_ROUNDED, _TRIED = 12, 48
# A model of few matrices loses percents to rounding, so weights move on by as much while that is predicted to pay: at
# most so many times, in steps of one of the smallest matrices, of one of the largest, and of several.
_COARSE_MATRICES, _MOST_MOVES, _SEVERAL = 600, 20, 4
# Least gain of a move; smaller ones are rounding errors.
_LEAST_GAIN = 1e-4
# Shapes that would take so many times as long as the best even with perfect overlap, or as a block may, are left out.
# Above 1, because fractions change when they are rounded to whole matrices.
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
    finished = (finish(problem, candidate, max_latency) for candidate in candidates[:_TRIED])
    solutions = list(islice((solution for solution in finished if solution is not None), _ROUNDED))
    if not solutions:  # whole matrices cost the last bytes; smaller blocks leave more
        candidates = _candidates(problem, schedules, max_latency, fixed, prune=False)
        finished = (finish(problem, candidate, max_latency) for candidate in candidates)
        solutions = list(islice((solution for solution in finished if solution is not None), _ROUNDED))
    if not solutions:
        raise MemoryLimitError(explain_infeasible(problem, schedules, max_latency, fixed))
    best = max(solutions, key=_worth)
    if fixed is None:
        best = _with_weights_moved(problem, best, max_latency)
    policy = as_placed(problem, best.policy)
    named = Solution(policy, best.schedule, predict(problem, policy, best.schedule))
    is_late = max_latency is not None and named.prediction.block_s > max_latency * (1 + LATENCY_TOLERANCE)
    return best if is_late or not named.prediction.feasible else named


def _worth(done: Solution) -> tuple[float, bool, int]:
    """Return what the best has most of; of equals, one pass for all shares most, and small blocks end first."""
    return _rank(done.prediction.tokens_per_s), done.schedule.is_single_pass, -done.policy.block_size


def _with_weights_moved(problem: PlanningProblem, found: Solution, max_latency: float | None) -> Solution:
    """Move weights between tiers, a few matrices at a time, while more throughput is predicted."""
    sizes = problem.storage.matrices.values()
    if len(sizes) > _COARSE_MATRICES:
        return found
    steps = [size / problem.stored_bytes for size in (min(sizes), max(sizes), _SEVERAL * max(sizes))]
    for _ in range(_MOST_MOVES):
        least = found.prediction.tokens_per_s * (1 + _LEAST_GAIN)
        moved = [
            Solution(policy, found.schedule, predict(problem, policy, found.schedule))
            for step in steps
            for policy in _moves(found.policy, step, problem.compute_tier == "gpu")
        ]
        better = [
            one
            for one in moved
            if one.prediction.feasible and one.prediction.tokens_per_s > least
            and (max_latency is None or one.prediction.block_s <= max_latency * (1 + LATENCY_TOLERANCE))
        ]  # fmt: skip
        if not better:
            break
        found = max(better, key=_worth)
    return found


def _moves(policy: Policy, step: float, has_gpu: bool) -> Iterator[Policy]:
    """Yield policies with a share of the weights on another tier."""
    shares = tier_fractions(policy, "weights", has_gpu)
    for source, target in permutations([tier for tier in TIERS if has_gpu or tier != "gpu"], 2):
        if moved := min(step, shares[source]):
            own = {**shares, source: shares[source] - moved, target: shares[target] + moved}
            yield replace(policy, wg=own["gpu"], wc=own["cpu"])


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
    best, workload = np.inf, problem.workload
    has_gpu = problem.compute_tier == "gpu"
    for shape, resident in _shapes(problem, schedules):
        if resident and fixed and tier_fractions(fixed, "weights", has_gpu)[problem.compute_tier] < 1:
            continue
        costs = block_costs(problem, shape, resident)
        least = _least_seconds(costs) if prune else 0.0
        if least > best * _PRUNED_FROM:
            continue
        candidate = solve(problem, shape, costs, resident, fixed)
        if candidate is None:
            continue
        if max_latency is not None and _block_seconds(candidate, costs) > max_latency * _PRUNED_FROM:
            continue
        if not problem.endless and workload.num_sequences % costs.sequences:  # the last block is smaller
            total_s = workload_seconds(problem, shape, costs, candidate.fractions, resident)
            candidate = replace(candidate, seconds_per_sequence=total_s / workload.num_sequences)
        solved.append((least, candidate))
        best = min(best, candidate.seconds_per_sequence)
    # Prune again with the final best, so that the order of shapes does not matter.
    kept = [candidate for least, candidate in solved if least <= best * _PRUNED_FROM]
    return sorted(
        kept, key=lambda one: (_rank(one.seconds_per_sequence), one.shape.num_sequences, one.shape.num_gpu_batches)
    )


def _shapes(problem: PlanningProblem, schedules: Sequence[Schedule]) -> Iterator[tuple[BlockShape, bool]]:
    """Yield block shapes worth trying with resident and offloaded weights, large ones first: they prune the most.

    None has more sequences than the workload. A single token is scored in one pass for all, or block by block.
    """
    workload = problem.workload
    room = sum(map(problem.usable, TIERS))
    sequence_bytes = problem.kv_elements * problem.cache_bytes * (workload.prompt + workload.output) / 2
    if workload.output == 1:
        sequence_bytes = 0.0
    resident = (True, False) if problem.stored_bytes <= problem.usable(problem.compute_tier) else (False,)
    # The largest batch of prompts whose products read packed weights as they are.
    batch_sizes = {*_BATCH_SIZES, max(1, int(problem.fused_rows(problem.precision.weights) / workload.computed))}
    if not problem.endless:  # blocks of equal size: 17 sequences are rather 9 and 8 than 8, 8 and 1
        batch_sizes |= {-(-workload.num_sequences // blocks) for blocks in _NUM_BLOCKS}
    known: set[BlockShape] = set()
    for schedule in schedules:
        if schedule.is_single_pass and workload.output > 1:
            continue
        for batch_size in sorted(batch_sizes, reverse=True):
            for batches in _batch_numbers(problem, schedule, batch_size):
                shape = BlockShape(batch_size, batches, schedule)
                if not problem.endless:
                    shape = shrunk(shape, workload.num_sequences)
                if shape not in known and shape.num_sequences * sequence_bytes <= room:
                    known.add(shape)
                    yield from ((shape, flag) for flag in resident)


def _batch_numbers(problem: PlanningProblem, schedule: Schedule, batch_size: int) -> list[int]:
    """Return the numbers of batches worth trying, large ones first, with the one that holds the whole workload."""
    if problem.endless:
        return sorted(_NUM_BATCHES, reverse=True)
    if schedule.is_single_pass:
        return [1]
    whole = -(-problem.workload.num_sequences // batch_size)
    return sorted({*_NUM_BATCHES, min(whole, _NUM_BATCHES[-1])}, reverse=True)


def _block_seconds(candidate: Candidate, costs: BlockCosts) -> float:
    return candidate.seconds_per_sequence * costs.sequences


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
