"""How metrics follow from statistics of instances, and which of them a run shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flexgen_helm.report.ratio_of_sums import RatioOfSums, Vector

Change = Literal["difference", "ratio"]
# Metrics in order of precedence; a run shows the first `MAX_SHOWN` that it has.
MAIN_METRICS = (
    # of open answers, which hardly ever match exactly
    "f1_score", "bleu_4", "exact_match", "quasi_exact_match", "prefix_exact_match",
    "exact_set_match", "f1_set_match", "iou_set_match", "rouge_l", "rouge_2",
    "final_number_exact_match", "math_equiv",
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
    """A metric that is scale * sum(numerators) / sum(denominators) over instances, or exp of that.

    numerator: name of a statistic of an instance.
    denominator: name of one, too; None counts the instances.
    is_perplexity: exp is taken.
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
    "bits_per_byte": Metric("logprob", "num_bytes", -1 / math.log(2)),
    "logprob_per_byte": Metric("logprob", "num_bytes"),
    **dict.fromkeys(
        ("token_perplexity", "perplexity"),
        Metric("logprob", "num_perplexity_tokens", -1.0, is_perplexity=True),
    ),
}


def metric_named(name: str) -> Metric:
    return _METRICS.get(name) or Metric(name, is_share=name in _SHARES)
