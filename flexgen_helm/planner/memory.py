"""Divide the memory of the tiers: weights and staging when a model loads, cache and hidden states for each run.

`plan_memory` places the weights. Without a policy it follows a rule of thumb:

- Weights that fit on the compute tier stay there: in the compute dtype if half of the tier is enough, else as stored.
- Otherwise a staging ring takes two layers, at most a quarter of the tier (half of it, if only that holds one layer).
  Of the rest, weights take half (three quarters on a gpu, whose cache goes to the host). The next weights take half of
  the host's limit, the others go to the disk. Of a mixture, experts go to the slowest tiers, and most of the staging
  memory is slots for them.
- The cache is on the compute tier of a machine without a gpu, and in host memory of one with a gpu.

`RunMemory` divides what is then free between hidden states and KV cache. Without a policy, resident weights run
in batches of `BATCH_TOKENS`, and streamed weights in blocks as large as the cache has room for. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import EMBED, expert_of, stage_names
from flexgen_helm.planner.cache_sizes import CacheSizes, cache_sizes
from flexgen_helm.planner.constants import (
    ACTIVATIONS_SHARE,
    ALIGNMENT,
    BATCH_TOKENS,
    BLOCK_SEQUENCES,
    COPIES_SHARE,
    COPY_BUFFER_BYTES,
    LARGE_BLOCK_SEQUENCES,
    LONG_ANSWER_TOKENS,
    LONG_BLOCKS,
    LONG_MAX_SEQUENCES,
    LONG_PAGE_TOKENS,
    MAX_BATCH_TOKENS,
    MAX_SEQUENCES,
    MAX_STAGED_CACHE_SHARE,
    MIN_EXPERT_SLOTS,
    MIN_STAGING_BYTES,
    NUM_LOADERS,
    PAGE_TOKENS,
    PASS_TOKENS,
    STAGED_CACHE_SHARE,
    STREAMED_BATCH_TOKENS,
    UNLIMITED,
)
from flexgen_helm.planner.placement import TIERS, StorageSizes, Tier, limit_flag, place, tier_fractions
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.units import exact_size

Fractions = Mapping[Tier, float]

# Share of the compute tier for the staging ring, and its share if only a larger ring holds a whole layer.
_STAGING_SHARE, _MAX_STAGING_SHARE = 0.25, 0.5
# Share of the compute tier for resident weights if not all of them fit. A gpu's cache goes to the host.
_WEIGHTS_SHARE: Mapping[Tier, float] = {"gpu": 0.75, "cpu": 0.5}
# Share of host memory for the next weights of a gpu.
_HOST_WEIGHTS_SHARE = 0.5


# Positions of a sequence that has room on the compute tier whatever the weights are: a prompt of a few examples.
_LEAST_POSITIONS = 512


@dataclass(frozen=True)
class MemoryPlan:
    """Placement of a loaded model.

    weights: matrix name -> tier. Vectors are not named: they are on the compute tier.
    cache, activations: fractions by tier.
    staging_bytes: size of the staging ring, 0 if all weights are resident.
    compute_copies: resident matrices are kept in the compute dtype.
    expert_bytes: of the slots for offloaded experts.
    """

    weights: Mapping[str, Tier]
    cache: Fractions
    activations: Fractions
    staging_bytes: int
    compute_copies: bool
    expert_bytes: int = 0

    @property
    def streams_weights(self) -> bool:
        return self.all_staging_bytes > 0

    @property
    def all_staging_bytes(self) -> int:
        return self.staging_bytes + self.expert_bytes


@dataclass(frozen=True)
class RunSize:
    """Size of a run.

    longest: positions of the longest sequence.
    longest_decoded: the same of those sequences that have a cache of their own.
    longest_steps: most decode steps of a sequence.
    prompt_tokens: over all requests; a request with more completions than tokens counts its completions.
    longest_early: most tokens of an answer that may end before its `max_tokens`; 0 if none may.
    """

    longest: int
    prompt_tokens: int
    longest_early: int = 0
    longest_decoded: int = 0
    longest_steps: int = 0

    def fits(self, limits: SchedulerLimits) -> bool:
        """Whether every request can run, one completion after the other, behind one shared prefix."""
        overhead = self.longest_steps * limits.step_overhead + 2 * (1 + limits.slot_overhead)
        return not self.longest_decoded or self.longest_decoded + overhead <= limits.cache_tokens


@dataclass(frozen=True)
class SchedulerLimits:
    """What one pass may hold.

    batch_tokens, batch_sequences: of one batch; a longer sequence is a batch of its own.
    max_sequences: sequences with a cache.
    cache_tokens: positions of KV cache over all sequences.
    pass_tokens: prompt tokens that one pass admits, so that running sequences do not wait; a longer prompt is admitted
        alone.
    page_tokens: 0 allocates a sequence's whole cache at admission. Otherwise caches grow by pages, and as many
        sequences are admitted as are expected to fit.
    is_paced: each pass admits a few sequences, so that young and old ones share the memory (diagonal schedule).
    slot_overhead: positions that each sequence takes besides its tokens (residual window, last disk page).
    step_overhead: positions that each decode step of a block takes besides its tokens (last disk page).
    max_windows: sequences and shared prefixes whose residual window is on the compute tier while the rest of their
        cache is offloaded.
    block_sequences: sequences of a cache block; above `BLOCK_SEQUENCES` only neighbours of similar length.
    """

    batch_tokens: int
    batch_sequences: int
    max_sequences: int
    cache_tokens: int
    pass_tokens: int
    page_tokens: int = 0
    slot_overhead: int = 0
    step_overhead: int = 0
    max_windows: int = UNLIMITED
    block_sequences: int = BLOCK_SEQUENCES
    is_paced: bool = False


def plan_memory(
    storage: StorageSizes,
    limits: Mapping[Tier, int],
    compute_tier: Tier,
    compute_bytes: int,
    policy: Policy | None = None,
) -> MemoryPlan:
    """Place the weights by a policy, or by the rule of thumb.

    limits: bytes of each tier.
    compute_bytes: of an element in the compute dtype.
    policy: without a gpu its gpu shares go to the cpu.

    Raises `MemoryLimitError` with the missing bytes if the weights with their staging ring exceed a tier.
    """
    has_gpu = compute_tier == "gpu"
    sizes = storage.matrices
    vector_bytes = storage.vector_bytes(compute_bytes)
    total, copy_bytes = sum(sizes.values()), storage.num_values * compute_bytes
    copies_fit = copy_bytes + vector_bytes <= COPIES_SHARE * limits[compute_tier]
    staging = staging_sizes(storage, limits[compute_tier])
    on_compute_tier: Fractions = {tier: float(tier == compute_tier) for tier in TIERS}
    resident = MemoryPlan(place(sizes, on_compute_tier), on_compute_tier, on_compute_tier, 0, copies_fit)
    left = limits[compute_tier] - total - vector_bytes
    if policy is not None:
        placed = place(sizes, tier_fractions(policy, "weights", has_gpu))
        cache, activations = (tier_fractions(policy, kind, has_gpu) for kind in ("cache", "activations"))
        used = staging.used(placed, compute_tier)
        plan = MemoryPlan(placed, cache, activations, used.ring, copies_fit and not used.num_bytes, used.experts)
    elif left >= least_run_bytes(storage, compute_bytes):
        return resident
    else:
        in_host_memory: Fractions = {tier: float(tier == "cpu") for tier in TIERS}
        room = limits[compute_tier] - staging.num_bytes - least_run_bytes(storage, compute_bytes)
        resident_bytes = max(0.0, _WEIGHTS_SHARE[compute_tier] * room - vector_bytes)
        host_bytes = _HOST_WEIGHTS_SHARE * limits["cpu"] if has_gpu else 0.0
        placed = place(sizes, _streamed_fractions(resident_bytes / total, host_bytes / total, compute_tier))
        used = staging.used(placed, compute_tier)
        plan = MemoryPlan(placed, in_host_memory, on_compute_tier, used.ring, False, used.experts)
    needed = {tier: sum(sizes[name] for name, at in plan.weights.items() if at == tier) for tier in TIERS}
    if plan.compute_copies:  # all weights are resident
        needed[compute_tier] = copy_bytes
    needed[compute_tier] += vector_bytes + plan.all_staging_bytes
    if has_gpu and needed["disk"]:
        needed["cpu"] += loader_buffer_bytes(storage)
    for tier in TIERS:
        if needed[tier] > limits[tier]:
            if policy is None and left >= 0:  # weights that leave little room for a run, and cannot be streamed either
                return resident
            raise MemoryLimitError(
                f"the {tier} tier is limited to {exact_size(limits[tier])}, and the weights with their staging need "
                f"{exact_size(needed[tier] - limits[tier])} more there: raise {limit_flag(tier)}"
            )
    return plan


def leaving_room(
    policy: Policy, storage: StorageSizes, limits: Mapping[Tier, int], compute_tier: Tier, compute_bytes: int
) -> Policy:
    """Return a searched policy with so few weights on the compute tier that a sequence can run beside them.

    A search has room for the requests that it assumes, in sizes that whole matrices exceed.
    """
    staging, total = staging_sizes(storage, limits[compute_tier]), sum(storage.matrices.values())
    beside = storage.vector_bytes(compute_bytes) + staging.num_bytes + least_run_bytes(storage, compute_bytes)
    has_gpu = compute_tier == "gpu"
    while share := policy.wg if has_gpu else policy.wc:
        placed = place(storage.matrices, tier_fractions(policy, "weights", has_gpu))
        taken = sum(size for name, size in storage.matrices.items() if placed[name] == compute_tier)
        excess = taken + beside - limits[compute_tier]
        if taken in (0, total) or excess <= 0:
            break
        share = max(0.0, share - max(0.001, excess / total))
        policy = replace(policy, wg=share) if has_gpu else replace(policy, wc=share)
    return policy


def _streamed_fractions(resident: float, host: float, compute_tier: Tier) -> Fractions:
    """Place a share of the weights on the compute tier, the next in host memory behind it, the rest on the disk."""
    resident = min(1.0, resident)
    host = min(1.0 - resident, host)
    rest = 1.0 - resident - host
    if compute_tier == "cpu":
        return {"gpu": 0.0, "cpu": resident, "disk": rest}
    return {"gpu": resident, "cpu": host, "disk": rest}


def least_run_bytes(storage: StorageSizes, compute_bytes: int) -> int:
    """Return what weights leave free on the compute tier, so that a sequence of `_LEAST_POSITIONS` can run at least.

    It counts two layers of its cache, its residual window, and its hidden states; the cache may be on any tier.
    """
    config = storage.config
    sizes = cache_sizes(config, storage.precision.cache, compute_bytes, on_disk=True)
    positions = min(_LEAST_POSITIONS, config.max_positions)
    hidden_bytes = config.state_size * compute_bytes
    return sizes.window_bytes + positions * (2 * sizes.layer_bytes_per_token + hidden_bytes)


def loader_buffer_bytes(storage: StorageSizes) -> int:
    """Bound the host memory into which loaders read weights from the disk, on their way to a device."""
    largest = (max(storage.matrices.values()), expert_slot_bytes(storage))  # each kind has its own loaders
    pages = (-(-min(COPY_BUFFER_BYTES, size) // ALIGNMENT) + 2 for size in largest if size)
    return NUM_LOADERS * sum(pages) * ALIGNMENT  # aligned reads begin before and end behind


@dataclass(frozen=True)
class StagingSizes:
    """Bytes on the compute tier through which offloaded weights reach it: the staging ring, and slots for experts."""

    ring: int
    experts: int = 0

    @property
    def num_bytes(self) -> int:
        return self.ring + self.experts

    def used(self, placed: Mapping[str, Tier], compute_tier: Tier) -> StagingSizes:
        """Return what a placement needs; a ring that it does not need is slots, too."""
        offloaded = {expert_of(name) is not None for name, tier in placed.items() if tier != compute_tier}
        if True not in offloaded:
            return StagingSizes(self.ring if offloaded else 0)
        return self if False in offloaded else StagingSizes(0, self.num_bytes)


def expert_slot_bytes(storage: StorageSizes) -> int:
    """Return the bytes of the largest expert, each of its matrices padded to a page; 0 without experts."""
    sizes: dict[str, int] = {}
    for name, num_bytes in storage.matrices.items():
        if (expert := expert_of(name)) is not None:
            sizes[expert] = sizes.get(expert, 0) + -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return max(sizes.values(), default=0)


def staging_sizes(storage: StorageSizes, limit: int) -> StagingSizes:
    """Size the memory through which offloaded weights reach a compute tier of `limit` bytes."""
    stages = [stage for stage in stage_names(storage.config) if stage != EMBED]
    total = _staging_bytes(max(map(storage.stage_bytes, stages)), limit)
    slot = expert_slot_bytes(storage)
    if not slot:
        return StagingSizes(total)
    always = max(storage.stage_bytes(stage) - storage.stage_expert_bytes(stage) for stage in stages)
    ring = max(MIN_STAGING_BYTES, min(2 * always + MIN_STAGING_BYTES, total // 2))
    return StagingSizes(ring, max(MIN_EXPERT_SLOTS * slot, total - ring))


def _staging_bytes(largest: int, limit: int) -> int:
    """Size staging memory for stages of up to `largest` bytes."""
    staging = max(MIN_STAGING_BYTES, min(2 * largest + MIN_STAGING_BYTES, int(_STAGING_SHARE * limit)))
    # A layer that does not fit is loaded again for every batch, so a larger ring pays if it makes one fit.
    one_layer = largest + MIN_STAGING_BYTES
    return one_layer if staging < one_layer <= limit * _MAX_STAGING_SHARE else staging


@dataclass(frozen=True)
class RunMemory:
    """Divides the free memory of a run between hidden states and KV cache.

    policy: None if the rule of thumb decides.
    is_searched: the policy is the search's and not the user's.
    free: bytes left on each tier once the weights are loaded.
    hidden_bytes: of one token's hidden state.
    """

    plan: MemoryPlan
    policy: Policy | None
    schedule: Schedule
    run: RunSize
    free: Mapping[Tier, int]
    compute_tier: Tier
    cache: CacheSizes
    hidden_bytes: int
    is_searched: bool = False

    def activation_fractions(self) -> Fractions:
        """Place hidden states: as planned, but for prefill-only as close to the compute device as they fit.

        A prefill-only pass holds the hidden states of the whole data set: they fill their share of the compute tier,
        then of host memory, then the disk.
        """
        total = self.run.prompt_tokens * self.hidden_bytes
        if self.schedule != "prefill-only" or not total:
            return self.plan.activations
        left, fractions = 1.0, dict.fromkeys(TIERS, 0.0)
        for tier in dict.fromkeys((self.compute_tier, "cpu")):
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
        plan, policy, cache, hidden = self.plan, self.policy, self.cache, self._hidden_state_bytes
        available, max_windows = self._cache_room
        room = {tier: max(0.0, available[tier]) / share for tier, share in plan.cache.items() if share > 0}

        fill_tokens = cache.fill_tokens
        memory_room = min((room[tier] for tier in room if tier != "disk"), default=math.inf)
        if room.get("disk", math.inf) >= (1 + fill_tokens) * memory_room:
            fill_tokens = 0  # memory runs out before the disk does, even with the worst page fill
        pass_tokens = PASS_TOKENS
        if self.schedule == "prefill-only":
            pass_tokens = UNLIMITED
        elif self.schedule != "row":
            pass_bytes = min(hidden[tier] / share for tier, share in plan.activations.items() if share > 0)
            pass_tokens = max(1, int(pass_bytes / self.hidden_bytes))
        block_sequences = self._block_sequences
        if policy is not None:
            batch_tokens, batch_sequences, max_sequences = MAX_BATCH_TOKENS, policy.gpu_batch_size, policy.block_size
            if self.is_searched and self._page_tokens:
                max_sequences *= LONG_BLOCKS
        elif plan.streams_weights:
            batch_tokens = batch_sequences = STREAMED_BATCH_TOKENS
            max_sequences = UNLIMITED
        else:
            batch_tokens = batch_sequences = BATCH_TOKENS
            max_sequences = MAX_SEQUENCES[self.compute_tier]
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
            is_paced=self.schedule == "diagonal" and self._page_tokens > 0,
        )

    @cached_property
    def _cache_room(self) -> tuple[dict[Tier, float], int]:
        """Bytes of each tier for cache blocks, and how many residual windows have room besides."""
        plan, cache, hidden, home = self.plan, self.cache, self._hidden_state_bytes, self.compute_tier
        available = {tier: self.free[tier] - (hidden[tier] if plan.activations[tier] > 0 else 0) for tier in TIERS}
        available[home] -= self._staging_bytes
        max_windows = UNLIMITED
        if cache.window_bytes and plan.cache[home] < 1:
            # Residual windows of an offloaded cache stay on the compute tier: half of its room is theirs.
            windows = max(available[home] / 2, cache.window_bytes)
            available[home] -= windows
            max_windows = int(windows // cache.window_bytes)
        for tier in TIERS:
            if available[tier] < 0 and (tier == home or plan.activations[tier] > 0):
                missing = exact_size(math.ceil(-available[tier]))
                raise MemoryLimitError(
                    f"the {tier} tier has no room for one sequence: its cache in use and its hidden states need "
                    f"{missing} more there: raise {limit_flag(tier)} or lower max_tokens"
                )
        return available, max_windows

    @property
    def _page_tokens(self) -> int:
        """Tokens by which caches grow; 0 where they do not: files of the disk tier have their whole size at once."""
        if self.plan.cache["disk"] > 0 or self.schedule == "prefill-only":
            return 0
        if self.schedule == "diagonal":
            return PAGE_TOKENS
        return LONG_PAGE_TOKENS if self.run.longest_early > LONG_ANSWER_TOKENS else 0

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
        attended = (self.compute_tier, "cpu") if self.cache.host_attends else (self.compute_tier,)
        return any(share > 0 and tier not in attended for tier, share in self.plan.cache.items())

    @property
    def _staged_sequence_bytes(self) -> int:
        layer_bytes = (self.run.longest + 1) * self.cache.layer_bytes_per_token
        return 2 * layer_bytes if 2 * layer_bytes <= self._staging_room else layer_bytes

    @property
    def _staging_room(self) -> float:
        share = STAGED_CACHE_SHARE if self._page_tokens else MAX_STAGED_CACHE_SHARE
        return share * (self.free[self.compute_tier] - self.cache.window_bytes)

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
        if self.schedule == "row":  # one batch at a time: nothing waits
            return dict.fromkeys(TIERS, 0.0)
        waiting: dict[Tier, float] = {}
        for tier in TIERS:
            allowed = ACTIVATIONS_SHARE * self.free[tier]
            if self.policy is not None and self.schedule != "prefill-only":
                sequences = self.policy.block_size
                cached = sequences * self.run.longest * self.cache.bytes_per_token * self.plan.cache[tier]
                windows = self._staging_bytes + sequences * self.cache.window_bytes
                allowed = max(allowed, self.free[tier] - cached - (windows if tier == self.compute_tier else 0))
            # At least one sequence, however long: a preempted one is computed again in one piece.
            most = max(self.run.prompt_tokens, self.run.longest)
            waiting[tier] = min(max(allowed, self.run.longest * self.hidden_bytes), most * self.hidden_bytes)
        return waiting
