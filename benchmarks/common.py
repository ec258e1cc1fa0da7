"""Parts of several benchmarks: scripts and their results, the machine, repeated timing, logged commands."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.errors import FlexgenError
from flexgen_helm.report.throughput import versions

# Runnable processes when a script begins; with more than this many, other programs compute meanwhile.
LOAD, BUSY_LOAD = psutil.getloadavg()[0], 0.5


class ProcessKilled(FlexgenError):
    """A signal ended the process; in a memory control group, for lack of memory."""


def script(main: Callable[..., None]) -> None:
    """Run a benchmark as a command whose options are the parameters of `main`; an error is one sentence."""
    import typer

    try:
        typer.run(main)
    except FlexgenError as error:
        sys.exit(f"error: {error}")


def report(result: Mapping[str, Any], out: Path | None) -> None:
    """Print a result as a table, and write it to the file `out`, with the day and whether the machine was busy."""
    from flexgen_helm.cli.console import output, print_table, write_json

    result = {"date": date.today().isoformat(), "versions": versions(), **result}
    if LOAD > BUSY_LOAD:
        busy = f"other programs were computing when this began (load {LOAD:.1f}): figures are noise"
        result["notes"] = [*result["notes"], busy]
    # What is no plain value, such as the seconds of all repetitions, is in the file alone.
    plain = (str, int, float)
    print_table([{k: value for k, value in row.items() if isinstance(value, plain)} for row in result["rows"]])
    ratios = (f"{key.replace('_', ' ')}: {value:.2f}x" for key, value in result["ratios"].items())
    output().print("\n".join([*ratios, *result["notes"]]), soft_wrap=True)
    if out is not None:
        write_json(out, result)


def machine() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": psutil.cpu_count(logical=False)}


def tokens_per_s(record: Mapping[str, Any]) -> float:
    """Return the output tokens per second of a whole run."""
    return float(record["output_tokens"]) / float(record["latency_s"])


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return {median, min, max, n} of one row."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


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
