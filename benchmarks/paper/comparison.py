"""`bench paper`: tables of the FlexGen paper | predicted for its T4 | measured by our own benchmarks.

A table is one record of `TABLES`; `rows` makes its rows. Predictions are computed by each call. Measurements are those
of the stored results of other benchmarks, so the command takes seconds. Columns that nobody has measured stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexgen_helm.benchmarks import Options, load
from flexgen_helm.benchmarks.common import machine, refuse_engine_flags
from flexgen_helm.benchmarks.paper import rows
from flexgen_helm.benchmarks.paper.rows import OUTPUT, PROMPT, Row, Sources
from flexgen_helm.errors import UsageError
from flexgen_helm.report.throughput import versions


@dataclass(frozen=True)
class Measurement:
    """The benchmark that measures a table.

    minutes: it takes on two cores.
    options: of the benchmark, besides its defaults.
    """

    benchmark: str
    minutes: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        flags = "".join(f" --{name} {text}" for name, text in texts.items())
        return f"bench {self.benchmark}{flags}, about {self.minutes} minutes"


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    unit: of all figures.
    rows: label, paper, predicted, measured; the last three None where there is none.
    note: what was measured on what shapes, why columns are empty, and why figures differ.
    columns: names of further figures that rows have, and what the page calls them.
    measured_by: None where nothing here can measure it.
    picture: what the page's picture of it shows, in `docs/images/paper_<name>.svg`; None without a picture.
    """

    name: str
    title: str
    unit: str
    rows: Callable[[Sources], list[Row]]
    note: str
    columns: tuple[tuple[str, str], ...] = ()
    measured_by: Measurement | None = None
    picture: str | None = None


def run(options: Options) -> dict[str, Any]:
    """Return the rows of all tables, or of the one that `options.table` names, in the format of benchmarks."""
    refuse_engine_flags("paper", options)
    tables = [table for table in TABLES if options.table in (None, table.name)]
    if not tables:
        raise UsageError(f"there is no table {options.table!r}; known are {', '.join(table.name for table in TABLES)}")
    lengths = options.prompt_len or PROMPT, options.gen_len or OUTPUT
    if lengths != (PROMPT, OUTPUT) and options.table != "throughput":
        raise UsageError("other lengths are for one table: give --table throughput with them")
    if options.measure and not any(table.measured_by for table in tables):
        raise UsageError(f"nothing here measures the table {options.table!r}: leave out --measure")
    for table in tables:
        filled = f"--measure runs {table.measured_by}" if table.measured_by else "nothing here measures it"
        options.tell(f"{table.name}: predicted in seconds; {filled}")
    sources = Sources(_measured(tables, options) if options.measure else {}, *lengths)
    found = [{"table": table.name, **row} for table in tables for row in table.rows(sources)]
    notes = [f"{table.name} ({table.unit}): {table.note}" for table in tables]
    return {
        "name": "paper",
        "hardware": machine(),
        "versions": versions(),
        "rows": found,
        "ratios": {},
        "notes": notes,
        **({"measured": sources.fresh} if options.measure else {}),
    }


def _measured(tables: Sequence[Table], options: Options) -> dict[str, Mapping[str, Any]]:
    """Run each benchmark that measures one of the tables; that of a GPU alone, where there is one."""
    from torch.cuda import is_available

    results: dict[str, Mapping[str, Any]] = {}
    for measurement in filter(None, (table.measured_by for table in tables)):
        if measurement.benchmark == "gpu" and not is_available():
            options.tell(f"{measurement}: left out, because torch finds no CUDA device")
            continue
        options.tell(f"measuring: {measurement}")
        results[measurement.benchmark] = load(measurement.benchmark)(
            Options(quick=options.quick, repeats=options.repeats, tell=options.tell, **measurement.options)
        )
    return results


TABLES = (
    Table(
        "throughput",
        "Maximum throughput, 512 + 32 tokens",
        "tokens/s",
        rows.throughput,
        "not measured here: no T4, and not the memory for these models. The largest error is that of 4-bit OPT-175B, "
        "where one rate of dequantization serves weights and cache.",
        measured_by=Measurement("gpu", 12),
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
        "22 + 12 tokens (`bench ablation`). All rows agree in "
        "direction. The simulated GPU's copies and products use the host's cores, so overlap and attention on the CPU "
        "have less to gain. Left out: OPT-175B's DeepSpeed policy, of which the paper has one digit.",
        measured_by=Measurement("ablation", 5),
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
        "measured: SmolLM2-135M in memory, two subjects of MMLU, 100 prompts each (`bench clients`). Our batches have "
        "no padding; the paper pads to the longest. XSum has to be downloaded.",
        measured_by=Measurement("clients", 7, {"tasks": ("mmlu",), "peers": ("huggingface",)}),
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
