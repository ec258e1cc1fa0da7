"""Compare a model's precisions, or models, over the runs of a suite, instance by instance."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from flexgen_helm.checkpoint.known_names import original_of
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.notes import reused_notes, trust_notes
from flexgen_helm.report.pools import overlap_notes, pool_by_scenario
from flexgen_helm.report.run_folder import asked_instances
from flexgen_helm.report.run_pair import RunPair
from flexgen_helm.report.scores import RunScores, grouped, precision_rank, read_finished_runs
from flexgen_helm.report.speeds import TotalSpeed, total_speeds
from flexgen_helm.report.verdicts import (
    DEFAULT_MARGIN,
    Comparison,
    Decision,
    SuiteEquivalence,
    decide,
    hochberg,
    suite_equivalence,
)
from flexgen_helm.suggestions import closest
from flexgen_helm.units import count


@dataclass(frozen=True)
class ModelComparison:
    """All comparisons of a model's precisions, or of all models with one of them.

    Where models are compared, what is called a precision here is a model.

    runs: their finished runs that have scores.
    pairs: (run entry, precision) -> the runs that are compared.
    pooled: comparisons over all instances of a scenario's runs, where it has several, such as the
        subjects of MMLU.
    speeds: of the compared runs of each precision, whose instances may differ.
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
    def baseline_run(self) -> RunScores:
        """A run of the baseline, one that knows the types of its files if there is one."""
        runs = [run for run in self.runs if run.label == self.baseline]
        return max(runs, key=lambda run: bool(run.stored))

    @cached_property
    def inconclusive(self) -> list[str]:
        """Models that are compared with another one which is not of full precision."""
        if self.baseline_run.is_full_precision is not False:
            return []
        runs = [pair.run for pair in self.pairs.values()]
        return list(
            dict.fromkeys(run.label for run in runs if run.model != self.baseline_run.model)
        )

    @cached_property
    def remedy(self) -> str:
        """The command that compares with a baseline of full precision; '' where none is lacking."""
        base = self.baseline_run
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

    def main_comparisons(self, precision: str) -> list[Comparison]:
        """Return the comparison that judges each run entry: of its first metric with a verdict."""
        by_entry: dict[str, Comparison] = {}
        for comparison in self.by_scenario:
            if comparison.precision == precision and comparison.equivalence is not None:
                by_entry.setdefault(comparison.run, comparison)
        return list(by_entry.values())

    def is_everywhere(self, precision: str, *decisions: Decision) -> bool:
        """Whether a precision has one of the verdicts on every run entry, or pool of them."""
        decided = {
            comparison.run
            for comparison in self.main_comparisons(precision)
            if comparison.equivalence and comparison.equivalence.decision in decisions
        }
        return decided == {comparison.run for comparison in self.by_scenario}

    @cached_property
    def verdicts(self) -> dict[str, SuiteEquivalence]:
        """Precision -> verdict over all run entries."""
        verdicts = {
            precision: suite_equivalence(judged, self.margin)
            for precision in dict.fromkeys(comparison.precision for comparison in self.comparisons)
            if (judged := self.main_comparisons(precision))
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
        raise UsageError(
            f"the baseline {baseline!r} is no precision or model of the suite; take one of "
            f"{', '.join([*PRECISIONS, *models])}"
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
    return _with_verdicts([model for model in compared if model.comparisons])


class _Test(NamedTuple):
    """A test of 'no change' and of equivalence; metrics of a run with equal p-values are one."""

    model: str
    run: str
    precision: str
    p_value: float | None
    equivalence_p_value: float

    @classmethod
    def of(cls, model: ModelComparison, comparison: Comparison) -> _Test:
        verdict = comparison.equivalence
        return cls(
            model.model,
            comparison.run,
            comparison.precision,
            comparison.p_value,
            1.0 if verdict is None else verdict.p_value,
        )


def _with_verdicts(models: Sequence[ModelComparison]) -> list[ModelComparison]:
    """Return the models with the verdicts of comparisons, corrected for all that are tested.

    A run of a pool has none: its instances are tested with those of the pool.
    """
    tests = list(
        dict.fromkeys(
            _Test.of(model, comparison)
            for model in models
            for comparison in model.by_scenario
            if comparison.equivalence
        )
    )
    equivalence_p = hochberg([test.equivalence_p_value for test in tests])
    change_p = hochberg([1.0 if test.p_value is None else test.p_value for test in tests])
    corrected = dict(zip(tests, zip(equivalence_p, change_p)))

    def decide_all(model: ModelComparison, comparisons: Sequence[Comparison]) -> list[Comparison]:
        return [
            decide(comparison, *corrected[test])
            if comparison.equivalence and (test := _Test.of(model, comparison)) in corrected
            else replace(comparison, equivalence=None)
            for comparison in comparisons
        ]

    return [
        replace(
            model,
            comparisons=decide_all(model, model.comparisons),
            pooled=decide_all(model, model.pooled),
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
    notes = reused_notes(runs)
    if len(set(instances.values())) > 1:
        counts = (
            f"{precision} has {len(instances[precision]):,} instances of {count(len(group), 'run')}"
            for precision, group in by_precision.items()
        )
        notes = [f"tokens/s are not of the same work: {', '.join(counts)}", *notes]
    return notes
