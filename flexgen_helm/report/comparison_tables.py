"""Tables of precisions compared: numbers for CSV, and verdicts, changes and speeds for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from flexgen_helm.report.choice import Choice
from flexgen_helm.report.comparison import Comparison, ModelComparison
from flexgen_helm.report.divergence import Divergence, SuiteDivergence, TextDivergence
from flexgen_helm.report.metrics import metric_named
from flexgen_helm.report.scores import precision_rank
from flexgen_helm.report.tables import Mark, Table, bars, score_text, seconds_text, whole_text

_COMPARISON_COLUMNS = [
    "model", "run", "metric", "precision", "instances", "baseline", "value", "kind", "change", "interval.low",
    "interval.high", "test.name", "test.p_value", "test.lost", "test.won", "flips.lost", "flips.won", "flips.changed",
    "equivalence.decision", "equivalence.margin", "equivalence.p_value", "equivalence.needed",
]  # fmt: skip


def comparisons_frame(models: Iterable[ModelComparison]) -> pd.DataFrame:
    """Return a row of numbers per comparison."""
    records = [{"model": model.model, **asdict(each)} for model in models for each in model.comparisons]
    for record in records:
        record["interval"] = dict(zip(("low", "high"), record["interval"] or ()))
        record |= {name: record[name] or {} for name in ("test", "flips", "equivalence")}
    return pd.json_normalize(records).reindex(columns=_COMPARISON_COLUMNS).convert_dtypes()


def comparison_tables(
    comparisons: Sequence[Comparison],
    baseline: str,
    links: Mapping[tuple[str, str], str] | None = None,
    scales: Mapping[str, float] | None = None,
) -> list[Table]:
    """Return a table per precision that is compared with `baseline`.

    links: (run entry, precision) -> folder.
    scales: from `interval_scales` of all that a page shows; None for those of `comparisons`.
    """
    ends = interval_scales(comparisons) if scales is None else scales
    tables = []
    for precision, own in _by_precision(comparisons).items():
        rows = [
            (each.run, metrics, f"{each.instances:,}", score_text(each.baseline), score_text(each.value),
             _change(each), _interval(each), _test(each))
            for metrics, each in own
        ]  # fmt: skip
        names = ["run entry", "metric", "n", baseline, precision, "change", "95 % interval", "p (lost : won)"]
        folders = {name: [(links or {}).get((each.run, name), "") for _, each in own] for name in (baseline, precision)}
        marks = {"95 % interval": [_mark(each, ends[_unit(each)]) for _, each in own]}
        cells, title = pd.DataFrame(rows, columns=names), f"{precision} against {baseline}"
        tables.append(Table(cells, title, 2, folders, marks, optional=("p (lost : won)", "n", "95 % interval")))
    return tables


def interval_scales(comparisons: Iterable[Comparison]) -> dict[str, float]:
    """Return the end of the axis that the intervals of each unit share: 1, 2 or 5 times a power of ten.

    A ratio's end is what it is above 1.
    """
    ends: dict[str, float] = {}
    for each in comparisons:
        reach = max(map(abs, _positions(each)), default=0.0)
        reach = (math.expm1(reach) if each.kind == "ratio" else reach) or 1.0
        power = 10.0 ** math.floor(math.log10(reach))
        end = next(step * power for step in (1, 2, 5, 10) if step * power >= reach)
        ends[_unit(each)] = max(ends.get(_unit(each), 0.0), end)
    return ends


def _by_precision(comparisons: Iterable[Comparison]) -> dict[str, list[tuple[str, Comparison]]]:
    """Return metrics and comparison by precision; metrics of a run entry with equal numbers are one row."""
    found: dict[str, list[tuple[str, Comparison]]] = {}
    for each in sorted(comparisons, key=lambda each: precision_rank(each.precision)):
        rows = found.setdefault(each.precision, [])
        if rows and replace(rows[-1][1], metric=each.metric) == each and _unit(rows[-1][1]) == _unit(each):
            rows[-1] = f"{rows[-1][0]}, {each.metric}", each
        else:
            rows.append((each.metric, each))
    return found


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


def verdict_tables(comparisons: Iterable[Comparison], baseline: str) -> list[Table]:
    """Return a table of verdicts and flips per precision that is compared with `baseline`."""
    tables = []
    for precision, own in _by_precision(each for each in comparisons if each.equivalence is not None).items():
        rows = [(each.run, metrics, _flips(each), each.equivalence and each.equivalence.text) for metrics, each in own]
        cells = pd.DataFrame(rows, columns=["run entry", "metric", "flips", "verdict"])
        tables.append(Table(cells, f"{precision} against {baseline}: verdicts", num_keys=2))
    return tables


def choice_table(choice: Choice) -> Table:
    """Return a row per candidate, the cheapest first."""
    candidates = choice.candidates
    cells = {
        "precision": [one.precision for one in candidates],
        "s per 1,000 tokens": [
            "" if one.seconds_per_token is None else f"{1000 * one.seconds_per_token:.4g}" for one in candidates
        ],
        "bytes per weight": [f"{one.weight_bytes:.3g}" for one in candidates],
        "verdict": [one.verdict for one in candidates],
    }
    return Table(pd.DataFrame(cells), f"Which precision, by {choice.by}", num_keys=0)


def divergence_table(found: TextDivergence | SuiteDivergence, baseline: str) -> Table:
    """Return a row per precision whose distributions were compared with the baseline's; of a suite, per run entry."""
    if isinstance(found, TextDivergence):
        on, cells, num_keys = Path(found.text).name, _divergence_cells(found.precisions, "window"), 0
    else:
        every = [each for entry in found.entries for each in entry.precisions]
        entries = [entry.entry for entry in found.entries for _ in entry.precisions]
        on, cells = "what the scores are made of", {"run entry": entries, **_divergence_cells(every, "instance")}
        num_keys = 2
        del cells["KL median"]  # of ten columns a tablet has no room
    return Table(pd.DataFrame(cells), f"Divergence from {baseline} on {on}, nats", num_keys)


def _divergence_cells(own: Sequence[Divergence], document: str) -> dict[str, list[str]]:
    return {
        "precision": [each.precision for each in own],
        "tokens": [f"{each.tokens:,}" for each in own],
        "perplexity": [f"×{each.ratio:.4f}" for each in own],
        "95 % interval": [
            f"none (1 {document})" if each.interval is None else " … ".join(f"{end:.4f}" for end in each.interval)
            for each in own
        ],
        "same top": [f"{each.same_top:.1%}" for each in own],
        "KL mean": [f"{each.kl.mean:.5f}" for each in own],
        "KL median": [f"{each.kl.median:.5f}" for each in own],
        "KL 99 %": [f"{each.kl.p99:.5f}" for each in own],
    }


def _flips(comparison: Comparison) -> str:
    flips = comparison.flips
    if flips is None:
        return ""
    return f"{flips.lost:,} : {flips.won:,}" + ("" if flips.changed is None else f" : {flips.changed:,}")


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


def speeds_table(speeds: pd.DataFrame) -> Table:
    """Return a row per precision; * marks throughputs that `reused_note` explains."""
    cells = {
        "precision": list(speeds["precision"]),
        "instances": list(map(whole_text, speeds["instances"])),
        "tokens": list(map(whole_text, speeds["tokens"])),
        "time": list(map(seconds_text, speeds["latency_s"])),
        "tokens/s": [
            f"{rate:,.0f}" + " *" * (reused > 0) for rate, reused in zip(speeds["tokens_per_s"], speeds["num_reused"])
        ],
    }
    return Table(pd.DataFrame(cells), num_keys=0, marks={"tokens/s": bars(speeds["tokens_per_s"])})


# --- Cells ---


def _change(comparison: Comparison) -> str:
    if not math.isfinite(comparison.change):
        return ""
    change = _in_unit(comparison, comparison.change)
    return f"{change} pp" if _unit(comparison) == "pp" else change


def _in_unit(comparison: Comparison, value: float) -> str:
    if comparison.kind == "ratio":
        return f"×{value:.4f}"
    return f"{100 * value:+.2f}" if _unit(comparison) == "pp" else f"{value:+.4f}"


def _interval(comparison: Comparison) -> str:
    if comparison.interval is None:
        if comparison.instances == 1:
            return "none (1 instance)"
        return "none (no mean)" if math.isfinite(comparison.change) else "none (not finite)"
    return " … ".join(_in_unit(comparison, end) for end in comparison.interval)


def _test(comparison: Comparison) -> str:
    test = comparison.test
    if test is None:
        return ""
    p_value = "< 0.0001" if test.p_value < 1e-4 else f"{test.p_value:.4f}"
    return p_value if test.lost is None else f"{p_value} ({test.lost} : {test.won})"
