"""One model in several precisions over the runs of a suite: differences by instance, with intervals and tests.

A figure of a run is a function of sums over its instances (`_FIGURES`), so both precisions' figures and their
difference can be computed anew for any draw of instances. Both are always taken over the same instances.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.checkpoint.names import split_precision
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.scores import RunScores, read_scores, reused_note

Change = Literal["difference", "ratio"]
Vector = NDArray[np.float64]

# Of the bootstrap and of the permutation test; drawn from one seed, so that a repeated comparison says the same.
RESAMPLES = 9999
_SEED = 0
# Elements of resampled instances at once.
_BATCH = 4_000_000
_MODEL = re.compile(r"model=[^,]*,?")
ORDER = tuple(PRECISIONS)


@dataclass(frozen=True)
class _Figure:
    """shape(sum of `top` / sum of `bottom`); bottom None: the number of instances. change: how two are compared."""

    top: str
    bottom: str | None
    shape: Callable[[Any], Any]
    change: Change


def _perplexity(units: str | None) -> _Figure:
    return _Figure("logprob", units, lambda mean: np.exp(-mean), "ratio")


_FIGURES = {
    "target_perplexity": _perplexity(None),
    "word_perplexity": _perplexity("num_words"),
    "byte_perplexity": _perplexity("num_bytes"),
    "token_perplexity": _perplexity("num_perplexity_tokens"),
    "perplexity": _perplexity("num_perplexity_tokens"),
    "bits_per_byte": _Figure("logprob", "num_bytes", lambda mean: -mean / math.log(2), "difference"),
    "logprob_per_byte": _Figure("logprob", "num_bytes", lambda mean: mean, "difference"),
}


@dataclass(frozen=True)
class PairedTest:
    """name: 'McNemar' (exact) or 'permutation' (signs of the differences by instance). lost, won: instances that
    only the baseline, or only the other precision, has right."""

    name: Literal["McNemar", "permutation"]
    p_value: float
    lost: int | None = None
    won: int | None = None


@dataclass(frozen=True)
class Comparison:
    """One figure of one run. value, baseline: over the shared instances; change: value - baseline, or value / baseline;
    interval: of the change, 95 %. interval and test are None where the figure is no function of its instances', or
    there is only one."""

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
class Speed:
    """Totals of the compared runs, which need not be the same in all precisions: instances, tokens asked for, and
    seconds of the engine; num_reused: answers whose seconds are those of an earlier run."""

    precision: str
    instances: int
    tokens: int
    latency_s: float
    num_reused: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.latency_s if self.latency_s else 0.0


@dataclass(frozen=True)
class ModelComparison:
    """notes: what could not be compared, a sentence each."""

    model: str
    comparisons: list[Comparison]
    speeds: list[Speed]
    notes: list[str]


@dataclass(frozen=True)
class _Run:
    """One run folder: model and precision apart, its name without them, and its statistics by instance."""

    name: str
    model: str
    precision: str
    scores: RunScores
    instances: dict[str, dict[str, float]]


def compare_suite(folder: Path, baseline: str = "fp16") -> list[ModelComparison]:
    """Every model of the suite in `folder` that has runs in `baseline` and in other precisions.

    Raises `UsageError` where there is nothing to compare.
    """
    if baseline not in PRECISIONS:
        raise UsageError(f"the baseline {baseline!r} is no precision; take one of {', '.join(PRECISIONS)}")
    if not folder.is_dir():
        raise UsageError(f"there is no suite in {folder}; run one first, or name another folder with -o")
    runs = [run for run in map(_read, sorted(folder.iterdir())) if run is not None]
    by_model: dict[str, list[_Run]] = {}
    for run in runs:
        by_model.setdefault(run.model, []).append(run)
    found = [_compare_model(model, own, baseline) for model, own in by_model.items()]
    compared = [each for each in found if each.comparisons]
    if compared:
        return compared
    seen = ", ".join(f"{run.model} in {run.precision}" for run in {(r.model, r.precision): r for r in runs}.values())
    other = "4bit" if baseline != "4bit" else "fp16"
    raise UsageError(
        f"nothing to compare in {folder}: it has {seen or 'no finished runs of flexgen models'}; run the same entries "
        f"in two precisions, for example with flexgen-helm run --precision {baseline},{other}"
    )


def _compare_model(model: str, runs: Sequence[_Run], baseline: str) -> ModelComparison:
    by_name: dict[str, dict[str, _Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, {})[run.precision] = run
    comparisons: list[Comparison] = []
    notes: list[str] = []
    spent: dict[str, list[_Run]] = {}
    for name, own in by_name.items():
        if baseline not in own or len(own) == 1:
            only = ", ".join(sorted(own, key=_rank))
            notes.append(f"{name} is there in {only} only and is left out")
            continue
        for precision in sorted(own, key=_rank):
            spent.setdefault(precision, []).append(own[precision])
        others = [own[precision] for precision in sorted(own, key=_rank) if precision != baseline]
        for metric in own[baseline].scores.scores:
            found = [_compare(metric, own[baseline], other, notes) for other in others if _has(other, metric)]
            comparisons += [each for each in found if each is not None]
    speeds = [_speed(precision, spent[precision]) for precision in sorted(spent, key=_rank)]
    notes += _speed_notes(spent)
    return ModelComparison(model, comparisons, speeds, list(dict.fromkeys(notes)))


def _has(run: _Run, metric: str) -> bool:
    return metric in run.scores.scores


def _compare(metric: str, base: _Run, other: _Run, notes: list[str]) -> Comparison | None:
    """One figure in two precisions; None, and a note, where it cannot be taken over the same instances."""
    shared = [key for key in base.instances if key in other.instances]
    for run in (base, other):
        if missing := len(run.instances) - len(shared):
            notes.append(f"{missing} instances of {run.name} are in {run.precision} only and are left out")
    figure = _FIGURES.get(metric, _Figure(metric, None, lambda mean: mean, "difference"))
    told = base.scores.scores[metric], other.scores.scores[metric]
    mine, theirs = (_column(run, shared, figure.top) for run in (base, other))
    units = np.ones(len(shared)) if figure.bottom is None else _column(base, shared, figure.bottom)
    whole = len(shared) == len(base.instances) == len(other.instances)
    values, interval, test = told, None, None
    if shared and mine is not None and theirs is not None and units is not None and units.sum() > 0:
        computed = tuple(float(figure.shape(side.sum() / units.sum())) for side in (mine, theirs))
        # What HELM aggregates in another way (an F1 over classes, say) is no function of these sums.
        if not whole or all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(computed, told)):
            values = computed[0], computed[1]
            interval, test = _interval(figure, mine, theirs, units), _test(mine, theirs)
    elif not whole:
        notes.append(
            f"{metric} of {base.name} in {other.precision} is left out, because {base.precision} has other instances "
            "and it cannot be taken over the shared ones alone"
        )
        return None
    change = float(_apart(figure.change)(values[1], values[0]))
    return Comparison(
        base.name, metric, other.precision, len(shared), values[0], values[1], figure.change, change, interval, test
    )


def _apart(change: Change) -> Callable[[Any, Any], Any]:
    return np.divide if change == "ratio" else np.subtract


def _interval(figure: _Figure, base: Vector, other: Vector, units: Vector) -> tuple[float, float] | None:
    """95 % of the change, by drawing instances with repetition (percentile bootstrap)."""
    from scipy.stats import bootstrap

    if len(base) < 2:
        return None

    def change(a: Vector, b: Vector, n: Vector, axis: int = -1) -> Any:
        below = n.sum(axis)
        return _apart(figure.change)(figure.shape(b.sum(axis) / below), figure.shape(a.sum(axis) / below))

    if np.array_equal(base, other):
        same = float(change(base, other, units))
        return same, same
    found = bootstrap(
        (base, other, units),
        change,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH // len(base)),
        method="percentile",
        random_state=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def _test(base: Vector, other: Vector) -> PairedTest | None:
    """Whether the differences by instance are as likely one way as the other; None where there is one to tell by."""
    from scipy.stats import binomtest, permutation_test

    if np.isin(base, (0, 1)).all() and np.isin(other, (0, 1)).all():
        lost, won = int(((base == 1) & (other == 0)).sum()), int(((base == 0) & (other == 1)).sum())
        p_value = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
        return PairedTest("McNemar", p_value, lost, won)
    if len(base) < 2:
        return None
    if np.array_equal(base, other):
        return PairedTest("permutation", 1.0)
    found = permutation_test(
        (base, other),
        lambda a, b, axis: (b - a).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH // len(base)),
        random_state=np.random.default_rng(_SEED),
    )
    return PairedTest("permutation", float(found.pvalue))


def _speed(precision: str, runs: Sequence[_Run]) -> Speed:
    records = [run.scores.run for run in runs]
    work = [record.get("workload", {}) for record in records]
    tokens = sum(each.get("prompt_tokens", 0) + each.get("output_tokens", 0) for each in work)
    instances = sum(len(run.instances) for run in runs)
    seconds = sum(record.get("latency_s", 0.0) for record in records)
    return Speed(precision, instances, tokens, seconds, sum(run.scores.num_reused for run in runs))


def _speed_notes(spent: Mapping[str, Sequence[_Run]]) -> list[str]:
    """What keeps the speeds of precisions from being compared with each other."""
    notes: list[str] = []
    done = {
        precision: {(run.name, instance) for run in runs for instance in run.instances}
        for precision, runs in spent.items()
    }
    precisions = sorted(spent, key=_rank)
    if any(done[precision] != done[precisions[0]] for precision in precisions):
        counts = ", ".join(
            f"{precision} has {len(done[precision]):,} instances of {len(spent[precision]):,} "
            + ("runs" if len(spent[precision]) > 1 else "run")
            for precision in precisions
        )
        notes.append(f"tokens a second are not of the same work: {counts}")
    reused = reused_note(run.scores for runs in spent.values() for run in runs)
    return notes if reused is None else [*notes, reused]


def _column(run: _Run, keys: Iterable[str], stat: str) -> Vector | None:
    """A statistic of each instance, None where some instance has none."""
    values = [run.instances[key].get(stat) for key in keys]
    return None if any(value is None for value in values) else np.array(values, dtype=np.float64)


def _rank(precision: str) -> tuple[int, str]:
    return (ORDER.index(precision) if precision in ORDER else len(ORDER), precision)


def _read(folder: Path) -> _Run | None:
    """The run in a folder, None where it is no finished run of a model of ours."""
    try:
        scores = read_scores(folder)
        per_instance = json.loads((folder / "per_instance_stats.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return None
    model, precision = scores.run.get("model"), scores.run.get("precision")
    if model is None or precision is None:
        return None
    base, suffix = split_precision(model)
    model = base if suffix == precision else model
    name = _MODEL.sub("", folder.name).rstrip(",:")
    return _Run(name, model, precision, scores, _by_instance(per_instance))


def _by_instance(entries: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """instance -> statistic -> its mean over trials: of the split that is scored, without perturbed instances."""
    gathered: dict[str, dict[str, dict[str, list[float]]]] = {"test": {}, "valid": {}}
    for entry in entries:
        for stat in entry["stats"]:
            name = stat["name"]
            if name.get("split") in gathered and "perturbation" not in name and stat.get("count"):
                own = gathered[name["split"]].setdefault(entry["instance_id"], {})
                own.setdefault(name["name"], []).append(float(stat["mean"]))
    chosen = gathered["test"] or gathered["valid"]
    return {key: {name: sum(v) / len(v) for name, v in stats.items()} for key, stats in chosen.items()}
