"""Shares of right answers of two paired runs: Tango's score interval, and an exact test of their equivalence.

Of n instances, `lost` are right in the first run only and `won` in the second only. The difference is (won - lost) / n.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flexgen_helm.report.metrics import Vector

# The nuisance parameter is searched in its 1 - _GAMMA confidence interval, which costs _GAMMA of the level.
_GAMMA = 1e-4
_GRID_POINTS = 48


def score_interval(lost: int, won: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of the difference (won - lost) / count of two paired shares.

    All differences that the score test does not reject, so no flips do not give [0, 0]: Tango, Statistics in Medicine
    17 (1998), 891-908, (8) and (9).
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    quantile = float(ndtri(0.5 + confidence / 2))

    def upper(up: int, down: int) -> float:
        """Return the largest difference (up - down) / count that is not rejected."""
        if up == count:
            return 1.0
        low = (up - down) / count
        return float(brentq(lambda shift: _score(up, down, count, shift) + quantile, low, 1 - 1e-12, xtol=1e-10))

    return -upper(lost, won), upper(won, lost)


def _score(up: Any, down: Any, count: int, shift: float) -> Any:
    """Return Tango's statistic for H0: share of `up` - share of `down` = shift.

    The variance has the share of `down` that is most likely under H0 (Tango's q21).
    """
    up, down = np.asarray(up, np.float64), np.asarray(down, np.float64)
    b = -(up + down) + (2 * count - up + down) * shift
    root = np.sqrt(np.maximum(b**2 + 8 * count * down * shift * (1 - shift), 0.0))
    most_likely = np.maximum((root - b) / (4 * count), np.maximum(0.0, -shift))
    variance = count * (2 * most_likely + shift * (1 - shift))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((up - down - count * shift) / np.sqrt(variance), nan=0.0, posinf=np.inf, neginf=-np.inf)


def equivalence_p_value(lost: int, won: int, count: int, margin: float) -> float:
    """Return the p-value of 'the shares differ by at least `margin`': the larger one of two one-sided exact tests.

    Below 0.05 the shares are equivalent within the margin (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15
    (1987), 657-680). It is a p-value for every number of instances and every share of flips.
    """
    return max(inferiority_p_value(lost, won, count, margin), inferiority_p_value(won, lost, count, margin))


def inferiority_p_value(lost: int, won: int, count: int, margin: float) -> float:
    """Return the p-value of H0: share of lost - share of won >= margin, against less.

    Exact and unconditional: the largest probability, over the unknown share of won, of a score statistic at most as
    large as the observed one. Lloyd and Moldovan, Statistics in Medicine 27 (2008), 3540-3549; the confidence interval
    of the unknown share is from Berger and Boos, J. American Statistical Association 89 (1994), 1012-1016.
    """
    from scipy.special import bdtr, betaincinv, gammaln, xlog1py, xlogy

    observed = float(_score(lost, won, count, margin))
    if observed >= 0:
        return 1.0
    low = float(betaincinv(won, count - won + 1, _GAMMA / 2)) if won else 0.0
    high = min(float(betaincinv(won + 1, count - won, 1 - _GAMMA / 2)) if won < count else 1.0, (1 - margin) / 2)
    low = min(low, high)
    # Beyond these there is less than 1e-9 of the probability.
    first = math.floor(count * low - 8 * math.sqrt(count * low))
    last = math.ceil(count * high + 8 * math.sqrt(count * high) + 30)
    num_won = np.arange(max(first, 0), min(last, count) + 1)
    num_lost = _largest(num_won, observed, count, margin)
    log_choices = gammaln(count + 1) - gammaln(num_won + 1) - gammaln(count - num_won + 1)

    def probability(shares: Vector) -> Vector:
        won_share = shares[:, None]
        weight = np.exp(log_choices + xlogy(num_won, won_share) + xlog1py(count - num_won, -won_share))
        lost_share = np.minimum((won_share + margin) / (1 - won_share), 1.0)
        below = np.where(num_lost >= 0, bdtr(np.maximum(num_lost, 0), count - num_won, lost_share), 0.0)
        return np.asarray((weight * below).sum(axis=1))

    # Equal steps of the square root are equal steps in standard errors.
    roots = np.linspace(math.sqrt(low), math.sqrt(high), _GRID_POINTS)
    found = probability(roots**2)
    best = int(found.argmax())
    near = np.linspace(roots[max(best - 1, 0)], roots[min(best + 1, len(roots) - 1)], 9)
    return min(1.0, float(max(found.max(), probability(near**2).max())) + _GAMMA)


def _largest(num_won: Any, observed: float, count: int, margin: float) -> Any:
    """Return, for each number of won, the largest number of lost whose score is at most `observed`; -1 if none is."""
    low, high = np.full(num_won.shape, -1), count - num_won
    while (low < high).any():
        middle = (low + high + 1) // 2
        is_small = _score(np.maximum(middle, 0), num_won, count, margin) <= observed + 1e-12
        low, high = np.where(is_small, middle, low), np.where(is_small, high, middle - 1)
    return low


def instances_needed(flips: float, margin: float) -> int:
    """Return how many instances show equivalence in at least 80 % of the cases if the shares do not differ.

    flips: share of instances that are lost or won. From the variance of the difference, flips / n, and the quantiles
    for two one-sided tests at 5 % (Chow, Shao and Wang, Sample Size Calculations, 2008, 4.2). The second term is for
    the exact test, whose steps matter if a handful of flips is expected.
    """
    from scipy.special import ndtri

    return math.ceil(flips * (float(ndtri(0.95) + ndtri(0.9)) / margin) ** 2 + 4 / margin)


def rounded(baseline: Vector, other: Vector) -> tuple[int, int]:
    """Return lost and won of scores in [0, 1], such as F1: each change counts with its size as the probability.

    A change of 0.3 is won with probability 0.3. So the expected difference of the shares is that of the means, and the
    exact test of the shares is one of the means: Schlag, A New Method for Constructing Exact Tests without Making any
    Assumptions (2008). The draws have one seed. Right and wrong answers stay as they are.
    """
    changes = other - baseline
    counts = np.random.default_rng(0).random(len(changes)) < np.abs(changes)
    return int((counts & (changes < 0)).sum()), int((counts & (changes > 0)).sum())
