"""Parts of several benchmarks: the check of flags, the machine, repeated timing, logged commands."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.hardware.profile import HardwareProfile


class ProcessKilled(FlexgenError):
    """A signal ended the process; in a memory control group, for lack of memory."""


def refuse_engine_flags(name: str, options: Options, *allowed: str) -> None:
    """Raise `UsageError` for an engine flag that benchmark `name`, whose workload is fixed, does not take."""
    if refused := sorted(set(options.engine) - set(allowed)):
        flags = "--offload-dir alone" if allowed else "no engine flags"
        raise UsageError(f"bench {name} has a fixed workload and takes {flags}: leave out {refused}")


def machine_profile(options: Options, folder: Path | None = None) -> HardwareProfile:
    """Measure this machine and the disk of `folder`, by default that of --offload-dir; --quick takes what is saved."""
    from flexgen_helm.engine.machine_profile import measured_profile

    offload_dir = options.engine.get("offload_dir")
    folder = folder or (None if offload_dir is None else Path(offload_dir))
    return measured_profile(folder=folder, fresh=not options.quick)


def machine() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": psutil.cpu_count(logical=False)}


def tokens_per_s(record: Mapping[str, Any]) -> float:
    """Return the output tokens per second of a whole run."""
    return float(record["output_tokens"]) / float(record["latency_s"])


def run_row(label: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a result row from the records of repeated runs, in seconds."""
    seconds = [record["latency_s"] for record in records]
    speed = median(map(tokens_per_s, records))
    return {"label": label, **summary(seconds), "tokens_per_s": speed, "seconds": seconds}


def time_calls(
    calls: Sequence[Callable[[], Any]], repeats: int, synchronize: Callable[[], None] = lambda: None
) -> list[float]:
    """Return, for each repeat, the mean seconds of one call.

    Calls on different operands keep any one operand from being found in a processor's cache.
    synchronize: waits for the device.
    """
    seconds = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        synchronize()
        seconds.append((time.perf_counter() - began) / len(calls))
    return seconds


def run_logged(command: Sequence[str], log: Path, name: str, **options: Any) -> float:
    """Run a command with its output in the file `log`, and return its seconds.

    options: of `subprocess.run`. Raises `ProcessKilled`, or `FlexgenError` with the end of the log if it fails.
    """
    with log.open("wb") as sink:
        began = time.perf_counter()
        done = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, **options)
        seconds = time.perf_counter() - began
    if done.returncode < 0:
        raise ProcessKilled(f"{name} was ended by signal {-done.returncode}")
    if done.returncode:
        raise FlexgenError(f"{name} ended with {done.returncode}:\n{log_tail(log)}")
    return seconds


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
