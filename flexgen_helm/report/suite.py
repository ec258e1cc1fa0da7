"""What a suite took: throughput and padding of its runs, time and bytes of its models, from the files in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.core.errors import UsageError
from flexgen_helm.report.comparison import ModelComparison, compare_suite
from flexgen_helm.report.scores import RunScores, read_scores, reused_note

SUITE_FILE = "flexgen_suite.json"
BASELINE = "fp16"


@dataclass(frozen=True)
class SuiteReport:
    """runs: finished ones of ours; models: name -> the engine's account of its block; compared: precisions of a model,
    where it has several; notes: what is missing, a sentence each."""

    suite: str
    runs: Sequence[RunScores]
    models: Mapping[str, Mapping[str, Any]]
    compared: Sequence[ModelComparison]
    notes: Sequence[str]


def read_suite(folder: Path) -> SuiteReport:
    """The report of the suite in `folder`. Raises `UsageError` where it has no finished run of ours."""
    if not folder.is_dir():
        raise UsageError(f"there is no suite in {folder}; run one first, or name another folder with -o")
    runs, unfinished = [], 0
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and (path / "flexgen_run.json").exists()):
        try:
            runs.append(read_scores(path))
        except (OSError, ValueError, KeyError):
            unfinished += 1
    if not runs:
        raise UsageError(f"{folder} has no finished runs of flexgen models; run the suite to its end first")
    notes = [f"{unfinished} runs are not finished and are left out"] if unfinished else []
    if (reused := reused_note(runs)) is not None:
        notes.append(reused)
    try:
        models = json.loads((folder / SUITE_FILE).read_text(encoding="utf-8"))["models"]
    except (OSError, ValueError, KeyError):
        models = {}
    models = {name: account for name, account in models.items() if "bytes" in account}
    # A plain helm-run, or one that was resumed: the engine's account of a block stands in each of its runs.
    others = {run.run["model"]: run.run for run in runs if "bytes" in run.run and run.run["model"] not in models}
    if others:
        notes.append(f"times and bytes of {', '.join(others)} are those of the last block alone")
        models |= others
    try:
        compared: Sequence[ModelComparison] = compare_suite(folder, BASELINE)
    except UsageError:
        compared = ()
    return SuiteReport(folder.name, runs, models, compared, notes)


def _finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no other numbers."""
    return {name: score if math.isfinite(score) else None for name, score in scores.items()}


def to_json(report: SuiteReport) -> dict[str, Any]:
    return {
        "suite": report.suite,
        "runs": {run.name: {"scores": _finite(run.scores), **run.run} for run in report.runs},
        "models": dict(report.models),
        "notes": list(report.notes),
    }
