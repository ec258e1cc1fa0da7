"""The report of a suite: scores and throughput of its runs, time and bytes of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.errors import UsageError
from flexgen_helm.files import read_object
from flexgen_helm.report.block_records import suite_totals
from flexgen_helm.report.notes import run_notes
from flexgen_helm.report.scores import RunScores, describe_run, finite, read_finished_runs
from flexgen_helm.report.verdicts import first_names
from flexgen_helm.units import count

SUITE_FILE = "flexgen_suite.json"
# HELM writes this into the folder names of our runs.
_FLEXGEN_MODEL = "model=flexgen_"
_RESUME = "run the command that made the suite again, and it continues with what is missing"


@dataclass(frozen=True)
class SuiteReport:
    """What is known of a suite.

    runs: finished runs of flexgen models.
    models: model -> the engine's usage record (time, bytes, peaks).
    notes: sentences, without full stops, about what is missing.
    """

    suite: str
    runs: Sequence[RunScores]
    models: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str]


def read_suite(folder: Path) -> SuiteReport:
    """Read the suite in `folder`; raises `UsageError` if it has no finished run of a flexgen
    model.
    """
    runs = read_finished_runs(folder)
    if not runs:
        raise UsageError(
            f"{folder} has no finished runs of flexgen models; run the suite to its end first"
        )
    last_call = read_object(folder / SUITE_FILE)
    notes = _missing_notes(folder, {run.name for run in runs}, last_call.get("failed", []))
    notes += run_notes(runs)
    models = suite_totals(run.record for run in runs)["models"]
    computed = {name: usage for name, usage in models.items() if "bytes" in usage}
    return SuiteReport(folder.name, runs, computed, notes)


def suite_to_json(report: SuiteReport) -> dict[str, Any]:
    return {
        "suite": report.suite,
        "runs": {
            run.name: {
                "scores": finite(run.scores),
                "standard_errors": run.standard_errors,
                "num_scored": run.num_scored,
                **run.record,
            }
            for run in report.runs
        },
        "models": dict(report.models),
        "notes": list(report.notes),
    }


def _missing_notes(folder: Path, finished: Set[str], failed: Sequence[str]) -> list[str]:
    """Return notes on the runs that have no scores, or none of the last call."""
    unfinished = sorted(path.name for path in folder.glob(f"*{_FLEXGEN_MODEL}*") if path.is_dir())

    def is_older(name: str) -> bool:
        # A plain helm-run may have finished it after the call in which it failed.
        scored, called = folder / name / "stats.json", folder / SUITE_FILE
        return name in finished and scored.stat().st_mtime_ns < called.stat().st_mtime_ns

    missing = {
        "failed": [name for name in failed if name not in finished],
        "did not finish": [name for name in unfinished if name not in {*finished, *failed}],
        "failed in the last call, so the scores are older": [
            name for name in failed if is_older(name)
        ],
    }
    return [
        f"{count(len(names), 'run')} {what} ({first_names([*map(describe_run, names)])}); {_RESUME}"
        for what, names in missing.items()
        if names
    ]
