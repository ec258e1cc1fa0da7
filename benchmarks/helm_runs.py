"""One `helm-run` in a process and folders of its own, and what it left behind."""

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

from flexgen_helm.checkpoint.paths import home
from flexgen_helm.core.errors import FlexgenError

# Times, and what only we write: no scores.
_NO_SCORES = ("flexgen_", "runtime", "training_", "batch_size")


@dataclass(frozen=True)
class HelmRun:
    """seconds: of the whole process, start-up included. request_s: HELM's request times, added up."""

    seconds: float
    request_s: float
    stats: Mapping[str, float]
    texts: Sequence[str]
    record: Mapping[str, Any] | None


def helm_run(
    entry: str,
    instances: int,
    folder: Path,
    configs: Path | None = None,
    threads: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> HelmRun:
    """Run `entry` with nothing to reuse: `folder` is new, and so are HELM's cache and our journal in it.

    configs: a folder whose .yaml files HELM is to find in its `--local-path`. threads: `-n`, None = HELM's default.
    variables: added to the environment.
    Raises `FlexgenError` with the end of HELM's log where the run fails.
    """
    local, output, own_home = (folder / name for name in ("prod_env", "output", "home"))
    for made in (local, output, own_home):
        made.mkdir(parents=True)
    for file in configs.glob("*.yaml") if configs else ():
        shutil.copy(file, local / file.name)
    _share_weights(own_home)
    command = [_helm_run_script(), "-r", entry, "-m", str(instances), "--suite", "bench"]
    command += ["-o", str(output), "--local-path", str(local)]
    if threads is not None:
        command += ["-n", str(threads)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FLEXGEN_HELM_HOME": str(own_home), **(variables or {})}
    log = folder / "log.txt"
    with log.open("wb") as sink:
        began = time.perf_counter()
        done = subprocess.run(command, env=environment, cwd=folder, stdout=sink, stderr=subprocess.STDOUT)
        seconds = time.perf_counter() - began
    directories = [path.parent for path in (output / "runs" / "bench").glob("*/stats.json")]
    if done.returncode or len(directories) != 1:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise FlexgenError(f"helm-run of {entry} ended with {done.returncode} and {len(directories)} results:\n{tail}")
    return read_run(directories[0], seconds)


def read_run(directory: Path, seconds: float) -> HelmRun:
    """The results in a HELM run directory."""
    states = _read(directory / "scenario_state.json")["request_states"]
    record = directory / "flexgen_run.json"
    return HelmRun(
        seconds=seconds,
        request_s=sum(state["result"].get("request_time") or 0.0 for state in states),
        stats=scores(_read(directory / "stats.json")),
        texts=[completion["text"] for state in states for completion in state["result"]["completions"]],
        record=_read(record) if record.is_file() else None,
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
    """A home with the weights of the real one and an empty journal."""
    models = home() / "models"
    if models.is_dir():
        (own_home / "models").symlink_to(models.resolve())
    if (home() / "hashes.json").is_file():
        shutil.copy(home() / "hashes.json", own_home / "hashes.json")


def _helm_run_script() -> str:
    beside = Path(sys.executable).with_name("helm-run")
    script = str(beside) if beside.is_file() else shutil.which("helm-run")
    if script is None:
        raise FlexgenError("helm-run is not on the path; run flexgen-helm doctor")
    return script


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
