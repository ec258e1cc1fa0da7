"""The change of a metric on paired instances, and what it may be in all instances like them.

A metric of a run is a function of sums over its instances. So the metric of two precisions, and its
change between them, can be computed again for any sample of the instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.report.metrics import Metric
from flexgen_helm.report.ratio_of_sums import Interval, RatioOfSums, Vector

# A document that was not seen may change by so much: its perplexity by a factor of e.
_UNSEEN_NATS = 1.0
# Of fewer documents a kind that makes up 5 % of them may be missing in more than 5 % of samples:
# 0.95 ** 59 < 0.05.
LEAST_DOCUMENTS = 59


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
    def decline(self) -> RatioOfSums:
        """The mean by which numerators fall from the baseline: of log-probabilities, the rise of
        the loss.
        """
        if self.is_logprob:
            unseen = _UNSEEN_NATS, math.inf
        else:
            unseen = (1.0, 1.0) if self.are_in_unit_interval else (-math.inf, math.inf)
        return RatioOfSums(self.baseline - self.scores, self.weights, unseen)

    @property
    def is_logprob(self) -> bool:
        return self.metric.numerator == "logprob"

    @property
    def are_in_unit_interval(self) -> bool:
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
        low, high = sorted(-self.metric.scale * end for end in self.decline.interval())
        with np.errstate(over="ignore"):
            return (
                (float(np.exp(low)), float(np.exp(high)))
                if self.metric.is_perplexity
                else (low, high)
            )

    def p_value(self) -> float | None:
        """Return the p-value of 'no change', two-sided.

        None for too few instances, or scores that are neither log-probabilities nor in [0, 1].
        """
        least = LEAST_DOCUMENTS if self.is_logprob else 2
        if len(self.baseline) < least or not (self.is_logprob or self.are_in_unit_interval):
            return None
        return min(1.0, 2 * min(self.decline.p_value(0.0), self.decline.negated.p_value(0.0)))

    def equivalence_p_value(self, margin: float) -> float:
        """Return the p-value of 'the change is `margin` or more': the larger one of two one-sided
        tests.

        Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15 (1987), 657-680. At most 5 %: the 90
        % interval is within the margin.
        """
        return max(self.decline.p_value(margin), self.decline.negated.p_value(margin))
