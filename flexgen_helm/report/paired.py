"""Metrics of paired instances: values and errors, intervals and tests of their change, and tests of equivalence.

A metric of a run is a function of sums over its instances. So the metric of two precisions, and its change between
them, can be computed again for any sample of the instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Change = Literal["difference", "ratio"]
Interval = tuple[float, float]
Vector = NDArray[np.float64]

LEVEL = 0.05
# Resampled values in memory at a time.
_BATCH_ELEMENTS = 4_000_000
# Metrics in order of precedence; a run shows the first `MAX_SHOWN` that it has.
MAIN_METRICS = (
    "exact_match", "quasi_exact_match", "prefix_exact_match", "exact_set_match", "f1_set_match", "iou_set_match",
    "f1_score", "rouge_l", "rouge_2", "final_number_exact_match", "math_equiv", "math_equiv_chain_of_thought",
    "chain_of_thought_correctness", "ifeval_strict_accuracy", "safety_score", "wildbench_score_rescaled",
    "omni_math_accuracy", "pass", "classification_macro_f1", "target_perplexity", "word_perplexity", "token_perplexity",
    "perplexity", "bits_per_byte", "logprob_per_byte",
)  # fmt: skip
MAX_SHOWN = 3
# Of each instance these are 0 or 1, so the metric is a share of the instances.
_SHARES = frozenset({
    "exact_match", "quasi_exact_match", "prefix_exact_match", "exact_set_match", "final_number_exact_match",
    "math_equiv", "math_equiv_chain_of_thought", "chain_of_thought_correctness", "pass",
})  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """How a metric follows from its instances: scale * sum of numerators / sum of denominators, or exp of that.

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
            slope = self.scale * (self.value(numerators, denominators) if self.is_perplexity else 1.0)
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


def _resampling(count: int) -> dict[str, Any]:
    """Return how scipy samples so many instances."""
    batch = max(1, _BATCH_ELEMENTS // count)
    # One seed, so that a repeated comparison gives the same numbers.
    return {"vectorized": True, "n_resamples": 9999, "batch": batch, "random_state": np.random.default_rng(0)}


# Changes of means, such as the loss per token.

_RESAMPLES = 4999
# Of fewer documents too many samples consist of a few of them, and their standard errors are too small.
_MIN_RESAMPLED = 10
# Sum of the normal quantiles of two one-sided tests at 5 % that decide in 80 % of the cases.
_QUANTILES = NormalDist().inv_cdf(0.95) + NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class RatioOfSums:
    """sum(changes) / sum(weights) over documents, such as the change of a loss per token, resampled by document.

    changes, weights: [documents]; weights are tokens, words, or 1. Two or more documents.
    """

    changes: Vector
    weights: Vector

    @cached_property
    def value(self) -> float:
        return float(self.changes.sum() / self.weights.sum())

    @cached_property
    def standard_error(self) -> float:
        return float(self._value_and_error(self.changes, self.weights)[1])

    @staticmethod
    def _value_and_error(changes: Vector, weights: Vector, axis: int = -1) -> tuple[Any, Any]:
        """Return values and standard errors by the delta method (Cochran, Sampling Techniques, 1977, 6.4)."""
        count, total = changes.shape[axis], weights.sum(axis)
        value = changes.sum(axis) / total
        squares = ((changes - np.expand_dims(value, axis) * weights) ** 2).sum(axis)
        return value, np.sqrt(count / (count - 1) * squares) / total

    @cached_property
    def _pivots(self) -> Any:
        """Resampled (value - this value) / standard error, sorted: the bootstrap-t of Efron and Tibshirani.

        An Introduction to the Bootstrap, 1993, 12.5. For few documents it is None, and Student's t takes its place.
        """
        from scipy.stats import bootstrap

        if len(self.changes) < _MIN_RESAMPLED:
            return None

        def pivot(changes: Vector, weights: Vector, axis: int) -> Any:
            value, error = self._value_and_error(changes, weights, axis)
            return np.nan_to_num((value - self.value) / error, nan=0.0, posinf=np.inf, neginf=-np.inf)

        settings = {**_resampling(len(self.changes)), "n_resamples": _RESAMPLES}
        with np.errstate(all="ignore"):
            found = bootstrap((self.changes, self.weights), pivot, paired=True, method="percentile", **settings)
        return np.sort(found.bootstrap_distribution)

    def interval(self) -> Interval:
        """Return the 95 % interval."""
        from scipy.special import stdtrit

        error = self.standard_error
        if not error:
            return self.value, self.value
        if self._pivots is None:
            half = float(stdtrit(len(self.changes) - 1, 1 - LEVEL / 2)) * error
            return self.value - half, self.value + half
        high = np.quantile(self._pivots, 1 - LEVEL / 2, method="higher")
        low = np.quantile(self._pivots, LEVEL / 2, method="lower")
        return self.value - float(high) * error, self.value - float(low) * error

    def equivalence_p_value(self, margin: float) -> float:
        """Return the p-value of 'the mean changes by at least `margin`': the larger one of two one-sided tests.

        Below 0.05 the means are equivalent within the margin (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15
        (1987), 657-680).
        """
        from scipy.special import stdtr

        if self.standard_error == 0:
            return float(abs(self.value) >= margin)
        below, above = (self.value + margin) / self.standard_error, (self.value - margin) / self.standard_error
        if self._pivots is None:
            return float(stdtr(len(self.changes) - 1, max(-below, above)))
        at_least = len(self._pivots) - np.searchsorted(self._pivots, below, "left")
        at_most = np.searchsorted(self._pivots, above, "right")
        return float(max(at_least, at_most) + 1) / (len(self._pivots) + 1)

    def documents_needed(self, margin: float) -> int:
        """Return how many documents show equivalence in about 80 % of the cases if the means do not differ."""
        return math.ceil(len(self.changes) * (_QUANTILES * self.standard_error / margin) ** 2) + 2


# Shares of right answers. Of n instances, `lost` are right in the first run only and `won` in the second only; the
# difference is (won - lost) / n.

# The nuisance parameter is searched in its 1 - _GAMMA confidence interval, which costs _GAMMA of the level.
_GAMMA = 1e-4
_GRID_POINTS = 48


def score_interval(lost: int, won: int, count: int) -> Interval:
    """Return the 95 % score interval of the difference (won - lost) / count of two paired shares.

    All differences that the score test does not reject, so no flips do not give [0, 0]: Tango, Statistics in Medicine
    17 (1998), 891-908, (8) and (9).
    """
    from scipy.optimize import brentq

    quantile = NormalDist().inv_cdf(1 - LEVEL / 2)

    def upper(up: int, down: int) -> float:
        """Return the largest difference (up - down) / count that is not rejected."""
        if up == count:
            return 1.0
        low = (up - down) / count
        return float(brentq(lambda shift: tango_score(up, down, count, shift) + quantile, low, 1 - 1e-12, xtol=1e-10))

    return -upper(lost, won), upper(won, lost)


def tango_score(up: Any, down: Any, count: int, shift: float) -> Any:
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

    It is a p-value for every number of instances and every share of flips.
    """
    return max(inferiority_p_value(lost, won, count, margin), inferiority_p_value(won, lost, count, margin))


def inferiority_p_value(lost: int, won: int, count: int, margin: float) -> float:
    """Return the p-value of H0: share of lost - share of won >= margin, against less.

    Exact and unconditional: the largest probability, over the unknown share of won, of a score statistic at most as
    large as the observed one. Lloyd and Moldovan, Statistics in Medicine 27 (2008), 3540-3549; the confidence interval
    of the unknown share is from Berger and Boos, J. American Statistical Association 89 (1994), 1012-1016.
    """
    from scipy.stats import binom, binomtest  # type: ignore[attr-defined]

    observed = float(tango_score(lost, won, count, margin))
    if observed >= 0:
        return 1.0
    low, high = np.minimum(binomtest(won, count).proportion_ci(1 - _GAMMA), (1 - margin) / 2).tolist()
    # Beyond these there is less than 1e-9 of the probability.
    first = math.floor(count * low - 8 * math.sqrt(count * low))
    last = math.ceil(count * high + 8 * math.sqrt(count * high) + 30)
    num_won = np.arange(max(first, 0), min(last, count) + 1)
    # The largest number of lost whose score is at most the observed one, for each number of won; -1 if none is.
    num_lost, most = np.full(num_won.shape, -1), count - num_won
    while (num_lost < most).any():
        middle = (num_lost + most + 1) // 2
        is_small = tango_score(np.maximum(middle, 0), num_won, count, margin) <= observed + 1e-12
        num_lost, most = np.where(is_small, middle, num_lost), np.where(is_small, most, middle - 1)

    def probability(shares: Vector) -> Vector:
        won_share = shares[:, None]
        lost_share = np.minimum((won_share + margin) / (1 - won_share), 1.0)
        below = binom.cdf(num_lost, count - num_won, lost_share)
        return np.asarray((binom.pmf(num_won, count, won_share) * below).sum(axis=1))

    # Equal steps of the square root are equal steps in standard errors.
    roots = np.linspace(math.sqrt(low), math.sqrt(high), _GRID_POINTS)
    found = probability(roots**2)
    best = int(found.argmax())
    near = np.linspace(roots[max(best - 1, 0)], roots[min(best + 1, len(roots) - 1)], 9)
    return min(1.0, float(max(found.max(), probability(near**2).max())) + _GAMMA)


def instances_needed(flips: float, margin: float) -> int:
    """Return how many instances show equivalence in at least 80 % of the cases if the shares do not differ.

    flips: share of instances that are lost or won. From the variance of the difference, flips / n, and the quantiles
    for two one-sided tests at 5 % (Chow, Shao and Wang, Sample Size Calculations, 2008, 4.2). The second term is for
    the exact test, whose steps matter if a handful of flips is expected.
    """
    return math.ceil(flips * (_QUANTILES / margin) ** 2 + 4 / margin)


def margin_shown(instances: int, flips: float) -> float:
    """Return the least margin within which so many instances show equivalence: the inverse of `instances_needed`."""
    return min(1.0, (2 + math.sqrt(4 + instances * flips * _QUANTILES**2)) / instances)


# Both, of the instances of two runs.


@dataclass(frozen=True)
class PairedTest:
    """Whether a change may be chance.

    name: 'McNemar' (exact) if every instance is right or wrong, else 'permutation' (signs of the differences).
    lost: instances that only the baseline has right (McNemar).
    won: instances that only the other precision has right (McNemar).
    """

    name: Literal["McNemar", "permutation"]
    p_value: float
    lost: int | None = None
    won: int | None = None


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
        """The change of a loss, of log-probabilities."""
        return RatioOfSums(self.baseline - self.scores, self.weights)

    @property
    def are_shares(self) -> bool:
        """Whether all scores are in [0, 1]."""
        return all(bool(((side >= 0) & (side <= 1)).all()) for side in (self.baseline, self.scores))

    @property
    def are_answers(self) -> bool:
        """Whether every instance is right or wrong."""
        return all(bool(np.isin(side, (0, 1)).all()) for side in (self.baseline, self.scores))

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
        base, scores = (float(self.metric.value(side, self.weights)) for side in (self.baseline, self.scores))
        return base, scores

    def rounded(self) -> tuple[int, int]:
        """Return lost and won of scores in [0, 1], such as F1: each change counts with its size as the probability.

        A change of 0.3 is won with probability 0.3. So the expected difference of the shares is that of the means, and
        the exact test of the shares is one of the means: Schlag, A New Method for Constructing Exact Tests without
        Making any Assumptions (2008). The draws have one seed. Right and wrong answers stay as they are.
        """
        changes = self.scores - self.baseline
        counts = np.random.default_rng(0).random(len(changes)) < np.abs(changes)
        return int((counts & (changes < 0)).sum()), int((counts & (changes > 0)).sum())

    def interval_and_test(self) -> tuple[Interval | None, PairedTest | None]:
        """Return `interval` and `test`, as one test that rejects where both do: they never disagree.

        Where the test rejects nothing, the interval reaches to 'no change'; where the interval has 'no change', p is
        0.05 or more.
        """
        interval, test = self.interval(), self.test()
        if interval is None or test is None:
            return interval, test
        no_change = float(self.metric.is_perplexity)
        low, high = interval
        if test.p_value >= LEVEL:
            interval = min(low, no_change), max(high, no_change)
        elif low <= no_change <= high:
            test = replace(test, p_value=LEVEL)
        return interval, test

    def interval(self) -> Interval | None:
        """Return the 95 % interval of the change; None for a single instance.

        Right and wrong answers have Tango's score interval, log-probabilities a bootstrap-t over documents. Other
        scores have a percentile bootstrap; where no instance changed, it is the score interval too, because no change
        among n instances does not show that there is none.
        """
        from scipy.stats import bootstrap

        if len(self.baseline) < 2:
            return None
        if self.metric.numerator == "logprob":
            low, high = sorted(-self.metric.scale * end for end in self.loss.interval())
            with np.errstate(over="ignore"):
                return (float(np.exp(low)), float(np.exp(high))) if self.metric.is_perplexity else (low, high)
        if self.are_answers or (self.are_shares and self.unchanged.all()):
            return score_interval(self.lost, self.won, len(self.baseline))

        def change(a: Vector, b: Vector, w: Vector, axis: int = -1) -> Any:
            return self.metric.change_between(self.metric.value(b, w, axis), self.metric.value(a, w, axis))

        samples = self.baseline, self.scores, self.weights
        found = bootstrap(
            samples, change, paired=True, method="percentile", **_resampling(len(self.baseline))
        ).confidence_interval
        return float(found.low), float(found.high)

    def test(self) -> PairedTest | None:
        """Test whether the instances change as often one way as the other; None for one that is not 0 or 1."""
        from scipy.stats import binomtest, permutation_test

        if self.are_answers:
            lost, won = self.lost, self.won
            p_value = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
            return PairedTest("McNemar", p_value, lost, won)
        if len(self.baseline) < 2:
            return None
        result = permutation_test(
            (self.baseline, self.scores),
            lambda a, b, axis: (b - a).mean(axis),
            permutation_type="samples",
            **_resampling(len(self.baseline)),
        )
        return PairedTest("permutation", float(result.pvalue))
