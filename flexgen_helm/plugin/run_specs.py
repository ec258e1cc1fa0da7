"""Run specs are checked before they are run: names, repetitions, settings that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.common.general import asdict_without_nones

from flexgen_helm.errors import UsageError
from flexgen_helm.files import read_object
from flexgen_helm.progress import Message, report
from flexgen_helm.report.run_folder import INSTANCE_STATS_FILE, SPEC_FILE, differing_settings
from flexgen_helm.report.scores import entry_of
from flexgen_helm.units import count

_MOST_NAME_BYTES = 255  # of a file or folder, on every disk of Linux


def without_repeated(run_specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the runs without those that are given twice, because a folder has one run.

    Raises `UsageError` for two of one name that differ, because HELM leaves many arguments of an
    entry out of the name, and for a name that no folder can have.
    """
    by_name: dict[str, RunSpec] = {}
    for run_spec in run_specs:
        if (length := len(run_spec.name.encode())) > _MOST_NAME_BYTES:
            raise UsageError(
                f"the run {run_spec.name[:60]}… needs a folder whose name has {length} bytes; "
                f"{_MOST_NAME_BYTES} are possible: shorten its entry, or the model's name in "
                "FLEXGEN_HELM_MODELS"
            )
        first = by_name.setdefault(run_spec.name, run_spec)
        if first != run_spec:
            differing = (
                differing_settings(_adapter(first), _adapter(run_spec), " and ")
                or "in scenario or metrics"
            )
            raise UsageError(
                f"two run entries make runs of one name, {run_spec.name}, which differ "
                f"({differing}): one would replace the other; give each of them a --suite of its "
                "own"
            )
    if num_repeated := len(run_specs) - len(by_name):
        report(
            Message(
                f"{count(num_repeated, 'run')} of the same name and content as another: each is "
                "made once"
            )
        )
    return list(by_name.values())


def report_other_settings(runner: Runner, run_specs: Sequence[RunSpec]) -> None:
    """Tell the user of completed runs that `--skip-completed-runs` keeps though they were made with
    other settings.
    """
    for run_spec in run_specs:
        folder = Path(runner.runs_path) / run_spec.name
        if (folder / INSTANCE_STATS_FILE).is_file():
            recorded = read_object(folder / SPEC_FILE).get("adapter_spec", {})
            if differing := differing_settings(recorded, _adapter(run_spec), ", now "):
                report(
                    Message(
                        f"{entry_of(run_spec.name)} was completed with other settings "
                        f"({differing}) and is kept by --skip-completed-runs; leave that flag out "
                        "to run it again"
                    )
                )


def _adapter(run_spec: RunSpec) -> dict[str, Any]:
    """Return a run's adapter spec as `run_spec.json` has it."""
    return dict(json.loads(json.dumps(asdict_without_nones(run_spec.adapter_spec))))
