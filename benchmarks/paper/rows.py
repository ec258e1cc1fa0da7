"""The rows of the paper's tables: the paper's figures from the CSV files here, predictions, and measurements.

A row has a label, and under `paper`, `predicted` and `measured` a figure or None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks.paper.network import NETWORKS, offloading, pipeline
from flexgen_helm.benchmarks.paper.pipeline import evaluate_pipeline
from flexgen_helm.benchmarks.paper.systems import COMPRESSED, SYSTEMS, with_page_cache
from flexgen_helm.benchmarks.paper.tables import evaluate_csv, full_memory, predict_row, row_problem
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.cost_model import PassTimes, block_costs
from flexgen_helm.planner.policy import ZIGZAG, Workload
from flexgen_helm.planner.problem import CACHE, HIDDEN, WEIGHTS, Affine, BlockShape, fraction_vector
from flexgen_helm.planner.search import Solution, search
from flexgen_helm.quant.precisions import FP16, Precision

PAPER = Path(__file__).parent
RESULTS = PAPER.parent / "results"
# Lengths of the paper's throughput tables.
PROMPT, OUTPUT = 512, 32
# Parts of a phase that the paper's breakdown has as columns.
_PARTS = {
    "compute": "compute_s",
    "weights read": "weight_read_s",
    "cache read": "cache_read_s",
    "cache written": "cache_write_s",
    "hidden states": None,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Sources:
    """What rows are made from, besides the paper.

    fresh: results of benchmarks by name, in place of the stored ones.
    prompt, output: lengths of the throughput table.
    """

    fresh: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt: int = PROMPT
    output: int = OUTPUT

    def result(self, benchmark: str) -> Mapping[str, Any] | None:
        """Return a benchmark's newest result; None where nobody has measured, or results are not installed.

        A stored one has the name of its file under `file`.
        """
        if benchmark in self.fresh:
            return self.fresh[benchmark]
        kind = "*" if benchmark == "gpu" else "cpu_*"
        stored = [
            {**json.loads(path.read_text(encoding="utf-8")), "file": path.name}
            for path in RESULTS.glob(f"{benchmark}_{kind}.json")
        ]
        return max(stored, key=lambda result: result["date"], default=None)

    def rows(self, benchmark: str) -> dict[str, Row]:
        """Return the rows of a result by label."""
        result = self.result(benchmark)
        return {} if result is None else {row["label"]: row for row in result["rows"]}


def throughput(sources: Sources) -> list[Row]:
    """Return the main table, and what `bench gpu` has measured.

    For other lengths there are predictions alone, for FlexGen with the search's policies.
    """
    lines = [row for row in _evaluated() if row["table"] == "throughput_512"]
    if (sources.prompt, sources.output) == (PROMPT, OUTPUT):
        device = (sources.result("gpu") or {"hardware": {"device": ""}})["hardware"]["device"]
        on_gpu = [
            {
                "label": f"{device}: {row['label']}",
                "paper": None,
                "predicted": None,
                "measured": _digits(row["tokens_per_s"]),
            }
            for row in sources.rows("gpu").values()
            if "tokens_per_s" in row
        ]
        return [_predicted(line) for line in lines] + on_gpu
    rows = []
    for line in lines:
        other = {**line, "prompt_len": str(sources.prompt), "gen_len": str(sources.output)}
        if line["system"].startswith("FlexGen"):
            problem, _, _ = row_problem(other, load_profile("t4"))
            found = search(problem, (ZIGZAG,))
            label, costs = f"{line['system']} {line['model']} {found.policy}", found.prediction
        else:
            label, costs = _throughput_label(line), predict_row(other, load_profile("t4"))
        predicted = _digits(costs.tokens_per_s) if costs.feasible else "OOM"
        rows.append({"label": label, "paper": None, "predicted": predicted, "measured": None})
    return rows


def policies(sources: Sources) -> list[Row]:
    return [_predicted(row) for row in _evaluated() if row["table"] == "ablation_policies"]


def ssd_speed(sources: Sources) -> list[Row]:
    return [_predicted(row) for row in _evaluated() if row["table"] == "ssd_speed"]


def frontier(sources: Sources) -> list[Row]:
    """Throughput by sequences of a block; for FlexGen the paper names no policies, so they are the search's."""
    policies = {(row["system"], row["model"]): row for row in _evaluated() if row["table"] == "throughput_512"}
    rows: list[Row] = []
    for line in pd.read_csv(PAPER / "latency_throughput_512_32_T4.csv").to_dict("records"):
        system, model, sequences = line["system"], line["model"], int(line["effective_batch_size"])
        if system.startswith("FlexGen"):
            precision = COMPRESSED if system == "FlexGen (c)" else FP16
            costs = _searched(model, Workload.uniform(PROMPT, OUTPUT, sequences), precision).prediction
        else:
            costs = predict_row({**policies[system, model], "gpu_batch_size": str(sequences)}, load_profile("t4"))
        rows.append(
            {
                "label": f"{system} {model}, block of {sequences}",
                "paper": line["tokens_per_s"],
                "predicted": _digits(costs.tokens_per_s),
                "measured": None,
                "paper_s": line["latency_s"],
                "predicted_s": round(costs.block_s),
            }
        )
    return rows


def techniques(sources: Sources) -> list[Row]:
    """Throughput without each technique, over the throughput with all of them."""
    paper = pd.read_csv(PAPER / "ablation_techniques_512_32_T4.csv", index_col="configuration").opt_30b_tokens_per_s
    own = sources.rows("ablation")
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
    flags = {"overlap": "no overlapping", "cpu_attention": "no cpu compute"}
    large: list[Row] = []
    for row in _evaluated():
        if row["model"] == "opt-175b" and row["table"] == "ablation_techniques":
            # The row that has both techniques has another policy.
            without = next((name for flag, name in flags.items() if row[flag] == "0"), "no policy search")
            large.append({"label": f"OPT-175B, {without}", **_share_of_best(row)})
    return [
        {
            "label": f"OPT-30B, {label}",
            "paper": round(float(paper[label]) / everything, 3),
            "predicted": round(value / full, 3),
            "measured": round(own[ours]["ratio"], 3) if own else None,
        }
        for label, value, ours in cases
    ] + large


def _share_of_best(line: Row) -> Row:
    """Return the throughput of a row of OPT-175B over that of the best policy with as much page cache."""
    (best,) = (
        row
        for row in _evaluated()
        if _throughput_label(row) == "FlexGen opt-175b 32x8 0/50 0/0 0/100"
        and row["page_cache"] == line["page_cache"]
        and row["overlap"] == row["cpu_attention"] == "1"
        and float(row["disk_read_gb_s"]) >= 1
    )
    keys = {"paper": "tokens_per_s", "predicted": "predicted_tokens_per_s"}
    shares = {column: round(float(line[key]) / float(best[key]), 3) for column, key in keys.items()}
    return {**shares, "measured": None}


def breakdown(sources: Sources) -> list[Row]:
    """OPT-175B without overlap: seconds of each phase, and what share of them each part takes."""
    paper = pd.read_csv(PAPER / "breakdown_opt_175b_512_T4.csv", index_col="stage").to_dict("index")
    (line,) = (
        row
        for row in _evaluated()
        if row["model"] == "opt-175b" and row["system"] == "FlexGen" and row["overlap"] == "0"
    )
    predicted = predicted_parts(line)
    rows: list[Row] = []
    for stage, figures in paper.items():
        seconds = {
            "paper": {"total": figures["total_s"]} | {part: figures[name] for part, name in _PARTS.items() if name},
            "predicted": predicted[stage],
        }
        totals = {column: _digits(spent["total"]) for column, spent in seconds.items()}
        rows.append({"label": f"{stage}, seconds", **totals, "measured": None})
        for part in _PARTS:
            shares = {
                column: round(spent[part] / spent["total"], 3) if part in spent else None
                for column, spent in seconds.items()
            }
            rows.append({"label": f"{stage}: {part}", **shares, "measured": None})
        sums = {
            column: round(sum(spent[part] for part in _PARTS if part in spent) / spent["total"], 3)
            for column, spent in seconds.items()
        }
        rows.append({"label": f"{stage}: all parts", **sums, "measured": None})
    return rows


def predicted_parts(line: Row) -> dict[str, dict[str, float]]:
    """Return phase -> part, or 'total' -> predicted seconds of an evaluated row; without overlap, parts add up."""
    problem, policy, schedule = row_problem(line, load_profile("t4"))
    costs = block_costs(problem, BlockShape(policy.gpu_batch_size, policy.num_gpu_batches, schedule))
    fractions = fraction_vector(policy, has_gpu=True)
    phases = {
        "prefill": (costs.prefill, 1.0, line["predicted_prefill_s"]),
        "decoding": (costs.decode, costs.decode_passes, line["predicted_decode_s"]),
    }
    return {
        phase: {part: passes * seconds for part, seconds in _parts(times, fractions)} | {"total": total}
        for phase, (times, passes, total) in phases.items()
    }


def _parts(times: PassTimes, fractions: Affine) -> Iterator[tuple[str, float]]:
    """Yield the parts of a pass: computing, and transfers of each kind over link and disk."""

    def seconds(columns: Mapping[Any, int], *resources: str) -> float:
        return sum(float(times[name][column] * fractions[column]) for name in resources for column in columns.values())

    yield "compute", float(times["compute"] @ fractions)
    yield "weights read", seconds(WEIGHTS, "to_gpu", "disk_read")
    yield "cache read", seconds(CACHE, "to_gpu", "disk_read")
    yield "cache written", seconds(CACHE, "to_cpu", "disk_write")
    yield "hidden states", seconds(HIDDEN, "to_gpu", "to_cpu", "disk_read", "disk_write")


def accuracy(sources: Sources) -> list[Row]:
    """WikiText-2 perplexity in 4 bits over that in 16, and the change of LAMBADA's accuracy."""
    paper = pd.read_csv(PAPER / "approximations_accuracy.csv", index_col="model").to_dict("index")
    own = sources.rows("precisions")
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


def subscenarios(sources: Sources) -> list[Row]:
    """OPT-30B's minutes for each run entry, padded as in the paper, by the policy that the search finds."""
    rows: list[Row] = []
    for line in pd.read_csv(PAPER / "helm_subscenarios_opt_iml_30b_T4.csv").to_dict("records"):
        workload = Workload.uniform(*(int(line[name]) for name in ("prompt_len", "gen_len", "num_sequences")))
        minutes = _searched("opt-30b", workload).prediction.latency_s / 60
        rows.append(
            {"label": line["run_entry"], "paper": line["minutes"], "predicted": round(minutes), "measured": None}
        )
    return rows


def data_wrangling(sources: Sources) -> list[Row]:
    """Seconds of each task, by the policy that the search finds."""
    rows: list[Row] = []
    lines = pd.read_csv(PAPER / "data_wrangling_T4.csv").to_dict("records")
    for model in ("opt-30b", "opt-175b"):
        for line in lines:
            workload = Workload.uniform(*(int(line[name]) for name in ("input_len", "output_len", "num_sequences")))
            rows.append(
                {
                    "label": f"{model}: {line['task']}",
                    "paper": line[f"{model.replace('-', '_')}_seconds"],
                    "predicted": round(_searched(model, workload).prediction.latency_s),
                    "measured": None,
                }
            )
    return rows


def mixed_lengths(sources: Sources) -> list[Row]:
    """Tokens that were asked for, over tokens that were computed: padding is the rest."""
    tasks = (sources.result("clients") or {"tasks": []})["tasks"]
    own = {f"{task['name']} abstract_algebra": task["prompts"]["efficiency"] for task in tasks}
    return [
        {"label": line["task"], "paper": line["efficiency"], "predicted": None, "measured": own.get(line["task"])}
        for line in pd.read_csv(PAPER / "helm_mixed_lengths_T4.csv").to_dict("records")
    ]


def devices(sources: Sources) -> list[Row]:
    return [
        {
            "label": f"{line['model']}, {line['num_gpus']} GPU, {line['metric']}",
            "paper": line["measured"],
            "predicted": _digits(line["predicted"]),
            "measured": None,
        }
        for line in evaluate_pipeline(PAPER, load_profile("t4")).to_dict("records")
    ]


def network(sources: Sources) -> list[Row]:
    """OPT-30B over four T4s in three networks, of which the first is the paper's for Petals, and offloaded on one."""
    petals = pd.read_csv(PAPER / "petals_512_T4.csv", index_col="model").tokens_per_s_of_one_gpu
    own = _opt_30b()
    seconds, rate = offloading(OUTPUT)
    paper = {"offloading": float(own["tokens_per_s"]), next(iter(NETWORKS)): float(petals["opt-30b"])}
    found = {"offloading": (seconds, rate)} | {name: pipeline(OUTPUT, network) for name, network in NETWORKS.items()}
    rows: list[Row] = []
    for name, (latency, tokens_per_s) in found.items():
        where = name if name == "offloading" else f"pipeline, {name}"
        figures = {"paper": paper.get(name), "predicted": _digits(tokens_per_s), "measured": None}
        rows.append({"label": f"{where}: tokens/s of a GPU", **figures})
        rows.append({"label": f"{where}: seconds", "paper": None, "predicted": round(latency), "measured": None})
    return rows


@cache
def _evaluated() -> list[Row]:
    return list(evaluate_csv(PAPER / "throughput.csv", load_profile("t4"))["rows"])


def _opt_30b() -> Row:
    """Return FlexGen's row of OPT-30B in the throughput table."""
    (line,) = (
        row
        for row in _evaluated()
        if (row["table"], row["system"], row["model"]) == ("throughput_512", "FlexGen", "opt-30b")
    )
    return line


def _searched(model: str, workload: Workload, precision: Precision = FP16) -> Solution:
    """Return the search's policy for FlexGen on the paper's T4, whose disk has a page cache."""
    entry = resolve(model).entry
    assert entry is not None
    hardware = with_page_cache(load_profile("t4"))
    problem = SYSTEMS["flexgen"](entry.config, hardware, workload, precision, compute_bytes=2, limits={})
    return search(full_memory(problem), (ZIGZAG,))


def _label(row: Row) -> str:
    return _throughput_label(row) + (", page cache held back" if row["page_cache"] == "held_back" else "")


def _throughput_label(row: Row) -> str:
    shares = " ".join("/".join(str(row[f"{kind}{tier}"]) for tier in "gc") for kind in "wch")
    return f"{row['system']} {row['model']} {row['gpu_batch_size']}x{row['num_gpu_batches']} {shares}"


def _predicted(row: Row) -> Row:
    label = _label(row)
    measured = row["tokens_per_s"]
    paper = measured if measured == "OOM" else float(measured)
    predicted = _digits(row["predicted_tokens_per_s"]) if row["feasible"] else "OOM"
    return {"label": label, "paper": paper, "predicted": predicted, "measured": None}


def _digits(value: float) -> float:
    """Round to three digits, or to a whole number."""
    return float(f"{value:.3g}") if value < 1000 else float(round(value))
