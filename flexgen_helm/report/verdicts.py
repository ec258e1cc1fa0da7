"""What a comparison says: equivalent within a margin, worse, better, or what would decide."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flexgen_helm.report.metrics import Change, metric_named
from flexgen_helm.report.paired import PairedScores
from flexgen_helm.report.ratio_of_sums import LEVEL, Interval, instances_needed, margin_shown

DEFAULT_MARGIN = 0.01

Decision = Literal["equivalent", "worse", "better", "not decided"]


# Number of runs in the name of a pool.
_POOLED = re.compile(r"\((\d+) runs\)$")


@dataclass(frozen=True)
class Flips:
    """Instances whose score changed, and those whose answer changed without it.

    lost, won: the score is lower or higher than in the baseline; of right and wrong answers, right
        to wrong and back.
    changed: another answer with the same score; None if the answers are not known.
    """

    lost: int
    won: int
    changed: int | None = None


@dataclass(frozen=True)
class Equivalence:
    """Whether a metric is equivalent to that of the baseline.

    margin: differences within it are equivalent; of a perplexity, ratios from 1 / (1 + margin) to
        1 + margin.
    p_value: of 'the difference is the margin or more'.
    needed: instances that would decide in 80 % of cases if there were no difference.
    available: instances of the data set; infinite if that is not known.
    shown: the least margin within which these, or else those that were scored, show equivalence.
    decision, text: filled by `decide`; the text is the verdict in words.
    """

    margin: float
    p_value: float
    needed: int
    available: float
    shown: float
    decision: Decision = "not decided"
    text: str = ""


@dataclass(frozen=True)
class Comparison:
    """A metric of a run in one precision, compared with the baseline.

    run: its run entry, or the name of a pool of runs.
    instances: number of instances that both precisions have; `baseline`, `value` and the rest are
        over these.
    baseline, value: the metric in the baseline and in the precision.
    change: value - baseline (kind 'difference') or value / baseline (kind 'ratio').
    interval: 95 % interval of the change; None for one instance or a metric that is not a mean over
        them.
    p_value: of 'no change'; None where there is no interval, or too few documents of a loss.
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
    p_value: float | None
    flips: Flips | None = None
    equivalence: Equivalence | None = None

    @property
    def is_worse(self) -> bool:
        lower_is_better = metric_named(self.metric).scale < 0
        return self.value > self.baseline if lower_is_better else self.value < self.baseline


@dataclass(frozen=True)
class SuiteEquivalence:
    """Whether a precision is equivalent to the baseline everywhere, and where it is worse.

    entries: run entries, or pools of them, that were judged, each by its first metric with a
        verdict.
    equivalent, worse: those of `entries` that are.
    text: the verdict in words.
    """

    margin: float
    entries: Sequence[str]
    equivalent: Sequence[str]
    worse: Sequence[str]
    text: str


def equivalence(
    paired: PairedScores, margin: float, available: float, level_share: float = 1.0
) -> Equivalence | None:
    """Return what is known of the equivalence of paired instances, not decided yet.

    None for one instance, or for a metric that has no margin.

    available: instances of the data set.
    level_share: of the level, what this test may spend; the p-value is divided by it.
    """
    if len(paired.baseline) < 2 or not (paired.is_logprob or paired.are_in_unit_interval):
        return None
    limit = math.log1p(margin) if paired.is_logprob else margin
    p_value = min(1.0, paired.equivalence_p_value(limit) / level_share)
    variance, furthest = paired.decline.variance, paired.decline.furthest_unseen
    needed = instances_needed(variance, limit, furthest)
    most = available if available < math.inf else len(paired.baseline)
    shown = margin_shown(most, variance, furthest)
    shown = math.expm1(shown) if paired.is_logprob else shown
    return Equivalence(margin, p_value, needed, available, shown)


def decide(comparison: Comparison, equivalence_p: float, p_value: float) -> Comparison:
    """Return the comparison with its verdict; the p-values are corrected for all that is compared
    with it.
    """
    verdict = comparison.equivalence
    if verdict is None:
        return comparison
    decision: Decision = "not decided"
    if equivalence_p <= LEVEL:
        decision = "equivalent"
    elif p_value <= LEVEL:
        decision = "worse" if comparison.is_worse else "better"
    verdict = replace(verdict, p_value=equivalence_p, decision=decision)
    verdict = replace(verdict, text=_verdict_text(comparison, verdict))
    return replace(
        comparison, p_value=None if comparison.p_value is None else p_value, equivalence=verdict
    )


def _verdict_text(comparison: Comparison, verdict: Equivalence) -> str:
    unit = "%" if comparison.kind == "ratio" else "% of the perplexity"
    within = f"{100 * verdict.margin:g} {'pp' if comparison.flips else unit}"
    if verdict.decision == "equivalent":
        return f"equivalent within {within}"
    if verdict.decision != "not decided":
        return verdict.decision
    count, flips = comparison.instances, comparison.flips
    units = "documents" if flips is None else "questions"
    if verdict.needed <= count:
        return (
            f"not decided: of all {units} like these {count:,}, the difference may be {within} or "
            "more"
        )
    observed = (
        f"lost {flips.lost:,} and won {flips.won:,}"
        if flips
        else f"changed {comparison.change:+.4g}"
    )
    if comparison.kind == "ratio":
        observed = f"×{comparison.change:.4f}"
    observed += f" {'of' if flips else 'in'} {count:,}"
    return (
        f"too few {units} to tell: {observed}; about {_rounded_up(verdict.needed):,} can show "
        "equivalence"
    )


def advice(judged: Sequence[Comparison]) -> list[str]:
    """Return what would decide those that are not decided, as far as the data sets have it.

    Of a run with several comparisons, the one that needs most counts.
    """
    more: dict[str, int] = {}
    exhausted: dict[str, float] = {}
    for comparison in judged:
        verdict = comparison.equivalence
        if (
            verdict is None
            or verdict.decision != "not decided"
            or verdict.needed <= comparison.instances
        ):
            continue  # more instances may decide, or not
        if verdict.available <= comparison.instances:
            exhausted[comparison.run] = max(verdict.shown, exhausted.get(comparison.run, 0.0))
        else:
            # `-m` is of each run of a pool
            pooled = _POOLED.search(comparison.run)
            num_runs = int(pooled[1]) if pooled else 1
            wanted = min(_rounded_up(verdict.needed), verdict.available) / num_runs
            more[comparison.run] = max(math.ceil(wanted), more.get(comparison.run, 0))
    sentences = []
    if more:
        what = first_names([f"{run} with -m {needed}" for run, needed in more.items()])
        sentences.append(f"run {what}; stored answers are not computed again")
    if margins := {
        run: math.ceil(100 * margin) for run, margin in exhausted.items() if margin < 0.49
    }:
        what = first_names([f"--margin {margin} for {run}" for run, margin in margins.items()])
        sentences.append(f"take {what}, the least that all of the data can show, or add other data")
    if too_small := [run for run in exhausted if run not in margins]:
        sentences.append(
            f"add other data to {first_names(too_small)}: all of it is too little for any --margin"
        )
    return sentences


def _rounded_up(number: int) -> int:
    """Round up to two digits."""
    step = 10 ** max(0, len(str(number)) - 2)
    return math.ceil(number / step) * step


def suite_equivalence(judged: Sequence[Comparison], margin: float) -> SuiteEquivalence:
    """Judge a precision over its run entries; judged: one decided comparison of each, not empty."""
    names = defaultdict[Decision, list[str]](list)
    for comparison in judged:
        if comparison.equivalence:
            names[comparison.equivalence.decision].append(comparison.run)
    entries = [comparison.run for comparison in judged]
    equal = names["equivalent"]
    worse = names["worse"]
    of_all = f"of {len(entries):,} run entries"
    if len(equal) == len(entries):
        where = f"all {len(entries):,} run entries" if len(entries) > 1 else entries[0]
        text = f"equivalent within {100 * margin:g} % or pp in {where}"
    elif len(entries) == 1:
        text = f"{judged[0].equivalence.text if judged[0].equivalence else ''} ({entries[0]})"
    elif worse:
        text = f"worse in {len(worse):,} {of_all}: {first_names(worse)}"
    elif undecided := names["not decided"]:
        text = f"too few questions to tell in {len(undecided):,} {of_all}: {first_names(undecided)}"
        text += f"; equivalent in {len(equal):,}" if equal else ""
    else:
        text = f"better in {first_names(names['better'])}"
        text += ", and equivalent elsewhere" if equal else ""
    return SuiteEquivalence(margin, entries, equal, worse, text)


def hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: of those at most 5 %, none is of a true
    hypothesis in 95 % of cases.

    Step-up (Hochberg, Biometrika 75 (1988), 800-802), so where all are at most 5 %, none is
    corrected. It needs tests that are independent, or depend positively, as those of models on the
    same questions do.
    """
    corrected, least = [1.0] * len(p_values), 1.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")[::-1], 1):
        least = corrected[index] = min(least, rank * p_values[index])
    return corrected


def first_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, at most so many, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
