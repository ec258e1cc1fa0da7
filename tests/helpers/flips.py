"""Flips of right and wrong answers: draws, and how often equivalence is claimed."""

from __future__ import annotations

from scipy.stats import binom

from flexgen_helm.report.paired import inferiority_p_value


def draw_flips(draw, count, lost, won, times):
    """Draw lost and won of `count` instances, [times, 2]."""
    return draw.multinomial(count, [lost, won, 1 - lost - won], times)[:, :2]


def claims(count: int, margin: float, lost: float, won: float) -> float:
    """The probability that equivalence is claimed, summed over all flips that happen."""

    def likely(share: float) -> range:
        low, high = (int(binom.ppf(tail, count, share)) if share else 0 for tail in (1e-5, 1 - 1e-5))
        return range(low, high + 1)

    def most(num_won: int) -> int:
        """The most lost with which inferiority is rejected: its p-value grows with them."""
        low, high = -1, min(count - num_won, int(count * margin) + num_won + 1)
        while low < high:
            middle = (low + high + 1) // 2
            is_rejected = inferiority_p_value(middle, num_won, count, margin) <= 0.05
            low, high = (middle, high) if is_rejected else (low, middle - 1)
        return low

    most_won = {num_lost: most(num_lost) for num_lost in likely(lost)}  # by symmetry
    total = 0.0
    for num_won in likely(won):
        limit = most(num_won)
        both = [num_lost for num_lost in likely(lost) if num_lost <= limit and num_won <= most_won[num_lost]]
        share = lost / (1 - won)
        total += binom.pmf(num_won, count, won) * binom.pmf(both, count - num_won, share).sum()
    return total
