"""Plan one run: schedule, policy, placement of cache and hidden states, and the limits of a pass. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.constants import PINNED_EXCESS_SHARE
from flexgen_helm.planner.linear_program import Solution
from flexgen_helm.planner.placement import TIER_PLACES, Fractions, Tier, tier_fractions
from flexgen_helm.planner.policy import Choices, Policy
from flexgen_helm.planner.run_memory import RunMemory, RunSize
from flexgen_helm.planner.scheduler_limits import SchedulerLimits
from flexgen_helm.planner.schedules import ROW, ZIGZAG, Schedule
from flexgen_helm.planner.weight_placement import Placement

# Shares of the cache in host memory that are tried where the planned places have no room for the largest request; the
# rest is on the disk.
_HOST_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided for one run.

    policy: the given or searched policy; None if the rule of thumb decides.
    weights: fractions by tier as loaded.
    cache, activations: fractions of the KV cache and of the hidden states by tier.
    limits: what a pass may hold.
    cache_room: bytes of each tier that cache blocks may take.
    """

    compute_tier: Tier
    policy: Policy | None
    schedule: Schedule
    weights: Fractions
    cache: Fractions
    activations: Fractions
    limits: SchedulerLimits
    cache_room: Mapping[Tier, int]

    def comparable_policy(self, at_once: int) -> Policy:
        """Return the policy that a run really had, or the closest one to the rule of thumb's, to predict its time.

        at_once: most sequences of a pass; the cache may have had room for fewer than were planned.
        """
        if self.policy is not None:
            if self.schedule.is_single_pass or at_once >= self.policy.block_size:
                return self.policy
            batches = -(-at_once // self.policy.gpu_batch_size)
            return replace(self.policy, gpu_batch_size=-(-at_once // batches), num_gpu_batches=batches)
        sequences = min(self.limits.max_sequences, at_once)
        batch = min(self.limits.batch_sequences, sequences)
        wg = min(1.0, self.weights["gpu"])
        wc = min(1.0 - wg, self.weights["cpu"])
        cc, hc = float(self.cache["cpu"] > 0), float(self.compute_tier == "cpu")
        return Policy(batch, max(1, sequences // batch), wg, wc, 1.0 - cc, cc, 1.0 - hc, hc)

    def describe(self, num_sequences: int) -> str:
        """Return the plan in one line, for people; num_sequences: of the whole run."""
        streams = [
            f"{share:.0%} of the weights from {TIER_PLACES[tier].partition(' ')[2]}"
            for tier, share in self.weights.items()
            if tier != self.compute_tier and share >= 0.005
        ]
        parts = [
            f"streams {' and '.join(streams)}" if streams else f"keeps all weights {TIER_PLACES[self.compute_tier]}"
        ]
        if self.cache[self.compute_tier] < 0.995:
            cache = [f"{share:.0%} {TIER_PLACES[tier]}" for tier, share in self.cache.items() if share >= 0.005]
            parts.append(f"KV cache {' and '.join(cache)}")
        block = max(1, min(self.limits.max_sequences, num_sequences))
        batch = min(self.limits.batch_sequences, block)
        parts.append(f"block of {block:,}" + (f" in batches of {batch:,}" if batch < block else ""))
        return ", ".join([*parts, f"schedule {self.schedule}"])


def plan_run(
    placement: Placement, size: RunSize, free: Mapping[Tier, int], choices: Choices, solution: Solution | None
) -> RunPlan:
    """Plan a run on weights that are loaded.

    free: bytes left on each tier.
    solution: the result of a search for this run, which takes precedence; None if nothing was searched or found.

    Raises `MemoryLimitError` if not even one sequence has room.
    """
    if placement.machine.has_gpu:
        free = {**free, "cpu": int(free["cpu"] / (1 + PINNED_EXCESS_SHARE))}
    if choices.policy is not None:
        return _plan(placement, size, free, choices.policy, choices.schedule)
    plans: list[Callable[[], RunPlan]] = []
    schedule = choices.schedule
    if solution is not None:
        schedule = solution.schedule
        plans.append(partial(_plan, placement, size, free, solution.policy, schedule, is_searched=True))
    plans += [partial(_plan, places, size, free, None, schedule) for places in _placements(placement)]
    return _first_that_fits(plans, size)


def _plan(
    placement: Placement,
    size: RunSize,
    free: Mapping[Tier, int],
    policy: Policy | None,
    schedule: Schedule | None,
    *,
    is_searched: bool = False,
) -> RunPlan:
    """Plan a run for one placement. Raises `MemoryLimitError` where not even one sequence has room."""
    machine, config = placement.machine, placement.model.config
    if policy is not None:
        cache, hidden = (tier_fractions(policy, kind, machine.has_gpu) for kind in ("cache", "activations"))
        placement = replace(placement, cache=cache, activations=hidden)
    schedule = schedule or (ZIGZAG if placement.streams_weights else ROW)
    sizes = cache_sizes(
        config,
        placement.model.precision.cache,
        machine.compute_bytes,
        on_disk=placement.cache["disk"] > 0,
        host_attention=machine.cpu_attention and machine.has_gpu,
        one_layer=schedule.is_single_pass,
    )
    hidden_bytes = config.state_size * machine.compute_bytes
    division = RunMemory(placement, policy, schedule, size, free, sizes, hidden_bytes, is_searched)
    return RunPlan(
        machine.compute_tier,
        policy,
        schedule,
        placement.shares,
        placement.cache,
        division.activation_fractions(),
        division.limits(),
        division.cache_room(),
    )


def _placements(placement: Placement) -> Iterator[Placement]:
    """Yield the planned places of cache and hidden states, then slower ones that have more room."""
    shares = [placement.cache, *map(_on_host, _HOST_SHARES)]
    places = [placement.activations]
    if placement.machine.has_gpu:
        places.append(_on_host(1.0))
    for cache, activations in product(shares, places):
        yield replace(placement, cache=cache, activations=activations)


def _on_host(share: float) -> Fractions:
    """Return the fractions with a share in host memory and the rest on the disk."""
    return {"gpu": 0.0, "cpu": share, "disk": 1.0 - share}


def _first_that_fits(choices: Sequence[Callable[[], RunPlan]], size: RunSize) -> RunPlan:
    """Return the first plan with room for every request; if there is none, the one with most room.

    Raises the first choice's `MemoryLimitError` if none has room for one sequence.
    """
    error, best = None, None
    for choice in choices:
        try:
            plan = choice()
        except MemoryLimitError as refused:
            error = error or refused
            continue
        if size.fits(plan.limits):
            return plan
        if best is None or plan.limits.cache_tokens > best.limits.cache_tokens:
            best = plan
    if best is None:
        assert error is not None
        raise error
    return best
