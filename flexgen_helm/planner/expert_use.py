"""How many experts of a layer a batch uses: what is read of an offloaded mixture. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

# Largest exponent that is fitted: then a few experts do all the work.
_MAX_SKEW = 6.0
_STEPS = 40


@lru_cache(maxsize=4096)
def expected_experts(count: int, per_token: int, tokens: float, skew: float = 0.0) -> float:
    """Return how many of `count` experts `tokens` tokens use on average, each of which uses
    `per_token`.
    """
    return sum(1 - (1 - share) ** tokens for share in _shares(count, per_token, skew))


def fitted_skew(count: int, per_token: int, touched: Mapping[int, tuple[int, int]]) -> float:
    """Return the exponent with which as many experts are expected as were counted; 0 if they were
    more.

    touched: tokens of a batch -> uses of a layer by such batches, and experts that these used, all
        together.
    """
    counted = sum(experts for _, experts in touched.values())

    def excess(skew: float) -> float:
        return (
            sum(
                n * expected_experts(count, per_token, tokens, skew)
                for tokens, (n, _) in touched.items()
            )
            - counted
        )

    low, high = 0.0, _MAX_SKEW
    if excess(low) <= 0:
        return low
    for _ in range(_STEPS):  # what is expected falls with the exponent
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=256)
def _shares(count: int, per_token: int, skew: float) -> tuple[float, ...]:
    """Return the probability that a token selects each expert, most likely first: at most 1,
    `per_token` in all.
    """
    weights = [(rank + 1) ** -skew for rank in range(count)]
    certain = 0  # experts that every token selects: their share would exceed 1
    while certain < per_token and (per_token - certain) * weights[certain] > sum(weights[certain:]):
        certain += 1
    left = sum(weights[certain:])
    return (1.0,) * certain + tuple(
        (per_token - certain) * weight / left for weight in weights[certain:]
    )
