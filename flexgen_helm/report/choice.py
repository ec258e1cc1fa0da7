"""Which precision to take: the cheapest one that is equivalent to the baseline on every run entry.

As many tests are made as precisions cost less than the baseline, so each is made at 5 % divided by their number
(Bonferroni): one that differs by the margin or more is taken in at most 5 % of cases. 'Equivalent on every run entry'
needs no correction: an intersection-union test (Berger, Technometrics 24 (1982), 295-300).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.paired import LEVEL
from flexgen_helm.report.scores import RunScores, grouped, precision_rank
from flexgen_helm.report.verdicts import Equivalence, first_names

Cost = Literal["time", "memory"]


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


def choose_precisions(models: Sequence[ModelComparison], by: Cost = "time") -> list[ModelComparison]:
    """Return the models with a `choice`; raises the first one's `UsageError` if none of them has one."""
    chosen, errors = [], []
    for model in models:
        choice = None
        try:
            choice = choose_precision(model, by)
        except UsageError as error:
            errors.append(error)
        chosen.append(model.with_extra("choice", choice))
    if len(errors) == len(models):
        raise errors[0]
    return chosen


def choose_precision(model: ModelComparison, by: Cost = "time") -> Choice:
    """Choose among the precisions of a model.

    Raises `UsageError` if none can be judged, or if the time of the baseline is not known.
    """
    if model.kind == "model":
        raise UsageError("--choose takes a precision of one model; with a model as --baseline leave it out")
    baseline, margin = model.baseline, model.margin
    entries = {one.run for one in model.comparisons}
    compared = grouped(model.comparisons, lambda one: one.precision)
    judged = {
        precision: [(one.run, one.equivalence) for one in model.judged(precision) if one.equivalence]
        for precision in sorted(compared, key=precision_rank)
        if {one.run for one in compared[precision]} == entries and precision in PRECISIONS and model.judged(precision)
    }
    if not judged:
        raise UsageError(
            f"no precision of flexgen/{model.model} can be chosen: none has all {len(entries):,} run entries with a "
            "verdict; run the same entries in each precision, with two or more instances and a metric such as "
            "exact_match"
        )
    candidates = [
        _candidate(precision, [run for run in model.runs if run.precision == precision and run.entry in entries])
        for precision in (*judged, baseline)
    ]
    base = candidates[-1]
    if by == "time" and base.seconds_per_token is None:
        raise UsageError(
            f"the time of flexgen/{model.model} in {baseline} is not known, because its runs' flexgen_run.json has "
            "none; take --by memory"
        )
    candidates.sort(key=lambda candidate: candidate.cost(by))  # equal ones stay in the order of `PRECISIONS`
    cheaper = [candidate for candidate in candidates if candidate.cost(by) < base.cost(by)]
    level, tests = LEVEL / max(1, len(cheaper)), f"tested at {100 * LEVEL:g} %"
    if len(cheaper) > 1:
        tests += f" divided by {len(cheaper)} cheaper precisions"
    lacking = {
        candidate.precision: [(run, verdict) for run, verdict in judged[candidate.precision] if verdict.p_value > level]
        for candidate in cheaper
    }
    verdicts = {precision: _verdict(found, margin) for precision, found in lacking.items()}
    taken = next((candidate for candidate in cheaper if not lacking[candidate.precision]), base)
    if taken is not base:
        number = len(judged[taken.precision])
        text = (
            f"take {taken.precision}: it is the cheapest by {by} ({_against(taken, base, by)}) that is equivalent to "
            f"{baseline} within {100 * margin:g} % or pp in {number:,} run {'entry' if number == 1 else 'entries'}, "
            f"{tests}"
        )
    elif not cheaper:
        text = f"stay with {baseline}: no other precision is cheaper by {by}"
    else:
        reasons = "; ".join(f"{precision}: {verdict}" for precision, verdict in verdicts.items())
        text = f"stay with {baseline}: no cheaper precision is equivalent, {tests} ({reasons})"
    # The share of the weights that are where they are computed with, as far as records say where they were.
    resident = [
        run.run["achieved_placement"]
        .get("weights", {})
        .get("cpu" if run.run["hardware"]["device"] == "cpu" else "gpu", 0)
        for run in model.runs
        if run.precision == baseline and run.run.get("achieved_placement") and run.run.get("hardware")
    ]
    if by == "time" and min(resident, default=0) >= 1:
        text += f"; {baseline} ran with all weights in the fastest memory, so this is not the time when offloaded"
    timeless = [candidate.precision for candidate in candidates if candidate.seconds_per_token is None]
    if by == "time" and timeless:
        text += f"; {', '.join(timeless)} cannot be chosen by time, because it is not known (flexgen_run.json has none)"
    if left_out := [name for name in compared if name not in judged]:
        text += f"; {', '.join(left_out)} cannot be chosen, because not all {len(entries):,} run entries were judged"
    command = f"flexgen-helm run -r ENTRY:model=flexgen/{model.model} -m N --precision {taken.precision}"
    candidates = [replace(one, verdict=verdicts.get(one.precision, "")) for one in candidates]
    return Choice(taken.precision, by, margin, level, candidates, text, command)


def _verdict(lacking: Sequence[tuple[str, Equivalence]], margin: float) -> str:
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


def _candidate(precision: str, runs: Sequence[RunScores]) -> Candidate:
    tokens, seconds = sum(run.num_tokens for run in runs), sum(run.latency_s for run in runs)
    is_known = tokens > 0 and all(run.latency_s > 0 for run in runs)
    weights, cache = PRECISIONS[precision].weights, PRECISIONS[precision].cache
    # A cache that is not quantized has the compute type.
    plain = 4 if any(run.run.get("hardware", {}).get("compute_dtype") == "float32" for run in runs) else 2
    return Candidate(
        precision,
        seconds / tokens if is_known else None,
        2 if weights is None else (weights.code_bytes + weights.scale_bytes) / weights.group_size,
        plain if cache is None else cache.bytes_per_value(plain),
    )


def _against(one: Candidate, base: Candidate, by: Cost) -> str:
    if by == "time" and one.seconds_per_token and base.seconds_per_token:
        return f"{one.seconds_per_token / base.seconds_per_token:.2f} of {base.precision}'s seconds per token"
    return (
        f"{one.weight_bytes:.2f} bytes per weight and {one.cache_bytes:.2f} per element of the KV cache, "
        f"{base.precision} has {base.weight_bytes:.2f} and {base.cache_bytes:.2f}"
    )
