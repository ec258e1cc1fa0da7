"""Divide the memory that a run finds free between its hidden states and its KV cache. No torch.

Without a policy, resident weights run in batches of `BATCH_TOKENS`, and streamed weights in blocks as large as the
cache has room for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.cache_sizes import CacheSizes
from flexgen_helm.planner.constants import (
    ACTIVATIONS_SHARE,
    BATCH_TOKENS,
    BLOCK_SEQUENCES,
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
    UNLIMITED,
)
from flexgen_helm.planner.placement import TIERS, Fractions, Tier, limit_flag
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.scheduler_limits import SchedulerLimits
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.planner.workload import Workload
from flexgen_helm.units import exact_size


@dataclass(frozen=True)
class RunSize:
    """Size of a run.

    longest: positions of the longest sequence.
    longest_decoded: the same of those sequences that have a cache of their own.
    longest_steps: most decode steps of a sequence.
    workload: lengths that the search plans for, of some requests at least; None without.
    decodes: some sequence draws a second token, so that it has a cache; without, only shared prefixes have.
    prompt_tokens: over all requests; a request with more completions than tokens counts its completions.
    longest_early: most tokens of an answer that may end before its `max_tokens`; 0 if none may.
    """

    longest: int
    prompt_tokens: int
    longest_early: int = 0
    longest_decoded: int = 0
    longest_steps: int = 0
    decodes: bool = True
    workload: Workload | None = None

    def fits(self, limits: SchedulerLimits) -> bool:
        """Whether every request can run, one completion after the other, behind one shared prefix."""
        overhead = self.longest_steps * limits.step_overhead + 2 * (1 + limits.slot_overhead)
        return not self.longest_decoded or self.longest_decoded + overhead <= limits.cache_tokens


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
        """Place hidden states: as planned, but for prefill-only as close to the compute device as they fit.

        A prefill-only pass holds the hidden states of the whole data set: they fill their share of the compute tier,
        then of host memory, then the disk.
        """
        total = self.size.prompt_tokens * self.hidden_bytes
        if not self.schedule.is_single_pass or not total:
            return self.placement.activations
        left, fractions = 1.0, dict.fromkeys(TIERS, 0.0)
        for tier in dict.fromkeys((self._compute_tier, "cpu")):
            fractions[tier] = min(left, ACTIVATIONS_SHARE * self.free[tier] / total)
            left = 1.0 - sum(fractions.values())
        return {**fractions, "disk": max(0.0, left)}

    def cache_room(self) -> dict[Tier, int]:
        """Return the bytes of each tier that cache blocks may take beside everything else; raises as `limits`."""
        return {tier: int(num_bytes) for tier, num_bytes in self._cache_room[0].items()}

    def limits(self) -> SchedulerLimits:
        """Derive what a pass may hold.

        Raises `MemoryLimitError` with the missing bytes if the compute device has no room for one sequence.
        """
        placement, policy, cache, hidden = self.placement, self.policy, self.cache, self._hidden_state_bytes
        available, max_windows = self._cache_room
        room = {tier: max(0.0, available[tier]) / share for tier, share in placement.cache.items() if share > 0}

        fill_tokens = cache.fill_tokens
        memory_room = min((room[tier] for tier in room if tier != "disk"), default=math.inf)
        if room.get("disk", math.inf) >= (1 + fill_tokens) * memory_room:
            fill_tokens = 0  # memory runs out before the disk does, even with the worst page fill
        pass_tokens = PASS_TOKENS
        if self.schedule.is_single_pass:
            pass_tokens = UNLIMITED
        elif self.schedule.reads_once:
            pass_bytes = min(hidden[tier] / share for tier, share in placement.activations.items() if share > 0)
            pass_tokens = max(1, int(pass_bytes / self.hidden_bytes))
        block_sequences = self._block_sequences
        if policy is not None:
            batch_tokens, batch_sequences, max_sequences = MAX_BATCH_TOKENS, policy.gpu_batch_size, policy.block_size
            if self.is_searched and self._page_tokens:
                max_sequences *= LONG_BLOCKS
        elif placement.streams_weights:
            batch_tokens = batch_sequences = STREAMED_BATCH_TOKENS
            max_sequences = UNLIMITED
        else:
            batch_tokens = batch_sequences = BATCH_TOKENS
            max_sequences = MAX_SEQUENCES[self._compute_tier]
            if self._page_tokens:
                max_sequences = max(max_sequences, LONG_MAX_SEQUENCES)
            block_sequences = block_sequences if self._is_staged else LARGE_BLOCK_SEQUENCES
        return SchedulerLimits(
            batch_tokens,
            batch_sequences,
            min(max_sequences, max_windows),
            cache_tokens=int(min(room.values()) / cache.bytes_per_token),
            pass_tokens=pass_tokens,
            page_tokens=self._page_tokens,
            slot_overhead=-(-cache.window_bytes // cache.bytes_per_token) + fill_tokens,
            step_overhead=fill_tokens,
            max_windows=max_windows,
            block_sequences=block_sequences,
        )

    @cached_property
    def _cache_room(self) -> tuple[dict[Tier, float], int]:
        """Bytes of each tier for cache blocks, and how many residual windows have room besides."""
        placement, cache, hidden = self.placement, self.cache, self._hidden_state_bytes
        compute_tier = self._compute_tier
        available = {tier: self.free[tier] - (hidden[tier] if placement.activations[tier] > 0 else 0) for tier in TIERS}
        available[compute_tier] -= self._staging_bytes
        max_windows = UNLIMITED
        if cache.window_bytes and placement.cache[compute_tier] < 1:
            # Residual windows of an offloaded cache stay on the compute tier: half of its room is theirs.
            windows = max(available[compute_tier] / 2, cache.window_bytes)
            available[compute_tier] -= windows
            max_windows = int(windows // cache.window_bytes)
        for tier in TIERS:
            if available[tier] < 0 and (tier == compute_tier or placement.activations[tier] > 0):
                missing = exact_size(math.ceil(-available[tier]))
                raise MemoryLimitError(
                    f"the {tier} tier has no room for one sequence: its cache in use and its hidden states need "
                    f"{missing} more there: raise {limit_flag(tier)} or lower max_tokens"
                )
        return available, max_windows

    @property
    def _page_tokens(self) -> int:
        """Tokens by which caches grow; 0 where they do not: files of the disk tier have their whole size at once."""
        if self.placement.cache["disk"] > 0 or self.schedule.is_single_pass:
            return 0
        return LONG_PAGE_TOKENS if self.size.longest_early > LONG_ANSWER_TOKENS else 0

    @property
    def _staging_bytes(self) -> int:
        """Bytes of an offloaded cache block on the compute tier: the layer in use and, where it has room, the next."""
        if not self._is_staged:
            return 0
        sequences = self._block_sequences
        if self.policy is not None:
            sequences = min(sequences, self.policy.gpu_batch_size)
        return sequences * self._staged_sequence_bytes

    @property
    def _is_staged(self) -> bool:
        """Whether a part of the cache is brought to the compute tier for attention."""
        attended = (self._compute_tier, "cpu") if self.cache.host_attends else (self._compute_tier,)
        return any(share > 0 and tier not in attended for tier, share in self.placement.cache.items())

    @property
    def _staged_sequence_bytes(self) -> int:
        layer_bytes = (self.size.longest + 1) * self.cache.layer_bytes_per_token
        return 2 * layer_bytes if 2 * layer_bytes <= self._staging_room else layer_bytes

    @property
    def _staging_room(self) -> float:
        share = STAGED_CACHE_SHARE if self._page_tokens else MAX_STAGED_CACHE_SHARE
        return share * (self.free[self._compute_tier] - self.cache.window_bytes)

    @property
    def _block_sequences(self) -> int:
        """Sequences of a cache block; of a staged one only so many that it has room if all are longest."""
        if not self._is_staged:
            return BLOCK_SEQUENCES
        return max(1, min(BLOCK_SEQUENCES, int(self._staging_room / self._staged_sequence_bytes)))

    @cached_property
    def _hidden_state_bytes(self) -> dict[Tier, float]:
        """Bytes of each tier that hidden states of waiting batches may take.

        Under a policy they may take what the block's cache and staging leave, and always at least their share.
        """
        if not self.schedule.reads_once:  # one batch at a time: nothing waits
            return dict.fromkeys(TIERS, 0.0)
        waiting: dict[Tier, float] = {}
        for tier in TIERS:
            allowed = ACTIVATIONS_SHARE * self.free[tier]
            if self.policy is not None and not self.schedule.is_single_pass:
                sequences = self.policy.block_size
                cached = sequences * self.size.longest * self.cache.bytes_per_token * self.placement.cache[tier]
                windows = self._staging_bytes + sequences * self.cache.window_bytes
                left = self.free[tier] - cached - (windows if tier == self._compute_tier else 0)
                if not self.size.decodes:  # the planned block has room, and shared prefixes have the rest
                    staging = self._staging_bytes if tier == self._compute_tier else 0
                    planned = sequences * self.size.longest * self.hidden_bytes * self.placement.activations[tier]
                    left = min(planned, self.free[tier] - staging)
                allowed = max(allowed, left)
            # At least one sequence, however long: a preempted one is computed again in one piece.
            most = max(self.size.prompt_tokens, self.size.longest)
            waiting[tier] = min(max(allowed, self.size.longest * self.hidden_bytes), most * self.hidden_bytes)
        return waiting
