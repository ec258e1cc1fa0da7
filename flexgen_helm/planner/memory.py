"""Where everything goes: from byte limits (and a policy, if one is given) to fractions by tier. No torch.

Until a search decides, 'auto' is this rule of thumb:

- Weights that fit beside the computing stay there: in the compute type where half of the tier suffices, else as they
  are stored.
- Otherwise a ring for streaming takes two layers' worth, at most a quarter of the tier (half of it, if that lets one
  layer fit). Of the rest, half (three quarters on a gpu, whose cache goes to the host) holds weights and half is left
  for the block's cache and hidden states. Weights beyond that go to the host's memory, where half of the limit is
  theirs, and then to the disk.
- The cache lies beside the computing on a machine without a gpu, and in host memory on one with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import stage_names, tensor_shapes
from flexgen_helm.planner.placement import TIERS, StorageSizes, Tier, limit_flag, place, tier_fractions
from flexgen_helm.planner.policy import Policy

Fractions = Mapping[Tier, float]

# Share of a tier that compute copies of the weights may take, so that the KV cache keeps the rest.
COPIES_SHARE = 0.5
_STAGING_SHARE, _MOST_STAGING_SHARE = 0.25, 0.5
_WEIGHTS_SHARE: Mapping[Tier, float] = {"gpu": 0.75, "cpu": 0.5}
# The least ring: three units of this size, so that one is used while another arrives.
MIN_STAGING_BYTES = 3 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """weights: tensor name -> tier (vectors, which rest beside the computing, are not named). cache, activations:
    fractions by tier. staging_bytes: of the ring, 0 where no weights are elsewhere. compute_copies: matrices beside
    the computing rest in the compute type."""

    weights: Mapping[str, Tier]
    cache: Fractions
    activations: Fractions
    staging_bytes: int
    compute_copies: bool

    @property
    def streams_weights(self) -> bool:
        return self.staging_bytes > 0


def plan_memory(
    rest: StorageSizes,
    limits: Mapping[Tier, int],
    home: Tier,
    compute_bytes: int,
    policy: Policy | None = None,
) -> MemoryPlan:
    """limits: bytes of each tier. home: the tier beside the computing. compute_bytes: of an element.

    Raises `MemoryLimitError` with the missing bytes where the weights with their ring exceed a tier. Without a gpu its
    shares are the cpu's.
    """
    has_gpu = home == "gpu"
    sizes = rest.matrices
    vectors = compute_bytes * sum(prod(shape) for shape in tensor_shapes(rest.config).values() if len(shape) == 1)
    total, unpacked = sum(sizes.values()), rest.num_values * compute_bytes
    copies_fit = unpacked + vectors <= COPIES_SHARE * limits[home]
    if policy is None and total + vectors <= limits[home]:
        near: Fractions = {tier: float(tier == home) for tier in TIERS}
        return MemoryPlan(place(sizes, near), near, near, 0, copies_fit)
    staging = staging_bytes(rest, limits[home])
    if policy is not None:
        wanted = tier_fractions(policy, "weights", has_gpu)
        placed = place(sizes, wanted)
        far = any(tier != home for tier in placed.values())
        cache, hidden = tier_fractions(policy, "cache", has_gpu), tier_fractions(policy, "activations", has_gpu)
        plan = MemoryPlan(placed, cache, hidden, staging if far else 0, copies_fit and not far)
    else:
        near_bytes = max(0.0, _WEIGHTS_SHARE[home] * (limits[home] - staging) - vectors)
        host_bytes = limits["cpu"] / 2 if has_gpu else 0.0
        first = min(1.0, near_bytes / total)
        second = min(1.0 - first, host_bytes / total)
        weights = {"gpu": first, "cpu": second} if has_gpu else {"gpu": 0.0, "cpu": first}
        beside: Fractions = {tier: float(tier == home) for tier in TIERS}
        host: Fractions = {tier: float(tier == "cpu") for tier in TIERS}
        placed = place(sizes, {**weights, "disk": 1.0 - first - second})  # type: ignore[dict-item]
        plan = MemoryPlan(placed, host, beside, staging, False)
    needed = _needed(plan, sizes, vectors, home, unpacked)
    for tier in TIERS:
        if needed[tier] > limits[tier]:
            raise MemoryLimitError(
                f"the {tier} tier is limited to {limits[tier]:,} bytes, and the weights with their staging need "
                f"{needed[tier]:,} there, {needed[tier] - limits[tier]:,} more: raise {limit_flag(tier)}"
            )
    return plan


def _needed(plan: MemoryPlan, sizes: Mapping[str, int], vectors: int, home: Tier, unpacked: int) -> dict[Tier, int]:
    needed = dict.fromkeys(TIERS, 0)
    for name, tier in plan.weights.items():
        needed[tier] += sizes[name]
    if plan.compute_copies:  # then nothing is elsewhere
        needed[home] = unpacked
    needed[home] += vectors + plan.staging_bytes
    return needed


def staging_bytes(rest: StorageSizes, limit: int) -> int:
    """Of the ring through which weights of other tiers come, in the tier beside the computing of `limit` bytes."""
    largest = max(rest.stage_bytes(stage) for stage in stage_names(rest.config)[1:])
    staging = max(MIN_STAGING_BYTES, min(2 * largest + MIN_STAGING_BYTES, int(_STAGING_SHARE * limit)))
    # A layer that does not fit is loaded anew for every batch: for one that could, a larger share is well spent.
    one = largest + MIN_STAGING_BYTES
    return one if staging < one <= limit * _MOST_STAGING_SHARE else staging
