"""Compare a model's precisions, or models, over the runs of a suite, instance by instance."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.checkpoint.known_names import original_of
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.answers import Answer, asked_instances, differing_settings
from flexgen_helm.report.notes import reused_note, trust_notes
from flexgen_helm.report.paired import PairedScores, metric_named
from flexgen_helm.report.pools import overlap_notes, pool_by_scenario
from flexgen_helm.report.scores import (
    RunScores,
    grouped,
    precision_rank,
    read_answers,
    read_finished_runs,
)
from flexgen_helm.report.speeds import TotalSpeed, total_speeds
from flexgen_helm.report.verdicts import (
    DEFAULT_MARGIN,
    Comparison,
    Decision,
    Flips,
    SuiteEquivalence,
    decide,
    equivalence,
    hochberg,
    suite_equivalence,
)
from flexgen_helm.suggestions import closest
from flexgen_helm.units import count

if TYPE_CHECKING:
    import pandas as pd


# Flips are the instances whose score or answer is not that of the baseline.
Direction = Literal["lost", "won", "changed"]
DIRECTIONS: tuple[Direction, ...] = ("lost", "won", "changed")
_NO_ANSWER = Answer("", (), "", None)


@dataclass(frozen=True)
class Flip:
    """An instance whose score or answer is not that of the baseline.

    direction: the score is lower (lost), higher (won), or the same with another answer (changed).
    prompt, references: as in `Answer`; of several trials, the answers are those of the first.
    folder, baseline_folder: names of the runs' folders.
    """

    model: str
    run: str
    precision: str
    metric: str
    instance: str
    direction: Direction
    baseline_score: float
    score: float
    prompt: str
    references: Sequence[str]
    baseline_answer: str
    answer: str
    baseline_logprob: float | None
    logprob: float | None
    baseline_folder: str
    folder: str


@dataclass(frozen=True)
class FlipGroup:
    """Flips of a model in one precision and one direction, against a baseline.

    count: how many there are; `flips` are the first of them.
    """

    model: str
    precision: str
    baseline: str
    direction: Direction
    count: int
    flips: Sequence[Flip]


@dataclass(frozen=True, eq=False)
class RunPair:
    """Two runs of an entry, or two pools of runs: in the baseline, and in another precision or of
    another model.
    """

    base: RunScores
    run: RunScores

    @cached_property
    def shared(self) -> pd.Index:
        """The instances that both runs have, with the same text under the same id as far as texts
        are known.
        """
        shared = self.base.instances.index.intersection(self.run.instances.index, sort=False)
        base, run = self.base.digests, self.run.digests
        return shared[[base.get(key) == run.get(key) for key in shared]] if base and run else shared

    @property
    def notes(self) -> list[str]:
        """What is not compared, and what differs beside the precision."""
        base, run = self.base, self.run
        with_same_id = base.instances.index.intersection(run.instances.index)
        notes = [
            f"{missing} instances of {side.entry} are in {side.label} only and are left out"
            for side in (base, run)
            if (missing := side.num_scored - len(with_same_id))
        ]
        if unknown := [side.label for side in (base, run) if not side.digests]:
            notes.append(
                f"{base.entry} is paired by ids of instances alone: {' and '.join(unknown)} has no "
                "texts (scenario_state.json) to compare"
            )
        if different := len(with_same_id) - len(self.shared):
            notes.append(
                f"{different:,} of {len(with_same_id):,} instances of {base.entry} ask something "
                f"else in {run.label} than in {base.label} under the same id and are left out: the "
                "data has changed between the runs"
            )
        joint = f" in {base.label} and "
        if (
            base.settings
            and run.settings
            and (differing := differing_settings(base.settings, run.settings, joint))
        ):
            notes.append(
                f"{base.entry} has other settings in {run.label}: {differing} in {run.label}"
            )
        origins = base.record.get("origin"), run.record.get("origin")
        if base.model == run.model and None not in origins and origins[0] != origins[1]:
            notes.append(
                f"{base.typed_model} means {origins[0]} in {base.label} and {origins[1]} in "
                f"{run.label}, so the difference is not that of the precision alone"
            )
        if base.prompts and run.prompts and base.prompts != run.prompts:
            notes.append(
                f"Prompts were sent {base.prompts} in {base.label} and {run.prompts} in {run.label}"
            )
        return notes

    @cached_property
    def changed(self) -> NDArray[np.bool_] | None:
        """Which of the shared instances have another answer; None if the answers are not known."""
        base, run = self.base.answers, self.run.answers
        if not all(key in base and key in run for key in self.shared):
            return None
        return np.array([base[key] != run[key] for key in self.shared], bool)

    def paired(self, metric: str) -> PairedScores:
        (base, weights), (scores, _) = (
            side.ratios[metric].loc[self.shared].to_numpy().T for side in (self.base, self.run)
        )
        return PairedScores(metric_named(metric), base, scores, weights)

    def comparisons(self, margin: float, notes: list[str]) -> list[Comparison]:
        """Compare the metrics that both have; notes: gets a note on one that cannot be."""
        comparisons = []
        for metric in self.base.scores:
            if metric in self.run.scores:
                if comparison := self._compare(metric, margin):
                    comparisons.append(comparison)
                else:
                    notes.append(
                        f"{metric} of {self.base.entry} in {self.run.label} is left out, because "
                        f"{self.base.label} has other instances and it cannot be computed over the "
                        "shared ones alone"
                    )
        return comparisons

    def _compare(self, name: str, margin: float) -> Comparison | None:
        """Compare one metric over the shared instances; None if it cannot be computed over them
        alone.
        """
        metric, base, run, total = metric_named(name), self.base, self.run, len(self.shared)
        values = base.scores[name], run.scores[name]
        interval = p_value = flips = verdict = None
        if name in base.ratios and name in run.ratios and total:
            paired = self.paired(name)
            values = paired.values
            if np.isfinite(paired.baseline).all() and np.isfinite(paired.scores).all():
                interval, p_value = paired.interval(), paired.p_value()
                level_share = min(base.level_share, run.level_share)
                p_value = None if p_value is None else min(1.0, p_value / level_share)
                verdict = equivalence(paired, margin, base.data_size, level_share)
                if paired.are_shares:
                    changed = (
                        None
                        if self.changed is None
                        else int((paired.unchanged & self.changed).sum())
                    )
                    flips = Flips(paired.lost, paired.won, changed)
        elif not total == base.num_scored == run.num_scored:
            return None
        with np.errstate(all="ignore"):
            change = float(metric.change_between(values[1], values[0]))
        return Comparison(
            base.entry,
            name,
            run.label,
            total,
            *values,
            metric.change,
            change,
            interval,
            p_value,
            flips,
            verdict,
        )

    def flipped(self, metrics: Sequence[str]) -> dict[Direction, dict[str, str]]:
        """Return instance -> the first metric that flipped it, by direction."""
        lost: dict[str, str] = {}
        won: dict[str, str] = {}
        for metric in metrics:
            paired = self.paired(metric)
            for key in self.shared[paired.scores < paired.baseline]:
                lost.setdefault(key, metric)
            for key in self.shared[paired.scores > paired.baseline]:
                won.setdefault(key, metric)
        keys = [] if self.changed is None else self.shared[self.changed]
        changed = {key: metrics[0] for key in keys if key not in lost and key not in won}
        return {"lost": lost, "won": won, "changed": changed}

    def flips(self, direction: Direction, flipped: Mapping[str, str]) -> list[Flip]:
        """Return flips with their answers; flipped: instance -> metric."""
        before, after = (read_answers(run, set(flipped)) for run in (self.base, self.run))
        flips = []
        for key, metric in flipped.items():
            old, new = before.get(key, _NO_ANSWER), after.get(key, _NO_ANSWER)
            scores = [
                float(run.ratios[metric].loc[key, "numerator"]) for run in (self.base, self.run)
            ]
            flips.append(
                Flip(
                    model=self.run.model,
                    run=self.run.entry,
                    precision=self.run.label,
                    metric=metric,
                    instance=key,
                    direction=direction,
                    baseline_score=scores[0],
                    score=scores[1],
                    prompt=new.prompt or old.prompt,
                    references=new.references or old.references,
                    baseline_answer=old.text,
                    answer=new.text,
                    baseline_logprob=old.logprob,
                    logprob=new.logprob,
                    baseline_folder=self.base.name,
                    folder=self.run.name,
                )
            )
        return flips


@dataclass(frozen=True)
class ModelComparison:
    """All comparisons of a model, or of all models with one of them: each is then in the place of a
    precision.

    runs: their finished runs that have scores. pairs: (run entry, precision) -> the runs that are
        compared.
    pooled: comparisons over all instances of a scenario's runs, where it has several, such as the
        subjects of MMLU.
    speeds: of the compared runs of each precision.
        Precisions may differ in their instances.
    notes: sentences, without full stops, about what could not be compared.
    """

    model: str
    baseline: str
    margin: float
    runs: Sequence[RunScores]
    pairs: Mapping[tuple[str, str], RunPair]
    comparisons: Sequence[Comparison]
    pooled: Sequence[Comparison]
    speeds: Sequence[TotalSpeed]
    notes: Sequence[str]

    @property
    def kind(self) -> str:
        """What is compared."""
        return "model" if self.runs[0].against else "precision"

    @cached_property
    def base(self) -> RunScores:
        """A run of the baseline, one that knows the types of its files if there is one."""
        runs = [run for run in self.runs if run.label == self.baseline]
        return max(runs, key=lambda run: bool(run.stored))

    @cached_property
    def inconclusive(self) -> list[str]:
        """Models that are compared with another one which is not of full precision."""
        base, lacks = self.base, self.base.is_full_precision is False
        runs = [pair.run for pair in self.pairs.values()]
        return list(dict.fromkeys(run.label for run in runs if lacks and run.model != base.model))

    @cached_property
    def remedy(self) -> str:
        """The command with a baseline of full precision; empty where none is lacking."""
        base = self.base
        if not self.inconclusive or base.folder is None:
            return ""
        suite = base.folder.parent.name
        original = original_of(base.model) or original_of(str(base.record.get("origin")))
        if full := [label for (_, label), pair in self.pairs.items() if pair.run.is_full_precision]:
            best = [*closest(original or base.label, full), *full]
            return f"flexgen-helm compare --suite {suite} --baseline {best[0]}"
        entries = [entry for entry, label in self.pairs if label == self.inconclusive[0]]
        entries = entries if len(entries) < 4 else ["ENTRY"]
        named = [
            f"{entry}{',:'[':' not in entry]}model=flexgen/{original or 'ORIGINAL'}"
            for entry in entries
        ]
        return (
            f"flexgen-helm run -r {shlex.join(named)} -m {asked_instances(base.folder) or 'N'} "
            f"--suite {suite}"
        )

    @cached_property
    def by_scenario(self) -> list[Comparison]:
        """The comparisons, those of a pool in place of its runs'."""
        pooled = {
            (comparison.precision, comparison.run.partition(" (")[0]) for comparison in self.pooled
        }
        alone = [
            comparison
            for comparison in self.comparisons
            if (comparison.precision, comparison.run.partition(":")[0]) not in pooled
        ]
        return [*self.pooled, *alone]

    def judged(self, precision: str) -> list[Comparison]:
        """Return what a precision is judged by: the first metric of each run entry that has a
        verdict.
        """
        judged: dict[str, Comparison] = {}
        for comparison in self.by_scenario:
            if comparison.precision == precision and comparison.equivalence is not None:
                judged.setdefault(comparison.run, comparison)
        return list(judged.values())

    def is_everywhere(self, precision: str, *decisions: Decision) -> bool:
        """Whether a precision has one of the verdicts on every run entry, or pool of them."""
        judged = self.judged(precision)
        known = {
            comparison.run
            for comparison in judged
            if comparison.equivalence and comparison.equivalence.decision in decisions
        }
        return known == {comparison.run for comparison in self.by_scenario}

    @cached_property
    def verdicts(self) -> dict[str, SuiteEquivalence]:
        """Precision -> verdict over all run entries."""
        judged = {
            comparison.precision: self.judged(comparison.precision)
            for comparison in self.comparisons
        }
        verdicts = {
            precision: suite_equivalence(comparisons, self.margin)
            for precision, comparisons in judged.items()
            if comparisons
        }
        for model in verdicts.keys() & self.inconclusive:
            verdicts[model] = replace(
                verdicts[model], text="inconclusive: no full-precision baseline"
            )
        return verdicts


def compare_suite(
    folder: Path, baseline: str = "fp16", margin: float = DEFAULT_MARGIN
) -> list[ModelComparison]:
    """Compare every model of the suite in `folder` that has runs in `baseline` and in another
    precision.

    baseline: a precision; or a model, with its suffix, with which all others are compared.
    margin: differences within it count as equivalent.

    Raises `UsageError` if there is no such model.
    """
    runs = read_finished_runs(folder)
    models = sorted({str(run.record.get("model")) for run in runs})
    precisions = "4bit,fp16" if baseline == "4bit" else f"{baseline},4bit"
    remedy = (
        "run the same entries in two precisions, for example with flexgen-helm run --precision "
        f"{precisions}"
    )
    if baseline in models:
        runs = [replace(run, against=baseline) for run in runs]
        remedy = "run the same entries with another model"
    elif baseline not in {*PRECISIONS, *(run.precision for run in runs)}:
        known = ", ".join([*PRECISIONS, *models])
        raise UsageError(
            f"the baseline {baseline!r} is no precision or model of the suite; take one of {known}"
        )
    elif len(models) > 1:
        remedy = f"compare models with --baseline {models[0]}, or {remedy}"
    if compared := compare_runs(runs, baseline, margin):
        return compared
    available = ", ".join(
        dict.fromkeys(f"{run.model} in {run.precision}" for run in runs if run.num_scored)
    )
    raise UsageError(
        f"nothing to compare in {folder}: it has "
        f"{available or 'no finished runs of flexgen models'}; {remedy}"
    )


def compare_runs(
    runs: Iterable[RunScores], baseline: str = "fp16", margin: float = DEFAULT_MARGIN
) -> list[ModelComparison]:
    """Compare what can be compared of runs that are already read."""
    by_model = grouped(
        (run for run in runs if run.num_scored), lambda run: run.against or run.model
    )
    compared = [_compare_model(name, group, baseline, margin) for name, group in by_model.items()]
    return _decided([model for model in compared if model.comparisons])


class _Judged(NamedTuple):
    """What is tested; metrics of a run with equal numbers are one test."""

    model: str
    run: str
    precision: str
    p_value: float | None
    equivalence_p_value: float

    @classmethod
    def of(cls, model: ModelComparison, comparison: Comparison) -> _Judged:
        verdict = comparison.equivalence
        return cls(
            model.model,
            comparison.run,
            comparison.precision,
            comparison.p_value,
            1.0 if verdict is None else verdict.p_value,
        )


def _decided(models: Sequence[ModelComparison]) -> list[ModelComparison]:
    """Return the models with verdicts, corrected for all comparisons that have one; runs of a pool
    have none.
    """
    judged = list(
        dict.fromkeys(
            _Judged.of(model, comparison)
            for model in models
            for comparison in model.by_scenario
            if comparison.equivalence
        )
    )
    equal = hochberg([test.equivalence_p_value for test in judged])
    different = hochberg([1.0 if test.p_value is None else test.p_value for test in judged])
    corrected = dict(zip(judged, zip(equal, different)))

    def decided(model: ModelComparison, comparisons: Sequence[Comparison]) -> list[Comparison]:
        return [
            decide(comparison, *corrected[test])
            if comparison.equivalence and (test := _Judged.of(model, comparison)) in corrected
            else replace(comparison, equivalence=None)
            for comparison in comparisons
        ]

    return [
        replace(
            model,
            comparisons=decided(model, model.comparisons),
            pooled=decided(model, model.pooled),
        )
        for model in models
    ]


def _compare_model(
    model: str, runs: Sequence[RunScores], baseline: str, margin: float
) -> ModelComparison:
    comparisons: list[Comparison] = []
    notes: list[str] = []
    pairs: dict[tuple[str, str], RunPair] = {}
    compared: list[RunScores] = []
    ranked = sorted(runs, key=lambda run: (run.entry, precision_rank(run.label)))
    for entry, group in grouped(ranked, lambda run: run.entry).items():
        by_precision = {run.label: run for run in group}
        base = by_precision.get(baseline)
        if base is None or len(by_precision) == 1:
            notes.append(f"{entry} was run in {', '.join(by_precision)} only and is left out")
            continue
        compared += by_precision.values()
        for run in by_precision.values():
            if run is not base:
                pair = pairs[entry, run.label] = RunPair(base, run)
                notes += pair.notes
                comparisons += pair.comparisons(margin, notes)
    compared.sort(key=lambda run: precision_rank(run.label))
    pooled = [
        comparison
        for pair in _paired_pools(compared, baseline)
        for comparison in pair.comparisons(margin, [])
    ]
    notes += [*overlap_notes(compared), *_speed_notes(compared), *trust_notes(compared)]
    if all(run.record.get("batch_invariant") for run in compared):
        notes.append(
            "All runs have --batch-invariant: no answer follows its batch, so the floor of noise "
            "is zero"
        )
    notes, speeds = list(dict.fromkeys(notes)), total_speeds(compared)
    return ModelComparison(model, baseline, margin, runs, pairs, comparisons, pooled, speeds, notes)


def _paired_pools(compared: Sequence[RunScores], baseline: str) -> Iterator[RunPair]:
    """Yield the pools of each precision with those of the baseline, over the run entries that both
    have.
    """
    for precision in dict.fromkeys(run.label for run in compared if run.label != baseline):
        entries = {run.entry for run in compared if run.label == precision}
        both = [
            run for run in compared if run.entry in entries and run.label in (baseline, precision)
        ]
        pools = {(run.entry, run.label): run for run in pool_by_scenario(both) if run.num_runs > 1}
        for (entry, label), pool in pools.items():
            if label == precision and (entry, baseline) in pools:
                yield RunPair(pools[entry, baseline], pool)


def _speed_notes(runs: Sequence[RunScores]) -> list[str]:
    """Return notes on what keeps the speeds of precisions from being comparable."""
    by_precision = grouped(runs, lambda run: run.label)
    instances = {
        precision: frozenset(
            (run.entry, instance) for run in group for instance in run.instances.index
        )
        for precision, group in by_precision.items()
    }
    notes = reused_note(runs)
    if len(set(instances.values())) > 1:
        counts = (
            f"{precision} has {len(instances[precision]):,} instances of {count(len(group), 'run')}"
            for precision, group in by_precision.items()
        )
        notes = [f"tokens/s are not of the same work: {', '.join(counts)}", *notes]
    return notes


def flip_groups(models: Sequence[ModelComparison], most: int = sys.maxsize) -> Iterator[FlipGroup]:
    """Return the flips of each model, precision and direction, of all metrics.

    An instance is once in a direction, with the first metric that flips it so; it has changed where
    no metric did.

    most: flips of a group whose answers are read.
    """
    for model in models:
        metrics: dict[str, dict[str, list[str]]] = {}
        for comparison in model.comparisons:
            if comparison.flips is not None:
                metrics.setdefault(comparison.precision, {}).setdefault(comparison.run, []).append(
                    comparison.metric
                )
        for precision in sorted(metrics, key=precision_rank):
            pairs = [
                (model.pairs[entry, precision], names)
                for entry, names in metrics[precision].items()
            ]
            flipped = [pair.flipped(names) for pair, names in pairs]
            for direction in DIRECTIONS:
                flips: list[Flip] = []
                for (pair, _), by_direction in zip(pairs, flipped):
                    if shown := dict(islice(by_direction[direction].items(), most - len(flips))):
                        flips += pair.flips(direction, shown)
                if total := sum(len(by_direction[direction]) for by_direction in flipped):
                    yield FlipGroup(model.model, precision, model.baseline, direction, total, flips)
