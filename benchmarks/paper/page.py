"""Tables of the FlexGen paper | predicted for its T4 | measured by our benchmarks: `python -m benchmarks.paper`.

A table is one record of `TABLES`; `rows` makes its rows. Predictions are computed by each call. Measurements are those
of stored results. Columns that nobody has measured stay empty. `make pages` writes all of them to docs/paper.md.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from flexgen_helm.benchmarks.paper import rows
from flexgen_helm.benchmarks.paper.rows import Row, stored_result
from flexgen_helm.errors import UsageError

# Stored results that are in the tables; some benchmarks are gone.
_MEASURED = {"ablation": "`benchmarks.ablation`", "clients": "`benchmarks.clients`", "precisions": "precisions"}
_MOST_DRAWN_ROWS = 12
# As the names of result files say it.
_PROCESSORS = {"amd_epyc": "AMD EPYC", "intel_xeon": "Intel Xeon"}


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    unit: of all figures.
    rows: label, paper, predicted, measured; the last three None where there is none.
    note: what was measured on what shapes, why columns are empty, and why figures differ.
    columns: names of further figures that rows have, and what the page calls them.
    picture: what the page's picture of it shows, in `docs/images/paper_<name>.svg`; None without a picture.
    """

    name: str
    title: str
    unit: str
    rows: Callable[[], list[Row]]
    note: str
    columns: tuple[tuple[str, str], ...] = ()
    picture: str | None = None


def page(name: str | None = None) -> str:
    """Return docs/paper.md; with a table's name, that table alone with all its rows. Raises `UsageError`."""
    chosen = [table for table in TABLES if name in (None, table.name)]
    if not chosen:
        raise UsageError(f"there is no table {name!r}; known are {', '.join(table.name for table in TABLES)}")
    lines = [] if name else _head()
    for table in chosen:
        lines += ["", f"## {table.title}", "", f"`{table.name}`, in {table.unit}.", ""]
        found, picture = table.rows(), None if name else table.picture
        if picture is not None:
            lines += [f"![{picture}](images/paper_{table.name}.svg)", ""]
        # The rows of a large table that is drawn are the command's.
        if picture is None or len(found) <= _MOST_DRAWN_ROWS:
            lines += [*_lines(table, found), ""]
        lines += [textwrap.fill(table.note[0].upper() + table.note[1:], 120)]
    return "\n".join(lines) + "\n"


def _head() -> list[str]:
    return [
        "# The paper, table by table",
        "",
        "`python -m benchmarks.paper NAME` prints a table, without a name this page; `make pages` writes it.",
        "*Paper* is the [FlexGen paper](https://arxiv.org/abs/2303.06865), *predicted* is our cost model for its T4,",
        "and *measured* comes from stored results of machines with two cores and no GPU. A dash, or a column that is",
        "left out, is what nobody has; a large table is drawn alone. Policies are GPU batch x batches, then percent on",
        "GPU/CPU of weights, KV cache and hidden states.",
        "",
        "| measured by | stored on | processor | threads | other programs | flexgen-helm | torch | transformers |",
        "|---|---|---|---|---|---|---|---|",
        *(_measurement(name, stored_result(name)) for name in _MEASURED),
    ]


def _measurement(name: str, result: Mapping[str, Any]) -> str:
    busy = "computed, too" if any("other programs were computing" in note for note in result["notes"]) else "-"
    releases = (result["versions"][package] for package in ("flexgen-helm", "torch", "transformers"))
    threads = str(result["hardware"].get("threads", "-"))
    return f"| {' | '.join((_MEASURED[name], day_of(result), processor_of(result), threads, busy, *releases))} |"


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


TABLES = (
    Table(
        "throughput",
        "Maximum throughput, 512 + 32 tokens",
        "tokens/s",
        rows.throughput,
        "not measured here: no T4, and not the memory for these models. The largest error is that of 4-bit OPT-175B, "
        "where one rate of dequantization serves weights and cache.",
    ),
    Table(
        "frontier",
        "Latency and throughput, 512 + 32 tokens",
        "tokens/s; seconds of a block",
        rows.frontier,
        "a block of as many sequences as in the paper, by the policy with the least latency that the search finds; the "
        "paper names none. DeepSpeed and Accelerate have those of the main table. Not measured here. Compressed "
        "OPT-175B is predicted to take up to 27 % longer than it did for few sequences, and 27 % less for many: one "
        "rate of dequantization serves weights and cache.",
        (("paper_s", "paper, s"), ("predicted_s", "predicted, s")),
        picture="Throughput by latency of four systems, the paper's and predicted",
    ),
    Table(
        "techniques",
        "Ablation of techniques",
        "share of the throughput with all techniques",
        rows.techniques,
        "measured: OPT-125M with dummy weights on a simulated machine with the paper's proportions on two cores, with "
        "22 + 12 tokens (`benchmarks.ablation`). All rows agree in "
        "direction. The simulated GPU's copies and products use the host's cores, so overlap and attention on the CPU "
        "have less to gain. Left out: OPT-175B's DeepSpeed policy, of which the paper has one digit.",
        picture="Throughput without each technique, of the paper, predicted and measured",
    ),
    Table(
        "policies",
        "Ablation of policies",
        "tokens/s",
        rows.policies,
        "not measured here: no T4. OOM: memory ran out. A paper's figure below 0.05 has two decimals and is too coarse "
        "to compare.",
    ),
    Table(
        "breakdown",
        "Execution breakdown, OPT-175B without overlap",
        "seconds of a phase, then shares of them",
        rows.breakdown,
        "the predicted parts add up, because nothing overlaps. The paper's add up to 1.2 times its prefill and 1.04 "
        "times its decoding, and it has none for hidden states. Its prefill reads weights for 768 s, a decode pass for "
        "98 s; the model has the same reads in both. In decoding the order of the parts is the paper's. Not measured "
        "here: no T4.",
        picture="Parts of both phases, as shares of their time",
    ),
    Table(
        "ssd",
        "Speed of the SSD, OPT-175B, a disk of 0.5 GB/s",
        "tokens/s",
        rows.ssd_speed,
        "not measured here: the model has 350 GB. The paper's disk reads about 1 GB/s in this run, twice the listed "
        "rate.",
    ),
    Table(
        "subscenarios",
        "Sub-scenarios of HELM, OPT-IML-30B",
        "minutes",
        rows.subscenarios,
        "not measured here: no T4. The paper's minutes have downloads, initialization and metrics in them, the "
        "predicted ones generation alone. The paper names no policies: the search's are predicted. Shapes are "
        "OPT-30B's, and prompts have the paper's padded lengths.",
    ),
    Table(
        "data_wrangling",
        "Data wrangling",
        "seconds",
        rows.data_wrangling,
        "not measured here: no T4. The paper names no policies: the search's are predicted.",
    ),
    Table(
        "mixed_lengths",
        "Mixed lengths",
        "share of computed tokens that are no padding",
        rows.mixed_lengths,
        "measured: SmolLM2-135M in memory, two subjects of MMLU, 100 prompts each (`benchmarks.clients`). Our batches "
        "have no padding; the paper pads to the longest. XSum has to be downloaded.",
    ),
    Table(
        "devices",
        "Four GPUs, 512 + 32 tokens",
        "tokens/s",
        rows.devices,
        "not measured here: no GPU. The paper names policies for one GPU; for four they are the search's, so a higher "
        "prediction also is another policy.",
    ),
    Table(
        "network",
        "Offloading against a pipeline over a network, OPT-30B, 512 + 32 tokens",
        "tokens/s of a GPU",
        rows.network,
        "not measured here: no GPU. The paper has a picture of three networks, and Petals' throughput in one. What a "
        "cost model predicted for Petals is in `docs/explanation/pipeline.md`.",
    ),
    Table(
        "accuracy",
        "Accuracy in 4 bits",
        "ratio or change from 16 bits",
        rows.accuracy,
        "measured: SmolLM2-135M, precision `4bit`, 100 passages, stored. `flexgen-helm compare` measures other models. "
        "No cost model predicts accuracy. This model is 220 and 1,300 times smaller than the paper's and loses more. "
        "The paper's sparse attention is left out.",
    ),
)
