"""What all benchmarks share: scripts, results as a table and as JSON, and figures of repeated
runs.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.report.versions import versions
from flexgen_helm.terminal import table_text

# Runnable processes when a script begins; with more than this many, other programs compute
# meanwhile.
LOAD, BUSY_LOAD = psutil.getloadavg()[0], 0.5
T = TypeVar("T")


def script(main: Callable[..., None]) -> None:
    """Run a benchmark as a command whose options are the parameters of `main`; an error is one
    sentence.
    """
    import typer

    try:
        typer.run(main)
    except FlexgenError as error:
        sys.exit(f"error: {error}")


def report(result: Mapping[str, Any], out: Path | None) -> None:
    """Print a result, with the day and whether the machine was busy, and write it to the file
    `out`.

    What is no plain value, such as the seconds of all repetitions, is in the file alone.
    """
    notes = [*result["notes"]]
    if LOAD > BUSY_LOAD:
        notes.append(
            f"other programs were computing when this began (load {LOAD:.1f}): figures are noise"
        )
    result = {"date": date.today().isoformat(), "versions": versions(), **result, "notes": notes}
    result["hardware"] = {
        "machine": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        **result["hardware"],
    }
    rows = result["rows"]
    shown = dict.fromkeys(
        key for row in rows for key in row if isinstance(row[key], str | int | float)
    )
    cells = [[_cell(row.get(key)) for key in shown] for row in rows]
    print(table_text([key.replace("_", " ") for key in shown], cells, 160) if rows else "no rows")
    for key, value in result["ratios"].items():
        print(f"{key.replace('_', ' ')}: {value:.2f}x")
    print(*notes, sep="\n")
    if out is not None:
        out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def choose(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return what is known by a name. Raises `UsageError`, with the names of all, for an unknown
    one.
    """
    if name not in known:
        raise UsageError(f"{kind} {name!r} is not known; take {', '.join(known)}")
    return known[name]


def tokens_per_s(record: Mapping[str, Any]) -> float:
    """Return the output tokens per second of a whole run."""
    return float(record["output_tokens"] / record["latency_s"])


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return {median, min, max, n} of one row."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def run_row(label: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a result row from the records of repeated runs, in seconds."""
    seconds = [record["latency_s"] for record in records]
    return {
        "label": label,
        **summary(seconds),
        "tokens_per_s": median(map(tokens_per_s, records)),
        "seconds": seconds,
    }
