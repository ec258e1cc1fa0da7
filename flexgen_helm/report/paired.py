"""Metrics of paired instances: values, errors, and what their change may be in all instances like
them.

A metric of a run is a function of sums over its instances. So the metric of two precisions, and its
change between them, can be computed again for any sample of the instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Change = Literal["difference", "ratio"]
Interval = tuple[float, float]
Vector = NDArray[np.float64]

LEVEL = 0.05
# A document that was not seen may change by so much: its perplexity by a factor of e.
_UNSEEN_NATS = 1.0
# And is so many times as far from the mean as the furthest that was seen: 1.5 times is too little
# for skewed changes.
_REACH = 1.6
# Of fewer documents a kind that makes up 5 % of them may be missing in more than 5 % of samples:
# 0.95 ** 59 < 0.05.
LEAST_DOCUMENTS = 59
# Metrics in order of precedence; a run shows the first `MAX_SHOWN` that it has.
MAIN_METRICS = (
    "exact_match", "quasi_exact_match", "prefix_exact_match", "exact_set_match", "f1_set_match",
    "iou_set_match", "f1_score", "rouge_l", "rouge_2", "final_number_exact_match", "math_equiv",
    "math_equiv_chain_of_thought", "chain_of_thought_correctness", "ifeval_strict_accuracy",
    "safety_score", "wildbench_score_rescaled", "omni_math_accuracy", "pass",
    "classification_macro_f1", "target_perplexity", "word_perplexity", "token_perplexity",
    "perplexity", "bits_per_byte", "logprob_per_byte",
)  # fmt: skip
MAX_SHOWN = 3
# Of each instance these are 0 or 1, so the metric is a share of the instances.
_SHARES = frozenset({
    "exact_match", "quasi_exact_match", "prefix_exact_match", "exact_set_match",
    "final_number_exact_match", "math_equiv", "math_equiv_chain_of_thought",
    "chain_of_thought_correctness", "pass",
})  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """How a metric follows from its instances: scale * sum of numerators / sum of denominators, or
    exp of that.

    numerator: statistic of an instance.
    denominator: statistic of an instance; None counts the instances.
    is_share: the metric is a share of the instances, so its differences are percentage points.
    """

    numerator: str
    denominator: str | None = None
    scale: float = 1.0
    is_perplexity: bool = False
    is_share: bool = False

    @property
    def change(self) -> Change:
        """How two values are compared."""
        return "ratio" if self.is_perplexity else "difference"

    def change_between(self, value: Any, baseline: Any) -> Any:
        return np.divide(value, baseline) if self.is_perplexity else np.subtract(value, baseline)

    def value(self, numerators: Vector, denominators: Vector, axis: int = -1) -> Any:
        mean = self.scale * numerators.sum(axis) / denominators.sum(axis)
        with np.errstate(over="ignore"):  # a perplexity may be infinite
            return np.exp(mean) if self.is_perplexity else mean

    def standard_error(self, numerators: Vector, denominators: Vector) -> float | None:
        """Return the standard error of `value`; None for one instance, or if it is not finite."""
        if len(numerators) < 2:
            return None
        with np.errstate(all="ignore"):
            slope = self.scale * (
                self.value(numerators, denominators) if self.is_perplexity else 1.0
            )
            error = float(abs(slope) * RatioOfSums(numerators, denominators).standard_error)
        return error if math.isfinite(error) else None


# Metrics that are no plain mean over the instances.
_METRICS = {
    "target_perplexity": Metric("logprob", None, -1.0, is_perplexity=True),
    "word_perplexity": Metric("logprob", "num_words", -1.0, is_perplexity=True),
    "byte_perplexity": Metric("logprob", "num_bytes", -1.0, is_perplexity=True),
    "token_perplexity": Metric("logprob", "num_perplexity_tokens", -1.0, is_perplexity=True),
    "perplexity": Metric("logprob", "num_perplexity_tokens", -1.0, is_perplexity=True),
    "bits_per_byte": Metric("logprob", "num_bytes", -1 / math.log(2)),
    "logprob_per_byte": Metric("logprob", "num_bytes"),
}


def metric_named(name: str) -> Metric:
    return _METRICS.get(name) or Metric(name, is_share=name in _SHARES)


@dataclass(frozen=True)
class RatioOfSums:
    """sum(changes) / sum(weights) over documents, such as the change of a loss per token.

    changes, weights: [documents]; weights are tokens, words, or 1. Two or more documents.
    unseen: least and largest change per weight that a document may have which was not seen. In
        between it is `_REACH` times as far from the mean as any that was seen.
    """

    changes: Vector
    weights: Vector
    unseen: Interval = (-math.inf, math.inf)

    @cached_property
    def value(self) -> float:
        return float(self.changes.sum() / self.weights.sum())

    @cached_property
    def residuals(self) -> Vector:
        return self.changes - self.value * self.weights

    @property
    def standard_error(self) -> float:
        """The standard error by the delta method (Cochran, Sampling Techniques, 1977, 6.4)."""
        count = len(self.changes)
        return float(np.sqrt(count / (count - 1) * (self.residuals**2).sum()) / self.weights.sum())

    @cached_property
    def reversed(self) -> RatioOfSums:
        return RatioOfSums(-self.changes, self.weights, self.unseen)

    @cached_property
    def furthest(self) -> float:
        """The largest change per weight of a document that was not seen."""
        low, high = self.unseen
        furthest_seen = float(np.abs(self.residuals).max() / self.weights.mean())
        return min(max(self.value + _REACH * furthest_seen, low), high)

    def p_value(self, limit: float) -> float:
        """Return the p-value of 'the mean of all documents is at least `limit`', against 'less'.

        The documents have random weights, those of a Bayesian bootstrap, and one more has the
        furthest change. So no change among n documents does not show that there is none. Of right
        and wrong answers it is the exact binomial test, and with limit 0 that of McNemar. Gaffke,
        Math. Methods of Statistics 14 (2005), 451-467; Learned-Miller and Thomas, A New Confidence
        Interval for the Mean of a Bounded Random Variable (2019).
        """
        unseen = (self.furthest - limit) * self.weights.mean()
        return _positive_probability(np.append(self.changes - limit * self.weights, unseen))

    def interval(self) -> Interval:
        """Return the 95 % interval."""
        return -self.reversed._upper(), self._upper()

    def _upper(self) -> float:
        """Return the largest mean that is not rejected at 2.5 %."""
        from scipy.optimize import brentq

        step = self.furthest - self.value
        # all documents change alike, and none may change otherwise
        if step <= 1e-9 * abs(self.value):
            return self.value
        while self.p_value(self.value + step) > LEVEL / 2:
            step *= 2
        above = self.value + step
        upper = brentq(lambda limit: self.p_value(limit) - LEVEL / 2, self.value, above, rtol=1e-6)
        return float(upper)

    @property
    def spread(self) -> tuple[float, float]:
        """The variance of a change per weight, and the furthest one; half an instance more has
        changed so far.
        """
        furthest = max(self.furthest, self.reversed.furthest)
        squares = float(((self.residuals / self.weights.mean()) ** 2).sum())
        return (squares + furthest**2 / 2) / (len(self.changes) + 1), furthest


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
    """Return how many instances show equivalence in at least 80 % of the cases if there is no
    difference.

    variance: of a change; of right and wrong answers the share that flips. From the quantiles for
    two one-sided tests at 5 % (Chow, Shao and Wang, Sample Size Calculations, 2008, 4.2). The
    second term is for the instance that was not seen, and matters if a handful of flips is
    expected.
    """
    return math.ceil(variance * (_QUANTILES / margin) ** 2 + 4 * furthest / margin)


def margin_shown(instances: float, variance: float, furthest: float = 1.0) -> float:
    """Return the least margin within which so many instances show equivalence: the inverse of
    `instances_needed`.
    """
    most = 2 * furthest + math.sqrt(4 * furthest**2 + instances * variance * _QUANTILES**2)
    return min(1.0, most / instances)


@dataclass(frozen=True)
class PairedScores:
    """A metric of the same instances in a baseline and in another precision.

    baseline, scores: [instances] numerators of the metric. weights: [instances] denominators.
    """

    metric: Metric
    baseline: Vector
    scores: Vector
    weights: Vector

    @cached_property
    def loss(self) -> RatioOfSums:
        """What is lost: of log-probabilities the change of the loss, of scores the negative
        change.
        """
        if self.is_loss:
            unseen = _UNSEEN_NATS, math.inf
        else:
            unseen = (1.0, 1.0) if self.are_shares else (-math.inf, math.inf)
        return RatioOfSums(self.baseline - self.scores, self.weights, unseen)

    @property
    def is_loss(self) -> bool:
        return self.metric.numerator == "logprob"

    @property
    def are_shares(self) -> bool:
        """Whether all scores are in [0, 1]."""
        return all(bool(((side >= 0) & (side <= 1)).all()) for side in (self.baseline, self.scores))

    @property
    def lost(self) -> int:
        return int((self.scores < self.baseline).sum())

    @property
    def won(self) -> int:
        return int((self.scores > self.baseline).sum())

    @property
    def unchanged(self) -> NDArray[np.bool_]:
        return self.scores == self.baseline

    @property
    def values(self) -> tuple[float, float]:
        """The metric in the baseline and in the other precision."""
        base, scores = (
            float(self.metric.value(side, self.weights)) for side in (self.baseline, self.scores)
        )
        return base, scores

    def interval(self) -> Interval | None:
        """Return the 95 % interval of the change; None for a single instance."""
        if len(self.baseline) < 2:
            return None
        low, high = sorted(-self.metric.scale * end for end in self.loss.interval())
        with np.errstate(over="ignore"):
            return (
                (float(np.exp(low)), float(np.exp(high)))
                if self.metric.is_perplexity
                else (low, high)
            )

    def p_value(self) -> float | None:
        """Return the p-value of 'no change', two-sided; None for too few instances, or scores on
        other scales.
        """
        if len(self.baseline) < (LEAST_DOCUMENTS if self.is_loss else 2) or not (
            self.is_loss or self.are_shares
        ):
            return None
        return min(1.0, 2 * min(self.loss.p_value(0.0), self.loss.reversed.p_value(0.0)))

    def equivalence_p_value(self, margin: float) -> float:
        """Return the p-value of 'the change is `margin` or more': the larger one of two one-sided
        tests.

        Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15 (1987), 657-680. At most 5 %: the 90
        % interval is within the margin.
        """
        return max(self.loss.p_value(margin), self.loss.reversed.p_value(margin))
