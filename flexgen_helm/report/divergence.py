"""What two runs that score the same tokens say of a precision: perplexities, the same top token, and KL divergence."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_helm.errors import UsageError
from flexgen_helm.files import read_object
from flexgen_helm.report.paired import Interval, RatioOfSums, Vector


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of one text in two precisions, in order.

    documents: [tokens] number of the document that each token is in.
    baseline, other: [tokens] log-probabilities of the tokens.
    same_top: [tokens] whether both have the same most probable token.
    sampled: [rows] places of the tokens whose whole rows were compared.
    exact: [rows] their KL divergence.
    """

    documents: NDArray[np.int64]
    baseline: Vector
    other: Vector
    same_top: NDArray[np.bool_]
    sampled: NDArray[np.int64]
    exact: Vector


@dataclass(frozen=True)
class Spread:
    """KL divergence over some tokens, in nats.

    interval: of the mean, 95 %, resampled by document; None for a single document.
    """

    tokens: int
    mean: float
    interval: Interval | None
    median: float
    p99: float
    largest: float


@dataclass(frozen=True)
class Divergence:
    """How far a precision is from the baseline on a text.

    baseline_perplexity, perplexity, ratio, interval: ratio = perplexity / baseline_perplexity with its 95 % interval,
        resampled by document; None for a single document.
    same_top: share of the tokens at which both have the same most probable token.
    kl: KL(baseline ‖ precision) of the tokens whose whole rows were compared.
    """

    baseline: str
    precision: str
    tokens: int
    documents: int
    baseline_perplexity: float
    perplexity: float
    ratio: float
    interval: Interval | None
    same_top: float
    kl: Spread


@dataclass(frozen=True)
class TextDivergence:
    """What `flexgen-helm divergence` found: divergences from one baseline on one text.

    model, text: as the user named them. window: tokens of a window.
    """

    model: str
    text: str
    window: int
    precisions: tuple[Divergence, ...]


@dataclass(frozen=True)
class EntryDivergence:
    """Divergences from one baseline on the runs of one run entry."""

    entry: str
    precisions: tuple[Divergence, ...]


@dataclass(frozen=True)
class SuiteDivergence:
    """What `flexgen-helm divergence --suite` found; model: as the user named it. suite: its name."""

    model: str
    suite: str
    entries: tuple[EntryDivergence, ...]


def read_divergence(
    path: Path, models: Collection[str], baseline: str, suite: str
) -> dict[str, TextDivergence | SuiteDivergence]:
    """Read what `flexgen-helm divergence --json` has printed, and return it by the model's name.

    models, suite: what is compared. Raises `UsageError` for another file, model, suite or baseline.
    """
    content = read_object(path)
    found: TextDivergence | SuiteDivergence
    try:
        if "suite" in content:
            entries = [EntryDivergence(str(each["entry"]), _divergences(each)) for each in content["entries"]]
            found = SuiteDivergence(str(content["model"]), str(content["suite"]), tuple(entries))
            precisions = [each for entry in entries for each in entry.precisions]
        else:
            precisions = [*_divergences(content)]
            found = TextDivergence(
                str(content["model"]), str(content["text"]), int(content["window"]), tuple(precisions)
            )
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"--divergence {path} is not what `flexgen-helm divergence --json` prints") from None
    name = found.model.removeprefix("flexgen/").replace("/", "--")
    if name not in models:
        raise UsageError(f"--divergence {path} is of the model {name}, and the suite has {', '.join(models)}")
    if isinstance(found, SuiteDivergence) and found.suite != suite:
        raise UsageError(f"--divergence {path} is of the suite {found.suite}, and the comparison is of {suite}")
    if others := {each.baseline for each in precisions} - {baseline}:
        raise UsageError(f"--divergence {path} is from {', '.join(others)}, and the comparison is with {baseline}")
    return {name: found}


def _divergences(content: Mapping[str, Any]) -> tuple[Divergence, ...]:
    return tuple(map(_divergence, content["precisions"]))


def _divergence(record: Mapping[str, Any]) -> Divergence:
    """Return a divergence from JSON, where null stands for infinite. Raises `KeyError`, `TypeError` or `ValueError`."""
    values = dict(record)
    for name in ("baseline_perplexity", "perplexity", "ratio", "same_top"):
        values[name] = _number(values[name])
    spread = values["kl"]
    mean, *others = (_number(spread[key]) for key in ("mean", "median", "p99", "largest"))
    values["kl"] = Spread(int(spread["tokens"]), mean, _pair(spread["interval"]), *others)
    return Divergence(**{**values, "interval": _pair(values["interval"])})


def _pair(interval: Any) -> Interval | None:
    if interval is None:
        return None
    low, high = map(_number, interval)
    return low, high


def _number(value: Any) -> float:
    return math.inf if value is None else float(value)


def divergence_between(baseline: str, precision: str, scored: ScoredTokens) -> Divergence:
    """Summarize what was scored; baseline, precision: their names."""
    every = np.arange(len(scored.documents))
    loss = _by_document(scored.baseline - scored.other, every, scored.documents)
    interval = _interval(loss)
    return Divergence(
        baseline,
        precision,
        len(every),
        len(loss.changes),
        _exp(-math.fsum(scored.baseline) / len(every)),
        _exp(-math.fsum(scored.other) / len(every)),
        _exp(loss.value),
        None if interval is None else (_exp(interval[0]), _exp(interval[1])),
        float(scored.same_top.mean()),
        _spread(scored.exact, scored.sampled, scored.documents),
    )


def _spread(values: Vector, places: NDArray[np.int64], documents: NDArray[np.int64]) -> Spread:
    mean = _by_document(values, places, documents)
    median, p99 = np.quantile(values, [0.5, 0.99])
    return Spread(len(values), mean.value, _interval(mean), float(median), float(p99), float(values.max()))


def _by_document(values: Vector, places: NDArray[np.int64], documents: NDArray[np.int64]) -> RatioOfSums:
    """Return the sum and the number of the values of each document that has any."""
    own: Any = documents[places]
    counts = np.bincount(own).astype(np.float64)
    has_any = counts > 0
    sums: Vector = np.bincount(own, weights=values).astype(np.float64)
    return RatioOfSums(sums[has_any], counts[has_any])


def _interval(change: RatioOfSums) -> Interval | None:
    return change.interval() if len(change.changes) > 1 else None


def _exp(exponent: float) -> float:
    """Return e to a power, infinite where a float cannot hold it."""
    with np.errstate(over="ignore"):
        return float(np.exp(exponent))
