"""One `helm-run` (or `flexgen-helm run`) in a process and folders of its own, and what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.checkpoint.paths import data_dir, state_dir
from flexgen_helm.errors import FlexgenError
from flexgen_helm.report.suite import SUITE_FILE

# Times, and what only we write: no scores.
_NO_SCORES = ("flexgen_", "runtime", "training_", "batch_size")
HELM, SUITE = ("helm-run",), ("flexgen-helm", "run")


@dataclass(frozen=True)
class HelmRun:
    """seconds: of the whole process, start-up included; ready_s: until the first request could be computed, so that
    the model was there. request_s: HELM's request times, added up. records: of ours, one a run."""

    seconds: float
    request_s: float
    stats: Mapping[str, float]
    texts: Sequence[str]
    records: Sequence[Mapping[str, Any]]
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
    """Run `entries` with nothing to reuse: `folder` is new, and so are HELM's cache and our journal in it.

    configs: a folder whose .yaml files HELM is to find in its `--local-path`. threads: `-n`, None = HELM's default.
    variables: added to the environment. program: `HELM` or `SUITE`.
    Raises `FlexgenError` with the end of HELM's log where the run fails.
    """
    local, output, own_home = (folder / name for name in ("prod_env", "output", "home"))
    for made in (local, output, own_home):
        made.mkdir(parents=True)
    for file in configs.glob("*.yaml") if configs else ():
        shutil.copy(file, local / file.name)
    _share_weights(own_home)
    _share_data(output / "scenarios")
    command = [_script(program[0]), *program[1:], "-r", *entries, "-m", str(instances), "--suite", "bench"]
    command += ["-o", str(output), "--local-path", str(local)]
    if threads is not None:
        command += ["-n", str(threads)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FLEXGEN_HELM_HOME": str(own_home), **(variables or {})}
    log = folder / "log.txt"
    with log.open("wb") as sink:
        started, began = time.time(), time.perf_counter()
        done = subprocess.run(command, env=environment, cwd=folder, stdout=sink, stderr=subprocess.STDOUT)
        seconds = time.perf_counter() - began
    directories = [path.parent for path in (output / "runs" / "bench").glob("*/stats.json")]
    if done.returncode or len(directories) != len(entries):
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise FlexgenError(
            f"{' '.join(program)} of {', '.join(entries)} ended with {done.returncode} and {len(directories)} "
            f"results:\n{tail}"
        )
    return read_runs(directories, seconds, started)


def read_runs(directories: Sequence[Path], seconds: float, started: float = 0.0) -> HelmRun:
    """The results in HELM's run directories, in the order of their names. started: the process's, as `time.time()`."""
    stats: dict[str, float] = {}
    states: list[Any] = []
    records, ready = [], []
    for directory in sorted(directories):
        prefix = f"{directory.name}: " if len(directories) > 1 else ""
        found = scores(_read(directory / "stats.json"))
        stats.update({prefix + name: value for name, value in found.items()})
        mine = _read(directory / "scenario_state.json")["request_states"]
        states += mine
        file = directory / "flexgen_run.json"
        if file.is_file():
            record = _read(file)
            records.append(record)
            wall = record.get("wall_s", {})
            ready.append(file.stat().st_mtime - wall.get("metrics", 0.0) - wall.get("generate", 0.0))
        else:
            ready += [
                # HELM's client loads the model for its first request and notes when that began in whole seconds,
                # rounded down: with one added, its computing is not made out longer than it was.
                state["result"]["request_datetime"] + 1.0 + (state["result"].get("request_time") or 0.0)
                for state in mine
                if state["result"].get("request_datetime")
            ]
    suite = directories[0].parent / SUITE_FILE
    if suite.is_file():  # its runs only fetch their answers, which are computed before the first of them
        wall = _read(suite)["wall_s"]
        ready = [suite.stat().st_mtime - wall["finish"] - wall["generate"]]
    return HelmRun(
        seconds=seconds,
        request_s=sum(state["result"].get("request_time") or 0.0 for state in states),
        stats=stats,
        texts=[completion["text"] for state in states for completion in state["result"]["completions"]],
        records=records,
        requests=[state["request"] for state in states if "request" in state],
        ready_s=min(ready) - started if ready else 0.0,
    )


def scores(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name (with split and perturbation) -> mean, of every statistic that is a score; empty ones are left out."""
    found = {}
    for stat in stats:
        name = stat["name"]
        if stat.get("mean") is None or any(part in name["name"] for part in _NO_SCORES):
            continue
        perturbation = (name.get("perturbation") or {}).get("name", "")
        key = " ".join(part for part in (name["name"], name.get("split"), name.get("sub_split"), perturbation) if part)
        found[key] = float(stat["mean"])
    return found


def _share_weights(own_home: Path) -> None:
    """A home with the weights of the real one, what is known of the machine, and an empty journal."""
    models = state_dir() / "models"
    if models.is_dir():
        (own_home / "models").symlink_to(models.resolve())
    for name in ("hashes.json", "profile.json"):  # a profile is measured once a machine, not once a run
        if (state_dir() / name).is_file():
            shutil.copy(state_dir() / name, own_home / name)


def _share_data(scenarios: Path) -> None:
    """HELM's MMLU looks for its data in the output folder; our own scenarios know the data folder."""
    folder = data_dir()
    if folder is not None and (folder / "mmlu").is_dir():
        (scenarios / "mmlu").mkdir(parents=True)
        (scenarios / "mmlu" / "data").symlink_to((folder / "mmlu").resolve())


def _script(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    script = str(beside) if beside.is_file() else shutil.which(name)
    if script is None:
        raise FlexgenError(f"{name} is not on the path; run flexgen-helm doctor")
    return script


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
