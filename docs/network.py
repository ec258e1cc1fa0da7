"""Draw docs/images/network.svg from the cost model: `make pages`. The paper's figure of FlexGen and Petals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexgen_helm.benchmarks.paper.network import NETWORKS, offloading, pipeline

OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
CHART = Path(__file__).resolve().parent / "images" / "network.svg"
# Geometry in pixels: of the picture, of a panel's axes.
WIDTH, HEIGHT, PANEL, TOP, BOTTOM, LEFT = 800, 330, 390, 62, 262, 52
AXIS = 310
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
  .title { font-size: 14px; font-weight: 600; }
  .grid { stroke: #d5dae1; }
  path { fill: none; stroke-width: 2; }
  .line0 { stroke: #3f51b5; stroke-width: 3; }
  .line1 { stroke: #2e7d32; }
  .line2 { stroke: #ef6c00; stroke-dasharray: 6 3; }
  .line3 { stroke: #c62828; stroke-dasharray: 2 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .grid { stroke: #3a424d; }
    .line0 { stroke: #8c9eff; }
    .line1 { stroke: #81c784; }
    .line2 { stroke: #ffb74d; }
    .line3 { stroke: #e57373; }
  }
"""


def panel(left: int, title: str, lines: Mapping[str, Sequence[float]], ticks: Sequence[float]) -> list[str]:
    """SVG lines of one panel, both axes logarithmic; lines: name -> values for `OUTPUTS`."""
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def x(output: float) -> float:
        return left + LEFT + AXIS * math.log(output / OUTPUTS[0]) / math.log(OUTPUTS[-1] / OUTPUTS[0])

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log(value) - low) / (high - low)

    drawn = [f'<text class="title" x="{left + LEFT}" y="{TOP - 18}">{title}</text>']
    for tick in ticks:
        drawn.append(
            f'<line class="grid" x1="{left + LEFT}" x2="{left + LEFT + AXIS}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        drawn.append(f'<text x="{left + LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for output in OUTPUTS:
        drawn.append(f'<text x="{x(output):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{output}</text>')
    drawn.append(f'<text x="{left + LEFT + AXIS / 2}" y="{BOTTOM + 36}" text-anchor="middle">new tokens</text>')
    for number, values in enumerate(lines.values()):
        points = " L".join(f"{x(output):.1f} {y(value):.1f}" for output, value in zip(OUTPUTS, values))
        drawn.append(f'<path class="line{number}" d="M{points}"/>')
    return drawn


def chart() -> str:
    """The SVG file's text."""
    figures = {"offloading on one GPU; pipeline:": [offloading(output) for output in OUTPUTS]}
    figures |= {name: [pipeline(output, network) for output in OUTPUTS] for name, network in NETWORKS.items()}
    seconds, rates = ({name: [row[column] for row in rows] for name, rows in figures.items()} for column in (0, 1))
    body = panel(0, "Latency of 12 sequences, s", seconds, (5, 10, 30, 100, 300, 1000))
    body += panel(PANEL, "Throughput of one GPU, tokens/s", rates, (0.1, 0.3, 1, 3, 10))
    for number, name in enumerate(figures):
        left = 24 + number * 165 + (70 if number else 0)
        body.append(f'<path class="line{number}" d="M{left} 16 L{left + 26} 16"/>')
        body.append(f'<text x="{left + 32}" y="20">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    title = "<title>OPT-30B over four T4s in three networks, and offloaded on one T4 (cost model)</title>"
    return "\n".join([f"{head}>", title, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
