"""Divide the free memory of a run between its hidden states and its KV cache. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.planner.cache_sizes import CacheSizes
from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.schedules import Schedule
from flexgen_helm.planner.weight_placement import Placement
from flexgen_helm.planner.workload import Workload
from flexgen_helm.shared_sizes import (
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
)
from flexgen_helm.tiers import TIERS, UNLIMITED, Fractions, Tier, limit_flag
from flexgen_helm.units import exact_size


@dataclass(frozen=True)
class RunSize:
    """Size of a run: what a plan must know of its requests.

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

    What computing takes besides, its workspace, is not counted here.

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
        for tier in dict.fromkeys((self._compute_tier, "cpu")):  # one where the host computes
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
        slot_bytes = cache.state_bytes + cache.window_bytes * (2 if fill_tokens else 1)
        batch_tokens, batch_sequences, max_sequences = self._batch_limits()
        is_resident = not placement.streams_weights and placement.cache[self._compute_tier] == 1.0
        return SchedulerLimits(
            batch_tokens=batch_tokens,
            batch_sequences=batch_sequences,
            max_sequences=min(max_sequences, max_states),
            cache_tokens=int(min(room.values()) / cache.bytes_per_token),
            pass_tokens=self._pass_tokens(max_sequences),
            page_tokens=self._page_tokens,
            slot_overhead=-(-slot_bytes // cache.bytes_per_token) + fill_tokens,
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
        # The first batch, which may be half full, is workspace but for two of its copies: the one
        # at rest, and that of the last batch, which leaves its rest late.
        workspace_share = 1 - 2 / self.placement.model.config.waiting_copies
        num_gathered = self.expert_tokens + int(STREAMED_BATCH_TOKENS / 2 * workspace_share)
        tokens = min(int(pass_bytes / self.hidden_bytes), num_gathered)
        # tokens of running sequences wait for experts, too
        if num_gathered < self.size.prompt_tokens and self.size.decodes:
            tokens = max(tokens // 2, tokens - max_sequences)
        return max(1, tokens)

    @property
    def _has_experts(self) -> bool:
        """Whether offloaded experts are read once for all tokens that have room."""
        return self.placement.staging.experts > 0 and self.schedule.reads_once

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
        size, waiting = self.size, {}
        for tier in TIERS:
            allowed = ACTIVATIONS_SHARE * self.free[tier]
            if self.policy is not None and not self.schedule.is_single_pass:
                allowed = max(allowed, self._beside_block(self.policy.block_size, tier))
            elif self._has_experts and tier == self._compute_tier:
                # beside one sequence's cache in use
                allowed = EXPERTS_SHARE * (
                    self.free[tier] - self._staged_block.num_bytes - self.cache.state_bytes
                )
            # At least one sequence, however long: a preempted one is computed again in one piece.
            most = max(size.prompt_tokens, size.longest) * max(1, self._copies[tier])
            waiting[tier] = min(
                max(allowed, size.longest * self.hidden_bytes), most * self.hidden_bytes
            )
        return waiting

    def _beside_block(self, block_size: int, tier: Tier) -> float:
        """Return the bytes of a tier that hidden states may take beside the staging and the cache
        of a block.

        block_size: sequences of the planned block.
        """
        cache, computes = self.cache, tier == self._compute_tier
        left: float = self.free[tier] - computes * self._staged_block.num_bytes
        positions = block_size * self.size.longest
        if not self.size.decodes:
            # the planned block has room, and the caches of shared prefixes have the rest
            return min(positions * self.hidden_bytes * self._copies[tier], left)
        window_bytes = (1 + (tier == "disk")) * block_size * cache.window_bytes
        left -= (positions * cache.bytes_per_token + window_bytes) * self.placement.cache[tier]
        return left - computes * block_size * cache.state_bytes

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
