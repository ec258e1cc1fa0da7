"""Draw docs/images/measured.svg from the stored benchmark results: `make pages`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.benchmarks.paper.page import day_of, processor_of
from flexgen_helm.benchmarks.paper.rows import stored_result, stored_rows

DOCS = Path(__file__).resolve().parent
CHART = DOCS / "images" / "measured.svg"

# Geometry in pixels.
WIDTH, LABELS, BAR, GROUP_GAP, VALUE = 800, 310, 15, 13, 150
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; }
  .title { font-size: 15px; font-weight: 600; }
  .note { font-size: 12px; fill: #52606d; }
  .ours { fill: #3f51b5; }
  .other { fill: #a9b2bd; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .note { fill: #a3afbb; }
    .ours { fill: #8c9eff; }
    .other { fill: #5f6b78; }
  }
"""


@dataclass(frozen=True)
class Group:
    """Two bars of one workload: the other program's value and ours, in the panel's unit."""

    label: str
    other: float
    ours: float


@dataclass(frozen=True)
class Panel:
    """A bar chart of its own scale. unit: of all values; better: 'lower' or 'higher'."""

    title: str
    other_name: str
    unit: str
    better: str
    groups: list[Group]


def note() -> str:
    """Return where and when the figures were measured."""
    parts = [
        f"{what}: {processor_of(result)}, {day_of(result)}"
        for what, result in (
            ("HELM", stored_result("clients")),
            ("offloading", stored_result("offload")),
        )
    ]
    return f"Two cores, no GPU, medians. {'; '.join(parts)}."


def helm_panel() -> Panel:
    """Seconds of a whole process: the better of our two commands, and of HELM's client with 1 and 4
    threads.
    """
    result = stored_rows("clients")
    tasks = {
        "mmlu": "MMLU, 200 requests",
        "natural": "synthetic_reasoning_natural, 100 requests",
        "pattern_match": "synthetic_reasoning, 100 requests",
        "lambada": "LAMBADA, 1,000 requests",
    }
    groups = [
        Group(
            label,
            other=min(result[f"{task}: huggingface -n {threads}"]["median"] for threads in (1, 4)),
            ours=min(
                result[f"{task}: {ours}"]["median"]
                for ours in ("flexgen-helm run", "helm-run with flexgen")
            ),
        )
        for task, label in tasks.items()
    ]
    return Panel(
        "HELM runs of SmolLM2-135M in memory",
        "HELM's Hugging Face client",
        "seconds",
        "lower",
        groups,
    )


def offload_panel() -> Panel:
    """Tokens a second with weights on the disk, each side in a memory control group of 2 GiB."""
    result = stored_rows("offload")
    groups = [
        Group(
            f"batch of {batch} sequences",
            other=result[f"accelerate x {batch} in a group"]["tokens_per_s"],
            ours=result[f"ours x {batch} in a group"]["tokens_per_s"],
        )
        for batch in (4, 48)
    ]
    title = "OPT-350M shapes offloaded to the disk, 2 GiB of memory"
    return Panel(title, "Accelerate disk_offload", "tokens/s", "higher", groups)


def draw(panel: Panel, top: int) -> tuple[list[str], int]:
    """SVG lines of one panel and the first free y below it."""
    scale = (WIDTH - LABELS - VALUE) / max(max(group.other, group.ours) for group in panel.groups)
    lines = [
        f'<text class="title" x="16" y="{top + 14}">{panel.title}</text>',
        f'<text class="note" x="16" y="{top + 33}">{panel.unit} ({panel.better} is better)</text>',
        f'<rect class="other" x="{LABELS}" y="{top + 23}" width="11" height="11" rx="2"/>',
        f'<text class="note" x="{LABELS + 17}" y="{top + 33}">{panel.other_name}</text>',
        f'<rect class="ours" x="{LABELS + 195}" y="{top + 23}" width="11" height="11" rx="2"/>',
        f'<text class="note" x="{LABELS + 212}" y="{top + 33}">flexgen_helm</text>',
    ]
    y = top + 48
    for group in panel.groups:
        factor = group.other / group.ours if panel.better == "lower" else group.ours / group.other
        values = {
            "other": f"{group.other:.0f}",
            "ours": f"{group.ours:.0f}, {factor:.1f} times faster",
        }
        lines.append(
            f'<text x="{LABELS - 10}" y="{y + BAR + 5}" text-anchor="end">{group.label}</text>'
        )
        for kind, value in (("other", group.other), ("ours", group.ours)):
            width = max(2.0, value * scale)
            lines += [
                (
                    f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.1f}" '
                    f'height="{BAR - 2}" rx="2"/>'
                ),
                (
                    f'<text class="note" x="{LABELS + width + 6:.1f}" '
                    f'y="{y + 11}">{values[kind]}</text>'
                ),
            ]
            y += BAR
        y += GROUP_GAP
    return lines, y + 10


def chart() -> str:
    """The SVG file's text."""
    lines: list[str] = []
    y = 8
    for panel in (helm_panel(), offload_panel()):
        drawn, y = draw(panel, y)
        lines += drawn
    lines.append(f'<text class="note" x="16" y="{y + 4}">{note()}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" role="img"'
    body = "\n".join(
        ["<title>Measured times and throughputs</title>", f"<style>{STYLE}</style>", *lines]
    )
    return f"{head}>\n{body}\n</svg>\n"


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
