"""Run `helm-run` or `flexgen-helm run` in a process and folders of its own, and read its
results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.process import log_tail, run_logged
from flexgen_helm.errors import FlexgenError
from flexgen_helm.paths import data_dir, state_dir
from flexgen_helm.report.suite import SUITE_FILE

# Parts of the names of statistics that are no scores: times, and what only our plugin writes.
_NO_SCORES = ("flexgen_", "runtime", "training_", "batch_size")
HELM, SUITE = ("helm-run",), ("flexgen-helm", "run")


@dataclass(frozen=True)
class HelmRun:
    """Measurements and results of one process.

    seconds: of the whole process, start-up included.
    request_s: sum of HELM's request times.
    stats: scores by name.
    texts: completions.
    records: contents of `flexgen_run.json`, one per run; none from HELM's own client.
    requests: HELM's requests as JSON.
    ready_s: seconds until the model was loaded and the first request could be computed.
    """

    seconds: float
    texts: Sequence[str]
    request_s: float = 0.0
    stats: Mapping[str, float] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    requests: Sequence[Mapping[str, Any]] = ()
    ready_s: float = 0.0


def helm_run(
    entries: Sequence[str],
    instances: int,
    folder: Path,
    configs: Path | None = None,
    threads: int | None = None,
    variables: Mapping[str, str] | None = None,
    program: Sequence[str] = HELM,
) -> HelmRun:
    """Run `entries` with nothing to reuse: `folder`, HELM's cache and our response cache in it are
    new.

    configs: folder with .yaml files for HELM's `--local-path`.
    threads: `-n`; None for HELM's default.
    variables: added to the environment.
    program: `HELM` or `SUITE`.
    Raises `FlexgenError` with the end of HELM's log if the run fails.
    """
    local, output, own_home = (folder / name for name in ("prod_env", "output", "home"))
    for made in (local, output, own_home):
        made.mkdir(parents=True)
    for file in configs.glob("*.yaml") if configs else ():
        shutil.copy(file, local / file.name)
    _share_weights(own_home)
    _share_data(output / "scenarios")
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    installed = shutil.which(program[0], path=paths) or program[0]
    command = [installed, *program[1:], "-r", *entries, f"--max-eval-instances={instances}"]
    command += ["--suite=bench", f"--output-path={output}", f"--local-path={local}"]
    if threads is not None:
        command += ["-n", str(threads)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "FLEXGEN_HELM_HOME": str(own_home),
        **(variables or {}),
    }
    log, name, started = (
        folder / "log.txt",
        f"{' '.join(program)} of {', '.join(entries)}",
        time.time(),
    )
    seconds = run_logged(command, log, name, env=environment, cwd=folder)
    directories = [path.parent for path in (output / "runs" / "bench").glob("*/stats.json")]
    if len(directories) != len(entries):
        raise FlexgenError(f"{name} ended with {len(directories)} results:\n{log_tail(log)}")
    return read_runs(directories, seconds, started)


def read_runs(directories: Sequence[Path], seconds: float, started: float = 0.0) -> HelmRun:
    """Read HELM's run directories in the order of their entries. started: `time.time()` at the
    process's start.

    Of several directories, the names of statistics begin with the entry, without its model.
    """
    stats: dict[str, float] = {}
    states: list[Any] = []
    records, ready = [], []
    for directory in sorted(directories, key=_entry_of):
        prefix = f"{_entry_of(directory)}: " if len(directories) > 1 else ""
        stats.update(
            {
                prefix + name: value
                for name, value in scores(_read(directory / "stats.json")).items()
            }
        )
        own_states = _read(directory / "scenario_state.json")["request_states"]
        states += own_states
        file = directory / "flexgen_run.json"
        if file.is_file():
            record = _read(file)
            records.append(record)
            wall = record.get("wall_s", {})
            ready.append(
                file.stat().st_mtime - wall.get("metrics", 0.0) - wall.get("generate", 0.0)
            )
        else:
            ready += [
                # HELM's client loads the model in its first request and records the start in whole
                # seconds, rounded down. One second more never overstates the time that it computes.
                state["result"]["request_datetime"]
                + 1.0
                + (state["result"].get("request_time") or 0.0)
                for state in own_states
                if state["result"].get("request_datetime")
            ]
    suite = directories[0].parent / SUITE_FILE
    # all answers are computed before the first run, and the runs only fetch them
    if suite.is_file():
        wall = _read(suite)["wall_s"]
        ready = [suite.stat().st_mtime - wall["finish"] - wall["generate"]]
    return HelmRun(
        seconds=seconds,
        request_s=sum(state["result"].get("request_time") or 0.0 for state in states),
        stats=stats,
        texts=[
            completion["text"] for state in states for completion in state["result"]["completions"]
        ],
        records=records,
        requests=[state["request"] for state in states if "request" in state],
        ready_s=min(ready) - started if ready else 0.0,
    )


def _entry_of(directory: Path) -> str:
    return re.sub(r"[,:]model=[^,]*", "", directory.name)


def scores(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of every score, by its name with split and perturbation."""
    means = {}
    for stat in stats:
        name = stat["name"]
        if stat.get("mean") is None or any(part in name["name"] for part in _NO_SCORES):
            continue
        perturbation = (name.get("perturbation") or {}).get("name", "")
        key = " ".join(
            part
            for part in (name["name"], name.get("split"), name.get("sub_split"), perturbation)
            if part
        )
        means[key] = float(stat["mean"])
    return means


def _share_weights(own_home: Path) -> None:
    """Give a new home the real one's weights and machine profile, but no cached responses."""
    models = state_dir() / "models"
    if models.is_dir():
        (own_home / "models").symlink_to(models.resolve())
    for name in ("hashes.json", "profile.json"):  # otherwise every run would measure a profile
        if (state_dir() / name).is_file():
            shutil.copy(state_dir() / name, own_home / name)


def _share_data(scenarios: Path) -> None:
    """Link MMLU's data into the output folder, where HELM looks for it; our own scenarios know the
    data folder.
    """
    folder = data_dir()
    if folder is not None and (folder / "mmlu").is_dir():
        (scenarios / "mmlu").mkdir(parents=True)
        (scenarios / "mmlu" / "data").symlink_to((folder / "mmlu").resolve())


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
