"""Search the policy with the highest throughput (the paper's 'Policy Search'). No torch.

For every block shape and schedule, a linear program finds the best fractions. The best few
candidates are rounded to whole matrices and cache blocks and evaluated again, so the prediction is
for what will be placed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import exact_size, size
from flexgen_helm.hardware.profile import MEASURED
from flexgen_helm.planner.affine import (
    CACHE,
    CG,
    COLUMNS,
    HG,
    HIDDEN,
    ONE,
    WEIGHTS,
    WG,
    Affine,
    affine,
)
from flexgen_helm.planner.cost_model import CHANNELS, RESOURCES, BlockCosts, block_costs
from flexgen_helm.planner.policy import BlockShape, Policy
from flexgen_helm.planner.predict import (
    CostEstimate,
    as_placed,
    cache_blocks,
    predict,
    shrunk,
    workload_seconds,
)
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import AUTOMATIC, ZIGZAG, Schedule
from flexgen_helm.tiers import TIER_PLACES, TIERS, Tier, limit_flag

# Attempts to move something of a full tier to the next one until all whole parts fit.
_ATTEMPTS = 16
# Tie-break: this much cost per fraction on disk (largest cost: 1; solver tolerance 1e-7).
_PREFERS_MEMORY = 1e-6
# Share by which a block may exceed its limit of time: rounding errors.
LATENCY_TOLERANCE = 1e-6
# Batches of a block that are tried: more than 20 read the weights hardly less often per sequence.
_NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20)
# Blocks of equal size that a workload is divided into, beside those of `_BATCH_SIZES`.
_NUM_BLOCKS = range(1, 7)
# Sequences of a batch that are tried, each at most twice as many as the one before.
_BATCH_SIZES = (
    1,
    2,
    4,
    8,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    72,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
)
# Divisions of a block's prompts into passes that are tried, each twice as many as the one before;
# and batches of blocks whose experts are streamed, which have their rows of the pass.
_NUM_DIVISIONS, _FEW_BATCHES = 3, (1, 2, 4, 8, 20)
# Relative differences below this count as equal; measured rates are no more exact.
_EQUAL_WITHIN = 0.01
# The best candidates, which are rounded and evaluated again.
_NUM_ROUNDED = 12
# Share by which a block that is not rounded yet may exceed the limit of time: rounding changes what
# it takes.
_UNROUNDED_TOLERANCE = 0.25
# What brings bytes to where is computed. Of blocks that are alike the one is taken that reads
# least: a processor and a disk that are shared with others hide less than planned.
_READS = ("disk_read", "to_gpu")
_Bounds = list[tuple[float, float | None]]


@dataclass(frozen=True)
class Solution:
    """A policy with its schedule, and what it costs as it will be placed."""

    policy: Policy
    schedule: Schedule
    prediction: CostEstimate

    @property
    def reading_s(self) -> float:
        """Seconds of reading for a block, hidden or not."""
        return sum(phase[name] for phase in self.prediction.seconds.values() for name in _READS)


@dataclass(frozen=True)
class Candidate:
    """The solution of the program for one block shape, not yet rounded.

    keeps_weights: rounding must not move them: all are on the compute tier, or they are loaded
        already.
    block_s: of a full block.
    seconds_per_sequence: of the workload, whose last block may be smaller.
    """

    costs: BlockCosts
    keeps_weights: bool
    fractions: Affine
    block_s: float
    seconds_per_sequence: float

    @property
    def reading_s(self) -> float:
        """Seconds of reading for a block, hidden or not."""
        costs = self.costs
        forms = (costs.prefill[name] + costs.decode_passes * costs.decode[name] for name in _READS)
        return float(sum(forms) @ self.fractions)


def search(
    problem: PlanningProblem,
    schedule: Schedule | None = None,
    *,
    max_latency: float | None = None,
    fixed: Policy | None = None,
) -> Solution:
    """Return the policy with the highest throughput.

    schedule: None for the best of `AUTOMATIC`.
    max_latency: seconds that a block may take.
    fixed: a policy whose weights are loaded already; the search chooses block, cache and hidden
        states.

    Raises `MemoryLimitError` with tier and missing bytes if nothing fits, or with the least latency
    if no block is quick enough.
    """
    schedules = AUTOMATIC if schedule is None else (schedule,)
    candidates = _candidates(problem, schedules, fixed)
    quick = [
        candidate
        for candidate in candidates
        if max_latency is None or candidate.block_s <= max_latency * (1 + _UNROUNDED_TOLERANCE)
    ]
    rounded = (
        _round_to_placeable(problem, candidate, max_latency)
        for candidate in _by_preference(problem, quick)
    )
    solutions = list(islice(filter(None, rounded), _NUM_ROUNDED))
    if not solutions:
        if max_latency is not None:
            _require_latency(problem, candidates, max_latency)
        raise MemoryLimitError(_explain_missing_memory(problem, schedules))
    best = solutions[0]
    # of equals, one pass for all shares most, and small blocks end first
    if not problem.places_experts:
        fastest = max(solution.prediction.tokens_per_s for solution in solutions)
        best = min(
            (
                solution
                for solution in solutions
                if solution.prediction.tokens_per_s >= fastest * (1 - _EQUAL_WITHIN)
            ),
            key=lambda solution: (
                _without_noise(_reading_s(problem, solution.reading_s, solution.policy.block_size)),
                -_without_noise(solution.prediction.tokens_per_s),
                not solution.schedule.is_single_pass,
                solution.policy.block_size,
            ),
        )
    policy = as_placed(problem, best.policy)
    placed = Solution(policy, best.schedule, predict(problem, policy, best.schedule))
    return (
        best
        if _exceeds_latency(placed.prediction, max_latency) or not placed.prediction.feasible
        else placed
    )


def _reading_s(problem: PlanningProblem, block_s: float, block_sequences: float) -> float:
    """Return the seconds of reading for the workload, or for each sequence of an endless one.

    block_s: seconds of reading for a block of `block_sequences` sequences.
    """
    num_sequences = problem.workload.num_sequences
    return block_s * (
        1 / block_sequences if problem.endless else -(-num_sequences // block_sequences)
    )


def _exceeds_latency(prediction: CostEstimate, max_latency: float | None) -> bool:
    return max_latency is not None and prediction.block_s > max_latency * (1 + LATENCY_TOLERANCE)


def _candidates(
    problem: PlanningProblem, schedules: Sequence[Schedule], fixed: Policy | None
) -> list[Candidate]:
    """Solve the program of every block shape."""
    solved: list[Candidate] = []
    num_sequences = problem.workload.num_sequences
    for shape in _shapes(problem, schedules):
        for candidate in _candidates_of_shape(problem, shape, fixed):
            costs = candidate.costs
            streams_experts = problem.config.experts is not None and not costs.resident
            if streams_experts and shape.schedule.is_single_pass and len(schedules) > 1:
                continue  # it was not asked for, and a block in passes reads no more and holds less
            if not problem.endless and num_sequences % costs.sequences:
                total_s = workload_seconds(problem, costs, candidate.fractions)
                candidate = replace(candidate, seconds_per_sequence=total_s / num_sequences)
            solved.append(candidate)
    return solved


def _by_preference(problem: PlanningProblem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates, the best first: of about equal ones that which reads least."""
    fastest = min((candidate.seconds_per_sequence for candidate in candidates), default=0.0)

    def preference(candidate: Candidate) -> tuple[float, ...]:
        shape, seconds = candidate.costs.shape, candidate.seconds_per_sequence
        reading = (
            candidate.fractions[WEIGHTS["disk"]]
            if problem.places_experts
            else _reading_s(problem, candidate.reading_s, candidate.costs.sequences)
        )
        return (
            max((1 + _EQUAL_WITHIN) * fastest, seconds),
            _without_noise(reading),
            _without_noise(seconds),
            shape.num_sequences,
            shape.num_gpu_batches,
        )

    return sorted(candidates, key=preference)


def _without_noise(value: float) -> float:
    """Round to parts in a million, so that noise of the solver does not choose between equals."""
    return float(f"{value:.6g}")


def _shapes(problem: PlanningProblem, schedules: Sequence[Schedule]) -> Iterator[BlockShape]:
    """Yield block shapes worth trying.

    None has more sequences than the workload. A single token is scored in one pass for all, or
    block by block.
    """
    workload = problem.workload
    room = sum(map(problem.usable, TIERS))
    # Only hopeless shapes are left out here: of whose cache not even half has room.
    sequence_bytes = (
        problem.kv_elements
        * problem.cache_bytes
        * (workload.mean_prompt + workload.mean_output)
        / 2
    )
    if workload.mean_output == 1:
        sequence_bytes = 0.0
    batch_sizes = {*_BATCH_SIZES}
    if not problem.endless:  # blocks of equal size: 17 sequences are rather 9 and 8 than 8, 8 and 1
        batch_sizes |= {-(-workload.num_sequences // blocks) for blocks in _NUM_BLOCKS}
    known: set[BlockShape] = set()
    for schedule in schedules:
        if schedule.is_single_pass and workload.mean_output > 1:
            continue
        for batch_size in batch_sizes:
            batches = set(_NUM_BATCHES if problem.config.experts is None else _FEW_BATCHES)
            if not problem.endless:  # with the one that holds the whole workload
                batches.add(min(-(-workload.num_sequences // batch_size), _NUM_BATCHES[-1]))
                if schedule.is_single_pass:
                    batches = {1}
            for num_batches in batches:
                shape = BlockShape(batch_size, num_batches, schedule)
                if not problem.endless:
                    shape = shrunk(shape, workload.num_sequences)
                if shape not in known and shape.num_sequences * sequence_bytes <= room:
                    known.add(shape)
                    yield shape


def _candidates_of_shape(
    problem: PlanningProblem, shape: BlockShape, fixed: Policy | None
) -> Iterator[Candidate]:
    """Solve the programs of one block shape: with weights that are streamed, and with resident ones
    if there is room.

    Where experts are streamed: in few passes over the prompts, and in more, which leave room to
    weights and cache.
    fixed: a policy whose weights are loaded already.
    """
    tier = problem.compute_tier
    loaded = None if fixed is None else fixed.tier_fractions("weights", tier == "gpu")
    bounds = _bounds(problem)
    for weights_tier, share in (loaded or {}).items():
        bounds[WEIGHTS[weights_tier]] = (share, share)
    passes, num_solved = 1, 0
    while num_solved < _NUM_DIVISIONS and passes <= problem.most_passes(shape):
        costs = block_costs(problem, replace(shape, passes=passes))
        if (candidate := _solve_program(problem, costs, bounds, loaded is not None)) is not None:
            num_solved += 1
            yield candidate
        passes *= 2
    if problem.stored_bytes <= problem.usable(tier) and not (loaded and loaded[tier] < 1):
        costs = block_costs(problem, shape, resident=True)
        bounds[WEIGHTS[tier]] = (1.0, 1.0)
        if (candidate := _solve_program(problem, costs, bounds, keeps_weights=True)) is not None:
            yield candidate


def _solve_program(
    problem: PlanningProblem, costs: BlockCosts, bounds: _Bounds, keeps_weights: bool
) -> Candidate | None:
    """Find the fractions of the quickest block; None if the program has no solution."""
    # Variables: nine fractions, then the longest resource of a prefill pass and of a decode pass.
    cost, constant = np.zeros(11), 0.0
    rows: list[Affine] = []
    upper: list[float] = []
    for variable, times, passes in (
        (9, costs.prefill, 1.0),
        (10, costs.decode, costs.decode_passes),
    ):
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
    for tier, free in _free_bytes(problem, costs).items():
        # In units of the tier, so that bytes and seconds have similar magnitudes for the solver.
        unit = max(1.0, problem.limits[tier])
        for form in costs.memory[tier]:
            rows.append(np.concatenate((form[:9], (0.0, 0.0))) / unit)
            upper.append((free - form[ONE]) / unit)
    scale = max(1e-12, float(np.abs(cost).max()))
    preference = np.zeros(11)
    preference[[columns["disk"] for columns in COLUMNS.values()]] = _PREFERS_MEMORY
    solved = _minimize(cost / scale + preference, rows, upper, bounds)
    if not solved.success:
        return None
    fractions = np.append(np.clip(solved.x[:9], 0.0, 1.0), 1.0)
    block_s = float(cost @ solved.x) + constant
    return Candidate(costs, keeps_weights, fractions, block_s, block_s / costs.sequences)


def _free_bytes(problem: PlanningProblem, costs: BlockCosts) -> dict[Tier, float]:
    """Return the bytes of each tier that a block may fill."""
    return {
        tier: min(problem.limits[tier], problem.capacity(tier) - costs.workspace[tier])
        for tier in TIERS
    }


def _bounds(problem: PlanningProblem) -> _Bounds:
    """Bound the nine fractions, and the longest resources; without a gpu its fractions are 0."""
    bounds: _Bounds = [(0.0, 1.0)] * 9 + [(0.0, None)] * 2
    if problem.compute_tier == "cpu":
        bounds[WG] = bounds[CG] = bounds[HG] = (0.0, 0.0)
    return bounds


def _minimize(cost: Affine, rows: Sequence[Affine], upper: Sequence[float], bounds: _Bounds) -> Any:
    """Minimize `cost` under `rows` x <= `upper`, where the fractions of weights, cache and hidden
    states sum to 1.
    """
    from scipy.optimize import linprog

    sums = np.zeros((3, len(cost)))
    for row, columns in zip(sums, COLUMNS.values()):
        row[list(columns.values())] = 1.0
    return linprog(cost, np.array(rows), np.array(upper), sums, np.ones(3), bounds, method="highs")


def _round_to_placeable(
    problem: PlanningProblem, candidate: Candidate, max_latency: float | None = None
) -> Solution | None:
    """Round a candidate to what can be placed; None if that does not fit or takes too long."""
    fractions, shape = candidate.fractions.copy(), candidate.costs.shape
    for attempt in range(1, _ATTEMPTS + 1):
        policy = _rounded_policy(shape, fractions)
        prediction = predict(problem, policy, shape.schedule, passes=shape.passes)
        if prediction.feasible:
            if shape.passes > 1:  # rounding may leave room for fewer, which a run then takes
                prediction = predict(problem, policy, shape.schedule)
            if _exceeds_latency(prediction, max_latency):
                return None
            return Solution(policy, shape.schedule, prediction)
        if not _move_to_next_tier(problem, candidate, fractions, prediction.missing, attempt):
            return None
    return None


def _rounded_policy(shape: BlockShape, fractions: Affine) -> Policy:
    """Return the policy in hundredths of a percent."""
    shares: list[float] = []
    for columns in COLUMNS.values():
        # no minus zero
        gpu, cpu = (abs(round(float(fractions[columns[tier]]), 4)) for tier in TIERS[:2])
        shares += [gpu, min(cpu, 1.0 - gpu)]
    return Policy(shape.gpu_batch_size, shape.num_gpu_batches, *shares)


def _move_to_next_tier(
    problem: PlanningProblem,
    candidate: Candidate,
    fractions: Affine,
    missing: Mapping[Tier, int],
    attempt: int,
) -> bool:
    """Move part of what full tiers have to the next ones, by changing `fractions`; return whether
    something has moved.

    It is of the weights, of the cache where no weights are left, and at last of the hidden states.
    missing: bytes by tier.
    attempt: from 1; more is moved each time, until something whole moves.
    """
    next_tier: dict[Tier, Tier] = {"gpu": "cpu", "cpu": "disk"}
    shape = candidate.costs.shape
    has_moved = False
    for tier, following in next_tier.items():
        if tier not in missing:
            continue
        # In bytes for the whole of a kind; a block that draws one token keeps no cache.
        stored = candidate.costs.memory[tier][0]
        if fractions[WEIGHTS[tier]] and not candidate.keeps_weights:
            columns, step = WEIGHTS, 1.05 * missing[tier] / problem.stored_bytes + 1e-4
        elif fractions[CACHE[tier]] and stored[CACHE[tier]]:
            blocks = cache_blocks(problem, shape.gpu_batch_size, shape.num_gpu_batches)
            columns, step = CACHE, 1 / len(blocks)
        else:
            columns, step = HIDDEN, 1.05 * missing[tier] / max(1.0, stored[HIDDEN[tier]]) + 1e-4
        moved = min(fractions[columns[tier]], attempt * step)
        fractions[columns[tier]] -= moved
        fractions[columns[following]] += moved
        has_moved |= bool(moved > 0)
    return has_moved


# Explain why no block fits.


def _require_latency(
    problem: PlanningProblem, candidates: Sequence[Candidate], max_latency: float
) -> None:
    """Raise `MemoryLimitError` with the seconds of the quickest block if one can be placed."""
    by_seconds = sorted(candidates, key=lambda candidate: candidate.block_s)
    rounded = (_round_to_placeable(problem, candidate) for candidate in by_seconds)
    if (quickest := next(filter(None, rounded), None)) is not None:
        enough = f"{1.001 * quickest.prediction.block_s:.4g}"  # above it, whatever is rounded
        raise MemoryLimitError(
            f"no block is done within {max_latency:g} s: the quickest takes {enough} s; raise "
            "--max-latency"
        )


def _explain_missing_memory(problem: PlanningProblem, schedules: Sequence[Schedule]) -> str:
    """Say how many bytes the smallest block needs and has on the tier that misses most, and what
    helps.
    """
    only_single_pass = all(schedule.is_single_pass for schedule in schedules)
    shape = BlockShape(1, 1, schedules[0] if only_single_pass else ZIGZAG)
    costs = block_costs(problem, replace(shape, passes=problem.most_passes(shape)))
    fractions = _filled_fast_first(problem, costs)
    needed = {tier: max(float(form @ fractions) for form in costs.memory[tier]) for tier in TIERS}
    free = _free_bytes(problem, costs)
    tier = max(TIERS, key=lambda tier: max(0.0, needed[tier] - free[tier]))
    if needed[tier] > free[tier]:
        short = shortage(problem, tier, needed[tier], costs.workspace[tier])
    else:
        largest = exact_size(max(problem.storage.matrices.values()))
        short = f"up to {largest} more, because a matrix is never split"
    return f"does not fit: needs {short}; {_advice(problem, tier)}"


def _filled_fast_first(problem: PlanningProblem, costs: BlockCosts) -> Affine:
    """Return the fractions that fill the tiers in order; what has no room is on the disk."""
    fractions, free = affine(1.0), _free_bytes(problem, costs)
    tiers: list[Tier] = ["gpu", "cpu"] if problem.compute_tier == "gpu" else ["cpu"]
    for columns in (HIDDEN, CACHE, WEIGHTS):
        rest = 1.0
        for tier in tiers:
            column = columns[tier]
            shares = (
                (free[tier] - form @ fractions) / form[column]
                for form in costs.memory[tier]
                if form[column] > 0
            )
            fractions[column] = min(rest, max(0.0, min(shares, default=rest)))
            rest -= fractions[column]
        fractions[columns["disk"]] = rest
    return fractions


def shortage(problem: PlanningProblem, tier: Tier, needed: float, workspace: float = 0) -> str:
    """Say how many bytes of a tier are needed, and how many there are."""
    limit, capacity = problem.limits[tier], problem.capacity(tier)
    if limit < min(needed, problem.largest_limit(tier)):  # the user's
        return (
            f"{exact_size(math.ceil(needed))} {TIER_PLACES[tier]}, {limit_flag(tier)} allows "
            f"{size(limit)}"
        )
    machine = "this machine" if problem.hardware.name == MEASURED else problem.hardware.name
    if limit > capacity - workspace:
        needed, limit = needed + workspace, capacity
    return f"{size(needed)} {TIER_PLACES[tier]}, {machine} has {size(limit)}"


def _advice(problem: PlanningProblem, tier: Tier) -> str:
    """Say what gives a tier more room, or needs less of it."""
    if problem.limits[tier] < problem.largest_limit(tier):
        return f"raise {limit_flag(tier)}"
    if tier == "disk" and problem.hardware.name == MEASURED:
        return "make room on the disk or name another folder with --offload-dir"
    return "take a lower --precision or a smaller model"
