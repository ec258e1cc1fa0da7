"""Search the policy with the highest throughput (the paper's 'Policy Search'). No torch.

For every block shape and schedule, `planner.linear_program` finds the best fractions. The best few candidates are
rounded to whole matrices and cache blocks and evaluated again, so the prediction is for what will be placed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import Any

import numpy as np

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import count, exact_size, size
from flexgen_helm.planner.cost_model import CHANNELS, RESOURCES, BlockCosts, block_costs
from flexgen_helm.planner.placement import TIERS, Tier, limit_flag, tier_fractions
from flexgen_helm.planner.policy import AUTOMATIC, ZIGZAG, Policy, Schedule
from flexgen_helm.planner.predict import (
    CostEstimate,
    as_placed,
    cache_blocks,
    placed_fractions,
    predict,
    shrunk,
    workload_seconds,
)
from flexgen_helm.planner.problem import (
    CACHE,
    CG,
    COLUMNS,
    HG,
    HIDDEN,
    MEASURED,
    ONE,
    WEIGHTS,
    WG,
    Affine,
    BlockShape,
    PlanningProblem,
    fractions_by_kind,
)
from flexgen_helm.quant.precisions import PRECISIONS

# The linear program of one block shape, and its solution rounded to whole tensors. No torch.

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


# Explain why no block fits, and suggest what helps. Every suggestion is tried before it is given. No torch.

# Missing bytes per weight that are rounding errors of the solver.
_NOISE = 1e-6


def explain_infeasible(
    problem: PlanningProblem, schedules: Sequence[Schedule], max_latency: float | None, fixed: Policy | None = None
) -> str:
    """Say in one sentence how much memory or time is missing, and what helps.

    fixed: a policy whose weights are loaded already.
    """
    shape, num_sequences = smallest_block(schedules), problem.workload.num_sequences
    has_all = shape.schedule.is_single_pass and not problem.endless and num_sequences > 1
    everything = f"the one pass of {shape.schedule} has {count(num_sequences, 'sequence')}"
    in_blocks = quickest_seconds(problem, (ZIGZAG,), fixed)
    quickest = quickest_seconds(problem, schedules, fixed) if has_all else in_blocks
    if quickest is not None and max_latency is not None:
        late, raised = f"no block is done within {max_latency:g} s", "raise --max-latency"
        if not has_all:
            return f"{late}: a single sequence takes {_at_least(quickest)} s; {raised}"
        if in_blocks is not None and in_blocks <= max_latency:
            raised = f"leave --schedule out, or {raised}"
        return f"{late}: {everything} and takes {_at_least(quickest)} s; {raised}"
    if has_all and in_blocks is None:
        shape, has_all = smallest_block((ZIGZAG,)), False
    costs = block_costs(problem, shape)
    fractions, missing = least_missing(problem, costs)
    tier = max(TIERS, key=lambda tier: missing[tier])
    needed = max(float(form @ fractions) for form in costs.memory[tier])
    limit, capacity, workspace = problem.limits[tier], problem.capacity(tier), costs.workspace[tier]
    if limit <= capacity - workspace:
        available = f"{size(needed)} where {exact_size(int(limit))} are allowed"
    else:  # the limit exceeds what the machine has
        machine = "this machine" if problem.hardware.name == MEASURED else problem.hardware.name
        available = f"{size(needed + workspace)} where {exact_size(int(capacity))} are all that {machine} has"
    if _exceeds_noise(problem, missing[tier]):
        short = f"{exact_size(missing[tier])} more on the {tier} tier, {available}"
    else:
        short = f"up to {exact_size(max(problem.storage.matrices.values()))} more, because a matrix is never split"
    *others, last = *_suggestions(problem, shape, tier, missing), "take a smaller model"
    advice = f"{', '.join(others)}{', or ' if others else ''}{last}"
    if has_all:
        return f"{everything}, whose hidden states and the weights need {short}: leave --schedule out, or {advice}"
    return f"even a block of one sequence needs {short}: {advice}"


def _at_least(seconds: float) -> str:
    """Return seconds that are enough as a limit: rounded up, to four digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 3)
    return f"{math.ceil(seconds / unit) * unit:.10g}"


def _suggestions(problem: PlanningProblem, shape: BlockShape, tier: Tier, missing: Mapping[Tier, int]) -> list[str]:
    """List what makes a block of one sequence fit, the most obvious first."""
    suggestions = []
    # The tier that misses the most bytes first; they may fit another tier too.
    tiers = sorted(TIERS, key=lambda other: other != tier)
    single = [limit_flag(other) for other in tiers if _fits(_with_raised_limits(problem, [other]), shape)]
    raisable = [other for other in TIERS if problem.limits[other] < problem.largest_limit(other)]
    raised = _with_raised_limits(problem, raisable)
    if single:
        suggestions.append(f"raise {' or '.join(single)}")
    elif _fits(raised, shape):
        suggestions.append(f"raise {' and '.join(map(limit_flag, raisable))}")
    else:
        still_missing = least_missing(raised, block_costs(raised, shape))[1]
        if not any(_exceeds_noise(problem, still_missing[memory]) for memory in ("gpu", "cpu")):
            needed = [limit_flag(other) for other in raisable if _exceeds_noise(problem, missing[other])]
            disk = "name a machine with a larger disk"
            if problem.hardware.name == MEASURED:
                disk = "make room on the disk or name another folder with --offload-dir"
            suggestions.append(f"raise {' and '.join(needed)} and {disk}" if needed else disk)
    smaller = [PRECISIONS[name] for name in ("8bit", "4bit")] if problem.precision.weights is None else []
    fitting = (each.name for each in smaller if _fits(replace(problem, precision=each), shape))
    if (name := next(fitting, None)) is not None:
        suggestions.append(f"take --precision {name}")
    return suggestions


def _fits(problem: PlanningProblem, shape: BlockShape) -> bool:
    candidates = (solve(problem, shape, block_costs(problem, shape, flag), flag) for flag in (False, True))
    return any(candidate is not None and finish(problem, candidate) is not None for candidate in candidates)


def _with_raised_limits(problem: PlanningProblem, tiers: Iterable[Tier]) -> PlanningProblem:
    """Raise the limits of `tiers` to their highest, where that is more."""
    for tier in tiers:
        highest = max(problem.limits[tier], problem.largest_limit(tier))
        problem = replace(problem, limits={**problem.limits, tier: highest})
    return problem


def _exceeds_noise(problem: PlanningProblem, num_bytes: float) -> bool:
    return num_bytes > _NOISE * problem.storage.num_values


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


# Throughput under limits of latency: the paper's trade-off curve. No torch.

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
