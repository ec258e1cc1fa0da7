"""Compare a model's precisions over the runs of a suite, instance by instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.answers import Answer, differing_settings, read_answers
from flexgen_helm.report.paired import Change, PairedScores, PairedTest, metric_named
from flexgen_helm.report.scores import (
    RunScores,
    by_scenario,
    finite,
    overlap_notes,
    precision_rank,
    read_finished_runs,
    reused_note,
    trust_notes,
)
from flexgen_helm.report.verdicts import (
    DEFAULT_MARGIN,
    Equivalence,
    Flips,
    SuiteEquivalence,
    equivalence,
    flips_between,
    suite_equivalence,
)

if TYPE_CHECKING:
    import pandas as pd

    from flexgen_helm.report.choice import Choice
    from flexgen_helm.report.divergence import SuiteDivergence, TextDivergence


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
    interval: tuple[float, float] | None
    test: PairedTest | None
    flips: Flips | None = None
    equivalence: Equivalence | None = None

    @property
    def is_worse(self) -> bool:
        metric = metric_named(self.metric)
        return self.value > self.baseline if metric.scale < 0 else self.value < self.baseline


@dataclass(frozen=True)
class ModelComparison:
    """All comparisons of a model.

    pooled: comparisons over all instances of a scenario's runs, where it has several, such as the subjects of MMLU.
    speeds: a row per precision with totals of its compared runs: instances, requested tokens, latency_s, tokens_per_s,
        num_reused (answers whose seconds were measured by an earlier run). Precisions may differ in their instances.
    notes: sentences, without full stops, about what could not be compared.
    verdicts: precision -> verdict over all run entries, pools in place of their runs.
    """

    model: str
    comparisons: list[Comparison]
    pooled: list[Comparison]
    speeds: pd.DataFrame
    notes: list[str]
    verdicts: dict[str, SuiteEquivalence]


def compare_suite(folder: Path, baseline: str = "fp16", margin: float = DEFAULT_MARGIN) -> list[ModelComparison]:
    """Compare every model of the suite in `folder` that has runs in `baseline` and in another precision.

    margin: differences within it count as equivalent.

    Raises `UsageError` if there is no such model.
    """
    return compare_runs(with_baseline(read_finished_runs(folder), baseline), folder, baseline, margin)


def with_baseline(runs: Sequence[RunScores], baseline: str) -> Sequence[RunScores]:
    """Return the runs; where the baseline is a model of theirs, all models are shown as precisions of it."""
    if all(run.run.get("model") != baseline for run in runs):
        return runs
    changes = [{"model": baseline, "precision": run.run.get("model"), "origin": None} for run in runs]
    return [replace(run, run={**run.run, **change}) for run, change in zip(runs, changes, strict=True)]


def compare_runs(
    finished: Sequence[RunScores], folder: Path, baseline: str = "fp16", margin: float = DEFAULT_MARGIN
) -> list[ModelComparison]:
    """Do as `compare_suite` with runs that are already read."""
    models = sorted({str(run.run.get("model")) for run in finished})
    if baseline not in {*PRECISIONS, *(run.precision for run in finished)}:
        known = ", ".join([*PRECISIONS, *models])
        raise UsageError(f"the baseline {baseline!r} is no precision or model of the suite; take one of {known}")
    runs = [run for run in finished if run.num_scored]
    names = dict.fromkeys(run.model for run in runs)
    compared = [_compare_model(name, [run for run in runs if run.model == name], baseline, margin) for name in names]
    if compared := [model for model in compared if model.comparisons]:
        return compared
    available = ", ".join(dict.fromkeys(f"{run.model} in {run.precision}" for run in runs))
    other = "4bit" if baseline != "4bit" else "fp16"
    remedy = f"run the same entries in two precisions, for example with flexgen-helm run --precision {baseline},{other}"
    if len(models) > 1:
        remedy = f"compare models with --baseline {models[0]}, or {remedy}"
    raise UsageError(
        f"nothing to compare in {folder}: it has {available or 'no finished runs of flexgen models'}; {remedy}"
    )


def comparison_to_json(
    models: Sequence[ModelComparison],
    suite: str,
    baseline: str,
    choices: Mapping[str, Choice] | None = None,
    divergences: Mapping[str, TextDivergence | SuiteDivergence] | None = None,
) -> dict[str, Any]:
    """Return what `compare --json` prints; choices, divergences: by model, null for a model without one."""

    def asked(model: str) -> dict[str, Any]:
        given: dict[str, Mapping[str, Any] | None] = {"choice": choices, "divergence": divergences}
        return {
            key: finite(asdict(values[model])) if model in values else None
            for key, values in given.items()
            if values is not None
        }

    return {
        "suite": suite,
        "baseline": baseline,
        "models": {
            model.model: {
                "comparisons": [finite(asdict(comparison)) for comparison in model.comparisons],
                "pooled": [finite(asdict(comparison)) for comparison in model.pooled],
                "speed": model.speeds.to_dict("records"),
                "notes": model.notes,
                "equivalence": {precision: asdict(verdict) for precision, verdict in model.verdicts.items()},
                **asked(model.model),
            }
            for model in models
        },
    }


def _compare_model(model: str, runs: Sequence[RunScores], baseline: str, margin: float) -> ModelComparison:
    comparisons: list[Comparison] = []
    notes: list[str] = []
    compared: list[RunScores] = []
    for name, group in groupby(sorted(runs, key=lambda run: run.entry), key=lambda run: run.entry):
        by_precision = {run.precision: run for run in sorted(group, key=_rank)}
        base = by_precision.get(baseline)
        if base is None or len(by_precision) == 1:
            notes.append(f"{name} was run in {', '.join(by_precision)} only and is left out")
            continue
        compared += by_precision.values()
        new, new_notes = _compare_entry(base, list(by_precision.values()), margin)
        comparisons += new
        notes += new_notes
    compared.sort(key=_rank)
    pooled: list[Comparison] = []
    for precision in dict.fromkeys(run.precision for run in compared if run.precision != baseline):
        for base, other in pools_between(compared, baseline, precision):
            pooled += _compare_entry(base, [other], margin)[0]
    notes += [*overlap_notes(compared), *_speed_notes(compared), *trust_notes(compared)]
    verdicts = _suite_verdicts(comparisons, pooled, margin)
    return ModelComparison(model, comparisons, pooled, _speeds(compared), list(dict.fromkeys(notes)), verdicts)


def pools_between(runs: Sequence[RunScores], baseline: str, precision: str) -> list[tuple[RunScores, RunScores]]:
    """Return the pools over the run entries that both precisions have, as pairs; runs: of one model."""
    entries = {run.entry for run in runs if run.precision == precision}
    both = [run for run in runs if run.entry in entries and run.precision in (baseline, precision)]
    pools = [run for run in by_scenario(both) if run.num_runs > 1]
    of_base = {run.entry: run for run in pools if run.precision == baseline}
    return [(of_base[other.entry], other) for other in pools if other.precision == precision and other.entry in of_base]


def judged_comparisons(
    comparisons: Sequence[Comparison], pooled: Sequence[Comparison], precision: str
) -> list[Comparison]:
    """Return what a precision is judged by: the first metric of each run entry that has a verdict.

    A pool takes the place of its runs.
    """
    own_pools = [each for each in pooled if each.precision == precision]
    in_pools = {each.run.partition(" (")[0] for each in own_pools}
    alone = [each for each in comparisons if each.precision == precision]
    alone = [each for each in alone if each.run.partition(":")[0] not in in_pools]
    judged: dict[str, Comparison] = {}
    for each in (*own_pools, *alone):
        if each.equivalence is not None:
            judged.setdefault(each.run, each)
    return list(judged.values())


def _suite_verdicts(
    comparisons: Sequence[Comparison], pooled: Sequence[Comparison], margin: float
) -> dict[str, SuiteEquivalence]:
    """Judge each precision over its run entries."""
    verdicts = {}
    for precision in dict.fromkeys(each.precision for each in comparisons):
        judged = [
            (each.run, each.equivalence, each.test, each.is_worse)
            for each in judged_comparisons(comparisons, pooled, precision)
            if each.equivalence is not None
        ]
        verdict = suite_equivalence(judged, margin)
        if verdict is not None:
            verdicts[precision] = verdict
    return verdicts


def _compare_entry(base: RunScores, runs: Sequence[RunScores], margin: float) -> tuple[list[Comparison], list[str]]:
    """Compare `base` with the others of `runs`, which are of the same entry, metric by metric. Also notes."""
    notes: list[str] = []
    pairs = []
    for other in runs:
        if other is not base:
            shared, pair_notes = shared_instances(base, other)
            pairs.append((other, shared))
            notes += [*pair_notes, *_setting_notes(base, other)]
    comparisons: list[Comparison] = []
    for metric in base.scores:
        for other, shared in pairs:
            if metric in other.scores:
                comparison = _compare_metric(metric, base, other, shared, margin)
                if comparison is not None:
                    comparisons.append(comparison)
                else:
                    notes.append(
                        f"{metric} of {base.entry} in {other.precision} is left out, because {base.precision} has "
                        "other instances and it cannot be computed over the shared ones alone"
                    )
    return comparisons, notes


def shared_instances(base: RunScores, other: RunScores) -> tuple[pd.Index, list[str]]:
    """Return the instances that both runs have, with the same text under the same id. Also notes on the others."""
    shared = base.instances.index.intersection(other.instances.index, sort=False)
    notes = [
        f"{missing} instances of {run.entry} are in {run.precision} only and are left out"
        for run in (base, other)
        if (missing := run.num_scored - len(shared))
    ]
    unknown = [run.precision for run in (base, other) if not run.digests]
    if unknown:
        notes.append(
            f"{base.entry} is paired by ids of instances alone: {' and '.join(unknown)} has no texts "
            "(scenario_state.json) to compare"
        )
        return shared, notes
    is_same = [base.digests.get(key) == other.digests.get(key) for key in shared]
    if not all(is_same):
        notes.append(
            f"{is_same.count(False):,} of {len(shared):,} instances of {base.entry} ask something else in "
            f"{other.precision} than in {base.precision} under the same id and are left out: the data has changed "
            "between the runs"
        )
    return shared[is_same], notes


def changed_answers(base: RunScores, other: RunScores, shared: pd.Index) -> list[bool] | None:
    """Return which of the shared instances have another answer; None if the answers are not known."""
    if not all(key in run.answers for run in (base, other) for key in shared):
        return None
    return [base.answers[key] != other.answers[key] for key in shared]


def _setting_notes(base: RunScores, other: RunScores) -> list[str]:
    """Return notes on what differs between two runs that are compared, beside their precision."""
    notes = []
    if base.settings and other.settings:
        joint = f" in {base.precision} and "
        if differing := differing_settings(base.settings, other.settings, joint):
            notes.append(f"{base.entry} has other settings in {other.precision}: {differing} in {other.precision}")
    origins = [run.run.get("origin") for run in (base, other)]
    if None not in origins and origins[0] != origins[1]:
        notes.append(
            f"{base.typed_model} means {origins[0]} in {base.precision} and {origins[1]} in {other.precision}, so the "
            "difference is not that of the precision alone"
        )
    if base.prompts and other.prompts and base.prompts != other.prompts:
        notes.append(
            f"Prompts of {base.typed_model} were sent {base.prompts} in {base.precision} and {other.prompts} in "
            f"{other.precision}"
        )
    return notes


def _compare_metric(name: str, base: RunScores, other: RunScores, shared: pd.Index, margin: float) -> Comparison | None:
    """Compare one metric over the shared instances; None if it cannot be computed over them alone."""
    metric = metric_named(name)
    values = base.scores[name], other.scores[name]
    interval = test = flips = verdict = None
    if name in base.terms and name in other.terms and len(shared):
        (baseline, weights), (scores, _) = (run.terms[name].loc[shared].to_numpy().T for run in (base, other))
        values = float(metric.value(baseline, weights)), float(metric.value(scores, weights))
        if np.isfinite(baseline).all() and np.isfinite(scores).all():
            paired = PairedScores(metric, baseline, scores, weights)
            interval, test = paired.interval_and_test()
            flips = flips_between(paired, lambda: changed_answers(base, other, shared))
            has_all = base.has_all_instances and len(shared) == base.num_scored
            verdict = equivalence(paired, test, margin, has_all=has_all)
    elif not len(shared) == base.num_scored == other.num_scored:
        return None
    with np.errstate(all="ignore"):
        change = float(metric.change_between(values[1], values[0]))
    precision, kind = other.precision, metric.change
    count = len(shared)
    return Comparison(base.entry, name, precision, count, *values, kind, change, interval, test, flips, verdict)


def _speeds(runs: Sequence[RunScores]) -> pd.DataFrame:
    """Add up the runs of each precision."""
    import pandas as pd

    rows = [
        (
            run.precision,
            run.num_scored,
            run.num_tokens,
            run.latency_s,
            run.num_reused,
        )
        for run in runs
    ]
    columns = ["precision", "instances", "tokens", "latency_s", "num_reused"]
    totals = pd.DataFrame(rows, columns=columns).groupby("precision", sort=False, as_index=False).sum()
    rates = (totals["tokens"] / totals["latency_s"]).where(totals["latency_s"] > 0, 0.0)
    return totals.assign(tokens_per_s=rates)


def _speed_notes(runs: Sequence[RunScores]) -> list[str]:
    """Return notes on what keeps the precisions' speeds from being comparable."""
    notes = []
    instances: dict[str, set[tuple[str, str]]] = {}
    for run in runs:
        instances.setdefault(run.precision, set()).update((run.entry, instance) for instance in run.instances.index)
    num_runs = Counter(run.precision for run in runs)
    if len(set(map(frozenset, instances.values()))) > 1:
        counts = ", ".join(
            f"{precision} has {len(own):,} instances of {num_runs[precision]:,} run{'s' * (num_runs[precision] > 1)}"
            for precision, own in instances.items()
        )
        notes.append(f"tokens/s are not of the same work: {counts}")
    reused = reused_note(runs)
    return notes if reused is None else [*notes, reused]


def _rank(run: RunScores) -> tuple[int, str]:
    return precision_rank(run.precision)


# Flips: the instances whose score or answer is not that of the baseline, with both answers.

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
class _Pair:
    """Two runs of an entry that are compared, and the metric by which its instances are."""

    base: RunScores
    other: RunScores
    metric: str


def flip_groups(
    models: Sequence[ModelComparison], runs: Sequence[RunScores], baseline: str, most: int | None = None
) -> Iterator[FlipGroup]:
    """Return the flips of each model, precision and direction, of each run entry by its first metric that has any.

    runs: those of the suite. most: flips of a group whose answers are read; None for all.
    """
    by_key = {(run.model, run.entry, run.precision): run for run in runs}
    for model in models:
        pairs: dict[str, dict[str, _Pair]] = {}
        for each in model.comparisons:
            if each.flips is not None:
                base, other = (by_key[model.model, each.run, precision] for precision in (baseline, each.precision))
                pairs.setdefault(each.precision, {}).setdefault(each.run, _Pair(base, other, each.metric))
        for precision in sorted(pairs, key=precision_rank):
            flipped = [(pair, _flipped(pair)) for pair in pairs[precision].values()]
            for direction in DIRECTIONS:
                keys = [(pair, key) for pair, found in flipped for key in found[direction]]
                if keys:
                    flips = list(_with_answers(keys[:most], direction))
                    yield FlipGroup(model.model, precision, baseline, direction, len(keys), flips)


def _flipped(pair: _Pair) -> dict[Direction, list[str]]:
    """Return the ids of the instances that flipped, by direction."""
    shared, _ = shared_instances(pair.base, pair.other)
    before, after = (run.terms[pair.metric].loc[shared, "numerator"].to_numpy() for run in (pair.base, pair.other))
    changed = np.array(changed_answers(pair.base, pair.other, shared) or np.zeros(len(shared)), bool)
    flipped = {"lost": after < before, "won": after > before, "changed": (after == before) & changed}
    return {direction: list(shared[flipped[direction]]) for direction in DIRECTIONS}


def _with_answers(flipped: Sequence[tuple[_Pair, str]], direction: Direction) -> Iterator[Flip]:
    for pair, group in groupby(flipped, key=lambda each: each[0]):
        keys = [key for _, key in group]
        before, after = (read_answers(run, set(keys)) for run in (pair.base, pair.other))
        for key in keys:
            old, new = before.get(key, _NO_ANSWER), after.get(key, _NO_ANSWER)
            scores = [float(run.terms[pair.metric].loc[key, "numerator"]) for run in (pair.base, pair.other)]
            yield Flip(
                model=pair.other.model,
                run=pair.other.entry,
                precision=pair.other.precision,
                metric=pair.metric,
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
                baseline_folder=pair.base.name,
                folder=pair.other.name,
            )
