"""Plan one run: schedule, policy, placement of cache and hidden states, and the limits of a pass.
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import exact_size
from flexgen_helm.planner.cache_sizes import CacheSizes, cache_sizes
from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.placement import tier_fractions
from flexgen_helm.planner.policy import Choices, Policy
from flexgen_helm.planner.schedules import ROW, ZIGZAG, Schedule
from flexgen_helm.planner.search import Solution
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.planner.workload import Workload
from flexgen_helm.tiers import (
    ACTIVATIONS_SHARE,
    BATCH_TOKENS,
    BLOCK_SEQUENCES,
    EXPERTS_SHARE,
    LARGE_BLOCK_SEQUENCES,
    LONG_ANSWER_TOKENS,
    LONG_BLOCKS,
    LONG_MAX_SEQUENCES,
    LONG_PAGE_TOKENS,
    MAX_BATCH_TOKENS,
    MAX_SEQUENCES,
    MAX_STAGED_CACHE_SHARE,
    PASS_TOKENS,
    STAGED_CACHE_SHARE,
    STREAMED_BATCH_TOKENS,
    TIER_PLACES,
    TIERS,
    UNLIMITED,
    Fractions,
    Tier,
    limit_flag,
)

# The free memory of a run is divided between its hidden states and its KV cache.


@dataclass(frozen=True)
class RunSize:
    """Size of a run.

    longest: positions of the longest sequence.
    prompt_tokens: over all requests; a request counts one a completion if these are more than its
        tokens.
    max_early_stop_tokens: most tokens of an answer that may end before its `max_tokens`; 0 if none
        may.
    longest_decoded: positions of the longest sequence that decodes; 0 if none does.
    longest_steps: most decode steps of a sequence.
    decodes: some sequence draws a second token, so that it has a cache; without, only shared
        prefixes have.
    workload: lengths that the search plans for, of some requests at least; None without.
    """

    longest: int
    prompt_tokens: int
    max_early_stop_tokens: int = 0
    longest_decoded: int = 0
    longest_steps: int = 0
    decodes: bool = True
    workload: Workload | None = None

    def fits(self, limits: SchedulerLimits) -> bool:
        """Whether every request can run, one completion after the other, behind one shared
        prefix.
        """
        overhead = self.longest_steps * limits.step_overhead + 2 * (1 + limits.slot_overhead)
        return not self.longest_decoded or self.longest_decoded + overhead <= limits.cache_tokens


class _StagedBlock(NamedTuple):
    """A cache block whose layers are brought to the compute tier.

    sequences: of the block.
    num_bytes: of the layer in use, and of the next where it has room; 0 if none is brought there.
    """

    sequences: int
    num_bytes: int


@dataclass(frozen=True)
class RunMemory:
    """Divides the free memory of a run between hidden states and KV cache.

    policy: None if the rule of thumb decides.
    is_searched: the policy is the search's and not the user's.
    free: bytes left on each tier once the weights are loaded.
    hidden_bytes: of one token's hidden state.
    """

    placement: Placement
    policy: Policy | None
    schedule: Schedule
    size: RunSize
    free: Mapping[Tier, int]
    cache: CacheSizes
    hidden_bytes: int
    is_searched: bool = False

    @property
    def _compute_tier(self) -> Tier:
        return self.placement.machine.compute_tier

    def activation_fractions(self) -> Fractions:
        """Place hidden states: as planned, but for prefill-only as close to the compute device as
        they fit.

        A prefill-only pass holds the hidden states of the whole data set: they fill their share of
        the compute tier, then of host memory, then the disk.
        """
        total = self.size.prompt_tokens * self.hidden_bytes
        if not self.schedule.is_single_pass or not total:
            return self.placement.activations
        left, fractions = 1.0, dict.fromkeys(TIERS, 0.0)
        for tier in dict.fromkeys((self._compute_tier, "cpu")):
            fractions[tier] = min(left, ACTIVATIONS_SHARE * self.free[tier] / total)
            left = 1.0 - sum(fractions.values())
        return {**fractions, "disk": max(0.0, left)}

    def limits(self) -> SchedulerLimits:
        """Derive what a pass may hold.

        Raises `MemoryLimitError` with the missing bytes if the compute device has no room for one
        sequence.
        """
        placement, cache = self.placement, self.cache
        room = {
            tier: max(0.0, self.cache_bytes[tier]) / share
            for tier, share in placement.cache.items()
            if share > 0
        }
        max_states = (
            int(self._states_bytes // cache.state_bytes) if self._states_bytes else UNLIMITED
        )
        fill_tokens = cache.fill_tokens
        memory_room = min((room[tier] for tier in room if tier != "disk"), default=math.inf)
        if room.get("disk", math.inf) >= (1 + fill_tokens) * memory_room:
            # memory runs out before the disk does, even if every page on it holds a single token
            fill_tokens = 0
        beside = cache.state_bytes + cache.window_bytes * (2 if fill_tokens else 1)
        batch_tokens, batch_sequences, max_sequences = self._batch_limits()
        is_resident = not placement.streams_weights and placement.cache[self._compute_tier] == 1.0
        return SchedulerLimits(
            batch_tokens=batch_tokens,
            batch_sequences=batch_sequences,
            max_sequences=min(max_sequences, max_states),
            cache_tokens=int(min(room.values()) / cache.bytes_per_token),
            pass_tokens=self._pass_tokens(max_sequences),
            page_tokens=self._page_tokens,
            slot_overhead=-(-beside // cache.bytes_per_token) + fill_tokens,
            step_overhead=fill_tokens,
            max_states=max_states,
            block_sequences=LARGE_BLOCK_SEQUENCES if is_resident else self._staged_block.sequences,
        )

    def _batch_limits(self) -> tuple[int, int, int]:
        """Return the most tokens and sequences of a batch, and the most sequences that have a
        cache.
        """
        policy = self.policy
        if policy is not None:
            blocks = LONG_BLOCKS if self.is_searched and self._page_tokens else 1
            tokens = STREAMED_BATCH_TOKENS if self._has_experts else MAX_BATCH_TOKENS
            return tokens, policy.gpu_batch_size, blocks * policy.block_size
        if self.placement.streams_weights:
            return STREAMED_BATCH_TOKENS, STREAMED_BATCH_TOKENS, UNLIMITED
        least = LONG_MAX_SEQUENCES if self._page_tokens else 0
        tokens = MAX_BATCH_TOKENS if self._compute_tier == "gpu" else BATCH_TOKENS
        return tokens, tokens, max(least, MAX_SEQUENCES[self._compute_tier])

    def _pass_tokens(self, max_sequences: int) -> int:
        """Return the most prompt tokens that join a pass.

        max_sequences: that may decode in it, too.
        """
        if self.schedule.is_single_pass:
            return UNLIMITED
        if not self.schedule.reads_once:
            return PASS_TOKENS
        shares = self.placement.activations.items()
        pass_bytes = min(self._waiting_bytes[tier] / share for tier, share in shares if share > 0)
        # The first batch is workspace but for its copy at rest, and may be half full; the last
        # leaves its rest late.
        beside = 1 - 2 / self.placement.model.config.waiting_copies
        together = self.expert_tokens + int(STREAMED_BATCH_TOKENS / 2 * beside)
        tokens = min(int(pass_bytes / self.hidden_bytes), together)
        # running ones have experts, too
        if together < self.size.prompt_tokens and self.size.decodes:
            tokens = max(tokens // 2, tokens - max_sequences)
        return max(1, tokens)

    @property
    def _has_experts(self) -> bool:
        """Whether offloaded experts are read once for all tokens that have room."""
        return self.placement.expert_bytes > 0 and self.schedule.reads_once

    @property
    def _copies(self) -> Fractions:
        """Copies of a token's hidden state that each tier has of a pass, or of its part whose
        experts are computed.
        """
        copies = self.placement.activations
        if not self._has_experts:
            return copies
        waiting = self.placement.model.config.waiting_copies
        # and one at rest
        return {**copies, self._compute_tier: waiting + self.schedule.is_single_pass}

    @cached_property
    def expert_tokens(self) -> int:
        """Tokens that may wait for a layer's experts beside the first batch, which is workspace."""
        if not self._has_experts:
            return UNLIMITED
        return int(
            self._waiting_bytes[self._compute_tier]
            / (self._copies[self._compute_tier] * self.hidden_bytes)
        )

    @cached_property
    def _page_tokens(self) -> int:
        """Tokens by which caches grow; 0 where they do not: files of the disk tier have their whole
        size at once.
        """
        if self.placement.cache["disk"] > 0 or self.schedule.is_single_pass:
            return 0
        return LONG_PAGE_TOKENS if self.size.max_early_stop_tokens > LONG_ANSWER_TOKENS else 0

    @cached_property
    def _staged_block(self) -> _StagedBlock:
        """The largest cache block; a staged one has so few sequences that all may be longest."""
        machine, precision = self.placement.machine, self.placement.model.precision
        # Attention over a plain cache in host memory runs there; a quantized one is fetched.
        host_attends = machine.cpu_attention and machine.has_gpu and precision.cache is None
        attended = (machine.compute_tier, "cpu") if host_attends else (machine.compute_tier,)
        if not any(
            share > 0 and tier not in attended for tier, share in self.placement.cache.items()
        ):
            return _StagedBlock(BLOCK_SEQUENCES, 0)
        share = STAGED_CACHE_SHARE if self._page_tokens else MAX_STAGED_CACHE_SHARE
        room = share * (self.free[self._compute_tier] - self.cache.state_bytes)
        sequence_bytes = (
            self.size.longest + 1
        ) * self.cache.layer_bytes_per_token + self.cache.layer_window_bytes
        if 2 * sequence_bytes <= room:
            sequence_bytes *= 2
        sequences = max(1, min(BLOCK_SEQUENCES, int(room / sequence_bytes)))
        staged = sequences if self.policy is None else min(sequences, self.policy.gpu_batch_size)
        return _StagedBlock(sequences, staged * sequence_bytes)

    @cached_property
    def _waiting_bytes(self) -> dict[Tier, float]:
        """Bytes of each tier that hidden states of waiting batches may take, or of tokens whose
        experts are computed.

        Under a policy they may take what the block's cache and staging leave, and always at least
        their share.
        """
        if not self.schedule.reads_once:  # one batch at a time: nothing waits
            return dict.fromkeys(TIERS, 0.0)
        size, policy, waiting = self.size, self.policy, {}
        for tier in TIERS:
            computes = tier == self._compute_tier
            allowed = ACTIVATIONS_SHARE * self.free[tier]
            if self._has_experts and computes:  # beside one sequence's cache in use
                allowed = EXPERTS_SHARE * (
                    self.free[tier] - self._staged_block.num_bytes - self.cache.state_bytes
                )
            if policy is not None and not self.schedule.is_single_pass:
                left: float = self.free[tier] - computes * self._staged_block.num_bytes
                positions = policy.block_size * size.longest
                if size.decodes:
                    windows = (1 + (tier == "disk")) * policy.block_size * self.cache.window_bytes
                    left -= (
                        positions * self.cache.bytes_per_token + windows
                    ) * self.placement.cache[tier]
                    left -= computes * policy.block_size * self.cache.state_bytes
                else:  # the planned block has room, and shared prefixes have the rest
                    left = min(positions * self.hidden_bytes * self._copies[tier], left)
                allowed = max(ACTIVATIONS_SHARE * self.free[tier], left)
            # At least one sequence, however long: a preempted one is computed again in one piece.
            most = max(size.prompt_tokens, size.longest) * max(1, self._copies[tier])
            waiting[tier] = min(
                max(allowed, size.longest * self.hidden_bytes), most * self.hidden_bytes
            )
        return waiting

    @cached_property
    def _available(self) -> dict[Tier, float]:
        """Bytes of each tier that waiting hidden states and staging leave; negative where they
        exceed it.
        """
        waiting = {
            tier: self._waiting_bytes[tier] for tier, copies in self._copies.items() if copies > 0
        }
        staged = {self._compute_tier: self._staged_block.num_bytes}
        return {
            tier: self.free[tier] - waiting.get(tier, 0) - staged.get(tier, 0) for tier in TIERS
        }

    @cached_property
    def _states_bytes(self) -> float:
        """Bytes for states of sequences whose cache is offloaded, which stay on the compute tier.

        Half of its room, or those of the planned block.
        """
        if not self.cache.state_bytes or self.placement.cache[self._compute_tier] == 1:
            return 0.0
        room = self._available[self._compute_tier]
        block = 1 if self.policy is None else self.policy.block_size
        return max(room / 2, min(room, block * self.cache.state_bytes), self.cache.state_bytes)

    @cached_property
    def cache_bytes(self) -> dict[Tier, float]:
        """Bytes of each tier that cache blocks may take; raises as `limits`."""
        compute_tier = self._compute_tier
        left = {
            **self._available,
            compute_tier: self._available[compute_tier] - self._states_bytes,
        }
        for tier in TIERS:
            if left[tier] < 0 and (tier == compute_tier or self.placement.activations[tier] > 0):
                missing = exact_size(math.ceil(-left[tier]))
                raise MemoryLimitError(
                    f"the {tier} tier has no room for one sequence: its cache in use and its "
                    f"hidden states need {missing} more there: raise {limit_flag(tier)} or lower "
                    "max_tokens"
                )
        return left


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
            tier_fractions(policy, kind, machine.has_gpu) for kind in ("cache", "activations")
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
    hidden_bytes = config.hidden_elements * machine.compute_bytes
    division = RunMemory(placement, policy, schedule, size, free, sizes, hidden_bytes, is_searched)
    return RunPlan(
        machine.compute_tier,
        policy,
        schedule,
        placement.shares,
        placement.cache,
        division.activation_fractions(),
        division.limits(),
        {tier: int(num_bytes) for tier, num_bytes in division.cache_bytes.items()},
        division.expert_tokens,
    )


def _placements(placement: Placement) -> Iterator[Placement]:
    """Yield the planned tiers of cache and hidden states, then slower ones that have more room."""

    def on_host(share: float) -> Fractions:
        return {"gpu": 0.0, "cpu": share, "disk": 1.0 - share}

    hidden = [placement.activations, *([on_host(1.0)] if placement.machine.has_gpu else [])]
    for cache, activations in product([placement.cache, *map(on_host, _HOST_SHARES)], hidden):
        yield replace(placement, cache=cache, activations=activations)
