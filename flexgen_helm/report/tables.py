"""Tables of a report, in human units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import quote

import pandas as pd

from flexgen_helm.checkpoint.suffixes import split_precision
from flexgen_helm.report.choice import costs
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.paired import metric_named
from flexgen_helm.report.scores import RunScores, finite, grouped, precision_rank
from flexgen_helm.report.speeds import TotalSpeed, total_speed
from flexgen_helm.report.verdicts import Comparison
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
        """Return, for each row, which of its keys it has in common with the row above."""
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
    digits = _digits(value)
    return f"{value:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


# --- Throughput ---


def throughput_table(runs: Sequence[RunScores], show_model: bool) -> Table:
    """Return a row of tokens and seconds per run; * marks throughputs that `reused_note`
    explains.
    """
    runs = _by_entry(runs)
    speeds = [total_speed(run.label, [run]) for run in runs]
    cells = {
        **_run_cells(runs, show_model),
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


def _run_cells(runs: Sequence[RunScores], show_model: bool) -> dict[str, list[str]]:
    models = {"model": [run.typed_model for run in runs]} if show_model else {}
    return {
        "run entry": [run.entry for run in runs],
        **models,
        "precision": [run.precision for run in runs],
    }


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


def text(table: Table, width: int) -> str:
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
    """Return a rate, with a * that `reused_note` explains."""
    return f"{speed.tokens_per_s:,.0f}{' *' if speed.num_reused else ''}"


def whole_text(value: Any) -> str:
    return "" if value is None else f"{value:,.0f}"


def seconds_text(value: float) -> str:
    return f"{value:,.1f} s" if value < 100 else duration(value)


def _digits(value: float) -> int:
    """Digits behind the point: of accuracies three, of large perplexities fewer."""
    return 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 1


def _score_text(value: float) -> str:
    return f"{value:,.{_digits(value) + (abs(value) < 10)}f}"


# Precisions compared: verdicts, changes and speeds.


def comparison_to_json(models: Sequence[ModelComparison], suite: str) -> dict[str, Any]:
    """Return what `compare --json` prints."""
    content = {
        "suite": suite,
        "baseline": models[0].baseline,
        "models": {
            model.model: {
                "baseline": model.base.at_rest,
                "full_precision": model.base.is_full_precision,
                "remedy": model.remedy,
                "comparisons": [asdict(comparison) for comparison in model.comparisons],
                "pooled": [asdict(comparison) for comparison in model.pooled],
                "speed": [speed.to_json() for speed in model.speeds],
                "notes": model.notes,
                "equivalence": {
                    precision: asdict(verdict) for precision, verdict in model.verdicts.items()
                },
                "costs": {precision: asdict(cost) for precision, cost in costs(model).items()},
            }
            for model in models
        },
    }
    return dict(finite(content))


def comparison_tables(
    model: ModelComparison, comparisons: Sequence[Comparison], scales: Mapping[str, float]
) -> list[Table]:
    """Return a table per precision: verdicts, flips and figures.

    scales: `interval_scales` of all that a page shows.
    """
    run_links = {(run.entry, run.label): run_link(run) for run in model.runs}
    tables = []
    for precision, group in _by_precision(comparisons).items():
        rows = [
            {
                "run entry": comparison.run,
                "metric": metrics,
                "verdict": comparison.equivalence.text if comparison.equivalence else "",
                "change": _change_text(comparison),
                "95 % interval": _interval(comparison),
                "flips": _flips(comparison),
                model.baseline: _score_text(comparison.baseline),
                precision: _score_text(comparison.value),
                "n": f"{comparison.instances:,}",
                "p": _p_value(comparison),
            }
            for metrics, comparison in group
        ]
        links = {
            label: [run_links.get((comparison.run, label), "") for _, comparison in group]
            for label in (model.baseline, precision)
        }
        marks = [_mark(comparison, scales[_unit(comparison)]) for _, comparison in group]
        tables.append(
            Table(
                pd.DataFrame(rows),
                f"{precision} against {model.baseline}",
                num_keys=2,
                links=links,
                marks={"95 % interval": marks},
                optional=("p", "n", precision, model.baseline, "95 % interval"),
            )
        )
    return tables


def interval_scales(comparisons: Iterable[Comparison]) -> dict[str, float]:
    """Return the end of the axis that the intervals of each unit share: 1, 2 or 5 times a power of
    ten.

    A ratio's end is what it is above 1.
    """
    ends: dict[str, float] = {}
    for comparison in comparisons:
        reach = max(map(abs, _positions(comparison)), default=0.0)
        reach = (math.expm1(reach) if comparison.kind == "ratio" else reach) or 1.0
        power = 10.0 ** math.floor(math.log10(reach))
        end = next(step * power for step in (1, 2, 5, 10) if step * power >= reach)
        ends[_unit(comparison)] = max(ends.get(_unit(comparison), 0.0), end)
    return ends


def _by_precision(comparisons: Iterable[Comparison]) -> dict[str, list[tuple[str, Comparison]]]:
    """Return metrics and comparison by precision; metrics of a run entry with equal numbers are one
    row.
    """
    by_precision: dict[str, list[tuple[str, Comparison]]] = {}
    for comparison in sorted(
        comparisons, key=lambda comparison: precision_rank(comparison.precision)
    ):
        rows = by_precision.setdefault(comparison.precision, [])
        if (
            rows
            and replace(rows[-1][1], metric=comparison.metric) == comparison
            and _unit(rows[-1][1]) == _unit(comparison)
        ):
            rows[-1] = f"{rows[-1][0]}, {comparison.metric}", comparison
        else:
            rows.append((comparison.metric, comparison))
    return by_precision


def _mark(comparison: Comparison, end: float) -> Mark | None:
    """Draw an interval on an axis from -end to end, whose middle is no change."""
    positions, axis = _positions(comparison), (f"{-end:g}", "0", f"{end:+g}")
    if not positions:
        return None
    if comparison.kind == "ratio":
        axis, end = (f"×{1 / (1 + end):.3g}", "×1", f"×{1 + end:.3g}"), math.log1p(end)
    elif _unit(comparison) == "pp":
        axis = f"{-100 * end:g}", "0", f"{100 * end:+g} pp"
    low, point, high = (50 + 50 * position / end for position in positions)
    return Mark(low, high, point, axis)


def summary_table(model: ModelComparison) -> Table:
    """Return a row per precision, or model, with its verdict over all run entries, what it costs,
    and its speed.
    """
    by_precision = costs(model)
    rows = []
    for speed in model.speeds:
        name = speed.label
        row = {
            model.kind: name,
            "verdict": model.verdicts[name].text if name in model.verdicts else "",
        }
        if cost := by_precision.get(name):
            cheapest = cost.cheapest if name != model.baseline else ()
            row["cheapest equivalent"] = " and ".join(f"by {what}" for what in cheapest)
            row["bytes per weight"] = (
                "as published" if cost.weight_bytes is None else f"{cost.weight_bytes:.3g}"
            )
        row |= {"tokens": whole_text(speed.tokens), "time": seconds_text(speed.latency_s)}
        rows.append({**row, "tokens/s": tokens_per_s_text(speed)})
    return Table(
        pd.DataFrame(rows).fillna(""),
        "Verdicts and costs",
        optional=("tokens", "time", "bytes per weight"),
    )


def _positions(comparison: Comparison) -> list[float]:
    """Return low end, change and high end, 0 where nothing changes; [] without an interval."""
    if comparison.interval is None:
        return []
    low, high = comparison.interval
    values = [low, comparison.change, high]
    if comparison.kind == "ratio":
        values = [math.log(value) if value > 0 else math.nan for value in values]
    return values if all(map(math.isfinite, values)) else []


def _unit(comparison: Comparison) -> str:
    """Return what a change is counted in; metrics without a unit have a scale of their own."""
    if comparison.kind == "ratio":
        return "×"
    return "pp" if metric_named(comparison.metric).is_share else comparison.metric


# --- Cells ---


def _in_unit(comparison: Comparison, value: float) -> str:
    if comparison.kind == "ratio":
        return f"×{value:.4f}"
    return f"{100 * value:+.2f}" if _unit(comparison) == "pp" else f"{value:+.4f}"


def _change_text(comparison: Comparison) -> str:
    if not math.isfinite(comparison.change):
        return ""
    unit = " pp" if _unit(comparison) == "pp" else ""
    return f"{_in_unit(comparison, comparison.change)}{unit}"


def _interval(comparison: Comparison) -> str:
    if comparison.interval is None:
        if comparison.instances == 1:
            return "none (1 instance)"
        return "none (no mean)" if math.isfinite(comparison.change) else "none (not finite)"
    return " … ".join(_in_unit(comparison, end) for end in comparison.interval)


def _flips(comparison: Comparison) -> str:
    flips = comparison.flips
    counts = (flips.lost, flips.won, flips.changed) if flips else ()
    return " : ".join(f"{count:,}" for count in counts if count is not None)


def _p_value(comparison: Comparison) -> str:
    p_value = comparison.p_value
    return "" if p_value is None else "< 0.0001" if p_value < 1e-4 else f"{p_value:.4f}"
