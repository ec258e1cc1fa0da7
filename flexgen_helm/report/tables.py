"""Tables of text, in human units, for terminals and HTML: scores, throughput, time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import pandas as pd

from flexgen_helm.checkpoint.suffixes import split_precision
from flexgen_helm.report.scores import RunScores, grouped, precision_rank
from flexgen_helm.report.speeds import TotalSpeed, total_speed
from flexgen_helm.terminal import table_text
from flexgen_helm.tiers import TIER_PLACES
from flexgen_helm.units import duration, size

_TRANSFERS = {
    "disk_to_cpu": "disk to memory",
    "cpu_to_disk": "memory to disk",
    "cpu_to_gpu": "memory to GPU",
    "gpu_to_cpu": "GPU to memory",
}
_WORKLOAD = {
    "requests": "num_requests",
    "prompt tokens": "prompt_tokens",
    "computed": "prompt_tokens_computed",
    "output tokens": "output_tokens",
}
_TEXT_COLUMNS = ("run entry", "metric", "model", "precision", "verdict", "cheapest equivalent")


@dataclass(frozen=True)
class Mark:
    """An interval below a number, in percent of the cell's width, with a dot at `point`.

    axis: what is at its left end, its middle and its right end.
    """

    low: float
    high: float
    point: float
    axis: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table for readers.

    cells: text.
    num_keys: leading columns whose cells are not repeated below each other.
    links: column -> targets of its cells.
    marks: column -> a mark or None per row.
    collapsed: long, so a page shows it on demand.
    optional: columns that a narrow terminal leaves out, the first first.
    """

    cells: pd.DataFrame
    title: str = ""
    num_keys: int = 1
    links: Mapping[str, Sequence[str]] = field(default_factory=dict)
    marks: Mapping[str, Sequence[Mark | None]] = field(default_factory=dict)
    collapsed: bool = False
    optional: Sequence[str] = ()

    @property
    def right_aligned(self) -> list[bool]:
        return [
            column >= self.num_keys and name not in _TEXT_COLUMNS
            for column, name in enumerate(self.cells)
        ]

    @property
    def repeats(self) -> list[list[bool]]:
        """Which keys of each row are those of the row above."""
        rows = self.cells.iloc[:, : self.num_keys].to_numpy().tolist()
        above = [[None] * self.num_keys, *rows]
        return [
            [row[: n + 1] == last[: n + 1] for n in range(len(row))]
            for row, last in zip(rows, above)
        ]


# --- Scores ---


def scores_table(runs: Sequence[RunScores], show_model: bool) -> Table:
    """Return a row per run and metric."""
    scored = [(run, metric) for run in _by_entry(runs) for metric in run.scores or ("-",)]
    # Models and precisions below each other, in the order in which entries and metrics first
    # appear.
    by_row = grouped(scored, lambda pair: (pair[0].entry, pair[1]))
    pairs = [pair for row in by_row.values() for pair in row]
    rows = [
        {
            "run entry": run.entry,
            "metric": metric,
            "model": run.typed_model,
            "precision": run.precision,
            "score": _score_and_error(run.scores.get(metric), run.standard_errors.get(metric)),
            "scored": f"{run.num_scored:,}" if run.num_scored else "",
            "requests": whole_text(run.workload.get("num_requests")),
        }
        for run, metric in pairs
    ]
    frame = pd.DataFrame(rows)
    if not show_model:
        del frame["model"]
    links = {"precision": [run_link(run) for run, _ in pairs]}
    return Table(frame, num_keys=2, links=links, optional=("requests", "scored"))


def _score_and_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    digits = decimals(value)
    return f"{value:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


# --- Throughput ---


def throughput_table(runs: Sequence[RunScores], show_model: bool) -> Table:
    """Return a row of tokens and seconds per run; * marks throughputs that `reused_notes`
    explains.
    """
    runs = _by_entry(runs)
    speeds = [total_speed(run.label, [run]) for run in runs]
    cells = {
        "run entry": [run.entry for run in runs],
        **({"model": [run.typed_model for run in runs]} if show_model else {}),
        "precision": [run.precision for run in runs],
        **{
            heading: [whole_text(run.workload.get(key)) for run in runs]
            for heading, key in _WORKLOAD.items()
        },
        "time": [seconds_text(run.latency_s) for run in runs],
        "tokens/s": list(map(tokens_per_s_text, speeds)),
    }
    optional = ("computed", "output tokens", "requests", "prompt tokens")
    links = {"precision": list(map(run_link, runs))}
    return Table(pd.DataFrame(cells), links=links, optional=optional)


def _by_entry(runs: Sequence[RunScores]) -> list[RunScores]:
    """Put the models and precisions of an entry next to each other."""
    entries = list(dict.fromkeys(run.entry for run in runs))
    return sorted(
        runs, key=lambda run: (entries.index(run.entry), run.model, precision_rank(run.precision))
    )


# --- Time, copies and memory of models ---


def usage_tables(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Table]:
    """Return a table per model, with a column per precision. models: name with its suffix -> usage
    record.
    """
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, usage in models.items():
        base, suffix = split_precision(name)
        precision = usage.get("precision") or suffix
        groups.setdefault(base if suffix == precision else name, {})[precision] = usage
    return {name: _usage_table(usages) for name, usages in groups.items()}


def _usage_table(usages: Mapping[str, Mapping[str, Any]]) -> Table:
    """Rows without a value in any precision are left out, and limits of tiers that nothing was
    in.
    """
    figures = {
        precision: _figures(usages[precision]) for precision in sorted(usages, key=precision_rank)
    }
    labels = next(iter(figures.values()))
    known = {label for label in labels if any(column[label] for column in figures.values())}

    def text(label: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        are_bytes = ":" in label or label.startswith(("peak", "limit"))
        return size(value) if are_bytes else seconds_text(value)

    shown = [label for label in labels if {label, label.replace("limit", "peak")} <= known]
    cells = {
        name: [text(label, column[label]) for label in shown] for name, column in figures.items()
    }
    return Table(pd.DataFrame({"": shown, **cells}))


def _figures(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a usage record: label -> value, None where it is not known."""
    times = usage["time_s"]
    return {
        "schedule": usage.get("schedule"),
        "time, measured": times["compute"] + times["wait"],
        "time, predicted": usage.get("predicted_latency_s"),
        "roofline": usage.get("roofline_s"),
        "computing": times["compute"],
        "waiting for data": times["wait"],
        "between batches": times.get("other"),
        **{
            f"{label}: {kind}": usage["bytes"][transfer].get(kind)
            for transfer, label in _TRANSFERS.items()
            for kind in ("weights", "cache", "activations")
        },
        **{
            f"{kind} {label}": usage.get(f"{kind}_bytes", {}).get(tier)
            for tier, label in TIER_PLACES.items()
            for kind in ("peak", "limit")
        },
        "peak workspace": usage.get("peak_workspace_bytes"),
    }


# --- Text ---


def table_to_text(table: Table, width: int) -> str:
    """Return a table of at most `width` columns; keys are not repeated, a second one is below."""
    stacked, rows = table.num_keys == 2, []
    for row, repeated in zip(table.cells.to_numpy().tolist(), table.repeats):
        if stacked and not repeated[0]:
            rows.append([row[0], *[""] * (len(row) - 2)])
        keys = ["" if same else key for key, same in zip(row, repeated)][stacked:]
        indented = (f"  {key}" if stacked and key else key for key in keys)
        rows.append([*indented, *row[table.num_keys :]])
    columns = [*range(min(table.num_keys, 1)), *range(table.num_keys, len(table.cells.columns))]
    headings = [str(table.cells.columns[n]) for n in columns]
    optional = [name for name in table.optional if name in headings]
    return table_text(headings, rows, width, optional)


# --- Cells ---


def run_link(run: RunScores) -> str:
    """Return the run's folder, seen from that of its suite; '' for a pool."""
    # without './' a colon would end a scheme
    return f"./{quote(run.name)}/" if run.num_runs == 1 else ""


def tokens_per_s_text(speed: TotalSpeed) -> str:
    """Return a rate, with a * that `reused_notes` explains."""
    return f"{speed.tokens_per_s:,.0f}{' *' if speed.num_reused else ''}"


def whole_text(value: Any) -> str:
    return "" if value is None else f"{value:,.0f}"


def seconds_text(value: float) -> str:
    return f"{value:,.1f} s" if value < 100 else duration(value)


def decimals(value: float) -> int:
    """Digits behind the point: of accuracies three, of large perplexities fewer."""
    return 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 1
