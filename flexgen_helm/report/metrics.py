"""How HELM's metrics follow from the instances of a run, and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Change = Literal["difference", "ratio"]
Vector = NDArray[np.float64]

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
    """How a metric follows from its instances: transform(sum of numerators / sum of denominators).

    numerator: statistic of an instance.
    denominator: statistic of an instance; None counts the instances.
    slope: derivative of `transform`.
    change: how two values are compared.
    is_share: the metric is a share of the instances, so its differences are percentage points.
    """

    numerator: str
    denominator: str | None = None
    transform: Callable[[Any], Any] = lambda mean: mean
    slope: Callable[[float], float] = lambda mean: 1.0
    change: Change = "difference"
    is_share: bool = False

    def value(self, numerators: Vector, denominators: Vector, axis: int = -1) -> Any:
        with np.errstate(over="ignore"):  # a perplexity may be infinite
            return self.transform(numerators.sum(axis) / denominators.sum(axis))

    def standard_error(self, numerators: Vector, denominators: Vector) -> float | None:
        """Return the standard error of `value`; None for one instance, or if it is not finite.

        For a mean it is the sample's standard deviation / sqrt(n). For other metrics it is the delta method: that of
        the ratio of sums, times the slope of `transform`.
        """
        count = len(numerators)
        if count < 2:
            return None
        total = float(denominators.sum())
        ratio = float(numerators.sum()) / total
        with np.errstate(all="ignore"):
            squares = float(((numerators - ratio * denominators) ** 2).sum())
            error = abs(self.slope(ratio)) * math.sqrt(count / (count - 1) * squares) / total
        return float(error) if math.isfinite(error) else None


def _perplexity(denominator: str | None) -> Metric:
    return Metric("logprob", denominator, lambda mean: np.exp(-mean), lambda mean: -np.exp(-mean), change="ratio")


# Metrics that are no plain mean over the instances.
_METRICS = {
    "target_perplexity": _perplexity(None),
    "word_perplexity": _perplexity("num_words"),
    "byte_perplexity": _perplexity("num_bytes"),
    "token_perplexity": _perplexity("num_perplexity_tokens"),
    "perplexity": _perplexity("num_perplexity_tokens"),
    "bits_per_byte": Metric("logprob", "num_bytes", lambda mean: -mean / math.log(2), lambda mean: -1 / math.log(2)),
    "logprob_per_byte": Metric("logprob", "num_bytes"),
}


def metric_named(name: str) -> Metric:
    return _METRICS.get(name) or Metric(name, is_share=name in _SHARES)
