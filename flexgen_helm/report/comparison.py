"""Compare a model's precisions over the runs of a suite, instance by instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.metrics import Change, metric_named
from flexgen_helm.report.paired import PairedTest, bootstrap_interval, change_between, paired_test
from flexgen_helm.report.scores import RunScores, by_scenario, finite, precision_rank, read_finished_runs, reused_note

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """A metric of a run in one precision, compared with the baseline.

    instances: number of instances that both precisions have; `baseline`, `value` and the rest are over these.
    change: value - baseline (kind 'difference') or value / baseline (kind 'ratio').
    interval: 95 % interval of the change; None, as `test`, for one instance or a metric that is not a mean over them.
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


@dataclass(frozen=True)
class ModelComparison:
    """All comparisons of a model.

    pooled: comparisons over all instances of a scenario's runs, where it has several, such as the subjects of MMLU.
    speeds: a row per precision with totals of its compared runs: instances, requested tokens, latency_s, tokens_per_s,
        num_reused (answers whose seconds were measured by an earlier run). Precisions may differ in their instances.
    notes: sentences, without full stops, about what could not be compared.
    """

    model: str
    comparisons: list[Comparison]
    pooled: list[Comparison]
    speeds: pd.DataFrame
    notes: list[str]


def compare_suite(folder: Path, baseline: str = "fp16") -> list[ModelComparison]:
    """Compare every model of the suite in `folder` that has runs in `baseline` and in another precision.

    Raises `UsageError` if there is no such model.
    """
    return compare_runs(read_finished_runs(folder), folder, baseline)


def compare_runs(finished: Sequence[RunScores], folder: Path, baseline: str = "fp16") -> list[ModelComparison]:
    """Do as `compare_suite` with runs that are already read."""
    if baseline not in PRECISIONS:
        raise UsageError(f"the baseline {baseline!r} is no precision; take one of {', '.join(PRECISIONS)}")
    runs = [run for run in finished if run.num_scored]
    names = dict.fromkeys(run.model for run in runs)
    models = [_compare_model(name, [run for run in runs if run.model == name], baseline) for name in names]
    if compared := [model for model in models if model.comparisons]:
        return compared
    available = ", ".join(dict.fromkeys(f"{run.model} in {run.precision}" for run in runs))
    other = "4bit" if baseline != "4bit" else "fp16"
    raise UsageError(
        f"nothing to compare in {folder}: it has {available or 'no finished runs of flexgen models'}; run the same "
        f"entries in two precisions, for example with flexgen-helm run --precision {baseline},{other}"
    )


def comparison_to_json(models: Sequence[ModelComparison], suite: str, baseline: str) -> dict[str, Any]:
    return {
        "suite": suite,
        "baseline": baseline,
        "models": {
            model.model: {
                "comparisons": [finite(asdict(comparison)) for comparison in model.comparisons],
                "pooled": [finite(asdict(comparison)) for comparison in model.pooled],
                "speed": model.speeds.to_dict("records"),
                "notes": model.notes,
            }
            for model in models
        },
    }


def _compare_model(model: str, runs: Sequence[RunScores], baseline: str) -> ModelComparison:
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
        new, new_notes = _compare_entry(base, list(by_precision.values()))
        comparisons += new
        notes += new_notes
    compared.sort(key=_rank)
    pooled: list[Comparison] = []
    for precision in dict.fromkeys(run.precision for run in compared if run.precision != baseline):
        entries = {run.entry for run in compared if run.precision == precision}
        both = [run for run in compared if run.entry in entries and run.precision in (baseline, precision)]
        pools = [run for run in by_scenario(both) if run.num_runs > 1]
        of_base = {run.entry: run for run in pools if run.precision == baseline}
        for other in pools:
            if other.precision == precision and other.entry in of_base:
                pooled += _compare_entry(of_base[other.entry], [other])[0]
    notes += _speed_notes(compared)
    return ModelComparison(model, comparisons, pooled, _speeds(compared), list(dict.fromkeys(notes)))


def _compare_entry(base: RunScores, runs: Sequence[RunScores]) -> tuple[list[Comparison], list[str]]:
    """Compare `base` with the others of `runs`, which are of the same entry, metric by metric. Also notes."""
    comparisons: list[Comparison] = []
    notes: list[str] = []
    for metric in base.scores:
        for other in runs:
            if other is not base and metric in other.scores:
                comparison, metric_notes = _compare_metric(metric, base, other)
                comparisons += [comparison] if comparison is not None else []
                notes += metric_notes
    return comparisons, notes


def _compare_metric(name: str, base: RunScores, other: RunScores) -> tuple[Comparison | None, list[str]]:
    """Compare one metric over the shared instances; None if it cannot be computed over them alone. Also notes."""
    shared = base.instances.index.intersection(other.instances.index, sort=False)
    notes = [
        f"{missing} instances of {run.entry} are in {run.precision} only and are left out"
        for run in (base, other)
        if (missing := run.num_scored - len(shared))
    ]
    metric = metric_named(name)
    values = base.scores[name], other.scores[name]
    interval, test = None, None
    if name in base.terms and name in other.terms and len(shared):
        (ours, weights), (theirs, _) = (run.terms[name].loc[shared].to_numpy().T for run in (base, other))
        values = float(metric.value(ours, weights)), float(metric.value(theirs, weights))
        if np.isfinite(ours).all() and np.isfinite(theirs).all():
            interval, test = bootstrap_interval(metric, ours, theirs, weights), paired_test(ours, theirs)
    elif notes:
        notes.append(
            f"{name} of {base.entry} in {other.precision} is left out, because {base.precision} has other instances "
            "and it cannot be computed over the shared ones alone"
        )
        return None, notes
    with np.errstate(all="ignore"):
        change = float(change_between(metric.change, values[1], values[0]))
    precision, kind = other.precision, metric.change
    return Comparison(base.entry, name, precision, len(shared), *values, kind, change, interval, test), notes


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
