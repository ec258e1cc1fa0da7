"""What a suite took: throughput and padding of its runs, time and bytes of its models, from the files in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.errors import UsageError
from flexgen_helm.report.comparison import ModelComparison, compare_suite
from flexgen_helm.report.scores import RunScores, read_scores, reused_note

SUITE_FILE = "flexgen_suite.json"
BASELINE = "fp16"
# In the name of a run of ours, as HELM writes it.
_OURS = "model=flexgen_"


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
    runs, unfinished = [], []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        scores = _finished(path)
        if scores is not None:
            runs.append(scores)
        elif _OURS in path.name:
            unfinished.append(path.name)
    if not runs:
        raise UsageError(f"{folder} has no finished runs of flexgen models; run the suite to its end first")
    last_call = _last_call(folder)
    notes = _missing(folder, [run.name for run in runs], unfinished, last_call.get("failed", []))
    if (reused := reused_note(runs)) is not None:
        notes.append(reused)
    models = last_call.get("models", {})
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


def _finished(path: Path) -> RunScores | None:
    """A finished run of ours, None for any other folder."""
    try:
        return read_scores(path) if (path / "flexgen_run.json").exists() else None
    except (OSError, ValueError, KeyError):
        return None


def _last_call(folder: Path) -> dict[str, Any]:
    """What the last `flexgen-helm run` left of the suite as a whole; empty where there is nothing."""
    try:
        found = json.loads((folder / SUITE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _missing(folder: Path, finished: Sequence[str], unfinished: Sequence[str], failed: Sequence[str]) -> list[str]:
    """A sentence for each run whose figures are not there, or are not those of the last call."""
    goes_on = "the command that made the suite goes on with it"
    notes = [f"run {name} failed: {goes_on}" for name in failed if name not in finished]
    notes += [f"run {name} is unfinished: {goes_on}" for name in unfinished if name not in failed]
    for name in failed:
        # One that was finished since, by a plain helm-run, is newer than the account of the call in which it failed.
        if name in finished and _written_ns(folder / name / "stats.json") < _written_ns(folder / SUITE_FILE):
            notes.append(f"run {name} failed in the last call, and its figures are of one before: {goes_on}")
    return notes


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


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
