"""Explain why no block fits, and suggest what helps. Every suggestion is tried before it is given. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.linear_program import finish, least_missing, quickest_seconds, smallest_block, solve
from flexgen_helm.planner.placement import TIERS, Tier, limit_flag
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.problem import MEASURED, BlockShape, PlanningProblem
from flexgen_helm.planner.schedules import ZIGZAG, Schedule
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.units import count, exact_size, size

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
