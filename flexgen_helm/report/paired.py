"""Statistics of paired instances: intervals of changes, exact McNemar and a permutation test.

A metric of a run is a function of sums over its instances. So the metric of two precisions, and its change between
them, can be computed again for any sample of the instances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flexgen_helm.report.losses import LossChange
from flexgen_helm.report.metrics import Change, Metric, Vector
from flexgen_helm.report.shares import score_interval

LEVEL = 0.05
# Resampled values in memory at a time.
_BATCH_ELEMENTS = 4_000_000


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


def change_between(kind: Change, value: Any, baseline: Any) -> Any:
    return np.divide(value, baseline) if kind == "ratio" else np.subtract(value, baseline)


def interval_and_test(
    metric: Metric, baseline: Vector, other: Vector, weights: Vector
) -> tuple[tuple[float, float] | None, PairedTest | None]:
    """Return `change_interval` and `paired_test`, as one test that rejects where both do: they never disagree.

    Where the test rejects nothing, the interval reaches to 'no change'; where the interval has 'no change', p is 0.05
    or more.
    """
    interval, test = change_interval(metric, baseline, other, weights), paired_test(baseline, other)
    if interval is None or test is None:
        return interval, test
    no_change = float(metric.change == "ratio")
    low, high = interval
    if test.p_value >= LEVEL:
        interval = min(low, no_change), max(high, no_change)
    elif low <= no_change <= high:
        test = replace(test, p_value=LEVEL)
    return interval, test


def change_interval(metric: Metric, baseline: Vector, other: Vector, weights: Vector) -> tuple[float, float] | None:
    """Return the 95 % interval of the change; None for a single instance.

    baseline, other: [instances] numerators. weights: [instances] denominators.

    Right and wrong answers have Tango's score interval, log-probabilities a bootstrap-t over documents. Other scores
    have a percentile bootstrap; where no instance changed, it is the score interval too, because no change among n
    instances does not show that there is none.
    """
    if len(baseline) < 2:
        return None
    if metric.numerator == "logprob":
        return _loss_interval(metric, LossChange(baseline - other, weights))
    is_score = all(((values >= 0) & (values <= 1)).all() for values in (baseline, other))
    if _are_answers(baseline, other) or (is_score and (baseline == other).all()):
        lost, won = int((other < baseline).sum()), int((other > baseline).sum())
        return score_interval(lost, won, len(baseline))
    return _bootstrap_interval(metric, baseline, other, weights)


def _loss_interval(metric: Metric, change: LossChange) -> tuple[float, float]:
    """Express the interval of a change of loss in the metric's own unit."""
    ends = change.interval()
    if metric.change == "ratio":
        with np.errstate(over="ignore"):
            return float(np.exp(ends[0])), float(np.exp(ends[1]))
    slope = -metric.slope(0.0)  # the others are linear in the mean log-probability
    low, high = sorted(slope * end for end in ends)
    return low, high


def _bootstrap_interval(metric: Metric, baseline: Vector, other: Vector, weights: Vector) -> tuple[float, float]:
    from scipy.stats import bootstrap

    def change(a: Vector, b: Vector, w: Vector, axis: int = -1) -> Any:
        return change_between(metric.change, metric.value(b, w, axis), metric.value(a, w, axis))

    interval = bootstrap(
        (baseline, other, weights),
        change,
        paired=True,
        method="percentile",
        **_resampling(len(baseline)),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _are_answers(baseline: Vector, other: Vector) -> bool:
    """Whether every instance is right or wrong."""
    return bool(np.isin(baseline, (0, 1)).all() and np.isin(other, (0, 1)).all())


def paired_test(baseline: Vector, other: Vector) -> PairedTest | None:
    """Test whether the instances change as often one way as the other; None for one instance that is not 0 or 1."""
    from scipy.stats import binomtest, permutation_test

    if _are_answers(baseline, other):
        lost, won = int(((baseline == 1) & (other == 0)).sum()), int(((baseline == 0) & (other == 1)).sum())
        p_value = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
        return PairedTest("McNemar", p_value, lost, won)
    if len(baseline) < 2:
        return None
    result = permutation_test(
        (baseline, other),
        lambda a, b, axis: (b - a).mean(axis),
        permutation_type="samples",
        **_resampling(len(baseline)),
    )
    return PairedTest("permutation", float(result.pvalue))


def _resampling(num_instances: int) -> dict[str, Any]:
    batch = max(1, _BATCH_ELEMENTS // num_instances)
    # One seed, so that a repeated comparison gives the same numbers.
    return {"vectorized": True, "n_resamples": 9999, "batch": batch, "random_state": np.random.default_rng(0)}
