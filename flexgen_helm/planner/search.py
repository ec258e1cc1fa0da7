"""The search for a policy: block shapes and schedules around a linear program (the paper's 'Policy Search'). No torch.

The fractions of every block shape are a solution of `planner.linear_program`. The best few are rounded to whole
matrices and whole cache blocks and evaluated again. The best that still fits is taken, so what is predicted is what
will be done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.cost_model import CACHE, ONE, BlockCosts, block_costs
from flexgen_helm.planner.linear_program import Candidate, Solution, finish, solve
from flexgen_helm.planner.placement import TIERS
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import capacity
from flexgen_helm.planner.problem import BlockShape, PlanningProblem
from flexgen_helm.planner.suggestions import explain_infeasible

# What 'auto' chooses from. Row by row is never better, and what the diagonal schedule's growing caches cost is not in
# the model, so it is searched where it is asked for.
AUTOMATIC: tuple[Schedule, ...] = ("zigzag", "prefill-only")
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20)
_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024)
# Candidates of the program that are rounded and evaluated again.
_ROUNDED = 12
# Two throughputs that differ by less are equal; then the smaller block is taken.
_EQUAL = 1e-6


def search(
    situation: PlanningProblem,
    schedules: Sequence[Schedule] = AUTOMATIC,
    *,
    max_latency: float | None = None,
    fixed: Policy | None = None,
) -> Solution:
    """The policy with the highest throughput. fixed: a policy whose weights lie already; only cache, hidden states
    and the block are chosen.

    Raises `MemoryLimitError` that names the tier and the missing bytes where nothing fits, or the least latency where
    no block is quick enough.
    """
    candidates = _candidates(situation, schedules, max_latency, fixed, prune=True)
    finished = [done for found in candidates[:_ROUNDED] if (done := finish(situation, found, max_latency))]
    if not finished:  # rounding to whole matrices cost the last bytes: smaller blocks leave more
        for found in _candidates(situation, schedules, max_latency, fixed, prune=False):
            if (done := finish(situation, found, max_latency)) is not None:
                finished.append(done)
                break
    if not finished:
        raise MemoryLimitError(explain_infeasible(situation, schedules, max_latency))
    return max(finished, key=lambda done: (_rank(done.prediction.tokens_per_s), -done.policy.block_size))


def _candidates(
    situation: PlanningProblem,
    schedules: Sequence[Schedule],
    max_latency: float | None,
    fixed: Policy | None,
    prune: bool,
) -> list[Candidate]:
    """Solutions of the program by shape, the best first. prune: leave out shapes that cannot be the best."""
    found: list[tuple[float, Candidate]] = []
    best = np.inf
    for shape, resident in _shapes(situation, schedules):
        if resident and fixed is not None and fixed.wg + fixed.wc * (situation.compute_tier == "cpu") < 1:
            continue
        model = block_costs(situation, shape, resident)
        least = _least(situation, model) if prune else 0.0
        if least > best * (1 + _EQUAL):
            continue
        solved = solve(situation, shape, model, resident, max_latency, fixed)
        if solved is not None:
            found.append((least, solved))
            best = min(best, solved.seconds_per_row)
    # What was solved before the best was known is left out too: the order must not matter.
    kept = [solved for least, solved in found if least <= best * (1 + _EQUAL)]
    return sorted(
        kept, key=lambda one: (_rank(one.seconds_per_row), one.shape.num_sequences, one.shape.num_gpu_batches)
    )


def _shapes(situation: PlanningProblem, schedules: Sequence[Schedule]) -> Iterator[tuple[BlockShape, bool]]:
    """Block shapes worth trying, large ones first (a good one early rules many out)."""
    workload, config = situation.workload, situation.config
    most = None if situation.endless else workload.num_sequences
    room = sum(min(situation.limits[tier], capacity(situation, tier)) for tier in TIERS)
    row_bytes = situation.kv_elements * situation.cache_bytes * (workload.prompt + workload.output) / 2
    weights = situation.stored_bytes
    fits = weights <= min(situation.limits[situation.compute_tier], capacity(situation, situation.compute_tier))
    for schedule in schedules:
        if (schedule == "prefill-only") != (workload.output == 1):
            continue
        if schedule == "diagonal" and (config.num_layers < 1 or workload.output < 2):
            continue
        # One batch more than pipeline stages would leave them idle less often; without stages on one device a block
        # of several batches pays where its memory is small.
        for rows in reversed(_ROWS):
            if most is not None and rows >= 2 * most and rows > 1:
                continue
            for batches in reversed(_BATCHES):
                if schedule in ("prefill-only",) and batches > 1:
                    continue
                if most is not None and rows * batches >= 2 * most and batches > 1:
                    continue
                if schedule != "prefill-only" and rows * batches * row_bytes > room:
                    continue
                for resident in (True, False) if fits else (False,):
                    yield BlockShape(rows, batches, schedule), resident


def _least(situation: PlanningProblem, model: BlockCosts) -> float:
    """A lower bound of the seconds a row: computing that no placement avoids."""
    found = 0.0
    for terms, times in ((model.prefill, 1.0), (model.decode, model.decode_passes)):
        coefficients = terms.resources["compute"]
        found += times * float(coefficients[ONE] + min(coefficients[list(CACHE.values())]))
    return found / model.rows


def _rank(value: float) -> float:
    """Rounded to parts of a million, so that noise of the solver does not choose between equals."""
    return float(f"{value:.6g}")
