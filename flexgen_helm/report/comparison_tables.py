"""What `compare` shows: tables of verdicts, changes and speeds, and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from flexgen_helm.report.choice import costs
from flexgen_helm.report.comparison import ModelComparison
from flexgen_helm.report.metrics import metric_named
from flexgen_helm.report.scores import finite, precision_rank
from flexgen_helm.report.tables import (
    Mark,
    Table,
    decimals,
    run_link,
    seconds_text,
    tokens_per_s_text,
    whole_text,
)
from flexgen_helm.report.verdicts import Comparison


def comparison_to_json(models: Sequence[ModelComparison], suite: str) -> dict[str, Any]:
    """Return what `compare --json` prints."""
    content = {
        "suite": suite,
        "baseline": models[0].baseline,
        "models": {
            model.model: {
                "baseline": model.baseline_run.at_rest,
                "full_precision": model.baseline_run.is_full_precision,
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
                "95 % interval": _interval_text(comparison),
                "flips": _flips_text(comparison),
                model.baseline: _score_text(comparison.baseline),
                precision: _score_text(comparison.value),
                "n": f"{comparison.instances:,}",
                "p": _p_value_text(comparison),
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


def _in_unit(comparison: Comparison, value: float) -> str:
    if comparison.kind == "ratio":
        return f"×{value:.4f}"
    return f"{100 * value:+.2f}" if _unit(comparison) == "pp" else f"{value:+.4f}"


def _change_text(comparison: Comparison) -> str:
    if not math.isfinite(comparison.change):
        return ""
    unit = " pp" if _unit(comparison) == "pp" else ""
    return f"{_in_unit(comparison, comparison.change)}{unit}"


def _interval_text(comparison: Comparison) -> str:
    if comparison.interval is None:
        if comparison.instances == 1:
            return "none (1 instance)"
        return "none (no mean)" if math.isfinite(comparison.change) else "none (not finite)"
    return " … ".join(_in_unit(comparison, end) for end in comparison.interval)


def _flips_text(comparison: Comparison) -> str:
    flips = comparison.flips
    counts = (flips.lost, flips.won, flips.changed) if flips else ()
    return " : ".join(f"{count:,}" for count in counts if count is not None)


def _p_value_text(comparison: Comparison) -> str:
    p_value = comparison.p_value
    return "" if p_value is None else "< 0.0001" if p_value < 1e-4 else f"{p_value:.4f}"


def _score_text(value: float) -> str:
    return f"{value:,.{decimals(value) + (abs(value) < 10)}f}"
