"""How long answers are expected to become, by a rate learnt from the run, and how much KV cache
they need in the passes to come. No torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Most passes ahead at which a forecast is evaluated, evenly spaced until the last answer must have
# ended.
_POINTS = 48
# Largest end rate that is computed with, so that logarithms are finite.
_LARGEST_RATE = 0.999


class AnswerLengths:
    """Counts tokens and ends of answers, by group: the `max_tokens` of their requests.

    The group None has answers that never end early.
    """

    def __init__(self) -> None:
        self._drawn = Counter[int | None]()
        self._ended = Counter[int | None]()

    def count_token(self, group: int | None) -> None:
        """Count a token that was drawn."""
        self._drawn[group] += 1

    def count_end(self, group: int | None) -> None:
        """Count an answer that ended before `max_tokens`."""
        self._ended[group] += 1

    def end_rate(self, group: int | None) -> float:
        """Return the probability that a running answer ends at its next token.

        It begins as if one answer had ended after half of `max_tokens`.
        """
        if group is None:
            return 0.0
        return min(1.0, (self._ended[group] + 1) / (self._drawn[group] + group / 2))

    def expected_tokens(self, group: int | None, most: int) -> float:
        """Return the expected number of further tokens of an answer that may have `most` more."""
        rate = self.end_rate(group)
        if rate == 0.0:
            return float(most)
        return float(-np.expm1(most * np.log1p(-min(rate, _LARGEST_RATE))) / rate)


@dataclass(frozen=True)
class CacheDemand:
    """Cache that the sequences of one block may need.

    tokens: of the longest sequence, the next one included; each slot is as wide.
    remaining: tokens that each sequence may still append.
    end_rates: of each sequence.
    constant: positions besides these, for as long as a forecast looks.
    """

    tokens: int
    remaining: list[int]
    end_rates: list[float]
    constant: int = 0


class Forecast:
    """Positions of KV cache that running answers are expected to take in the passes to come.

    Means and variances are sums over sequences, which end independently of each other.
    """

    def __init__(self, horizon: int, page_tokens: int, slot_overhead: int) -> None:
        """Begin without any sequences.

        horizon: passes until the last answer must have ended.
        slot_overhead: positions of a slot beside its tokens.
        """
        self._passes: Array = np.unique(np.linspace(0, max(1, horizon), _POINTS).round())
        self._page_tokens, self._slot_overhead = page_tokens, slot_overhead
        self._mean: Array = np.zeros(len(self._passes))
        self._variance: Array = np.zeros(len(self._passes))

    def add(self, demand: CacheDemand) -> None:
        """Count a block from now on."""
        mean, variance = self._moments(demand)
        self._mean, self._variance = self._mean + mean, self._variance + variance

    def peak_with(self, demand: CacheDemand) -> float:
        """Return the largest expectation, plus a standard deviation, with one block more."""
        mean, variance = self._moments(demand)
        return float(np.max(self._mean + mean + np.sqrt(self._variance + variance)))

    def _moments(self, demand: CacheDemand) -> tuple[Array, Array]:
        """Return mean and variance of a block's positions, by pass.

        A sequence with end rate r still runs at pass t with probability p = (1 - r)^t, and 0 once
        its tokens are used up. Its slot then has s positions: means are sums of p s, variances of p
        (1 - p) s^2.
        """
        if not demand.remaining:
            return np.full(len(self._passes), float(demand.constant)), np.zeros(len(self._passes))
        remaining = np.array(demand.remaining, dtype=np.float64)[:, None]
        rates = np.minimum(np.array(demand.end_rates), _LARGEST_RATE)[:, None]
        running = np.exp(self._passes * np.log1p(-rates)) * (self._passes <= remaining)
        longest_remaining = float(remaining.max())
        # Slots grow by pages, and at last to the longest sequence's end.
        slot = np.ceil((demand.tokens + self._passes) / self._page_tokens) * self._page_tokens
        slot = np.minimum(slot, demand.tokens + longest_remaining) + self._slot_overhead
        return demand.constant + (running * slot).sum(0), (running * (1 - running) * slot**2).sum(0)
