"""`bench paper`: tables of the FlexGen paper | predicted for its T4 | measured by our own benchmarks.

A table is one record of `TABLES`. The paper's figures are the CSV files beside this module. Predictions are computed by
each call. Measurements are those of the stored results of other benchmarks, so the command takes seconds. Columns of a
row that nobody has measured stay empty.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.common import machine, refuse_engine_flags
from flexgen_helm.benchmarks.paper.pipeline import evaluate_pipeline
from flexgen_helm.benchmarks.paper.systems import SYSTEMS, with_page_cache
from flexgen_helm.benchmarks.paper.tables import evaluate_csv
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.placement import TIERS
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.search import search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16
from flexgen_helm.report.throughput import versions

PAPER = Path(__file__).parent
RESULTS = PAPER.parent / "results"
HARDWARE = "cpu_2core_amd_epyc"
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    rows: label, paper, predicted, measured; the last two None where there is none.
    unit: of all figures.
    note: what was measured on what shapes, why columns are empty, and why figures differ.
    """

    name: str
    title: str
    unit: str
    rows: Callable[[], list[Row]]
    note: str


def run(options: Options) -> dict[str, Any]:
    """Return the rows of all tables, or of the one that `options.table` names, in the format of benchmarks."""
    refuse_engine_flags("paper", options)
    tables = [table for table in TABLES if options.table in (None, table.name)]
    if not tables:
        raise UsageError(f"there is no table {options.table!r}; known are {', '.join(table.name for table in TABLES)}")
    options.tell("predictions take seconds; measurements are the stored ones")
    rows = [{"table": table.name, **row} for table in tables for row in table.rows()]
    notes = [f"{table.name} ({table.unit}): {table.note}" for table in tables]
    return {
        "name": "paper",
        "hardware": machine(),
        "versions": versions(),
        "rows": rows,
        "ratios": {},
        "notes": notes,
    }


def throughput() -> list[Row]:
    return [_predicted(row) for row in _evaluated() if row["table"] == "throughput_512"]


def policies() -> list[Row]:
    return [_predicted(row) for row in _evaluated() if row["table"] == "ablation_policies"]


def ssd_speed() -> list[Row]:
    return [_predicted(row) for row in _evaluated() if row["table"] == "ssd_speed"]


def techniques() -> list[Row]:
    """OPT-30B's throughput without each technique, over the throughput with all of them."""
    paper = pd.read_csv(PAPER / "ablation_techniques_512_32_T4.csv", index_col="configuration").opt_30b_tokens_per_s
    own = _stored("ablation")
    lines = [row for row in _evaluated() if row["model"] == "opt-30b" and row["system"] == "FlexGen"]

    def predicted(**wanted: str) -> float:
        (line,) = (row for row in lines if all(row[name] == value for name, value in wanted.items()))
        return float(line["predicted_tokens_per_s"])

    block = {"gpu_batch_size": "48", "num_gpu_batches": "3"}
    full = predicted(table="throughput_512")
    cases = (
        ("no policy search", predicted(table="ablation_policies", wc="100", **block), "no weights on the gpu"),
        ("no overlapping", predicted(overlap="0"), "no overlap"),
        ("no cpu compute", predicted(cpu_attention="0"), "no cpu attention"),
        ("deepspeed policy", predicted(gpu_batch_size="8"), "row by row, small batch"),
    )
    everything = float(paper["all optimizations"])
    return [
        {
            "label": label,
            "paper": round(float(paper[label]) / everything, 3),
            "predicted": round(value / full, 3),
            "measured": round(own[ours]["ratio"], 3) if own else None,
        }
        for label, value, ours in cases
    ]


def breakdown() -> list[Row]:
    """OPT-175B without overlap: whole phases."""
    paper = pd.read_csv(PAPER / "breakdown_opt_175b_512_T4.csv", index_col="stage").total_s
    (line,) = (
        row
        for row in _evaluated()
        if row["model"] == "opt-175b" and row["system"] == "FlexGen" and row["overlap"] == "0"
    )
    parts = {"prefill": "predicted_prefill_s", "decoding": "predicted_decode_s"}
    return [
        {"label": stage, "paper": float(paper[stage]), "predicted": round(line[name]), "measured": None}
        for stage, name in parts.items()
    ]


def accuracy() -> list[Row]:
    """WikiText-2 perplexity in 4 bits over that in 16, and the change of LAMBADA's accuracy."""
    paper = pd.read_csv(PAPER / "approximations_accuracy.csv", index_col="model").to_dict("index")
    own = _stored("precisions")
    rows: list[Row] = []
    for model, figures in paper.items():
        for label, before, after in (
            ("WikiText-2 perplexity, ratio", "wikitext_ppl_fp16", "wikitext_ppl_4bit"),
            ("LAMBADA accuracy, change", "lambada_acc_fp16", "lambada_acc_4bit"),
        ):
            change = figures[after] / figures[before] if "ratio" in label else figures[after] - figures[before]
            rows.append({"label": f"{model}: {label}", "paper": round(change, 3), "predicted": None, "measured": None})
    if own:
        fp16, packed = own["fp16"], own["4bit"]
        for label, value in (
            ("WikiText-2 perplexity, ratio", packed["perplexity"] / fp16["perplexity"]),
            ("LAMBADA accuracy, change", packed["accuracy"] - fp16["accuracy"]),
        ):
            label = f"smollm2-135m: {label}"
            rows.append({"label": label, "paper": None, "predicted": None, "measured": round(value, 3)})
    return rows


def subscenarios() -> list[Row]:
    """OPT-30B's minutes for each run entry, padded as in the paper, by the policy that the search finds."""
    hardware = with_page_cache(load_profile("t4"))
    entry = resolve("opt-30b").entry
    assert entry is not None
    rows: list[Row] = []
    for line in pd.read_csv(PAPER / "helm_subscenarios_opt_iml_30b_T4.csv").to_dict("records"):
        workload = Workload.uniform(*(int(line[name]) for name in ("prompt_len", "gen_len", "num_sequences")))
        problem = SYSTEMS["flexgen"](entry.config, hardware, workload, FP16, compute_bytes=2, limits={})
        problem = replace(problem, limits={tier: problem.capacity(tier) for tier in TIERS})
        minutes = search(problem, (ZIGZAG,)).prediction.latency_s / 60
        rows.append(
            {"label": line["run_entry"], "paper": line["minutes"], "predicted": round(minutes), "measured": None}
        )
    return rows


def mixed_lengths() -> list[Row]:
    """Tokens that were asked for, over tokens that were computed: padding is the rest."""
    path = RESULTS / f"clients_{HARDWARE}.json"
    tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.is_file() else []
    own = {f"{task['name']} abstract_algebra": task["prompts"]["efficiency"] for task in tasks}
    return [
        {"label": line["task"], "paper": line["efficiency"], "predicted": None, "measured": own.get(line["task"])}
        for line in pd.read_csv(PAPER / "helm_mixed_lengths_T4.csv").to_dict("records")
    ]


def devices() -> list[Row]:
    return [
        {
            "label": f"{line['model']}, {line['num_gpus']} GPU, {line['metric']}",
            "paper": line["measured"],
            "predicted": f"{line['predicted']:.3g}" if line["predicted"] < 1000 else round(line["predicted"]),
            "measured": None,
        }
        for line in evaluate_pipeline(PAPER, load_profile("t4")).to_dict("records")
    ]


TABLES = (
    Table(
        "throughput",
        "Maximum throughput, 512 + 32 tokens",
        "tokens/s",
        throughput,
        "not measured here: no T4, and not the memory for these models. The largest error is that of 4-bit "
        "OPT-175B, where one rate of dequantization serves weights and cache.",
    ),
    Table(
        "techniques",
        "Ablation of techniques, OPT-30B",
        "share of the throughput with all techniques",
        techniques,
        "measured: OPT-125M with dummy weights, 22 + 12 tokens, a simulated GPU with the paper's proportions on "
        "two cores of an AMD EPYC (`bench ablation`). All rows agree in direction. The simulated GPU's copies "
        "and products use the host's cores, so overlap and attention on the CPU have less to gain.",
    ),
    Table(
        "policies",
        "Ablation of policies",
        "tokens/s",
        policies,
        "not measured here: no T4. OOM: memory ran out. A paper's figure below 0.05 has two decimals and is too "
        "coarse to compare.",
    ),
    Table(
        "breakdown",
        "Execution breakdown, OPT-175B without overlap",
        "seconds",
        breakdown,
        "whole phases; not measured here, because it needs a T4 and a model of 350 GB.",
    ),
    Table(
        "ssd",
        "Speed of the SSD, OPT-175B, a disk of 0.5 GB/s",
        "tokens/s",
        ssd_speed,
        "not measured here: the model has 350 GB. The paper's disk reads about 1 GB/s in this run, twice the "
        "listed rate.",
    ),
    Table(
        "subscenarios",
        "Sub-scenarios of HELM, OPT-IML-30B",
        "minutes",
        subscenarios,
        "not measured here: no T4. The paper's minutes have downloads, initialization and metrics in them, the "
        "predicted ones generation alone. The paper names no policies: the search's are predicted. Shapes are "
        "OPT-30B's, and prompts have the paper's padded lengths.",
    ),
    Table(
        "mixed_lengths",
        "Mixed lengths",
        "share of computed tokens that are no padding",
        mixed_lengths,
        "measured: SmolLM2-135M in memory, two subjects of MMLU, 100 prompts each (`bench clients`). Our batches have "
        "no padding; the paper pads to the longest. XSum has to be downloaded.",
    ),
    Table(
        "devices",
        "Four GPUs, 512 + 32 tokens",
        "tokens/s",
        devices,
        "not measured here: no GPU. The paper names policies for one GPU; for four they are the search's, so a higher "
        "prediction also is another policy.",
    ),
    Table(
        "accuracy",
        "Accuracy in 4 bits",
        "ratio or change from 16 bits",
        accuracy,
        "measured: SmolLM2-135M, precision `4bit`, 100 passages (`bench precisions`). No cost model predicts "
        "accuracy. This model is 220 and 1,300 times smaller than the paper's and loses more. The paper's sparse "
        "attention is left out.",
    ),
)


def page() -> str:
    """Return docs/paper.md."""
    torch = {
        name: json.loads((RESULTS / f"{name}_{HARDWARE}.json").read_text(encoding="utf-8"))["versions"]["torch"]
        for name in ("ablation", "clients", "precisions")
    }
    releases = ", ".join(f"`bench {name}` with torch {release}" for name, release in torch.items())
    lines = [
        "# The paper, table by table",
        "",
        "`flexgen-helm bench paper` prints these tables, `--table NAME` one of them; `make pages` writes this page.",
        "*Paper* is the [FlexGen paper](https://arxiv.org/abs/2303.06865), *predicted* is our cost model for its T4,",
        "and *measured* comes from stored results on two cores of an AMD EPYC without a GPU:",
        f"{releases}.",
        "A dash is a figure that nobody has.",
        "Policies are GPU batch x batches, then percent on GPU/CPU of weights, KV cache, and hidden states.",
    ]
    for table in TABLES:
        lines += ["", f"## {table.title}", "", f"`--table {table.name}`, {table.unit}.", ""]
        lines += ["| | paper | predicted | measured |", "|---|---:|---:|---:|"]
        for row in table.rows():
            cells = ("-" if row[name] is None else str(row[name]) for name in ("paper", "predicted", "measured"))
            lines.append(f"| {row['label']} | {' | '.join(cells)} |")
        lines += ["", textwrap.fill(table.note[0].upper() + table.note[1:], 120)]
    lines += [
        "",
        "## Not here yet",
        "",
        "The latency frontier, data wrangling, and offloading against a network have no table here, and the",
        "breakdown has no parts. Pictures and a column of a real GPU are missing too.",
        "[The cost model](explanation/cost_model.md) and [pipelines](explanation/pipeline.md)",
        "have what was compared of them.",
    ]
    return "\n".join(lines) + "\n"


@cache
def _evaluated() -> list[Row]:
    return list(evaluate_csv(PAPER / "throughput.csv", load_profile("t4"))["rows"])


def _stored(benchmark: str) -> Mapping[str, Row]:
    """Return the rows of a stored result by label; none where the results are not installed."""
    path = RESULTS / f"{benchmark}_{HARDWARE}.json"
    if not path.is_file():
        return {}
    return {row["label"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def _predicted(row: Row) -> Row:
    shares = " ".join("/".join(row[f"{kind}{tier}"] for tier in "gc") for kind in "wch")
    label = f"{row['system']} {row['model']} {row['gpu_batch_size']}x{row['num_gpu_batches']} {shares}"
    if row["page_cache"] == "held_back":
        label += ", page cache held back"
    measured = row["tokens_per_s"]
    paper = measured if measured == "OOM" else float(measured)
    predicted = f"{row['predicted_tokens_per_s']:.3g}" if row["feasible"] else "OOM"
    return {"label": label, "paper": paper, "predicted": predicted, "measured": None}
