"""Where everything goes: from byte limits (and a policy, if one is given) to fractions by tier. No torch.

Until a search decides, 'auto' is this rule of thumb:

- Weights that fit beside the computing stay there: in the compute type where half of the tier suffices, else in 16
  bits.
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

from flexgen_helm.core.errors import MemoryLimitError
from flexgen_helm.models.spec import ModelSpec, stage_tensor_shapes, stages
from flexgen_helm.policy.placement import TIERS, Tier, matrices, place, shares
from flexgen_helm.policy.policy import Policy

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
    def streams(self) -> bool:
        return self.staging_bytes > 0


def plan_memory(
    spec: ModelSpec,
    limits: Mapping[Tier, int],
    home: Tier,
    rest_bytes: int,
    compute_bytes: int,
    policy: Policy | None = None,
) -> MemoryPlan:
    """limits: bytes of each tier. home: the tier beside the computing. rest_bytes, compute_bytes: of an element.

    Raises `MemoryLimitError` with the missing bytes where the weights with their ring exceed a tier. Without a gpu its
    shares are the cpu's.
    """
    has_gpu = home == "gpu"
    sizes = matrices(spec, rest_bytes)
    vectors = compute_bytes * sum(prod(s) for stage in stages(spec) for s in _shapes(spec, stage) if len(s) == 1)
    total = sum(sizes.values())
    if policy is None and total + vectors <= limits[home]:
        copies = total // rest_bytes * compute_bytes + vectors <= COPIES_SHARE * limits[home]
        near: Fractions = {tier: float(tier == home) for tier in TIERS}
        return MemoryPlan(place(sizes, near), near, near, 0, copies)
    staging = staging_bytes(spec, rest_bytes, limits[home])
    if policy is not None:
        wanted = shares(policy, "weights", has_gpu)
        placed = place(sizes, wanted)
        far = any(tier != home for tier in placed.values())
        cache, hidden = shares(policy, "cache", has_gpu), shares(policy, "activations", has_gpu)
        copies = not far and total // rest_bytes * compute_bytes + vectors <= COPIES_SHARE * limits[home]
        plan = MemoryPlan(placed, cache, hidden, staging if far else 0, copies)
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
    needed = _needed(plan, sizes, vectors, home, compute_bytes / rest_bytes)
    for tier in TIERS:
        if needed[tier] > limits[tier]:
            flag = "--disk" if tier == "disk" else f"--{tier}-memory"
            raise MemoryLimitError(
                f"the {tier} tier is limited to {limits[tier]:,} bytes, and the weights with their staging need "
                f"{needed[tier]:,} there, {needed[tier] - limits[tier]:,} more: raise {flag}"
            )
    return plan


def _needed(plan: MemoryPlan, sizes: Mapping[str, int], vectors: int, home: Tier, growth: float) -> dict[Tier, int]:
    needed = dict.fromkeys(TIERS, 0)
    for name, tier in plan.weights.items():
        needed[tier] += round(sizes[name] * growth) if plan.compute_copies and tier == home else sizes[name]
    needed[home] += vectors + plan.staging_bytes
    return needed


def staging_bytes(spec: ModelSpec, rest_bytes: int, limit: int) -> int:
    """Of the ring through which weights of other tiers come, in the tier beside the computing of `limit` bytes."""
    largest = max(rest_bytes * sum(prod(s) for s in _shapes(spec, stage) if len(s) > 1) for stage in stages(spec)[1:])
    staging = max(MIN_STAGING_BYTES, min(2 * largest + MIN_STAGING_BYTES, int(_STAGING_SHARE * limit)))
    # A layer that does not fit is loaded anew for every batch: for one that could, a larger share is well spent.
    one = largest + MIN_STAGING_BYTES
    return one if staging < one <= limit * _MOST_STAGING_SHARE else staging


def _shapes(spec: ModelSpec, stage: str) -> list[tuple[int, ...]]:
    return list(stage_tensor_shapes(spec, stage).values())
