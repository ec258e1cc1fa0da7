"""A ratio of sums over documents: standard errors, intervals, p-values and sample sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
Vector = NDArray[np.float64]

LEVEL = 0.05
# A document that was not seen is at most so many times as far from the mean as the furthest that
# was seen: 1.5 times is too little for skewed changes.
_REACH = 1.6


@dataclass(frozen=True)
class RatioOfSums:
    """sum(numerators) / sum(denominators) over documents, such as the change of a loss per token.

    numerators, denominators: [documents], two or more; denominators are tokens, words, or 1.
    bounds: least and largest ratio of a document that was not seen. Within them it is up to
        `_REACH` times as far from the mean as any that was seen.
    """

    numerators: Vector
    denominators: Vector
    bounds: Interval = (-math.inf, math.inf)

    @cached_property
    def value(self) -> float:
        return float(self.numerators.sum() / self.denominators.sum())

    @cached_property
    def residuals(self) -> Vector:
        return self.numerators - self.value * self.denominators

    @property
    def standard_error(self) -> float:
        """The standard error by the delta method (Cochran, Sampling Techniques, 1977, 6.4)."""
        count = len(self.numerators)
        return float(
            np.sqrt(count / (count - 1) * (self.residuals**2).sum()) / self.denominators.sum()
        )

    @cached_property
    def negated(self) -> RatioOfSums:
        return RatioOfSums(-self.numerators, self.denominators, self.bounds)

    @cached_property
    def largest_unseen(self) -> float:
        """The largest ratio that a document which was not seen may have."""
        low, high = self.bounds
        furthest_seen = float(np.abs(self.residuals).max() / self.denominators.mean())
        return min(max(self.value + _REACH * furthest_seen, low), high)

    def p_value(self, limit: float) -> float:
        """Return the p-value of 'the ratio over all documents is at least `limit`'.

        The alternative is 'less'. The documents have random weights, those of a Bayesian bootstrap,
        and one more has the largest ratio that is possible. So that no document has changed does
        not show that none would. Of right and wrong answers it is the exact binomial test, and with
        limit 0 that of McNemar. Gaffke, Math. Methods of Statistics 14 (2005), 451-467;
        Learned-Miller and Thomas, A New Confidence Interval for the Mean of a Bounded Random
        Variable (2019).
        """
        unseen = (self.largest_unseen - limit) * self.denominators.mean()
        return _positive_probability(np.append(self.numerators - limit * self.denominators, unseen))

    def interval(self) -> Interval:
        """Return the 95 % interval."""
        return -self.negated._upper(), self._upper()

    def _upper(self) -> float:
        """Return the largest ratio that is not rejected at 2.5 %."""
        from scipy.optimize import brentq

        step = self.largest_unseen - self.value
        # All documents have one ratio, and none may have another.
        if step <= 1e-9 * abs(self.value):
            return self.value
        while self.p_value(self.value + step) > LEVEL / 2:
            step *= 2
        above = self.value + step
        upper = brentq(lambda limit: self.p_value(limit) - LEVEL / 2, self.value, above, rtol=1e-6)
        return float(upper)

    @property
    def furthest_unseen(self) -> float:
        """The largest absolute ratio that a document which was not seen may have."""
        return max(self.largest_unseen, self.negated.largest_unseen)

    @property
    def variance(self) -> float:
        """The variance of a document's ratio, as if half a document more had `furthest_unseen`."""
        squares = float(((self.residuals / self.denominators.mean()) ** 2).sum())
        return (squares + self.furthest_unseen**2 / 2) / (len(self.numerators) + 1)


def _positive_probability(values: Vector) -> float:
    """Return the probability that sum(values * draws) > 0, where draws are exponential.

    By its saddlepoint: Lugannani and Rice, Advances in Applied Probability 12 (1980), 475-490; 0 to
    2 % too large.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr

    values, counts = np.unique(values, return_counts=True)
    low, high = float(values[0]), float(values[-1])
    if low >= 0 or high <= 0:
        return float(low >= 0)

    def slope(point: float) -> float:  # of the cumulant generating function
        return float((counts * values / (1 - point * values)).sum())

    near = 1 - 1e-12
    saddlepoint = brentq(slope, near / low, near / high, xtol=1e-300, rtol=1e-14)
    tilted = values / (1 - saddlepoint * values)
    cumulants = 2 * float((counts * np.log1p(-saddlepoint * values)).sum())
    root = math.copysign(math.sqrt(max(cumulants, 0.0)), saddlepoint)
    scaled = saddlepoint * math.sqrt(float((counts * tilted**2).sum()))
    if abs(root) < 1e-4:
        return 0.5
    density = math.exp(-(root**2) / 2) / math.sqrt(2 * math.pi)
    return float(ndtr(-root) + density * (1 / scaled - 1 / root))


# Sum of the normal quantiles of two one-sided tests at 5 % that decide in 80 % of the cases.
_QUANTILES = NormalDist().inv_cdf(0.95) + NormalDist().inv_cdf(0.9)


def instances_needed(variance: float, margin: float, furthest: float = 1.0) -> int:
    """Return how many instances show equivalence in 80 % of the cases if there is no difference.

    variance: of an instance's change; of right and wrong answers the share that flips.
    furthest: the largest absolute change of an instance that was not seen. Its term matters where a
        handful of flips is expected.
    From the quantiles for two one-sided tests at 5 % (Chow, Shao and Wang, Sample Size
    Calculations, 2008, 4.2).
    """
    return math.ceil(variance * (_QUANTILES / margin) ** 2 + 4 * furthest / margin)


def margin_shown(instances: float, variance: float, furthest: float = 1.0) -> float:
    """Return the least margin within which so many instances show equivalence.

    The inverse of `instances_needed`, whose parameters it has.
    """
    most = 2 * furthest + math.sqrt(4 * furthest**2 + instances * variance * _QUANTILES**2)
    return min(1.0, most / instances)
