"""Plan one run: schedule, policy, placement of cache and hidden states, and the limits of a pass. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.constants import PINNED_EXCESS_SHARE
from flexgen_helm.planner.linear_program import Solution
from flexgen_helm.planner.memory import Fractions, MemoryPlan, RunMemory, RunSize, SchedulerLimits
from flexgen_helm.planner.placement import TIER_PLACES, Tier, tier_fractions
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.quant.precisions import CacheFormat


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided for one run.

    policy: the given or searched policy; None if the rule of thumb decides.
    cache, activations: fractions of the KV cache and of the hidden states by tier.
    limits: what a pass may hold.
    """

    policy: Policy | None
    schedule: Schedule
    cache: Fractions
    activations: Fractions
    limits: SchedulerLimits

    def comparable_policy(self, weights: Fractions, num_sequences: int, compute_tier: Tier) -> Policy:
        """Return the policy of the run, or the closest one to a run by the rule of thumb, to predict its time.

        weights: fractions by tier as loaded.
        num_sequences: of the whole run.
        """
        if self.policy is not None:
            return self.policy
        sequences = min(self.limits.max_sequences, num_sequences)
        batch = min(self.limits.batch_sequences, sequences)
        wg = min(1.0, weights["gpu"])
        wc = min(1.0 - wg, weights["cpu"])
        cc, hc = float(self.cache["cpu"] > 0), float(compute_tier == "cpu")
        return Policy(batch, max(1, sequences // batch), wg, wc, 1.0 - cc, cc, 1.0 - hc, hc)

    def describe(self, weights: Fractions, num_sequences: int, compute_tier: Tier) -> str:
        """Return the plan in one line, for people.

        weights: fractions by tier as loaded.
        num_sequences: of the whole run.
        """
        streams = [
            f"{share:.0%} of the weights from {TIER_PLACES[tier].partition(' ')[2]}"
            for tier, share in weights.items()
            if tier != compute_tier and share >= 0.005
        ]
        parts = [f"streams {' and '.join(streams)}" if streams else f"keeps all weights {TIER_PLACES[compute_tier]}"]
        if self.cache[compute_tier] < 0.995:
            cache = [f"{share:.0%} {TIER_PLACES[tier]}" for tier, share in self.cache.items() if share >= 0.005]
            parts.append(f"KV cache {' and '.join(cache)}")
        block = max(1, min(self.limits.max_sequences, num_sequences))
        batch = min(self.limits.batch_sequences, block)
        parts.append(f"block of {block:,}" + (f" in batches of {batch:,}" if batch < block else ""))
        return ", ".join([*parts, f"schedule {self.schedule}"])


def plan_run(
    memory: MemoryPlan,
    run: RunSize,
    free: Mapping[Tier, int],
    *,
    policy: Policy | None,
    schedule: Schedule | None,
    solution: Solution | None,
    config: ModelConfig,
    cache_format: CacheFormat | None,
    compute_tier: Tier,
    compute_bytes: int,
    cpu_attention: bool,
) -> RunPlan:
    """Plan a run on weights that are loaded.

    memory: where the weights are, and where cache and hidden states go unless a policy decides.
    free: bytes left on each tier.
    policy, schedule: what the user has decided; None for 'auto'.
    solution: the result of a search for this run, which takes precedence; None if nothing was searched or found.
    cache_format: None for a cache in the compute dtype.
    compute_bytes: of an element in the compute dtype.
    """
    is_searched = solution is not None
    if solution is not None:
        policy, schedule = solution.policy, solution.schedule
    if policy is not None:
        cache, hidden = (tier_fractions(policy, kind, compute_tier == "gpu") for kind in ("cache", "activations"))
        memory = replace(memory, cache=cache, activations=hidden)
    schedule = schedule or ("zigzag" if memory.streams_weights else "row")
    sizes = cache_sizes(
        config,
        cache_format,
        compute_bytes,
        on_disk=memory.cache["disk"] > 0,
        host_attention=cpu_attention and compute_tier == "gpu",
        one_layer=schedule == "prefill-only",
    )
    hidden_bytes = config.hidden_size * compute_bytes
    if compute_tier == "gpu":
        free = {**free, "cpu": int(free["cpu"] / (1 + PINNED_EXCESS_SHARE))}
    division = RunMemory(memory, policy, schedule, run, free, compute_tier, sizes, hidden_bytes, is_searched)
    return RunPlan(policy, schedule, memory.cache, division.activation_fractions(), division.limits())
