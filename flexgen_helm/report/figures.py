"""Plotly figures of a report. Their backgrounds are transparent; the page's style sheet colours text and grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexgen_helm.quant.precisions import PRECISIONS

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_PRECISION_COLOURS = dict(zip(PRECISIONS, ("#888888", "#2a9d8f", "#1f77b4", "#9467bd", "#d62728")))


def bars(frame: pd.DataFrame, unit: str, series: Mapping[str, str] | None = None, stacked: bool = False) -> go.Figure:
    """Draw horizontal bars: a group per index label, a colour per column in `series` (column -> legend), or per column.

    stacked: one bar per label, instead of one per column.
    """
    import plotly.express as px

    series = series or {column: column for column in frame}
    shown = frame[list(series)].rename(columns=series).astype(float).fillna(0)
    figure = px.bar(shown, orientation="h", barmode="relative" if stacked else "group", text_auto=",.4~r")
    _style(figure, 150 + len(shown) * (34 if stacked else 22 * len(series)), unit)
    return figure.update_yaxes(title=None, autorange="reversed")


def intervals(comparisons: pd.DataFrame, baseline: str) -> go.Figure:
    """Draw changes of one kind with their intervals: ratios on a log axis, differences in percentage points.

    comparisons: rows of `tables.comparisons_frame`.
    """
    import plotly.express as px

    ratio = comparisons["kind"].iloc[0] == "ratio"
    change, low, high = (
        comparisons[name].astype(float) * (1 if ratio else 100) for name in ("change", "interval.low", "interval.high")
    )
    label = comparisons["run"] + "<br>" + comparisons["metric"]
    figure = px.scatter(
        comparisons.assign(change=change, label=label, above=high - change, below=change - low),
        x="change",
        y="label",
        color="precision",
        error_x="above",
        error_x_minus="below",
        log_x=bool(ratio),
        color_discrete_map=_PRECISION_COLOURS,
    )
    # orientation: grouping then moves points vertically; cliponaxis: a point on the plot's edge is drawn whole.
    figure.update_traces(orientation="h", cliponaxis=False, marker_size=9)
    figure.add_vline(x=1 if ratio else 0, line_color="#888888")
    title = f"ratio to {baseline}" if ratio else f"difference to {baseline}, percentage points"
    _style(figure, 140 + 60 * label.nunique(), title, scattermode="group", showlegend=True)
    return figure.update_yaxes(title=None, categoryarray=label.unique(), autorange="reversed")


def frontier(points: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Draw throughput over latency for the points of `planner.frontier`, with the shapes of their blocks."""
    import plotly.express as px

    blocks = [f"{point['policy']['gpu_batch_size']}x{point['policy']['num_gpu_batches']}" for point in points]
    seconds, speeds = ([point[key] for point in points] for key in ("latency_s", "tokens_per_s"))
    figure = px.line(x=seconds, y=speeds, text=blocks, markers=True, log_x=True, log_y=True)
    _style(figure.update_traces(textposition="top left"), 520, "latency of a block, seconds")
    return figure.update_yaxes(title="generated tokens/s")


def _style(figure: go.Figure, height: int, x_title: str, **layout: Any) -> None:
    figure.update_layout(
        template="plotly_white",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#999999", "activecolor": "#666666"},
        height=height,
        margin={"l": 20, "r": 20, "t": 20, "b": 40},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "title": None},
        **layout,
    )
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(automargin=True)
