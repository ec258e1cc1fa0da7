"""Plan one run: schedule, policy, placement of cache and hidden states, and the limits of a pass. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.constants import PINNED_EXCESS_SHARE
from flexgen_helm.planner.linear_program import Solution
from flexgen_helm.planner.memory import Fractions, MemoryPlan, RunMemory, RunSize, SchedulerLimits
from flexgen_helm.planner.placement import TIER_PLACES, Tier, tier_fractions
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.quant.precisions import CacheFormat

# Shares of the cache in host memory that are tried where the planned places have no room for the largest request; the
# rest is on the disk.
_HOST_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided for one run.

    policy: the given or searched policy; None if the rule of thumb decides.
    cache, activations: fractions of the KV cache and of the hidden states by tier.
    limits: what a pass may hold.
    cache_room: bytes of each tier that cache blocks may take.
    """

    policy: Policy | None
    schedule: Schedule
    cache: Fractions
    activations: Fractions
    limits: SchedulerLimits
    cache_room: Mapping[Tier, int]

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

    Raises `MemoryLimitError` if not even one sequence has room.
    """
    if compute_tier == "gpu":
        free = {**free, "cpu": int(free["cpu"] / (1 + PINNED_EXCESS_SHARE))}
    own = _Run(run, free, config, cache_format, compute_tier, compute_bytes, cpu_attention)
    if policy is not None:
        return own.plan(memory, policy, schedule)
    choices: list[Callable[[], RunPlan]] = []
    if solution is not None:
        choices.append(partial(own.plan, memory, solution.policy, solution.schedule, is_searched=True))
        schedule = solution.schedule
    choices += [partial(own.plan, placed, None, schedule) for placed in _placements(memory, compute_tier)]
    return _first_that_fits(choices, run)


@dataclass(frozen=True)
class _Run:
    """What the plan of a run follows from besides placement and schedule; see `plan_run`."""

    size: RunSize
    free: Mapping[Tier, int]
    config: ModelConfig
    cache_format: CacheFormat | None
    compute_tier: Tier
    compute_bytes: int
    cpu_attention: bool

    def plan(
        self, memory: MemoryPlan, policy: Policy | None, schedule: Schedule | None, *, is_searched: bool = False
    ) -> RunPlan:
        """Plan the run for one placement. Raises `MemoryLimitError` where not even one sequence has room."""
        has_gpu = self.compute_tier == "gpu"
        if policy is not None:
            cache, hidden = (tier_fractions(policy, kind, has_gpu) for kind in ("cache", "activations"))
            memory = replace(memory, cache=cache, activations=hidden)
        schedule = schedule or ("zigzag" if memory.streams_weights else "row")
        sizes = cache_sizes(
            self.config,
            self.cache_format,
            self.compute_bytes,
            on_disk=memory.cache["disk"] > 0,
            host_attention=self.cpu_attention and has_gpu,
            one_layer=schedule == "prefill-only",
        )
        hidden_bytes = self.config.state_size * self.compute_bytes
        division = RunMemory(
            memory, policy, schedule, self.size, self.free, self.compute_tier, sizes, hidden_bytes, is_searched
        )
        activations, limits = division.activation_fractions(), division.limits()
        return RunPlan(policy, schedule, memory.cache, activations, limits, division.cache_room())


def _placements(memory: MemoryPlan, compute_tier: Tier) -> Iterator[MemoryPlan]:
    """Yield the planned places of cache and hidden states, then slower ones that have more room."""
    shares = [memory.cache, *map(_on_host, _HOST_SHARES)]
    places = [memory.activations]
    if compute_tier == "gpu":
        places.append(_on_host(1.0))
    for cache, activations in product(shares, places):
        yield replace(memory, cache=cache, activations=activations)


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
