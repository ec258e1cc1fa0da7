"""The linear program of one block shape, and what its solution becomes where tensors are placed whole. No torch.

The nine fractions that minimize the time of a token solve

    min  T / rows      with  T = prefill pass + passes x decode pass,  pass >= every resource (see `planner.cost_model`)
    s.t. bytes of each tier <= its limit,  wg + wc + wd = cg + cc + cd = hg + hc + hd = 1,  T <= max_latency

by HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexgen_helm.planner.cost_model import CACHE, HIDDEN, ONE, WEIGHTS, Affine, BlockCosts, block_costs
from flexgen_helm.planner.placement import TIERS, Tier
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.planner.predict import Prediction, capacity, evaluate, predict
from flexgen_helm.planner.problem import BlockShape, PlanningProblem

# Times that a tier's share of the weights is lowered until its whole matrices fit.
_TRIES = 16


@dataclass(frozen=True)
class Solution:
    """A policy with its schedule, and what it costs as it will be placed."""

    policy: Policy
    schedule: Schedule
    prediction: Prediction


@dataclass(frozen=True)
class Candidate:
    """A solution: the fractions of one block shape before they are rounded. resident: all weights are at home."""

    shape: BlockShape
    resident: bool
    fractions: Affine
    seconds_per_row: float


def solve(
    situation: PlanningProblem,
    shape: BlockShape,
    model: BlockCosts,
    resident: bool,
    max_latency: float | None,
    fixed: Policy | None,
) -> Candidate | None:
    """The linear program of one block shape; None where it has no solution."""
    from scipy.optimize import linprog

    share = situation.overlap_share
    phases = ((model.prefill, 1.0), (model.decode, model.decode_passes))
    # Variables: nine fractions, then the longest resource of a prefill and of a decode pass.
    cost, constant = np.zeros(11), 0.0
    upper: list[Affine] = []
    bounds: list[float] = []
    for number, (terms, times) in enumerate(phases):
        if not times:
            continue
        total = sum(terms.resources.values())
        assert isinstance(total, np.ndarray)
        cost[:9] += times * (1 - share) * total[:9]
        constant += times * (1 - share) * total[ONE]
        cost[9 + number] += times * share
        for coefficients in (*terms.resources.values(), *terms.together):
            if coefficients.any():
                row = np.zeros(11)
                row[:9], row[9 + number] = coefficients[:9], -1.0
                upper.append(row)
                bounds.append(-coefficients[ONE])
    scale = max(1e-12, float(np.abs(cost).max()))
    for tier in TIERS:
        room = min(situation.limits[tier], capacity(situation, tier) - model.working[tier])
        for coefficients in model.memory[tier]:
            # In parts of the tier, so that bytes and seconds are of one size for the solver.
            unit = max(1.0, situation.limits[tier])
            upper.append(np.concatenate((coefficients[:9], (0.0, 0.0))) / unit)
            bounds.append((room - coefficients[ONE]) / unit)
    if max_latency is not None:
        upper.append(cost.copy())
        bounds.append(max_latency - constant)
    sums = np.zeros((3, 11))
    for number, kind in enumerate((WEIGHTS, CACHE, HIDDEN)):
        sums[number, list(kind.values())] = 1.0
    limits: list[tuple[float, float | None]] = [(0.0, 1.0)] * 9 + [(0.0, None)] * 2
    if situation.compute_tier == "cpu":
        for kind in (WEIGHTS, CACHE, HIDDEN):
            limits[kind["gpu"]] = (0.0, 0.0)
    if resident:
        limits[WEIGHTS[situation.compute_tier]] = (1.0, 1.0)
    if fixed is not None:
        held = dict(zip(TIERS, (fixed.wg, fixed.wc, fixed.wd)))
        if situation.compute_tier == "cpu":
            held = {"gpu": 0.0, "cpu": fixed.wg + fixed.wc, "disk": fixed.wd}
        for tier, part in held.items():
            limits[WEIGHTS[tier]] = (part, part)
    solved = linprog(cost / scale, np.array(upper), np.array(bounds), sums, np.ones(3), limits, method="highs")
    if not solved.success:
        return None
    fractions = np.append(np.clip(solved.x[:9], 0.0, 1.0), 1.0)
    return Candidate(shape, resident, fractions, (float(solved.fun) * scale + constant) / model.rows)


def finish(situation: PlanningProblem, candidate: Candidate, max_latency: float | None) -> Solution | None:
    """Round to what can be placed; where whole matrices do not fit a tier, some of its share goes to the next."""
    fractions = candidate.fractions.copy()
    total = situation.stored_bytes
    for _ in range(_TRIES):
        policy = _policy(candidate.shape, fractions)
        done = predict(situation, policy, candidate.shape.schedule)
        late = max_latency is not None and done.prefill_s + done.decode_s > max_latency * (1 + 1e-6)
        if done.feasible:
            return None if late else Solution(policy, candidate.shape.schedule, done)
        lowered = False
        for tier, following in (("gpu", "cpu"), ("cpu", "disk")):
            short = done.missing.get(tier, 0) / total  # type: ignore[call-overload]
            part = fractions[WEIGHTS[tier]]  # type: ignore[index]
            if short and part > 0 and not candidate.resident:
                moved = min(part, 1.05 * short + 1e-4)
                fractions[WEIGHTS[tier]] -= moved  # type: ignore[index]
                fractions[WEIGHTS[following]] += moved  # type: ignore[index]
                lowered = True
        if not lowered:
            return None
    return None


def _policy(shape: BlockShape, fractions: Affine) -> Policy:
    """Percentages to a hundredth, which is how policies are written."""
    parts = [abs(round(float(x), 4)) for x in fractions[:9]]  # no minus zero
    pairs = [(parts[3 * kind], min(parts[3 * kind + 1], 1.0 - parts[3 * kind])) for kind in range(3)]
    return Policy(shape.gpu_batch_size, shape.num_gpu_batches, *(x for pair in pairs for x in pair))


def least_missing(situation: PlanningProblem, model: BlockCosts) -> tuple[Affine, dict[Tier, int]]:
    """Fractions that miss the fewest bytes over all tiers, and the bytes by tier."""
    from scipy.optimize import linprog

    upper, bounds = [], []
    unit = float(situation.storage.num_values)
    for place, tier in enumerate(TIERS):
        room = min(situation.limits[tier], capacity(situation, tier) - model.working[tier])
        for coefficients in model.memory[tier]:
            slack = np.zeros(3)
            slack[place] = -1.0
            upper.append(np.concatenate((coefficients[:9] / unit, slack)))
            bounds.append((room - coefficients[ONE]) / unit)
    sums = np.zeros((3, 12))
    for number, kind in enumerate((WEIGHTS, CACHE, HIDDEN)):
        sums[number, list(kind.values())] = 1.0
    limits: list[tuple[float, float | None]] = [(0.0, 1.0)] * 9 + [(0.0, None)] * 3
    if situation.compute_tier == "cpu":
        limits[0] = limits[3] = limits[6] = (0.0, 0.0)
    cost = np.concatenate((np.zeros(9), np.ones(3)))
    solved = linprog(cost, np.array(upper), np.array(bounds), sums, np.ones(3), limits, method="highs")
    short = {tier: int(np.ceil(solved.x[9 + place] * unit)) for place, tier in enumerate(TIERS)}
    return np.append(solved.x[:9], 1.0), short


def quickest_seconds(situation: PlanningProblem, schedules: Sequence[Schedule]) -> float | None:
    """The least seconds of any block, which is one of a single sequence; None where not even that fits."""
    one = single_sequence(schedules)
    quickest: float | None = None
    for resident in (False, True):
        found = solve(situation, one, block_costs(situation, one, resident), resident, None, None)
        if found is not None:
            done = evaluate(situation, one, found.fractions)
            quickest = min(quickest or np.inf, done.prefill_s + done.decode_s)
    return quickest


def single_sequence(schedules: Sequence[Schedule]) -> BlockShape:
    """The smallest block."""
    return BlockShape(1, 1, "prefill-only" if tuple(schedules) == ("prefill-only",) else "zigzag")
