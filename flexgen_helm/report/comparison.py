"""Compare a model's precisions over the runs of a suite, instance by instance."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_helm.checkpoint.names import split_precision
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.paired import (
    Change,
    PairedTest,
    Vector,
    bootstrap_interval,
    change_between,
    metric_named,
    paired_test,
)
from flexgen_helm.report.scores import RunScores, read_finished_runs, reused_note

if TYPE_CHECKING:
    import pandas as pd

_MODEL_ARGUMENT = re.compile(r"model=[^,]*,?")


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

    speeds: a row per precision with totals of its compared runs: instances, requested tokens, latency_s, tokens_per_s,
        num_reused (answers whose seconds were measured by an earlier run). Precisions may differ in their instances.
    notes: sentences, without full stops, about what could not be compared.
    """

    model: str
    comparisons: list[Comparison]
    speeds: pd.DataFrame
    notes: list[str]


@dataclass(frozen=True)
class _Run:
    """A finished run. name: without its model; instances: a row per instance, a column per statistic."""

    name: str
    model: str
    precision: str
    scores: RunScores
    instances: pd.DataFrame


def compare_suite(folder: Path, baseline: str = "fp16") -> list[ModelComparison]:
    """Compare every model of the suite in `folder` that has runs in `baseline` and in another precision.

    Raises `UsageError` if there is no such model.
    """
    if baseline not in PRECISIONS:
        raise UsageError(f"the baseline {baseline!r} is no precision; take one of {', '.join(PRECISIONS)}")
    finished = read_finished_runs(folder)
    runs = [run for run in (_read_run(folder, scores) for scores in finished) if run is not None]
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
                "comparisons": [asdict(comparison) for comparison in model.comparisons],
                "speed": model.speeds.to_dict("records"),
                "notes": model.notes,
            }
            for model in models
        },
    }


def _compare_model(model: str, runs: Sequence[_Run], baseline: str) -> ModelComparison:
    comparisons: list[Comparison] = []
    notes: list[str] = []
    compared: list[_Run] = []
    for name, group in groupby(sorted(runs, key=lambda run: run.name), key=lambda run: run.name):
        by_precision = {run.precision: run for run in sorted(group, key=_precision_rank)}
        base = by_precision.get(baseline)
        if base is None or len(by_precision) == 1:
            notes.append(f"{name} was run in {', '.join(by_precision)} only and is left out")
            continue
        compared += by_precision.values()
        for metric in base.scores.scores:
            for other in by_precision.values():
                if other is not base and metric in other.scores.scores:
                    comparison, metric_notes = _compare_metric(metric, base, other)
                    comparisons += [comparison] if comparison is not None else []
                    notes += metric_notes
    compared.sort(key=_precision_rank)
    notes += _speed_notes(compared)
    return ModelComparison(model, comparisons, _speeds(compared), list(dict.fromkeys(notes)))


def _compare_metric(name: str, base: _Run, other: _Run) -> tuple[Comparison | None, list[str]]:
    """Compare one metric over the shared instances; None if it cannot be computed over them alone. Also notes."""
    shared = base.instances.index.intersection(other.instances.index, sort=False)
    notes = [
        f"{missing} instances of {run.name} are in {run.precision} only and are left out"
        for run in (base, other)
        if (missing := len(run.instances) - len(shared))
    ]
    metric = metric_named(name)
    values = base.scores.scores[name], other.scores.scores[name]
    ours, theirs = (_statistic(run, shared, metric.numerator) for run in (base, other))
    weights = np.ones(len(shared)) if metric.denominator is None else _statistic(base, shared, metric.denominator)
    interval, test = None, None
    if ours is not None and theirs is not None and weights is not None and weights.sum() > 0:
        computed = tuple(float(metric.transform(side.sum() / weights.sum())) for side in (ours, theirs))
        # HELM may aggregate a metric in another way, such as F1 over classes: then it is no function of these sums.
        if notes or all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(computed, values)):
            values = computed[0], computed[1]
            interval, test = bootstrap_interval(metric, ours, theirs, weights), paired_test(ours, theirs)
    elif notes:
        notes.append(
            f"{name} of {base.name} in {other.precision} is left out, because {base.precision} has other instances "
            "and it cannot be computed over the shared ones alone"
        )
        return None, notes
    change = float(change_between(metric.change, values[1], values[0]))
    precision, kind = other.precision, metric.change
    return Comparison(base.name, name, precision, len(shared), *values, kind, change, interval, test), notes


def _speeds(runs: Sequence[_Run]) -> pd.DataFrame:
    """Add up the runs of each precision."""
    import pandas as pd

    rows = [
        (
            run.precision,
            len(run.instances),
            run.scores.workload.get("prompt_tokens", 0) + run.scores.workload.get("output_tokens", 0),
            run.scores.run.get("latency_s", 0.0),
            run.scores.num_reused,
        )
        for run in runs
    ]
    columns = ["precision", "instances", "tokens", "latency_s", "num_reused"]
    totals = pd.DataFrame(rows, columns=columns).groupby("precision", sort=False, as_index=False).sum()
    rates = (totals["tokens"] / totals["latency_s"]).where(totals["latency_s"] > 0, 0.0)
    return totals.assign(tokens_per_s=rates)


def _speed_notes(runs: Sequence[_Run]) -> list[str]:
    """Return notes on what keeps the precisions' speeds from being comparable."""
    notes = []
    instances: dict[str, set[tuple[str, str]]] = {}
    for run in runs:
        instances.setdefault(run.precision, set()).update((run.name, instance) for instance in run.instances.index)
    num_runs = Counter(run.precision for run in runs)
    if len(set(map(frozenset, instances.values()))) > 1:
        counts = ", ".join(
            f"{precision} has {len(own):,} instances of {num_runs[precision]:,} run{'s' * (num_runs[precision] > 1)}"
            for precision, own in instances.items()
        )
        notes.append(f"tokens/s are not of the same work: {counts}")
    reused = reused_note(run.scores for run in runs)
    return notes if reused is None else [*notes, reused]


def _statistic(run: _Run, instances: pd.Index, name: str) -> Vector | None:
    """Return a statistic of the instances; None if one of them has none."""
    if name not in run.instances:
        return None
    values: Vector = run.instances.loc[instances, name].to_numpy(dtype=np.float64)
    return None if np.isnan(values).any() else values


def _precision_rank(run: _Run) -> tuple[int, str]:
    order = tuple(PRECISIONS)
    return (order.index(run.precision) if run.precision in order else len(order), run.precision)


def _read_run(suite: Path, scores: RunScores) -> _Run | None:
    """Add the instances' statistics to the scores of a run; None if HELM has not finished writing them."""
    try:
        per_instance = json.loads((suite / scores.name / "per_instance_stats.json").read_text(encoding="utf-8"))
        model, precision, instances = scores.run["model"], scores.run["precision"], _instances_frame(per_instance)
    except (OSError, ValueError, KeyError):
        return None
    base, suffix = split_precision(model)
    name = _MODEL_ARGUMENT.sub("", scores.name).rstrip(",:")
    return _Run(name, base if suffix == precision else model, precision, scores, instances)


def _instances_frame(per_instance: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row per instance and a column per statistic, averaged over trials.

    Of the split that HELM scores (test, else valid), without perturbations.
    """
    import pandas as pd

    rows = [
        (stat["name"].get("split"), entry["instance_id"], stat["name"]["name"], float(stat["mean"]))
        for entry in per_instance
        for stat in entry["stats"]
        if "perturbation" not in stat["name"] and stat.get("count")
    ]
    stats = pd.DataFrame(rows, columns=["split", "instance", "statistic", "mean"])
    split = "test" if (stats["split"] == "test").any() else "valid"
    return stats[stats["split"] == split].pivot_table("mean", "instance", "statistic", aggfunc="mean", sort=False)
