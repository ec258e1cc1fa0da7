"""Plan one run: schedule, policy, placement of cache and hidden states, and the limits of a pass
(`planner.run_memory`). No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.policy import Choices, Policy
from flexgen_helm.planner.run_memory import RunMemory, RunSize
from flexgen_helm.planner.schedules import ROW, ZIGZAG, Schedule
from flexgen_helm.planner.search import Solution
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.tiers import (
    TIER_PLACES,
    UNLIMITED,
    Fractions,
    Tier,
)

# Shares of the cache in host memory that are tried where the planned tiers have no room for the
# largest request; the rest is on the disk.
_HOST_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided for one run.

    policy: the given or searched policy; None if the rule of thumb decides.
    weights: fractions by tier as loaded.
    cache, activations: fractions of the KV cache and of the hidden states by tier.
    limits: what a pass may hold.
    cache_room: bytes of each tier that cache blocks may take.
    expert_tokens: that may wait for a layer's experts beside the first batch, each with its
        `ModelConfig.waiting_copies` on the compute tier; `UNLIMITED` where no experts are offloaded
        from it.
    """

    compute_tier: Tier
    policy: Policy | None
    schedule: Schedule
    weights: Fractions
    cache: Fractions
    activations: Fractions
    limits: SchedulerLimits
    cache_room: Mapping[Tier, int]
    expert_tokens: int = UNLIMITED

    def comparable_policy(self, at_once: int) -> Policy:
        """Return the policy that a run really had, or the closest one to the rule of thumb's, to
        predict its time.

        at_once: most sequences of a pass; the cache may have had room for fewer than were planned.
        """
        policy = self.policy
        if policy is not None and (self.schedule.is_single_pass or at_once >= policy.block_size):
            return policy
        sequences = min(self.limits.max_sequences, at_once)
        batches = -(
            -sequences // (self.limits.batch_sequences if policy is None else policy.gpu_batch_size)
        )
        batch = -(-sequences // batches)
        if policy is not None:
            return replace(policy, gpu_batch_size=batch, num_gpu_batches=batches)
        wg = min(1.0, self.weights["gpu"])
        wc = min(1.0 - wg, self.weights["cpu"])
        cc, hc = float(self.cache["cpu"] > 0), float(self.compute_tier == "cpu")
        return Policy(batch, batches, wg, wc, 1.0 - cc, cc, 1.0 - hc, hc)

    def describe(self, num_sequences: int, prompt_tokens: int = 0) -> str:
        """Return the plan in one line, for people; num_sequences, prompt_tokens: of the whole
        run.
        """
        streams = [
            f"{share:.0%} of the weights from {TIER_PLACES[tier].partition(' ')[2]}"
            for tier, share in self.weights.items()
            if tier != self.compute_tier and share >= 0.005
        ]
        parts = [
            f"streams {' and '.join(streams)}"
            if streams
            else f"keeps all weights {TIER_PLACES[self.compute_tier]}"
        ]
        if self.cache[self.compute_tier] < 0.995:
            cache = [
                f"{share:.0%} {TIER_PLACES[tier]}"
                for tier, share in self.cache.items()
                if share >= 0.005
            ]
            parts.append(f"KV cache {' and '.join(cache)}")
        block = max(1, min(self.limits.max_sequences, num_sequences))
        batch = min(self.limits.batch_sequences, block)
        parts.append(f"block of {block:,}" + (f" in batches of {batch:,}" if batch < block else ""))
        in_pass = self.expert_tokens if self.schedule.is_single_pass else self.limits.pass_tokens
        if (
            self.expert_tokens < UNLIMITED
            and (passes := -(-prompt_tokens * block // (num_sequences * in_pass))) > 1
        ):
            parts.append(f"its prompts in {passes:,} readings of the experts")
        return ", ".join([*parts, f"schedule {self.schedule}"])


def plan_run(
    placement: Placement,
    size: RunSize,
    free: Mapping[Tier, int],
    choices: Choices,
    solution: Solution | None,
) -> RunPlan:
    """Plan a run on weights that are loaded: the first plan with room for every request, or with
    most room.

    free: bytes left on each tier.
    solution: the result of a search for this run, which takes precedence; None if nothing was
        searched or found.

    Raises `MemoryLimitError` if not even one sequence has room.
    """
    if choices.policy is not None:
        return _plan(placement, size, free, choices)
    planned = choices if solution is None else replace(choices, schedule=solution.schedule)
    attempts = [] if solution is None else [(placement, replace(planned, policy=solution.policy))]
    attempts += [(slower, planned) for slower in _placements(placement)]
    if choices.schedule is None:  # at last batch by batch: nothing waits
        attempts.append((placement, replace(choices, schedule=ROW)))
    error, best = None, None
    for attempt, chosen in attempts:
        try:
            plan = _plan(attempt, size, free, chosen, is_searched=chosen.policy is not None)
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


def _plan(
    placement: Placement,
    size: RunSize,
    free: Mapping[Tier, int],
    choices: Choices,
    is_searched: bool = False,
) -> RunPlan:
    """Plan a run for one placement. Raises `MemoryLimitError` where not even one sequence has
    room.
    """
    machine, config, policy = placement.machine, placement.model.config, choices.policy
    if policy is not None:
        cache, hidden = (
            policy.tier_fractions(kind, machine.has_gpu) for kind in ("cache", "activations")
        )
        placement = replace(placement, cache=cache, activations=hidden)
    schedule = choices.schedule or (ZIGZAG if placement.streams_weights else ROW)
    sizes = cache_sizes(
        config,
        placement.model.precision.cache,
        machine.compute_bytes,
        on_disk=placement.cache["disk"] > 0,
        one_layer=schedule.is_single_pass,
    )
    hidden_bytes = config.state_size * machine.compute_bytes
    memory = RunMemory(placement, policy, schedule, size, free, sizes, hidden_bytes, is_searched)
    return RunPlan(
        machine.compute_tier,
        policy,
        schedule,
        placement.shares,
        placement.cache,
        memory.activation_fractions(),
        memory.limits(),
        {tier: int(num_bytes) for tier, num_bytes in memory.cache_bytes.items()},
        memory.expert_tokens,
    )


def _placements(placement: Placement) -> Iterator[Placement]:
    """Yield the planned tiers of cache and hidden states, then slower ones that have more room."""

    def on_host(share: float) -> Fractions:
        return {"gpu": 0.0, "cpu": share, "disk": 1.0 - share}

    hidden = [placement.activations, *([on_host(1.0)] if placement.machine.has_gpu else [])]
    for cache, activations in product([placement.cache, *map(on_host, _HOST_SHARES)], hidden):
        yield replace(placement, cache=cache, activations=activations)
