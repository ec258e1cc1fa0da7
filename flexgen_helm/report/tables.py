"""Tables of a report: DataFrames of numbers (for CSV and figures), and of text in human units (for readers).

A number's column has the name that it has in `flexgen_run.json` or `flexgen_suite.json`, such as 'time_s.compute'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from flexgen_helm.report.comparison import Comparison, ModelComparison
from flexgen_helm.report.scores import RunScores

# Columns of `runs_table` that fit on a terminal.
SUMMARY_COLUMNS = ["run", "scores", "requests", "tokens", "tokens/s", "efficiency"]
_RUN_COLUMNS = [
    "run", "model", "precision", "workload.num_requests", "workload.prompt_tokens", "workload.prompt_tokens_computed",
    "workload.output_tokens", "latency_s", "padded_throughput", "actual_throughput", "efficiency",
    "padding.to_longest", "padding.in_buckets", "num_reused",
]  # fmt: skip
_COMPARISON_COLUMNS = [
    "model", "run", "metric", "precision", "instances", "baseline", "value", "kind", "change", "interval.low",
    "interval.high", "test.name", "test.p_value", "test.lost", "test.won",
]  # fmt: skip
_TRANSFERS = {
    "disk_to_cpu": "disk to memory",
    "cpu_to_disk": "memory to disk",
    "cpu_to_gpu": "memory to GPU",
    "gpu_to_cpu": "GPU to memory",
}
_CELL_OF_NUMBER = r"([\d,.]+(%| GB| \*)?)?"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count else "0"


_whole, _tenths, _percent = "{:,.0f}".format, "{:,.1f}".format, "{:.1%}".format
# Heading -> column, and the format of its cells.
_Cells = Mapping[str, tuple[str, Callable[[Any], str]]]
_RUN_CELLS: _Cells = {
    "run": ("run", str),
    "scores": ("scores", str),
    "requests": ("workload.num_requests", _whole),
    "tokens": ("tokens", _whole),
    "prompt tokens computed": ("workload.prompt_tokens_computed", _whole),
    "padded tokens/s": ("padded_throughput", _whole),
    "tokens/s": ("actual_throughput", _whole),
    "efficiency": ("efficiency", _percent),
    "to the longest": ("padding.to_longest", _percent),
    "in buckets": ("padding.in_buckets", _percent),
}
_MODEL_CELLS: _Cells = {
    "model": ("model", str),
    "schedule": ("schedule", str),
    "seconds": ("busy_s", _tenths),
    "predicted": ("predicted_latency_s", _tenths),
    "compute": ("time_s.compute", _tenths),
    "wait": ("time_s.wait", _tenths),
    "of the roofline": ("of_roofline", _percent),
    "read from disk": ("disk_bytes", _gigabytes),
    "over the link": ("link_bytes", _gigabytes),
    "peak gpu": ("peak_bytes.gpu", _gigabytes),
    "peak cpu": ("peak_bytes.cpu", _gigabytes),
    "peak disk": ("peak_bytes.disk", _gigabytes),
}
_SPEED_CELLS: _Cells = {
    "precision": ("precision", str),
    "instances": ("instances", _whole),
    "tokens": ("tokens", _whole),
    "seconds": ("latency_s", _whole),
    "tokens/s": ("tokens_per_s", _whole),
}


def runs_frame(runs: Iterable[RunScores]) -> pd.DataFrame:
    """Return a row of numbers per run, with a column such as 'scores.exact_match' for every metric of any of them."""
    frame = pd.json_normalize([{"run": run.name, **run.run, "scores": run.scores} for run in runs])
    return frame.reindex(columns=[*_RUN_COLUMNS, *frame.filter(like="scores.")])


def runs_table(runs: Sequence[RunScores]) -> pd.DataFrame:
    """Return a row of text per run; * marks throughputs that `reused_note` explains."""
    frame = runs_frame(runs)
    scores = ["  ".join(f"{name} {score:.3f}" for name, score in run.scores.items()) or "-" for run in runs]
    tokens = frame["workload.prompt_tokens"] + frame["workload.output_tokens"]
    return _text(frame.assign(scores=scores, tokens=tokens), _RUN_CELLS)


def models_frame(models: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row of numbers per model. busy_s: compute and wait; disk_bytes, link_bytes: all kinds together."""
    defaults = {"schedule": None, "predicted_latency_s": None, "roofline_s": None}
    frame = pd.json_normalize([{**defaults, **usage, "model": name} for name, usage in models.items()])
    busy_s = frame["time_s.compute"] + frame["time_s.wait"]
    return frame.assign(
        busy_s=busy_s,
        of_roofline=frame["roofline_s"].astype(float) / busy_s,
        disk_bytes=frame.filter(like="bytes.disk_to_cpu.").sum(axis="columns"),
        link_bytes=frame.filter(regex=r"bytes\.(cpu_to_gpu|gpu_to_cpu)\.").sum(axis="columns"),
    )


def models_table(models: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    return _text(models_frame(models), _MODEL_CELLS)


def transfers_frame(models: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return GB moved: a row per model and transfer that moved any, a column per kind of tensor."""
    moved = {
        f"{name}<br>{label}": {kind: count / 1e9 for kind, count in usage["bytes"][transfer].items()}
        for name, usage in models.items()
        for transfer, label in _TRANSFERS.items()
        if any(usage["bytes"][transfer].values())
    }
    return pd.DataFrame.from_dict(moved, orient="index")


def comparisons_frame(models: Iterable[ModelComparison]) -> pd.DataFrame:
    """Return a row of numbers per comparison."""
    records = [{"model": model.model, **asdict(each)} for model in models for each in model.comparisons]
    for record in records:
        record["interval"] = dict(zip(("low", "high"), record["interval"] or ()))
        record["test"] = record["test"] or {}
    return pd.json_normalize(records).reindex(columns=_COMPARISON_COLUMNS).convert_dtypes()


def comparisons_table(comparisons: Iterable[Comparison], baseline: str) -> pd.DataFrame:
    """Return text rows: each metric's baseline, then the other precisions.

    The baseline's row is repeated if the next precision shares other instances with it.
    """
    rows: list[tuple[str, ...]] = []
    previous = ("", "", "")
    for comparison in comparisons:
        label = f"{comparison.run} ({comparison.instances:,} instances)"
        group = (label, comparison.metric, _score(comparison.baseline))
        if group != previous:
            next_metric = label == previous[0] and comparison.metric != previous[1]
            rows.append(("" if next_metric else label, comparison.metric, baseline, group[2], "", ""))
            previous = group
        rows.append(("", "", comparison.precision, _score(comparison.value), _change(comparison), _test(comparison)))
    return pd.DataFrame(rows, columns=["run", "metric", "precision", "score", "change (95 %)", "test"])


def speeds_table(speeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row of text per precision; * marks throughputs that `reused_note` explains."""
    return _text(speeds, _SPEED_CELLS)


def right_aligned(table: pd.DataFrame) -> list[bool]:
    """Return, for each column, whether all its cells are numbers, with or without a unit."""
    return [bool(table[column].str.fullmatch(_CELL_OF_NUMBER).all()) for column in table]


def markdown(table: pd.DataFrame) -> str:
    """Return a markdown table whose columns also line up in a terminal."""
    rows = [list(table.columns), *table.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = right_aligned(table)
    rule = "|".join("-" * (width + 1) + ("-", ":")[r] for width, r in zip(widths, right))
    lines = [
        "| " + " | ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _text(frame: pd.DataFrame, cells: _Cells) -> pd.DataFrame:
    """Format the columns of `cells`; a missing number becomes an empty cell."""
    table = pd.DataFrame(
        {
            heading: [fmt(value) if pd.notna(value) else "" for value in frame[column]]
            for heading, (column, fmt) in cells.items()
        }
    )
    if "num_reused" in frame:
        table["tokens/s"] += frame["num_reused"].map(lambda count: " *" if count > 0 else "")
    return table


def _score(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.3f}"


def _change(comparison: Comparison) -> str:
    template = "×{:.4f}" if comparison.kind == "ratio" else "{:+.4f}"
    change = template.format(comparison.change)
    if comparison.interval is None:
        reason = "one instance" if comparison.instances == 1 else "not a mean over instances"
        return f"{change} (no interval: {reason})"
    low, high = map(template.format, comparison.interval)
    return f"{change} ({low} … {high})"


def _test(comparison: Comparison) -> str:
    test = comparison.test
    if test is None:
        return ""
    p_value = "p < 0.0001" if test.p_value < 1e-4 else f"p = {test.p_value:.4f}"
    return p_value if test.lost is None else f"{p_value}, {test.lost} lost, {test.won} won"
