"""A comparison of precisions as markdown, as JSON and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flexgen_helm.report.comparison import ORDER, Comparison, ModelComparison, PairedTest
from flexgen_helm.report.page import figure_html, markdown_table, page

if TYPE_CHECKING:
    import plotly.graph_objects as go

TITLES = ("run", "metric", "precision", "score", "change (95 %)", "test")
SPEED_TITLES = ("precision", "instances", "tokens", "seconds", "tokens/s")
_COLOURS = dict(zip(ORDER, ("#888888", "#2a9d8f", "#1f77b4", "#9467bd", "#d62728")))


def to_json(models: Sequence[ModelComparison], suite: str, baseline: str) -> dict[str, Any]:
    return {
        "suite": suite,
        "baseline": baseline,
        "models": {
            found.model: {
                "comparisons": [asdict(each) for each in found.comparisons],
                "speed": [{**asdict(speed), "tokens_per_s": speed.tokens_per_s} for speed in found.speeds],
                "notes": found.notes,
            }
            for found in models
        },
    }


def to_markdown(models: Sequence[ModelComparison], suite: str, baseline: str) -> str:
    """Tables whose columns also line up in a terminal."""
    parts = [f"# {suite}: {baseline} and other precisions", _legend(baseline)]
    for found in models:
        parts += [f"## {found.model}", markdown_table(TITLES, rows(found, baseline))]
        parts.append(markdown_table(SPEED_TITLES, speed_rows(found), right=4))
        parts += [f"- {note}." for note in found.notes]
    return "\n\n".join(parts) + "\n"


def to_html(models: Sequence[ModelComparison], suite: str, baseline: str) -> str:
    """One page that needs nothing but itself."""
    sections = [section(found, baseline, found.model, first=not place) for place, found in enumerate(models)]
    return page(f"{suite}: {baseline} and other precisions", _legend(baseline), sections)


def section(found: ModelComparison, baseline: str, title: str, first: bool) -> dict[str, Any]:
    """One model's part of a page; first: it brings the library that draws pictures."""
    return {
        "title": title,
        "pictures": _pictures(found, baseline, first),
        "tables": [(TITLES, rows(found, baseline)), (SPEED_TITLES, speed_rows(found))],
        "notes": found.notes,
    }


def rows(found: ModelComparison, baseline: str) -> list[tuple[str, ...]]:
    """A row for the baseline of each figure, and one for every other precision. Precisions that share other instances
    with the baseline have a row of the baseline over those."""
    made: list[tuple[str, ...]] = []
    over: tuple[str, int] | None = None
    figure: tuple[str, str] | None = None
    last: tuple[str, int] | None = None
    for each in found.comparisons:
        again = (each.run, each.metric) == figure
        # As it is shown: digits beyond that are no other baseline.
        base = (_score(each.baseline), each.instances)
        if not again or base != last:
            told = over == (each.run, each.instances) and not again
            run = "" if told else f"{each.run} ({each.instances:,} instances)"
            made.append((run, each.metric, baseline, base[0], "", ""))
            over, figure, last = (each.run, each.instances), (each.run, each.metric), base
        made.append(("", "", each.precision, _score(each.value), _change(each), _test(each.test)))
    return made


def speed_rows(found: ModelComparison) -> list[tuple[str, ...]]:
    return [
        (
            speed.precision,
            f"{speed.instances:,}",
            f"{speed.tokens:,}",
            f"{speed.latency_s:,.0f}",
            f"{speed.tokens_per_s:,.0f}" + (" *" if speed.num_reused else ""),
        )
        for speed in found.speeds
    ]


def _legend(baseline: str) -> str:
    return (
        f"Changes are against {baseline} on the same instances: × is a ratio, the others are differences. Intervals: "
        "bootstrap over instances. Tests: exact McNemar for right and wrong answers, else a permutation of signs. "
        "Tokens a second are of whole runs, whatever instances they share."
    )


def _score(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.3f}"


def _change(each: Comparison) -> str:
    def shown(value: float) -> str:
        return f"×{value:.4f}" if each.kind == "ratio" else f"{value:+.4f}"

    if each.interval is None:
        why = "one instance" if each.instances == 1 else "not a mean over instances"
        return f"{shown(each.change)} (no interval: {why})"
    return f"{shown(each.change)} ({shown(each.interval[0])} … {shown(each.interval[1])})"


def _test(test: PairedTest | None) -> str:
    if test is None:
        return ""
    told = "p < 0.0001" if test.p_value < 1e-4 else f"p = {test.p_value:.4f}"
    return told if test.lost is None else f"{told}, {test.lost} lost, {test.won} won"


def _pictures(found: ModelComparison, baseline: str, first: bool) -> list[str]:
    """Differences, in hundredths, and ratios, each with its interval."""
    made: list[str] = []
    for kind, title in (
        ("difference", f"difference to {baseline}, in hundredths"),
        ("ratio", f"ratio to {baseline}"),
    ):
        own = [each for each in found.comparisons if each.kind == kind]
        if own:
            made.append(figure_html(_picture(own, title, kind == "ratio"), first=first and not made))
    return made


def _picture(comparisons: Sequence[Comparison], title: str, ratio: bool) -> go.Figure:
    import plotly.graph_objects as go

    figure, factor = go.Figure(), 1 if ratio else 100
    names = list(dict.fromkeys(f"{each.run}<br>{each.metric}" for each in comparisons))
    for precision in dict.fromkeys(each.precision for each in comparisons):
        own = [each for each in comparisons if each.precision == precision]
        ends = [each.interval or (each.change, each.change) for each in own]
        figure.add_trace(
            go.Scatter(
                name=precision,
                x=[factor * each.change for each in own],
                y=[f"{each.run}<br>{each.metric}" for each in own],
                error_x={
                    "symmetric": False,
                    "array": [factor * (high - each.change) for (_, high), each in zip(ends, own)],
                    "arrayminus": [factor * (each.change - low) for (low, _), each in zip(ends, own)],
                },
                orientation="h",  # so that grouping sets precisions apart in height and leaves the values alone
                mode="markers",
                cliponaxis=False,  # a point on the edge is drawn whole
                marker={"size": 9, "color": _COLOURS.get(precision)},
                hovertemplate="%{y}: %{x:.4g}<extra>" + precision + "</extra>",
            )
        )
    figure.add_vline(x=1 if ratio else 0, line_color="#888888")
    figure.update_layout(
        template="plotly_white",
        height=140 + 60 * len(names),
        margin={"l": 20, "r": 20, "t": 20, "b": 40},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        scattermode="group",
        showlegend=True,
    )
    figure.update_xaxes(title=title, type="log" if ratio else "linear")
    figure.update_yaxes(automargin=True, categoryorder="array", categoryarray=names, autorange="reversed")
    return figure
