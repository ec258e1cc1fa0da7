"""Runs of one scenario, such as the subjects of MMLU, as one run over all their instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flexgen_helm.report.scores import RunScores, grouped, metric_ratio

# Runs of one scenario that are also shown together.
_MIN_POOLED = 3
# A few questions occur in two data sets. Of fewer distinct ones a pool's standard error would be
# 0.5 % too small.
_MIN_DISTINCT = 0.995
# What a pool adds up of the runs' records, beside the workload.
_SUMMED = (
    "latency_s",
    "num_reused",
    "num_clipped",
    "unfinished_thinking",
)


def pool(runs: Sequence[RunScores]) -> RunScores:
    """Return runs of one scenario, model and precision as one run over all their instances.

    Its scores are those that follow from the instances of every run, so larger runs count more, and
    its record has the sums of tokens and seconds.
    """
    import pandas as pd

    instances = pd.concat({run.entry: run.instances for run in runs})
    common = [name for name in runs[0].scores if all(name in run.ratios for run in runs)]
    scores = {name: metric_ratio(name, instances)[1] for name in common}
    record: dict[str, Any] = {
        **{key: runs[0].record[key] for key in ("model", "precision") if key in runs[0].record},
        "workload": _sums([run.workload for run in runs]),
        **_sums(
            [{key: value for key, value in run.record.items() if key in _SUMMED} for run in runs]
        ),
    }
    name = f"{runs[0].scenario} ({len(runs)} runs)"
    return RunScores(name, scores, record, instances, parts=runs, against=runs[0].against)


def pool_by_scenario(runs: Iterable[RunScores]) -> list[RunScores]:
    """Replace the runs of a model, precision and scenario by their pool if there are `_MIN_POOLED`
    or more.

    Runs that share instances stay: the same instances, run in several ways, are no larger sample.
    """
    pooled: list[RunScores] = []
    for group in _scenarios(runs):
        pooled += [pool(group)] if len(group) >= _MIN_POOLED and _are_disjoint(group) else group
    return pooled


def overlap_notes(runs: Iterable[RunScores]) -> list[str]:
    """Return notes, without full stops, on runs of a scenario that have no row together."""
    notes = []
    for group in _scenarios(runs):
        if len(group) >= _MIN_POOLED and not _are_disjoint(group):
            why = (
                "share instances"
                if all(run.digests for run in group)
                else "do not say which instances they have"
            )
            notes.append(
                f"The {len(group)} runs of {group[0].scenario} {why}, so they have no row together"
            )
    return list(dict.fromkeys(notes))


def _scenarios(runs: Iterable[RunScores]) -> list[list[RunScores]]:
    return list(grouped(runs, lambda run: (run.scenario, run.model, run.precision)).values())


def _are_disjoint(runs: Sequence[RunScores]) -> bool:
    """Whether an instance occurs in one of the runs only, but for a few; False if that is not
    known.
    """
    digests = [set(run.digests.values()) for run in runs]
    return all(digests) and len(set().union(*digests)) >= _MIN_DISTINCT * sum(map(len, digests))


def _sums(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add up records key by key; a key that a record lacks counts as 0."""
    return {
        key: sum(record.get(key, 0) for record in records)
        for key in dict.fromkeys(key for record in records for key in record)
    }
