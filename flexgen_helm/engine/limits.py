"""How much a pass may hold: from what the tiers have left to limits for the scheduler. No torch.

A rule of thumb until a policy search decides. In memory: batches of `BATCH_TOKENS`, a few thousand prompt tokens a
pass. Streamed: batches as large as one reading of the weights is worth, and as many rows as the cache has room for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.planner.memory import MemoryPlan
from flexgen_helm.planner.placement import TIERS, Tier
from flexgen_helm.planner.policy import Policy, Schedule
from flexgen_helm.scheduling.scheduler import BLOCK_SEQUENCES, UNLIMITED, SchedulerLimits

# Real tokens of one batch: large enough for the full product rate, small enough to stay near the cache.
BATCH_TOKENS = 1024
# Streamed matrices are upcast anew for every batch, so fewer and larger ones pay.
STREAMED_BATCH_TOKENS = 2048
# Real tokens of one batch where a policy counts sequences: bounds the workspace of their prompts.
MAX_BATCH_TOKENS = 4096
# Rows that decode together in memory: a CPU's products are near their full rate with a hundred, a GPU's want more.
MAX_ROWS: Mapping[Tier, int] = {"cpu": 128, "gpu": 512}
# Rows of one slot group there: each group is one more call of attention a layer, 0.2 ms for a model of 135M.
LARGE_GROUP_ROWS = 128
# Prompt tokens that join a pass in memory. Decoding goes on between them, which costs a reading of the weights each
# time (some 2 %), and answers arrive, and are safe, all along instead of at the end of a block.
PASS_TOKENS = 4 * BATCH_TOKENS
# Share of the computing's tier that hidden states of waiting batches may take.
HIDDEN_SHARE = 0.1
# A page of a cache that grows: copying a row's cache once a page costs about a sixteenth of reading it every step.
PAGE_TOKENS = 16


@dataclass(frozen=True)
class RunSize:
    """longest: positions of the longest row. prompt_tokens: over all requests (of one with more
    completions than tokens, those)."""

    longest: int
    prompt_tokens: int


def activation_fractions(
    plan: MemoryPlan, schedule: Schedule, workload: RunSize, free: Mapping[Tier, int], home: Tier, token_bytes: int
) -> Mapping[Tier, float]:
    """Where hidden states wait: as planned; for `prefill-only`, whose whole data set is under way at once, beside the
    computing as far as its share goes, then in host memory, then on the disk."""
    total = workload.prompt_tokens * token_bytes
    if schedule != "prefill-only" or not total:
        return plan.activations
    left, fractions = 1.0, dict.fromkeys(TIERS, 0.0)
    for tier in (home, "cpu"):
        fractions[tier] = max(fractions[tier], min(left, HIDDEN_SHARE * free[tier] / total))
        left = 1.0 - sum(fractions.values())
    return {**fractions, "disk": max(0.0, left)}


def scheduler_limits(
    plan: MemoryPlan,
    policy: Policy | None,
    schedule: Schedule,
    workload: RunSize,
    free: Mapping[Tier, int],
    home: Tier,
    cache_bytes: int,
    layer_cache_bytes: int,
    hidden_bytes: int,
    row_bytes: int = 0,
    host_attends: bool = False,
    fill_tokens: int = 0,
) -> SchedulerLimits:
    """free: bytes left on each tier. cache_bytes, layer_cache_bytes: of one position in all layers and in one.
    hidden_bytes: of one token's states. row_bytes: of a row's newest tokens, beside the computing. host_attends: to
    a cache in its memory, of which nothing is brought then. fill_tokens: positions that the last page of a prompt or
    of a step may take beside it on the disk."""
    # Layers of groups elsewhere that are brought beside the computing: the one in use and the next.
    near = (home, "cpu") if host_attends else (home,)
    far = any(share > 0 and tier not in near for tier, share in plan.cache.items())
    group = BLOCK_SEQUENCES if policy is None else min(BLOCK_SEQUENCES, policy.gpu_batch_size)
    staged = 2 * group * (workload.longest + 1) * layer_cache_bytes if far else 0
    most = workload.prompt_tokens * hidden_bytes  # no pass has more tokens than all prompts together
    waiting = dict.fromkeys(TIERS, 0.0)
    for tier in TIERS if schedule != "row" else ():
        share = HIDDEN_SHARE * free[tier]
        if policy is not None and schedule != "prefill-only":  # planned: what the block's cache and its staging leave
            cache = policy.block_size * workload.longest * cache_bytes * plan.cache[tier]
            beside = staged + policy.block_size * row_bytes if tier == home else 0
            share = max(share, free[tier] - cache - beside)
        waiting[tier] = min(share, most)
    # Newest tokens of a packed cache lie beside the computing, wherever the rest of it is: where that is elsewhere too,
    # half of the room is theirs.
    most_rows, divided = UNLIMITED, row_bytes and plan.cache[home] < 1
    room: dict[Tier, float] = {}
    for tier, share in plan.cache.items():
        left = free[tier] - (waiting[tier] if plan.activations[tier] > 0 else 0) - (staged if tier == home else 0)
        if divided and tier == home:
            left /= 2
            most_rows = max(1, int(left // row_bytes))
        if share > 0:
            room[tier] = max(0.0, left) / share
    tokens = int(min(room.values()) / cache_bytes)
    nearer = min((size for tier, size in room.items() if tier != "disk"), default=math.inf)
    if room.get("disk", math.inf) >= (1 + fill_tokens) * nearer:
        fill_tokens = 0  # memory ends first, however full the pages are
    row_tokens = -(-row_bytes // cache_bytes) + fill_tokens
    pass_tokens = PASS_TOKENS
    if schedule == "prefill-only":
        pass_tokens = UNLIMITED
    elif schedule != "row":
        shares = [waiting[tier] / share for tier, share in plan.activations.items() if share > 0]
        pass_tokens = max(1, int(min(shares) / hidden_bytes))
    page = PAGE_TOKENS if schedule == "diagonal" else 0
    further = page, row_tokens, fill_tokens, most_rows
    if policy is not None:
        rows = min(policy.block_size, most_rows)
        return SchedulerLimits(MAX_BATCH_TOKENS, policy.gpu_batch_size, rows, tokens, pass_tokens, *further)
    batch = STREAMED_BATCH_TOKENS if plan.streams_weights else BATCH_TOKENS
    rows = min(most_rows, UNLIMITED if plan.streams_weights else MAX_ROWS[home])
    group = BLOCK_SEQUENCES if plan.streams_weights or far else LARGE_GROUP_ROWS
    return SchedulerLimits(batch, batch, rows, tokens, pass_tokens, *further, block_sequences=group)
