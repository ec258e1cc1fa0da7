"""docs/paper.md: the tables of `bench paper` as a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from datetime import date
from typing import Any

from flexgen_helm.benchmarks import KNOWN
from flexgen_helm.benchmarks.paper.comparison import TABLES, Table
from flexgen_helm.benchmarks.paper.rows import Row, Sources

# Benchmarks whose stored results are in the tables.
_MEASURED = ("ablation", "clients", "precisions")
_MOST_DRAWN_ROWS = 12
# As the names of result files say it.
_PROCESSORS = {"amd_epyc": "AMD EPYC", "intel_xeon": "Intel Xeon"}


def page() -> str:
    """Return docs/paper.md, from the stored results."""
    sources = Sources()
    lines = [
        "# The paper, table by table",
        "",
        "`flexgen-helm bench paper` prints these tables, `--table NAME` one of them; `make pages` writes this page.",
        "`--measure` runs the benchmarks that fill the measured column, and says beforehand how long they take.",
        "*Paper* is the [FlexGen paper](https://arxiv.org/abs/2303.06865), *predicted* is our cost model for its T4,",
        "and *measured* comes from stored results of machines with two cores and no GPU. A dash, or a column that is",
        "left out, is what nobody has; a large table is drawn alone. Policies are GPU batch x batches, then percent on",
        "GPU/CPU of weights, KV cache and hidden states.",
        "",
        "| measured by | stored on | processor | threads | other programs | flexgen-helm | torch | transformers |",
        "|---|---|---|---|---|---|---|---|",
        *(_measurement(sources, name) for name in _MEASURED),
    ]
    for table in TABLES:
        lines += ["", f"## {table.title}", "", f"`--table {table.name}`, {table.unit}.", ""]
        if table.picture is not None:
            lines += [f"![{table.picture}](images/paper_{table.name}.svg)", ""]
        rows = table.rows(sources)
        # The rows of a large table that is drawn are the command's.
        if table.picture is None or len(rows) <= _MOST_DRAWN_ROWS:
            lines += [*_lines(table, rows), ""]
        lines += [textwrap.fill(table.note[0].upper() + table.note[1:], 120)]
    return "\n".join(lines) + "\n"


def _measurement(sources: Sources, benchmark: str) -> str:
    result = sources.result(benchmark)
    assert result is not None, f"no stored result of bench {benchmark}"
    busy = "computed, too" if any("other programs were computing" in note for note in result["notes"]) else "-"
    releases = " | ".join(result["versions"][name] for name in ("flexgen-helm", "torch", "transformers"))
    threads = result["hardware"].get("threads", "-")
    name = f"`bench {benchmark}`" if benchmark in KNOWN else benchmark  # some are gone, and their results stay
    return f"| {name} | {day_of(result)} | {processor_of(result)} | {threads} | {busy} | {releases} |"


def day_of(result: Mapping[str, Any]) -> str:
    day = date.fromisoformat(result["date"])
    return f"{day.day} {day:%B %Y}"


def processor_of(result: Mapping[str, Any]) -> str:
    """Return the processor of a stored result."""
    return next(name for part, name in _PROCESSORS.items() if part in result["file"])


def _lines(table: Table, rows: list[Row]) -> list[str]:
    columns = {"paper": "paper", "predicted": "predicted", "measured": "measured", **dict(table.columns)}
    columns = {name: title for name, title in columns.items() if any(row[name] is not None for row in rows)}
    lines = [f"| | {' | '.join(columns.values())} |", f"|---|{'---:|' * len(columns)}"]
    for row in rows:
        cells = ("-" if row[name] is None else _cell(row[name]) for name in columns)
        lines.append(f"| {row['label']} | {' | '.join(cells)} |")
    return lines


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
