"""Perplexities of two paired runs: the change of the loss per token, word or document, resampled by document.

A loss is a sum of -log p over the documents, divided by a sum of tokens. Both runs have the same tokens, so its change
is a ratio too: sum(d) / sum(w), with the change d and the weight w of each document. exp of it is the ratio of the
perplexities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from flexgen_helm.report.metrics import Vector

_RESAMPLES = 4999
# Of fewer documents too many samples consist of a few of them, and their standard errors are too small.
_MIN_RESAMPLED = 10
_BATCH_ELEMENTS = 4_000_000


@dataclass(frozen=True)
class LossChange:
    """The change of a loss: the statistics of its documents.

    changes: [documents] change of the loss. weights: [documents] tokens, words, or 1. Two or more documents.
    """

    changes: Vector
    weights: Vector

    @cached_property
    def value(self) -> float:
        return float(self.changes.sum() / self.weights.sum())

    @cached_property
    def standard_error(self) -> float:
        """The delta method's for a ratio of sums (Cochran, Sampling Techniques, 1977, 6.4)."""
        count = len(self.changes)
        squares = float(((self.changes - self.value * self.weights) ** 2).sum())
        return float(np.sqrt(count / (count - 1) * squares) / self.weights.sum())

    @cached_property
    def _pivots(self) -> Any:
        """Resampled (value - own value) / standard error, sorted: the bootstrap-t of Efron and Tibshirani (1993, 12.5).

        For few documents it is None, and Student's t takes its place.
        """
        count = len(self.changes)
        if count < _MIN_RESAMPLED or self.standard_error == 0:
            return None
        d, w = self.changes, self.weights
        columns = np.stack([d, w, d * d, d * w, w * w], axis=1)
        batch = max(1, _BATCH_ELEMENTS // count)
        if batch >= _RESAMPLES:
            sums = _only_sample(count) @ columns
        else:
            draw = np.random.default_rng(0)
            rows = [min(batch, _RESAMPLES - first) for first in range(0, _RESAMPLES, batch)]
            sums = np.concatenate([_sample(draw, number, count) @ columns for number in rows])
        sum_d, sum_w, dd, dw, ww = sums.T
        with np.errstate(all="ignore"):
            values = sum_d / sum_w
            squares = np.maximum(dd - 2 * values * dw + values**2 * ww, 0.0)
            errors = np.sqrt(count / (count - 1) * squares) / sum_w
            pivots = (values - self.value) / errors
        return np.sort(np.nan_to_num(pivots, nan=0.0, posinf=np.inf, neginf=-np.inf))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        tail, error = (1 - confidence) / 2, self.standard_error
        low, high = self._quantile(1 - tail), self._quantile(tail)
        return (self.value - low * error, self.value - high * error) if error else (self.value, self.value)

    def _quantile(self, share: float) -> float:
        if self._pivots is None:
            from scipy.special import stdtrit

            return float(stdtrit(len(self.changes) - 1, share))
        return float(np.quantile(self._pivots, share, method="higher" if share > 0.5 else "lower"))

    def equivalence_p_value(self, margin: float) -> float:
        """Return the p-value of 'the loss changes by at least `margin`': the larger one of two one-sided tests.

        Below 0.05 the losses are equivalent within the margin (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15
        (1987), 657-680).
        """
        if self.standard_error == 0:
            return float(abs(self.value) >= margin)
        below, above = (self.value + margin) / self.standard_error, (self.value - margin) / self.standard_error
        if self._pivots is None:
            from scipy.special import stdtr

            degrees = len(self.changes) - 1
            return max(float(stdtr(degrees, -below)), float(stdtr(degrees, above)))
        pivots, total = self._pivots, len(self._pivots) + 1
        at_least = len(pivots) - np.searchsorted(pivots, below, "left")
        at_most = np.searchsorted(pivots, above, "right")
        return float(max(at_least, at_most) + 1) / total

    def documents_needed(self, margin: float) -> int:
        """Return how many documents show equivalence in about 80 % of the cases if the losses do not differ."""
        from scipy.special import ndtri

        quantiles = float(ndtri(0.95) + ndtri(0.9))
        return int(np.ceil(len(self.changes) * (quantiles * self.standard_error / margin) ** 2)) + 2


@lru_cache(maxsize=1)
def _only_sample(count: int) -> Vector:
    """Return all resamples of `count` documents: the metrics of a run share them."""
    return _sample(np.random.default_rng(0), _RESAMPLES, count)


def _sample(draw: np.random.Generator, number: int, count: int) -> Vector:
    """Return how often each document is in each resample, [number, count]."""
    places = draw.integers(count, size=(number, count)) + count * np.arange(number)[:, None]
    return np.bincount(places.ravel(), minlength=number * count).reshape(number, count).astype(np.float64)
