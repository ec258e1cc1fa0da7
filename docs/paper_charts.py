"""Draw docs/images/paper_*.svg, pictures of tables of docs/paper.md: `make pages`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexgen_helm.benchmarks.paper.rows import Row, breakdown, frontier, techniques

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH = 800
COLORS = ("#3f51b5", "#2e7d32", "#ef6c00", "#c62828", "#8d99a6")
DARK_COLORS = ("#8c9eff", "#81c784", "#ffb74d", "#e57373", "#78838f")
STYLE = "\n".join(
    (
        "",
        (
            '  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, '
            "sans-serif; fill: #1f2933; }"
        ),
        "  .title { font-size: 14px; font-weight: 600; }",
        "  .grid { stroke: #d5dae1; }",
        "  .whole { stroke: #1f2933; stroke-dasharray: 3 3; }",
        *(
            f"  .c{number} {{ fill: {color}; stroke: {color}; }}"
            for number, color in enumerate(COLORS)
        ),
        "  path { fill: none !important; stroke-width: 2; }",
        "  rect { stroke: none !important; }",
        "  @media (prefers-color-scheme: dark) {",
        "    text { fill: #e6edf3; }",
        "    .grid { stroke: #3a424d; }",
        "    .whole { stroke: #e6edf3; }",
        *(
            f"    .c{number} {{ fill: {color}; stroke: {color}; }}"
            for number, color in enumerate(DARK_COLORS)
        ),
        "  }",
        "",
    )
)


def charts() -> dict[str, str]:
    """Return the text of each picture by its file's name."""
    return {
        "paper_frontier.svg": frontier_chart(frontier()),
        "paper_breakdown.svg": breakdown_chart(breakdown()),
        "paper_techniques.svg": techniques_chart(techniques()),
    }


def frontier_chart(rows: Sequence[Row]) -> str:
    """Draw latency and throughput, both logarithmic: the paper's as dots, the predicted ones as
    lines.
    """
    systems = ("FlexGen (c)", "FlexGen", "DeepSpeed", "Accelerate")
    body: list[str] = []
    for number, system in enumerate(systems):
        body.append(f'<circle class="c{number}" cx="{70 + 120 * number}" cy="16" r="4"/>')
        body.append(f'<path class="c{number}" d="M{58 + 120 * number} 16 h24"/>')
        body.append(f'<text x="{90 + 120 * number}" y="20">{system}</text>')
    body.append('<text x="560" y="20">dots: the paper; lines: predicted</text>')
    panels = (
        (52, "opt-30b", "OPT-30B", (100, 200, 500, 1500), (0.05, 0.2, 1, 5, 10)),
        (
            446,
            "opt-175b",
            "OPT-175B",
            (500, 1000, 2000, 5000, 15000),
            (0.003, 0.01, 0.05, 0.2, 1, 2),
        ),
    )
    for left, model, title, seconds, rates in panels:
        body += _frontier_panel(left, title, seconds, rates)
        for number, system in enumerate(systems):
            own = [row for row in rows if row["label"].startswith(f"{system} {model},")]
            theirs, ours = (
                [
                    (
                        _log(row[f"{column}_s"], seconds, left, left + 320),
                        _log(row[column], rates, 270, 62),
                    )
                    for row in own
                ]
                for column in ("paper", "predicted")
            )
            body.append(
                f'<path class="c{number}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in ours)}"/>'
            )
            body += [
                f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in theirs
            ]
            if len(ours) == 1:  # a line of one point is not seen
                body.append(
                    f'<path class="c{number}" d="M{ours[0][0] - 6:.1f} {ours[0][1]:.1f} h12"/>'
                )
    return _svg("Latency and throughput of the paper's frontier, and predicted", 316, body)


def _frontier_panel(
    left: int, title: str, seconds: Sequence[float], rates: Sequence[float]
) -> Iterator[str]:
    yield f'<text class="title" x="{left}" y="48">{title}: tokens/s</text>'
    for rate in rates:
        y = _log(rate, rates, 270, 62)
        yield f'<line class="grid" x1="{left}" x2="{left + 320}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{rate:g}</text>'
    for tick in seconds:
        x = _log(tick, seconds, left, left + 320)
        yield f'<text x="{x:.1f}" y="288" text-anchor="middle">{tick:,}</text>'
    yield f'<text x="{left + 160}" y="306" text-anchor="middle">seconds of a block</text>'


def _log(value: float, ticks: Sequence[float], first: float, last: float) -> float:
    """Return the place of a value on a logarithmic axis from `first` to `last` pixels."""
    return first + (last - first) * math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])


def breakdown_chart(rows: Sequence[Row]) -> str:
    """Draw each phase's parts as shares of it, one beside the other, with a line where the phase
    ends.
    """
    figures = {row["label"]: row for row in rows}
    parts = [label.removeprefix("prefill: ") for label in figures if label.startswith("prefill: ")][
        :-1
    ]
    body: list[str] = []
    for number, part in enumerate(parts):
        body.append(
            f'<rect class="c{number}" x="{24 + 150 * number}" y="7" width="12" height="12" rx="2"/>'
        )
        body.append(f'<text x="{42 + 150 * number}" y="17">{part}</text>')
    y, left, scale = 42, 170, 480
    for phase in ("prefill", "decoding"):
        top = y
        for column in ("paper", "predicted", "measured"):
            if figures[f"{phase}: compute"][column] is None:
                continue
            body.append(
                f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{phase}, {column}</text>'
            )
            x = float(left)
            for number, part in enumerate(parts):
                width = scale * (figures[f"{phase}: {part}"][column] or 0.0)
                body.append(
                    f'<rect class="c{number}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="18"/>'
                )
                x += width
            total = figures[f"{phase}, seconds"][column]
            seconds = f"{total:,.0f}" if total >= 100 else f"{total:.3g}"
            body.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{seconds} s</text>')
            y += 24
        body.append(
            f'<line class="whole" x1="{left + scale}" x2="{left + scale}" y1="{top - 5}" '
            f'y2="{y - 1}"/>'
        )
        y += 16
    return _svg("Shares of the time of OPT-175B's phases without overlap", y, body)


def techniques_chart(rows: Sequence[Row]) -> str:
    """Draw throughput without each technique as a share of that with all."""
    columns = ("paper", "predicted", "measured")
    body: list[str] = []
    for number, column in enumerate(columns):
        body.append(
            f'<rect class="c{number}" x="{190 + 130 * number}" y="7" width="12" height="12" '
            'rx="2"/>'
        )
        body.append(f'<text x="{208 + 130 * number}" y="17">{column}</text>')
    y, left, scale = 36, 190, 540
    for row in rows:
        body.append(f'<text x="{left - 10}" y="{y + 27}" text-anchor="end">{row["label"]}</text>')
        for number, column in enumerate(columns):
            share = row[column] or 0.0
            body.append(
                f'<rect class="c{number}" x="{left}" y="{y}" width="{scale * share:.1f}" '
                'height="13" rx="2"/>'
            )
            body.append(f'<text x="{left + scale + 10}" y="{y + 11}">{share:.2f}</text>')
            y += 15
        y += 12
    body.append(
        f'<line class="whole" x1="{left + scale}" x2="{left + scale}" y1="30" y2="{y - 8}"/>'
    )
    return _svg("Throughput without each technique, over the throughput with all", y, body)


def _svg(title: str, height: int, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join(
        (head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *body, "</svg>", "")
    )


if __name__ == "__main__":
    for name, text in charts().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
