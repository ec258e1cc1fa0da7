"""Which tier each whole tensor or cache block goes to, under fractions of a policy. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexgen_helm.models.config import expert_of
from flexgen_helm.tiers import TIERS, Tier


def most_underfilled(
    tiers: Iterable[Tier],
    fractions: Mapping[Tier, float],
    placed_bytes: Mapping[Tier, int],
    total: int,
) -> Tier:
    """Return the tier that misses most of its fraction of `total` bytes; ties go to the first.

    Differences are rounded, so that rounding errors of the fractions do not break ties.
    """
    return max(tiers, key=lambda tier: round(fractions[tier] * total - placed_bytes[tier], 3))


def choose_tiers(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor; the matrices of an expert stay together.

    What every token needs comes to the fastest tiers first, and experts, of which a token needs a
    few, to what is left of the tiers.
    """
    units = {name: expert_of(name) or name for name in sizes}
    dense: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, unit in units.items():
        group = dense if unit == name else experts
        group[unit] = group.get(unit, 0) + sizes[name]
    if not experts:
        return _spread(sizes, fractions)
    total = sum(sizes.values())
    left = {tier: fractions[tier] * total for tier in TIERS}
    placed = _fill_in_order(dense, left)
    for unit, tier in placed.items():
        left[tier] -= dense[unit]
    placed |= _fill_in_order(experts, left)
    return {name: placed[unit] for name, unit in units.items()}


def _fill_in_order(sizes: Mapping[str, int], left: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor so that what is left of the tiers is filled, the fastest
    first.

    left: bytes by tier; below 0 where whole tensors have taken more than a tier had. The slowest
        tier with room takes what finds none.
    """
    taken = dict.fromkeys(TIERS, 0.0)
    num_bytes = sum(sizes.values())
    rest = float(num_bytes)
    for tier in TIERS:
        taken[tier] = max(0.0, min(rest, left[tier]))
        rest -= taken[tier]
    slowest: Tier = next((tier for tier in reversed(TIERS) if left[tier] > 0), "cpu")
    taken[slowest] += rest
    return _spread(sizes, {tier: share / max(1, num_bytes) for tier, share in taken.items()})


def _spread(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor, in order; ties go to the faster tier.

    Each tensor goes to the most underfilled tier, so after every one each tier is at most a tensor
    off its fraction.
    Offloaded tensors are therefore spread evenly over the layers, which overlap needs.
    """
    placed_bytes, total = dict.fromkeys(TIERS, 0), 0
    placed: dict[str, Tier] = {}
    allowed: list[Tier] = [tier for tier in TIERS if fractions[tier] > 0] or ["cpu"]
    if len(allowed) == 1:
        return dict.fromkeys(sizes, allowed[0])
    for name, size in sizes.items():
        total += size
        placed[name] = most_underfilled(allowed, fractions, placed_bytes, total)
        placed_bytes[placed[name]] += size
    return placed


def achieved_fractions(sizes: Mapping[str, int], placed: Mapping[str, Tier]) -> dict[Tier, float]:
    """Return the fraction of the bytes on each tier."""
    total = sum(sizes.values())
    num_bytes = {
        tier: sum(size for name, size in sizes.items() if placed[name] == tier) for tier in TIERS
    }
    return {tier: size / total if total else 0.0 for tier, size in num_bytes.items()}
