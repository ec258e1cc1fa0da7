"""What a comparison says: equivalent within a margin, worse, better, or how many instances would decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flexgen_helm.report.paired import (
    LEVEL,
    Change,
    Interval,
    PairedScores,
    PairedTest,
    equivalence_p_value,
    instances_needed,
    metric_named,
)

DEFAULT_MARGIN = 0.01
# Of fewer, all change in one direction by chance in more than 5 % of cases: 2 x 0.5 ** 5.
_LEAST_INSTANCES = 6

Decision = Literal["equivalent", "worse", "better", "not decided", "cannot decide"]


@dataclass(frozen=True)
class Flips:
    """Instances whose score changed, and those whose answer changed without it.

    lost, won: the score is lower or higher than in the baseline; of right and wrong answers, right to wrong and back.
    changed: another answer with the same score; None if the answers are not known.
    """

    lost: int
    won: int
    changed: int | None = None


@dataclass(frozen=True)
class Equivalence:
    """Whether a metric is equivalent to that of the baseline, by two one-sided tests at 5 %.

    margin: differences within it are equivalent; of a perplexity, ratios from 1 / (1 + margin) to 1 + margin.
    p_value: of 'the difference is the margin or more'.
    decision: equivalent, else worse or better by the paired test, else not decided.
    needed: instances that would decide in 80 % of cases if there were no difference; None if it is
        decided.
    text: the verdict in words.
    """

    margin: float
    p_value: float
    decision: Decision
    needed: int | None
    text: str


@dataclass(frozen=True)
class Comparison:
    """A metric of a run in one precision, compared with the baseline.

    instances: number of instances that both precisions have; `baseline`, `value` and the rest are over these.
    change: value - baseline (kind 'difference') or value / baseline (kind 'ratio').
    interval: 95 % interval of the change; None, as `test`, for one instance or a metric that is not a mean over them.
    flips: instances whose score or answer changed; None for perplexities, where all do.
    equivalence: the verdict; None where there is no interval, or no margin for the metric.
    """

    run: str
    metric: str
    precision: str
    instances: int
    baseline: float
    value: float
    kind: Change
    change: float
    interval: Interval | None
    test: PairedTest | None
    flips: Flips | None = None
    equivalence: Equivalence | None = None

    @property
    def is_worse(self) -> bool:
        lower_is_better = metric_named(self.metric).scale < 0
        return self.value > self.baseline if lower_is_better else self.value < self.baseline


@dataclass(frozen=True)
class SuiteEquivalence:
    """Whether a precision is equivalent to the baseline everywhere, and where it is worse.

    entries: run entries, or pools of them, that were judged, each by its first metric with a verdict.
    equivalent, worse: those of `entries` that are; worse ones after Holm's correction for their number.
    text: the verdict in words.
    """

    margin: float
    entries: Sequence[str]
    equivalent: Sequence[str]
    worse: Sequence[str]
    text: str


def equivalence(
    paired: PairedScores,
    test: PairedTest | None,
    margin: float = DEFAULT_MARGIN,
    *,
    has_all: bool = False,
    look: float = 1.0,
) -> Equivalence | None:
    """Judge a metric of paired instances; None for one instance, or for a metric that has no margin.

    has_all: the data set has no more instances. look: share of the level that this test may spend; the p-value of
        `test` is already divided by it.
    """
    count = len(paired.baseline)
    if count < 2:
        return None
    if paired.metric.numerator == "logprob":
        log_margin = math.log1p(margin)
        p_value, needed = paired.loss.equivalence_p_value(log_margin), paired.loss.documents_needed(log_margin)
        loss, unit = paired.loss.value, " %"
    elif paired.are_shares:
        lost, won = paired.rounded()
        p_value = equivalence_p_value(lost, won, count, margin)
        needed = instances_needed((lost + won + 0.5) / (count + 1), margin)
        loss, unit = float((paired.baseline - paired.scores).sum()), " pp"
    else:
        return None
    p_value = min(1.0, p_value / look)
    within = f"{100 * margin:g}{unit}"
    step = 10 ** max(0, len(str(needed)) - 2)  # to two digits
    wanted = f"about {math.ceil(needed / step) * step:,}"
    decision: Decision = "not decided"
    if p_value <= LEVEL:
        return Equivalence(margin, p_value, "equivalent", None, f"equivalent within {within}")
    if test is not None and test.p_value < LEVEL and loss:
        decision = "worse" if loss > 0 else "better"
        return Equivalence(margin, p_value, decision, None, decision)
    if count < _LEAST_INSTANCES:
        needed = max(needed, _LEAST_INSTANCES)
        why = f"{count} instances cannot show a difference; at least {_LEAST_INSTANCES} can"
    elif needed <= count:
        why = f"the difference is too near to {within} for {count:,} instances"
    elif has_all:
        decision = "cannot decide"
        why = f"it has {count:,} instances, and {wanted} would decide"
    else:
        why = f"{wanted} instances would decide if there were no difference"
    subject = "this data set cannot decide" if decision == "cannot decide" else decision
    return Equivalence(margin, p_value, decision, needed, f"{subject}: {why}")


def suite_equivalence(judged: Sequence[Comparison], margin: float) -> SuiteEquivalence:
    """Judge a precision over its run entries; judged: one comparison with a verdict of each entry, of at least one.

    'Equivalent everywhere' needs every entry to be equivalent, so it needs no correction: an intersection-union test
    (Berger, Technometrics 24 (1982), 295-300). 'Worse somewhere' has Holm's (Scandinavian J. of Statistics 6 (1979),
    65-70), so it is said in at most 5 % of suites without a difference.
    """
    entries = [one.run for one in judged]
    equal = [one.run for one in judged if one.equivalence and one.equivalence.decision == "equivalent"]
    rejected = holm([1.0 if one.test is None else one.test.p_value for one in judged])
    worse = [one.run for one, found in zip(judged, rejected) if found and one.is_worse]
    total, within = f"{len(entries):,} run entries", f"within {100 * margin:g} % or pp"
    if len(entries) == 1:
        decision = f"equivalent {within}" if equal else "worse" if worse else "not decided"
        if not equal and rejected[0] and not worse:
            decision = "better"
        text = f"{decision} in the only run entry: {entries[0]}"
    elif len(equal) == len(entries):
        text = f"equivalent everywhere, {within} ({total})"
    elif worse:
        text = f"worse in {len(worse):,} of {total} (Holm's correction): {first_names(worse)}"
    else:
        text = f"not decided: {len(equal):,} of {total} are equivalent, and none is worse (Holm's correction)"
    return SuiteEquivalence(margin, entries, equal, worse, text)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return which hypotheses Holm's procedure rejects; at most `level` of all families have one that is true."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def first_names(names: Sequence[str], most: int = 5) -> str:
    """List at most so many names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
