"""Search the policy with the highest throughput (the paper's 'Policy Search'). No torch.

For every block shape and schedule, a linear program finds the best fractions. The best few
candidates are rounded to whole matrices and cache blocks and evaluated again, so the prediction is
for what will be placed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import count, exact_size, size
from flexgen_helm.planner.cost_model import CHANNELS, RESOURCES, BlockCosts, block_costs
from flexgen_helm.planner.placement import tier_fractions
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import (
    CostEstimate,
    as_placed,
    cache_blocks,
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
)
from flexgen_helm.planner.schedules import AUTOMATIC, ZIGZAG, Schedule
from flexgen_helm.tiers import TIER_PLACES, TIERS, Tier, limit_flag

# Attempts to lower a tier's share of the weights until its whole matrices fit.
_ATTEMPTS = 16
# Of two equal costs the one without the disk is taken: this much for a fraction there, where the
# largest cost is 1. The solver takes less than 1e-7 for nothing.
_PREFERS_MEMORY = 1e-6
# Share by which a block may exceed its limit of time: rounding errors.
LATENCY_TOLERANCE = 1e-6
# Missing bytes per weight that are rounding errors of the solver.
_NOISE = 1e-6
_NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20)
_NUM_BLOCKS = range(1, 7)
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
_DIVISIONS, _FEW_BATCHES = 3, (1, 2, 4, 8, 20)
# Share of the time by which blocks are alike: rates of a machine are less well known.
_ALIKE = 0.01
# Candidates that are rounded and evaluated again.
_ROUNDED = 12
# Blocks that exceed their limit of time by more than this share are not rounded; rounding changes
# what others take.
_SLACK = 0.25
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
    """

    costs: BlockCosts
    keeps_weights: bool
    fractions: Affine
    seconds_per_sequence: float

    @property
    def reading_s(self) -> float:
        """Seconds of reading for a block, hidden or not."""
        costs = self.costs
        forms = (costs.prefill[name] + costs.decode_passes * costs.decode[name] for name in _READS)
        return float(sum(forms) @ self.fractions)


def search(
    problem: PlanningProblem,
    schedules: Sequence[Schedule] = AUTOMATIC,
    *,
    max_latency: float | None = None,
    fixed: Policy | None = None,
) -> Solution:
    """Return the policy with the highest throughput.

    max_latency: seconds that a block may take.
    fixed: a policy whose weights are loaded already; the search chooses block, cache and hidden
        states.

    Raises `MemoryLimitError` with tier and missing bytes if nothing fits, or with the least latency
    if no block is quick enough.
    """
    candidates = _candidates(problem, schedules, max_latency, fixed)
    finished = (_finish(problem, candidate, max_latency) for candidate in candidates)
    solutions = list(islice(filter(None, finished), _ROUNDED))
    if not solutions:
        raise MemoryLimitError(_explain_infeasible(problem, schedules, max_latency, fixed))
    best = solutions[0]
    # of equals, one pass for all shares most, and small blocks end first
    if not problem.places_experts:
        fastest = max(found.prediction.tokens_per_s for found in solutions)
        best = min(
            (
                found
                for found in solutions
                if found.prediction.tokens_per_s >= fastest * (1 - _ALIKE)
            ),
            key=lambda found: (
                _rank(_reads(problem, found.reading_s, found.policy.block_size)),
                -_rank(found.prediction.tokens_per_s),
                not found.schedule.is_single_pass,
                found.policy.block_size,
            ),
        )
    policy = as_placed(problem, best.policy)
    placed = Solution(policy, best.schedule, predict(problem, policy, best.schedule))
    return (
        best
        if _is_late(placed.prediction, max_latency) or not placed.prediction.feasible
        else placed
    )


def _reads(problem: PlanningProblem, block_s: float, block: float) -> float:
    """Return the seconds of reading for the workload, or for each sequence of an endless one.

    block_s: for a block of `block` sequences.
    """
    blocks = 1 / block if problem.endless else -(-problem.workload.num_sequences // block)
    return block_s * blocks


def _is_late(prediction: CostEstimate, max_latency: float | None) -> bool:
    return max_latency is not None and prediction.block_s > max_latency * (1 + LATENCY_TOLERANCE)


def _candidates(
    problem: PlanningProblem,
    schedules: Sequence[Schedule],
    max_latency: float | None,
    fixed: Policy | None,
) -> list[Candidate]:
    """Solve the program of every block shape; the best first."""
    solved: list[Candidate] = []
    num_sequences = problem.workload.num_sequences
    for shape in _shapes(problem, schedules):
        for candidate in _solve(problem, shape, fixed):
            costs = candidate.costs
            streams_experts = problem.config.experts is not None and not costs.resident
            if streams_experts and shape.schedule.is_single_pass and len(schedules) > 1:
                continue  # it was not asked for, and a block in passes reads no more and holds less
            block_s = candidate.seconds_per_sequence * costs.sequences
            if max_latency is not None and block_s > max_latency * (1 + _SLACK):
                continue
            if not problem.endless and num_sequences % costs.sequences:  # the last block is smaller
                total_s = workload_seconds(problem, costs, candidate.fractions)
                candidate = replace(candidate, seconds_per_sequence=total_s / num_sequences)
            solved.append(candidate)
    alike = (1 + _ALIKE) * min((found.seconds_per_sequence for found in solved), default=0.0)

    def preference(found: Candidate) -> tuple[float, ...]:
        shape, seconds = found.costs.shape, found.seconds_per_sequence
        read = (
            found.fractions[WEIGHTS["disk"]]
            if problem.places_experts
            else _reads(problem, found.reading_s, found.costs.sequences)
        )
        return (
            max(alike, seconds),
            _rank(read),
            _rank(seconds),
            shape.num_sequences,
            shape.num_gpu_batches,
        )

    return sorted(solved, key=preference)


def _rank(value: float) -> float:
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
        problem.kv_elements * problem.cache_bytes * (workload.prompt + workload.output) / 2
    )
    if workload.output == 1:
        sequence_bytes = 0.0
    batch_sizes = {*_BATCH_SIZES}
    if not problem.endless:  # blocks of equal size: 17 sequences are rather 9 and 8 than 8, 8 and 1
        batch_sizes |= {-(-workload.num_sequences // blocks) for blocks in _NUM_BLOCKS}
    known: set[BlockShape] = set()
    for schedule in schedules:
        if schedule.is_single_pass and workload.output > 1:
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


def _solve(
    problem: PlanningProblem, shape: BlockShape, fixed: Policy | None = None
) -> Iterator[Candidate]:
    """Solve the programs of one block shape: with weights that are streamed, and with resident ones
    if there is room.

    Where experts are streamed: in few passes over the prompts, and in more, which leave room to
    weights and cache.
    fixed: a policy whose weights are loaded already.
    """
    tier = problem.compute_tier
    loaded = None if fixed is None else tier_fractions(fixed, "weights", tier == "gpu")
    bounds = _bounds(problem, 2)
    for name, part in (loaded or {}).items():
        bounds[WEIGHTS[name]] = (part, part)
    passes, streamed = 1, 0
    while streamed < _DIVISIONS and passes <= problem.most_passes(shape):
        costs = block_costs(problem, replace(shape, passes=passes))
        if (solved := _solved(problem, costs, bounds)) is not None:
            streamed += 1
            yield Candidate(costs, loaded is not None, solved[0], solved[1] / costs.sequences)
        passes *= 2
    if problem.stored_bytes <= problem.usable(tier) and not (loaded and loaded[tier] < 1):
        costs = block_costs(problem, shape, resident=True)
        bounds[WEIGHTS[tier]] = (1.0, 1.0)
        if (solved := _solved(problem, costs, bounds)) is not None:
            yield Candidate(costs, True, solved[0], solved[1] / costs.sequences)


def _solved(
    problem: PlanningProblem, costs: BlockCosts, bounds: _Bounds
) -> tuple[Affine, float] | None:
    """Return the fractions of the quickest block, and its seconds; None if the program has no
    solution.
    """
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
    for tier, form, free in _memory_rows(problem, costs):
        # In units of the tier, so that bytes and seconds have similar magnitudes for the solver.
        unit = max(1.0, problem.limits[tier])
        rows.append(np.concatenate((form[:9], (0.0, 0.0))) / unit)
        upper.append(free / unit)
    scale = max(1e-12, float(np.abs(cost).max()))
    preference = np.zeros(11)
    preference[[columns["disk"] for columns in COLUMNS.values()]] = _PREFERS_MEMORY
    solved = _minimize(cost / scale + preference, rows, upper, bounds)
    if not solved.success:
        return None
    return np.append(np.clip(solved.x[:9], 0.0, 1.0), 1.0), float(cost @ solved.x) + constant


def _memory_rows(
    problem: PlanningProblem, costs: BlockCosts
) -> Iterator[tuple[Tier, Affine, float]]:
    """Yield tier, form and the bytes that the form's variable part may take."""
    for tier in TIERS:
        free = min(problem.limits[tier], problem.capacity(tier) - costs.workspace[tier])
        yield from ((tier, form, free - form[ONE]) for form in costs.memory[tier])


def _bounds(problem: PlanningProblem, num_more: int) -> _Bounds:
    """Bound the nine fractions and more variables; without a gpu its fractions are 0."""
    bounds: _Bounds = [(0.0, 1.0)] * 9 + [(0.0, None)] * num_more
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


def _finish(
    problem: PlanningProblem, candidate: Candidate, max_latency: float | None = None
) -> Solution | None:
    """Round a candidate to what can be placed; None if that does not fit or takes too long.

    If whole matrices and cache blocks exceed a tier, part of its share moves to the next tier: of
    the weights, of the cache where no weights are left, and at last of the hidden states.
    """
    fractions, shape = candidate.fractions.copy(), candidate.costs.shape
    next_tier: dict[Tier, Tier] = {"gpu": "cpu", "cpu": "disk"}
    for attempt in range(1, _ATTEMPTS + 1):
        shares: list[float] = []
        for columns in COLUMNS.values():
            # In hundredths of a percent, and no minus zero.
            gpu, cpu = (abs(round(float(fractions[columns[tier]]), 4)) for tier in TIERS[:2])
            shares += [gpu, min(cpu, 1.0 - gpu)]
        policy = Policy(shape.gpu_batch_size, shape.num_gpu_batches, *shares)
        prediction = predict(problem, policy, shape.schedule, passes=shape.passes)
        if prediction.feasible:
            if shape.passes > 1:  # rounding may leave room for fewer, which a run then takes
                prediction = predict(problem, policy, shape.schedule)
            return (
                None
                if _is_late(prediction, max_latency)
                else Solution(policy, shape.schedule, prediction)
            )
        lowered = False
        for tier, following in next_tier.items():
            missing = prediction.missing.get(tier, 0)
            if not missing:
                continue
            # In bytes for the whole of a kind; a block that draws one token keeps no cache.
            stored = candidate.costs.memory[tier][0]
            if fractions[WEIGHTS[tier]] and not candidate.keeps_weights:
                columns, step = WEIGHTS, 1.05 * missing / problem.stored_bytes + 1e-4
            elif fractions[CACHE[tier]] and stored[CACHE[tier]]:
                columns, step = CACHE, 1 / len(cache_blocks(problem, policy))
            else:
                columns, step = HIDDEN, 1.05 * missing / max(1.0, stored[HIDDEN[tier]]) + 1e-4
            # more each time, until something whole moves
            moved = min(fractions[columns[tier]], attempt * step)
            fractions[columns[tier]] -= moved
            fractions[columns[following]] += moved
            lowered |= moved > 0
        if not lowered:
            return None
    return None


# Explain why no block fits.


def _explain_infeasible(
    problem: PlanningProblem,
    schedules: Sequence[Schedule],
    max_latency: float | None,
    fixed: Policy | None,
) -> str:
    """Say in one sentence how much memory or time is missing, and what helps."""
    shape, num_sequences = _smallest_block(schedules), problem.workload.num_sequences
    has_all = shape.schedule.is_single_pass and not problem.endless and num_sequences > 1
    everything = f"the one pass of {shape.schedule} has {count(num_sequences, 'sequence')}"
    in_blocks = _quickest_seconds(problem, (ZIGZAG,), fixed)
    quickest = _quickest_seconds(problem, schedules, fixed) if has_all else in_blocks
    if quickest is not None and max_latency is not None:
        late, advice = f"no block is done within {max_latency:g} s", "raise --max-latency"
        unit = 10.0 ** (math.floor(math.log10(quickest)) - 3)
        enough = f"{math.ceil(quickest / unit) * unit:.10g} s"  # rounded up, to four digits
        if not has_all:
            return f"{late}: a single sequence takes {enough}; {advice}"
        if in_blocks is not None and in_blocks <= max_latency:
            advice = f"leave --schedule out, or {advice}"
        return f"{late}: {everything} and takes {enough}; {advice}"
    if has_all and in_blocks is None:
        shape, has_all = _smallest_block((ZIGZAG,)), False
    short, words = _missing_memory(problem, shape)
    if has_all:
        return (
            f"{everything}, whose hidden states and the weights need {short}: leave --schedule "
            f"out, or {words}"
        )
    return f"does not fit: needs {short}; {words}"


def _missing_memory(problem: PlanningProblem, shape: BlockShape) -> tuple[str, str]:
    """Say how many bytes a block needs and has on the tier that misses most, and what helps."""
    shape = replace(shape, passes=problem.most_passes(shape))
    costs = block_costs(problem, shape)
    fractions, missing = _least_missing(problem, costs)
    tier = max(TIERS, key=lambda tier: missing[tier])
    if missing[tier]:
        needed = max(float(form @ fractions) for form in costs.memory[tier])
        short = shortage(problem, tier, needed, costs.workspace[tier])
    else:
        short = (
            f"up to {exact_size(max(problem.storage.matrices.values()))} more, because a matrix is "
            "never split"
        )
    return short, _advice(problem, tier)


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


def _least_missing(problem: PlanningProblem, costs: BlockCosts) -> tuple[Affine, dict[Tier, int]]:
    """Return the fractions that miss the fewest bytes over all tiers, and those bytes by tier."""
    # Variables: nine fractions, then the missing bytes of each tier.
    rows, upper = [], []
    unit = float(problem.storage.num_values)
    for tier, form, free in _memory_rows(problem, costs):
        rows.append(np.concatenate((form[:9] / unit, [-float(tier == name) for name in TIERS])))
        upper.append(free / unit)
    solved = _minimize(np.concatenate((np.zeros(9), np.ones(3))), rows, upper, _bounds(problem, 3))
    missing = {
        tier: math.ceil(share * unit) if share > _NOISE else 0
        for tier, share in zip(TIERS, solved.x[9:])
    }
    return np.append(solved.x[:9], 1.0), missing


def _quickest_seconds(
    problem: PlanningProblem, schedules: Sequence[Schedule], fixed: Policy | None
) -> float | None:
    """Return the seconds of the quickest block as it will be placed, the smallest one; None if not
    even that fits.
    """
    found = (
        _finish(problem, candidate)
        for candidate in _solve(problem, _smallest_block(schedules), fixed)
    )
    return min(
        (solution.prediction.block_s for solution in found if solution is not None), default=None
    )


def _smallest_block(schedules: Sequence[Schedule]) -> BlockShape:
    """Return the smallest block: one sequence, but all where only a single pass is allowed."""
    return BlockShape(
        1, 1, schedules[0] if all(schedule.is_single_pass for schedule in schedules) else ZIGZAG
    )
