"""Which precision to take: the cheapest one that is equivalent to the baseline on every run entry.

As many tests are made as precisions cost less than the baseline, so each is made at 5 % divided by their number
(Bonferroni): one that differs by the margin or more is taken in at most 5 % of cases. 'Equivalent on every run entry'
needs no correction: an intersection-union test (Berger, Technometrics 24 (1982), 295-300).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import Comparison, ModelComparison, judged_comparisons
from flexgen_helm.report.paired import LEVEL
from flexgen_helm.report.scores import RunScores, precision_rank
from flexgen_helm.report.verdicts import Equivalence, first_names

Cost = Literal["time", "memory"]
_PLAIN_BYTES, _FLOAT32_BYTES = 2, 4


@dataclass(frozen=True)
class Candidate:
    """A precision and its costs.

    seconds_per_token: over the run entries that all candidates have; None if it is not known.
    weight_bytes, cache_bytes: of a weight of the layers, and of an element of the KV cache, with scales.
    verdict: over all run entries, in words; empty for one that is not cheaper than the baseline.
    """

    precision: str
    seconds_per_token: float | None
    weight_bytes: float
    cache_bytes: float
    verdict: str = ""

    def cost(self, by: Cost) -> tuple[float, ...]:
        if by == "memory":
            return self.weight_bytes, self.cache_bytes
        return (np.inf if self.seconds_per_token is None else self.seconds_per_token,)


@dataclass(frozen=True)
class Choice:
    """The precision to take.

    precision: the cheapest one that is equivalent to the baseline, else the baseline.
    level: of each test.
    candidates: the baseline and the others, the cheapest first.
    text: a sentence that says why. command: with which to go on.
    """

    precision: str
    by: Cost
    margin: float
    level: float
    candidates: Sequence[Candidate]
    text: str
    command: str


def choose_precisions(
    models: Sequence[ModelComparison], runs: Sequence[RunScores], baseline: str, margin: float, by: Cost = "time"
) -> dict[str, Choice]:
    """Choose a precision for each model, by name; raises the first one's `UsageError` if no model has a choice."""
    choices, errors = {}, []
    for model in models:
        try:
            choices[model.model] = choose_precision(model, runs, baseline, margin, by)
        except UsageError as error:
            errors.append(error)
    if not choices:
        raise errors[0]
    return choices


def choose_precision(
    model: ModelComparison, runs: Sequence[RunScores], baseline: str, margin: float, by: Cost = "time"
) -> Choice:
    """Choose among the precisions of a model; runs: those of the suite.

    Raises `UsageError` if none can be judged, or if the time of the baseline is not known.
    """
    compared = [run for run in runs if run.model == model.model and run.num_scored]
    entries_of: dict[str, set[str]] = {}
    for comparison in model.comparisons:
        entries_of.setdefault(comparison.precision, set()).add(comparison.run)
    every = set().union(*entries_of.values())
    judged = {
        precision: judged_comparisons(model.comparisons, model.pooled, precision)
        for precision in sorted(entries_of, key=precision_rank)
        if entries_of[precision] == every and precision in PRECISIONS
    }
    judged = {precision: entries for precision, entries in judged.items() if entries}
    if not judged:
        raise UsageError(
            f"no precision of flexgen/{model.model} can be chosen: none has all {len(every):,} run entries with a "
            "verdict; run the same entries in each precision, with two or more instances and a metric such as "
            "exact_match"
        )
    base, *rest = (_costs(compared, every, precision) for precision in (baseline, *judged))
    if by == "time" and base.seconds_per_token is None:
        raise UsageError(
            f"the time of flexgen/{model.model} in {baseline} is not known, because its runs' flexgen_run.json has "
            "none; take --by memory"
        )
    rest.sort(key=lambda candidate: candidate.cost(by))  # equal ones stay in the order of `PRECISIONS`
    cheaper = [candidate.precision for candidate in rest if candidate.cost(by) < base.cost(by)]
    level = LEVEL / max(1, len(cheaper))
    lacking = {precision: not_equivalent(judged[precision], level) for precision in cheaper}
    verdicts = {precision: verdict_text(entries, margin) for precision, entries in lacking.items()}
    taken = next((precision for precision, entries in lacking.items() if not entries), baseline)
    candidates = sorted(
        (replace(one, verdict=verdicts.get(one.precision, "")) for one in (*rest, base)), key=lambda one: one.cost(by)
    )
    found = {candidate.precision: candidate for candidate in candidates}
    if taken != baseline:
        text = (
            f"take {taken}: it is the cheapest by {by} ({_ratio(found[taken], base, by)}) that is equivalent to "
            f"{baseline} within {100 * margin:g} % or pp in {_entries(len(judged[taken]))}, "
            f"{_at_level(cheaper)}"
        )
    elif not cheaper:
        text = f"stay with {baseline}: no other precision is cheaper by {by}"
    else:
        reasons = "; ".join(f"{precision}: {text}" for precision, text in verdicts.items())
        text = f"stay with {baseline}: no cheaper precision is equivalent, {_at_level(cheaper)} ({reasons})"
    if by == "time" and _is_resident(compared, baseline):
        text += f"; {baseline} ran with all weights in the fastest memory, so this is not the time when offloaded"
    timeless = [candidate.precision for candidate in rest if candidate.seconds_per_token is None]
    if by == "time" and timeless:
        text += f"; {', '.join(timeless)} cannot be chosen by time, because it is not known (flexgen_run.json has none)"
    left_out = [name for name in entries_of if name not in judged]
    if left_out:
        text += f"; {', '.join(left_out)} cannot be chosen, because not all {len(every):,} run entries were judged"
    command = f"flexgen-helm run -r ENTRY:model=flexgen/{model.model} -m N --precision {taken}"
    return Choice(taken, by, margin, level, candidates, text, command)


def _entries(number: int) -> str:
    return f"{number:,} run {'entry' if number == 1 else 'entries'}"


def _at_level(cheaper: Sequence[str]) -> str:
    tests = "" if len(cheaper) == 1 else f" divided by {len(cheaper)} cheaper precisions"
    return f"tested at {100 * LEVEL:g} %{tests}"


def not_equivalent(entries: Sequence[Comparison], level: float) -> list[tuple[str, Equivalence]]:
    """Return the run entries that a test at a level does not show to be equivalent, with their verdicts."""
    verdicts = [(entry.run, entry.equivalence) for entry in entries if entry.equivalence is not None]
    return [(run, verdict) for run, verdict in verdicts if verdict.p_value > level]


def verdict_text(lacking: Sequence[tuple[str, Equivalence]], margin: float) -> str:
    """Say what is known of a precision; lacking: run entries that are not shown to be equivalent."""
    if not lacking:
        return f"equivalent within {100 * margin:g} % or pp"
    for decision in ("worse", "better"):
        if names := [run for run, verdict in lacking if verdict.decision == decision]:
            return f"{decision} in {first_names(names)}"
    run, verdict = max(lacking, key=lambda pair: pair[1].needed or 0)
    if verdict.decision == "equivalent":
        return f"not decided: {run} is equivalent at {100 * LEVEL:g} % alone"
    return f"{verdict.text} ({run})"


def _costs(runs: Iterable[RunScores], entries: set[str], precision: str) -> Candidate:
    of_precision = [run for run in runs if run.precision == precision and run.entry in entries]
    tokens, seconds = sum(run.num_tokens for run in of_precision), sum(run.latency_s for run in of_precision)
    is_known = tokens > 0 and all(run.latency_s > 0 for run in of_precision)
    format_ = PRECISIONS[precision]
    weights, cache = format_.weights, format_.cache
    dtypes = [run.run.get("hardware", {}).get("compute_dtype") for run in of_precision]
    # A cache that is not quantized has the compute type.
    plain = _FLOAT32_BYTES if "float32" in dtypes else _PLAIN_BYTES
    return Candidate(
        precision,
        seconds / tokens if is_known else None,
        _PLAIN_BYTES if weights is None else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
        plain if cache is None else cache.bytes_per_value(plain),
    )


def _is_resident(runs: Iterable[RunScores], precision: str) -> bool:
    """Whether all weights were where they are computed with, as far as records say where they were."""
    shares = []
    for run in runs:
        placement, hardware = run.run.get("achieved_placement"), run.run.get("hardware")
        if run.precision == precision and placement and hardware:
            shares.append(placement.get("weights", {}).get("cpu" if hardware["device"] == "cpu" else "gpu", 0.0))
    return bool(shares) and min(shares) >= 1


def _ratio(one: Candidate, base: Candidate, by: Cost) -> str:
    if by == "time" and one.seconds_per_token and base.seconds_per_token:
        return f"{one.seconds_per_token / base.seconds_per_token:.2f} of {base.precision}'s seconds per token"
    return (
        f"{one.weight_bytes:.2f} bytes per weight and {one.cache_bytes:.2f} per element of the KV cache, "
        f"{base.precision} has {base.weight_bytes:.2f} and {base.cache_bytes:.2f}"
    )
