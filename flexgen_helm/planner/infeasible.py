"""Explain why no block fits, and suggest what helps. Every suggestion is tried before it is given. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.linear_program import finish, least_missing, quickest_seconds, single_sequence, solve
from flexgen_helm.planner.placement import TIERS, Tier, limit_flag
from flexgen_helm.planner.policy import Schedule
from flexgen_helm.planner.problem import MEASURED, BlockShape, PlanningProblem
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.units import exact_size, size

# Missing bytes per weight that are rounding errors of the solver.
_NOISE = 1e-6


def explain_infeasible(problem: PlanningProblem, schedules: Sequence[Schedule], max_latency: float | None) -> str:
    """Say in one sentence how much memory or time is missing, and what helps."""
    quickest = quickest_seconds(problem, schedules)
    if quickest is not None and max_latency is not None:
        return (
            f"no block is done within {max_latency:g} s: a single sequence takes {quickest:.1f} s; raise --max-latency"
        )
    shape = single_sequence(schedules)
    costs = block_costs(problem, shape)
    fractions, missing = least_missing(problem, costs)
    tier = max(TIERS, key=lambda tier: missing[tier])
    needed = max(float(form @ fractions) for form in costs.memory[tier])
    limit, capacity, workspace = problem.limits[tier], problem.capacity(tier), costs.workspace[tier]
    if limit <= capacity - workspace:
        available = f"{size(needed)} where {exact_size(int(limit))} are allowed"
    else:  # the limit exceeds what the machine has
        machine = "this machine" if problem.hardware.name == MEASURED else problem.hardware.name
        room = "are allowed" if tier == "gpu" and _is_simulated(problem) else f"are all that {machine} has"
        available = f"{size(needed + workspace)} where {exact_size(int(capacity))} {room}"
    if _exceeds_noise(problem, missing[tier]):
        short = f"{exact_size(missing[tier])} more on the {tier} tier, {available}"
    else:
        short = f"up to {exact_size(max(problem.storage.matrices.values()))} more, because a matrix is never split"
    *others, last = *_suggestions(problem, shape, tier, missing), "take a smaller model"
    advice = f"{', '.join(others)}{', or ' if others else ''}{last}"
    return f"even a block of one sequence needs {short}: {advice}"


def _suggestions(problem: PlanningProblem, shape: BlockShape, tier: Tier, missing: Mapping[Tier, int]) -> list[str]:
    """List what makes a block of one sequence fit, the most obvious first."""
    suggestions = []
    # The tier that misses the most bytes first; they may fit another tier too.
    tiers = sorted(TIERS, key=lambda other: other != tier)
    single = [limit_flag(other) for other in tiers if _fits(_with_raised_limits(problem, [other]), shape)]
    raisable = [other for other in TIERS if problem.limits[other] < _highest_limit(problem, other)]
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
    precision = PRECISIONS["4bit"]
    if problem.precision.weights is None and _fits(replace(problem, precision=precision), shape):
        suggestions.append(f"take --precision {precision.name}")
    return suggestions


def _fits(problem: PlanningProblem, shape: BlockShape) -> bool:
    candidates = (solve(problem, shape, block_costs(problem, shape, flag), flag) for flag in (False, True))
    return any(candidate is not None and finish(problem, candidate) is not None for candidate in candidates)


def _with_raised_limits(problem: PlanningProblem, tiers: Iterable[Tier]) -> PlanningProblem:
    """Raise the limits of `tiers` to their highest, where that is more."""
    for tier in tiers:
        highest = _highest_limit(problem, tier)
        if problem.limits[tier] >= highest:
            continue
        if tier == "gpu" and _is_simulated(problem):
            gpu = replace(problem.hardware.cpu, memory_bytes=int(highest))
            problem = replace(problem, hardware=replace(problem.hardware, gpu=gpu))
        problem = replace(problem, limits={**problem.limits, tier: highest})
    return problem


def _highest_limit(problem: PlanningProblem, tier: Tier) -> float:
    """Return the limit that leaves the machine its margin; a simulated gpu is as large as the host's memory."""
    return problem.largest_limit("cpu" if tier == "gpu" and _is_simulated(problem) else tier)


def _is_simulated(problem: PlanningProblem) -> bool:
    """Whether the gpu is the host's processor with another memory size (`plan.simulated_gpu`)."""
    cpu, gpu = problem.hardware.cpu, problem.hardware.gpu
    return gpu is not None and replace(gpu, memory_bytes=cpu.memory_bytes) == cpu


def _exceeds_noise(problem: PlanningProblem, num_bytes: float) -> bool:
    return num_bytes > _NOISE * problem.storage.num_values
