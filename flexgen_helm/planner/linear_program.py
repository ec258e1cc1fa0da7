"""The linear program of one block shape, and its solution rounded to whole tensors. No torch.

It finds the nine fractions that minimize the time of a sequence, with HiGHS: of weights (w), KV cache (c) and hidden
states (h) on GPU (g), CPU (c) and disk (d):

    min  T / sequences    with  T = prefill pass + passes x decode pass,  pass >= every resource (`planner.cost_model`)
    s.t. bytes of each tier <= its limit,  wg + wc + wd = cg + cc + cd = hg + hc + hd = 1

A limit of T needs no row: a block whose least T exceeds it has no solution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexgen_helm.planner.affine import CACHE, CG, COLUMNS, HG, HIDDEN, ONE, WEIGHTS, WG, Affine
from flexgen_helm.planner.cost_model import CHANNELS, RESOURCES, BlockCosts, block_costs
from flexgen_helm.planner.placement import TIERS, Tier, tier_fractions
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import CostEstimate, cache_blocks, predict
from flexgen_helm.planner.problem import BlockShape, PlanningProblem
from flexgen_helm.planner.schedules import ZIGZAG, Schedule

# Attempts to lower a tier's share of the weights until its whole matrices fit.
_ATTEMPTS = 16
# Of two equal costs the one without the disk is taken: this much for a fraction there, where the largest cost is 1. The
# solver takes less than 1e-7 for nothing.
_PREFERS_MEMORY = 1e-6
# Share by which a block may exceed its limit of time: rounding errors.
LATENCY_TOLERANCE = 1e-6
_Bounds = list[tuple[float, float | None]]


@dataclass(frozen=True)
class Solution:
    """A policy with its schedule, and what it costs as it will be placed."""

    policy: Policy
    schedule: Schedule
    prediction: CostEstimate


@dataclass(frozen=True)
class Candidate:
    """The solution of the program for one block shape, not yet rounded.

    keeps_weights: rounding must not move them: all are on the compute tier, or they are loaded already.
    """

    shape: BlockShape
    keeps_weights: bool
    fractions: Affine
    seconds_per_sequence: float


def solve(
    problem: PlanningProblem,
    shape: BlockShape,
    costs: BlockCosts,
    resident: bool,
    fixed: Policy | None = None,
) -> Candidate | None:
    """Solve the program of one block shape; None if it has no solution.

    fixed: a policy whose weights are loaded already.
    """
    # Variables: nine fractions, then the longest resource of a prefill pass and of a decode pass.
    cost, constant = np.zeros(11), 0.0
    rows: list[Affine] = []
    upper: list[float] = []
    for variable, times, passes in ((9, costs.prefill, 1.0), (10, costs.decode, costs.decode_passes)):
        if not passes:
            continue
        total = np.sum([times[name] for name in RESOURCES], axis=0)
        exposed = passes * (1 - problem.overlap_share)
        cost[:9] += exposed * total[:9]
        constant += exposed * total[ONE]
        cost[variable] += passes * problem.overlap_share
        for form in (times[name] for name in (*RESOURCES, *CHANNELS)):
            if form.any():
                row = np.zeros(11)
                row[:9], row[variable] = form[:9], -1.0
                rows.append(row)
                upper.append(-form[ONE])
    for tier, form, free in _memory_rows(problem, costs):
        # In units of the tier, so that bytes and seconds have similar magnitudes for the solver.
        unit = max(1.0, problem.limits[tier])
        rows.append(np.concatenate((form[:9], (0.0, 0.0))) / unit)
        upper.append(free / unit)
    bounds = _bounds(problem, 2)
    if resident:
        bounds[WEIGHTS[problem.compute_tier]] = (1.0, 1.0)
    if fixed is not None:
        for tier, part in tier_fractions(fixed, "weights", problem.compute_tier == "gpu").items():
            bounds[WEIGHTS[tier]] = (part, part)
    scale = max(1e-12, float(np.abs(cost).max()))
    preference = np.zeros(11)
    preference[[columns["disk"] for columns in (WEIGHTS, CACHE, HIDDEN)]] = _PREFERS_MEMORY
    solved = _minimize(cost / scale + preference, rows, upper, bounds)
    if not solved.success:
        return None
    fractions = np.append(np.clip(solved.x[:9], 0.0, 1.0), 1.0)
    keeps_weights = resident or fixed is not None
    return Candidate(shape, keeps_weights, fractions, (float(cost @ solved.x) + constant) / costs.sequences)


def finish(problem: PlanningProblem, candidate: Candidate, max_latency: float | None = None) -> Solution | None:
    """Round a candidate to what can be placed; None if that does not fit or takes too long.

    If whole matrices and cache blocks exceed a tier, part of its share moves to the next tier: of the weights, of the
    cache where no weights are left, and at last of the hidden states.
    """
    fractions, schedule = candidate.fractions.copy(), candidate.shape.schedule
    next_tier: dict[Tier, Tier] = {"gpu": "cpu", "cpu": "disk"}
    for attempt in range(1, _ATTEMPTS + 1):
        policy = _policy(candidate.shape, fractions)
        prediction = predict(problem, policy, schedule)
        if prediction.feasible:
            late = max_latency is not None and prediction.block_s > max_latency * (1 + LATENCY_TOLERANCE)
            return None if late else Solution(policy, schedule, prediction)
        lowered = False
        for tier, following in next_tier.items():
            missing = prediction.missing.get(tier, 0)
            if not missing:
                continue
            # In bytes for the whole of a kind; a block that draws one token keeps no cache.
            stored = block_costs(problem, candidate.shape).memory[tier][0]
            if fractions[WEIGHTS[tier]] and not candidate.keeps_weights:
                columns, step = WEIGHTS, 1.05 * missing / problem.stored_bytes + 1e-4
            elif fractions[CACHE[tier]] and stored[CACHE[tier]]:
                columns, step = CACHE, 1 / len(cache_blocks(problem, policy))
            else:
                columns, step = HIDDEN, 1.05 * missing / max(1.0, stored[HIDDEN[tier]]) + 1e-4
            moved = min(fractions[columns[tier]], attempt * step)  # more each time, until something whole moves
            fractions[columns[tier]] -= moved
            fractions[columns[following]] += moved
            lowered |= moved > 0
        if not lowered:
            return None
    return None


def least_missing(problem: PlanningProblem, costs: BlockCosts) -> tuple[Affine, dict[Tier, int]]:
    """Return the fractions that miss the fewest bytes over all tiers, and those bytes by tier."""
    # Variables: nine fractions, then the missing bytes of each tier.
    rows, upper = [], []
    unit = float(problem.storage.num_values)
    for tier, form, free in _memory_rows(problem, costs):
        rows.append(np.concatenate((form[:9] / unit, [-float(tier == other) for other in TIERS])))
        upper.append(free / unit)
    solved = _minimize(np.concatenate((np.zeros(9), np.ones(3))), rows, upper, _bounds(problem, 3))
    missing = {tier: int(np.ceil(solved.x[9 + place] * unit)) for place, tier in enumerate(TIERS)}
    return np.append(solved.x[:9], 1.0), missing


def quickest_seconds(
    problem: PlanningProblem, schedules: Sequence[Schedule], fixed: Policy | None = None
) -> float | None:
    """Return the seconds of the quickest block as it will be placed, the smallest one; None if not even that fits.

    fixed: a policy whose weights are loaded already.
    """
    shape, has_gpu = smallest_block(schedules), problem.compute_tier == "gpu"
    seconds = []
    for resident in (False, True):
        if resident and fixed and tier_fractions(fixed, "weights", has_gpu)[problem.compute_tier] < 1:
            continue
        candidate = solve(problem, shape, block_costs(problem, shape, resident), resident, fixed=fixed)
        if candidate is not None and (done := finish(problem, candidate)) is not None:
            seconds.append(done.prediction.block_s)
    return min(seconds, default=None)


def smallest_block(schedules: Sequence[Schedule]) -> BlockShape:
    """Return the smallest block: one sequence, but all where only a single pass is allowed."""
    return BlockShape(1, 1, schedules[0] if all(own.is_single_pass for own in schedules) else ZIGZAG)


def _memory_rows(problem: PlanningProblem, costs: BlockCosts) -> Iterator[tuple[Tier, Affine, float]]:
    """Yield tier, form and the bytes that the form's variable part may take."""
    for tier in TIERS:
        free = min(problem.limits[tier], problem.capacity(tier) - costs.workspace[tier])
        yield from ((tier, form, free - form[ONE]) for form in costs.memory[tier])


def _bounds(problem: PlanningProblem, num_others: int) -> _Bounds:
    """Bound the nine fractions and the other variables; without a gpu its fractions are 0."""
    bounds: _Bounds = [(0.0, 1.0)] * 9 + [(0.0, None)] * num_others
    if problem.compute_tier == "cpu":
        bounds[WG] = bounds[CG] = bounds[HG] = (0.0, 0.0)
    return bounds


def _minimize(cost: Affine, rows: Sequence[Affine], upper: Sequence[float], bounds: _Bounds) -> Any:
    """Minimize `cost` under `rows` x <= `upper`, where the fractions of weights, cache and hidden states sum to 1."""
    from scipy.optimize import linprog

    sums = np.zeros((3, len(cost)))
    for row, columns in zip(sums, COLUMNS.values()):
        row[list(columns.values())] = 1.0
    return linprog(cost, np.array(rows), np.array(upper), sums, np.ones(3), bounds, method="highs")


def _policy(shape: BlockShape, fractions: Affine) -> Policy:
    """Round fractions to hundredths of a percent."""
    parts = [abs(round(float(x), 4)) for x in fractions[:9]]  # no minus zero
    pairs = [(parts[3 * kind], min(parts[3 * kind + 1], 1.0 - parts[3 * kind])) for kind in range(3)]
    return Policy(shape.gpu_batch_size, shape.num_gpu_batches, *(x for pair in pairs for x in pair))
