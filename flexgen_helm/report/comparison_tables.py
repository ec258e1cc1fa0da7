"""Tables of precisions compared: numbers for CSV, and verdicts, changes and speeds for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
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
    comparisons: Iterable[Comparison], baseline: str, links: Mapping[tuple[str, str], str] | None = None
) -> list[Table]:
    """Return a table per precision that is compared with `baseline`. links: (run entry, precision) -> folder."""
    comparisons = list(comparisons)
    precisions = sorted({each.precision for each in comparisons}, key=precision_rank)
    return [
        _comparison_table(
            [each for each in comparisons if each.precision == precision], baseline, precision, links or {}
        )
        for precision in precisions
    ]


def _comparison_table(
    comparisons: Sequence[Comparison], baseline: str, precision: str, links: Mapping[tuple[str, str], str]
) -> Table:
    rows = [
        (each.run, each.metric, f"{each.instances:,}", score_text(each.baseline), score_text(each.value), _change(each),
         _interval(each), _test(each))
        for each in comparisons
    ]  # fmt: skip
    names = ["run entry", "metric", "n", baseline, precision, "change", "95 % interval", "p (lost : won)"]
    # Changes in one unit share a scale, whose middle is no change.
    largest: dict[str, float] = {}
    for each in comparisons:
        reach = max((abs(position) for position in _positions(each)), default=0.0)
        largest[_unit(each)] = max(largest.get(_unit(each), 0.0), reach)

    def mark(each: Comparison) -> Mark | None:
        positions = _positions(each)
        if not positions:
            return None
        scale = largest[_unit(each)] or 1.0
        low, point, high = (50 + 48 * position / scale for position in positions)
        return Mark(low, high, point)

    return Table(
        pd.DataFrame(rows, columns=names),
        f"{precision} against {baseline}",
        num_keys=2,
        links={name: [links.get((each.run, name), "") for each in comparisons] for name in (baseline, precision)},
        marks={"95 % interval": list(map(mark, comparisons))},
    )


def verdict_tables(comparisons: Iterable[Comparison], baseline: str) -> list[Table]:
    """Return a table of verdicts and flips per precision that is compared with `baseline`."""
    comparisons = [each for each in comparisons if each.equivalence is not None]
    tables = []
    for precision in sorted({each.precision for each in comparisons}, key=precision_rank):
        own = [each for each in comparisons if each.precision == precision]
        cells = {
            "run entry": [each.run for each in own],
            "metric": [each.metric for each in own],
            "flips": [_flips(each) for each in own],
            "verdict": [each.equivalence.text if each.equivalence else "" for each in own],
        }
        tables.append(Table(pd.DataFrame(cells), f"{precision} against {baseline}: verdicts", num_keys=2))
    return tables


def choice_table(choice: Choice) -> Table:
    """Return a row per candidate, the cheapest first; halves that were not needed are empty."""
    own = choice.candidates
    cells = {
        "precision": [each.precision for each in own],
        "s per 1,000 tokens": [
            "" if each.seconds_per_token is None else f"{1000 * each.seconds_per_token:.4g}" for each in own
        ],
        "bytes per weight": [f"{each.weight_bytes:.3g}" for each in own],
        "half that chooses": [each.first.text if each.first else "" for each in own],
        "half that confirms": [each.second.text if each.second else "" for each in own],
    }
    return Table(pd.DataFrame(cells), f"Which precision, by {choice.by}")


def divergence_table(found: TextDivergence | SuiteDivergence, baseline: str) -> Table:
    """Return a row per precision whose distributions were compared with the baseline's; of a suite, per run entry."""
    if isinstance(found, TextDivergence):
        on, cells, num_keys = Path(found.text).name, _divergence_cells(found.precisions, "window"), 1
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
    return Table(pd.DataFrame(cells), marks={"tokens/s": bars(speeds["tokens_per_s"])})


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
