"""Why no block fits, and what would help: each piece of advice is tried before it is given. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.linear_program import finish, least_missing, quickest_seconds, single_sequence, solve
from flexgen_helm.planner.placement import TIERS, Tier, limit_flag
from flexgen_helm.planner.policy import Schedule
from flexgen_helm.planner.predict import capacity
from flexgen_helm.planner.problem import MEASURED, BlockShape, PlanningProblem, without_margin
from flexgen_helm.quant.precisions import PRECISIONS

# Bytes a value that the solver leaves of a nothing.
_NOISE = 1e-6


def explain_infeasible(situation: PlanningProblem, schedules: Sequence[Schedule], max_latency: float | None) -> str:
    """Why nothing fits, in a sentence with the bytes or the seconds that are missing."""
    quickest = quickest_seconds(situation, schedules)
    if quickest is not None and max_latency is not None:
        return (
            f"no block is done within {max_latency:g} s: a single sequence takes {quickest:.1f} s; raise --max-latency"
        )
    one = single_sequence(schedules)
    model = block_costs(situation, one)
    fractions, short = least_missing(situation, model)
    tier = max(TIERS, key=lambda tier: short[tier])
    needed = max(float(coefficients @ fractions) for coefficients in model.memory[tier])
    limit, has = situation.limits[tier], capacity(situation, tier)
    if limit <= has - model.working[tier]:
        told = f"{needed:,.0f} where {limit:,.0f} are allowed"
    else:  # a limit above what the machine has gives nothing
        where = "this machine" if situation.hardware.name == MEASURED else situation.hardware.name
        room = "are allowed" if tier == "gpu" and _is_simulated(situation) else f"are all that {where} has"
        told = f"{needed + model.working[tier]:,.0f} where {has:,.0f} {room}"
    if short[tier] > _noise(situation):
        missing = f"{short[tier]:,} bytes more on the {tier} tier ({told})"
    else:
        missing = f"up to {max(situation.storage.matrices.values()):,} bytes more, because every matrix rests whole"
    remedies = [*_remedies(situation, one, tier, short), "take a smaller model"]
    advice = f"{', '.join(remedies[:-1])}{', or ' if remedies[1:] else ''}{remedies[-1]}"
    return f"even a block of one sequence needs {missing}: {advice}"


def _remedies(situation: PlanningProblem, one: BlockShape, tier: Tier, short: Mapping[Tier, int]) -> list[str]:
    """What makes a block of one sequence fit, the most obvious first; each is tried, so that none is in vain."""

    def fits(changed: PlanningProblem) -> bool:
        for resident in (False, True):
            found = solve(changed, one, block_costs(changed, one, resident), resident, None, None)
            if found is not None and finish(changed, found, None) is not None:
                return True
        return False

    noise, found = _noise(situation), []
    # The tier that misses the bytes first: what it lacks may fit another one too.
    tiers = sorted(TIERS, key=lambda other: other != tier)
    alone = [limit_flag(other) for other in tiers if fits(_opened(situation, (other,)))]
    if alone:
        found.append(f"raise {' or '.join(alone)}")
    together = [other for other in TIERS if _can_be_raised(situation, other)]
    if not found and fits(_opened(situation, together)):
        found.append(_raise(together))
    opened = _opened(situation, together)
    rest = least_missing(opened, block_costs(opened, one))[1]
    if not found and max(rest["gpu"], rest["cpu"]) <= noise:
        held = [other for other in together if short[other] > noise]
        if situation.hardware.name == MEASURED:
            more = "make room on the disk or name another folder with --offload-dir"
        else:
            more = "name a machine with a larger disk"
        found.append(f"{_raise(held)} and {more}" if held else more)
    precision = PRECISIONS["4bit"]
    if situation.precision.weights is None and fits(replace(situation, precision=precision)):
        found.append(f"take --precision {precision.name}")
    return found


def _raise(tiers: Sequence[Tier]) -> str:
    return f"raise {' and '.join(map(limit_flag, tiers))}"


def _opened(situation: PlanningProblem, tiers: Sequence[Tier]) -> PlanningProblem:
    """With the limits of `tiers` raised as far as they should be."""
    for tier in tiers:
        if not _can_be_raised(situation, tier):
            continue
        most = _most(situation, tier)
        if tier == "gpu" and _is_simulated(situation):
            gpu = replace(situation.hardware.cpu, memory_bytes=int(most))
            situation = replace(situation, hardware=replace(situation.hardware, gpu=gpu))
        situation = replace(situation, limits={**situation.limits, tier: most})
    return situation


def _can_be_raised(situation: PlanningProblem, tier: Tier) -> bool:
    return situation.limits[tier] < _most(situation, tier)


def _most(situation: PlanningProblem, tier: Tier) -> float:
    """What a limit may be raised to: more than no limit would give takes the machine its margin."""
    has = capacity(situation, "cpu" if tier == "gpu" and _is_simulated(situation) else tier)
    return without_margin(has, has if tier != "disk" else 0)


def _is_simulated(situation: PlanningProblem) -> bool:
    """Whether the gpu is the host's processor (`plan.simulated`), whose memory is what the flag says."""
    cpu, gpu = situation.hardware.cpu, situation.hardware.gpu
    return gpu is not None and replace(gpu, memory_bytes=cpu.memory_bytes) == cpu


def _noise(situation: PlanningProblem) -> float:
    return _NOISE * situation.storage.num_values
