"""The rows of the paper's tables: the paper's figures from the CSV files here, predictions, and measurements.

A row has a label, and under `paper`, `predicted` and `measured` a figure or None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks.paper.systems import COMPRESSED, SYSTEMS, with_page_cache, with_torch_dequantization
from flexgen_helm.benchmarks.paper.tables import evaluate_csv, full_memory, predict_row, row_problem
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.hardware.profile import HardwareProfile, load_profile
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


def row(label: str, paper: Any = None, predicted: Any = None, measured: Any = None, **more: Any) -> Row:
    return {"label": label, "paper": paper, "predicted": predicted, "measured": measured, **more}


def stored_result(benchmark: str) -> dict[str, Any]:
    """Return a benchmark's newest stored result, with the name of its file under `file`.

    It has no rows where nobody has measured, or where results are not installed.
    """
    stored = [
        {**json.loads(path.read_text(encoding="utf-8")), "file": path.name}
        for path in RESULTS.glob(f"{benchmark}_{'*' if benchmark == 'gpu' else 'cpu_*'}.json")
    ]
    return max(stored, key=lambda result: result["date"], default={"rows": [], "tasks": []})


def stored_rows(benchmark: str) -> dict[str, Row]:
    """Return the rows of a stored result by label."""
    return {row["label"]: row for row in stored_result(benchmark)["rows"]}


def throughput() -> list[Row]:
    """Return the main table, and what `benchmarks.gpu` has measured."""
    result = stored_result("gpu")
    return [*map(_predicted, _lines(table="throughput_512"))] + [
        row(f"{result['hardware']['device']}: {line['label']}", measured=_digits(line["tokens_per_s"]))
        for line in result["rows"]
        if "tokens_per_s" in line
    ]


def policies() -> list[Row]:
    return [*map(_predicted, _lines(table="ablation_policies"))]


def ssd_speed() -> list[Row]:
    return [*map(_predicted, _lines(table="ssd_speed"))]


def frontier() -> list[Row]:
    """Throughput by sequences of a block; for FlexGen the paper names no policies, so they are the search's."""
    rows: list[Row] = []
    for line in pd.read_csv(PAPER / "latency_throughput_512_32_T4.csv").to_dict("records"):
        system, model, sequences = line["system"], line["model"], int(line["effective_batch_size"])
        if system.startswith("FlexGen"):
            precision = COMPRESSED if system == "FlexGen (c)" else FP16
            costs = _searched(model, Workload.uniform(PROMPT, OUTPUT, sequences), precision).prediction
        else:
            small = {**_main_line(system, model), "gpu_batch_size": str(sequences)}
            costs = predict_row(small, load_profile("t4"))
        latencies = {"paper_s": line["latency_s"], "predicted_s": round(costs.block_s)}
        label = f"{system} {model}, block of {sequences}"
        rows.append(row(label, line["tokens_per_s"], _digits(costs.tokens_per_s), **latencies))
    return rows


def techniques() -> list[Row]:
    """Throughput without each technique, over the throughput with all of them."""
    paper = pd.read_csv(PAPER / "ablation_techniques_512_32_T4.csv", index_col="configuration").opt_30b_tokens_per_s
    measured = stored_rows("ablation")

    def predicted(**wanted: str) -> float:
        (line,) = _lines(model="opt-30b", system="FlexGen", **wanted)
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
    rows = [
        row(
            f"OPT-30B, {label}",
            round(float(paper[label]) / everything, 3),
            round(value / full, 3),
            round(measured[ours]["ratio"], 3) if measured else None,
        )
        for label, value, ours in cases
    ]
    flags = {"overlap": "no overlapping", "cpu_attention": "no cpu compute"}
    for line in _lines(model="opt-175b", table="ablation_techniques"):
        # The row that has both techniques has another policy.
        without = next((name for flag, name in flags.items() if line[flag] == "0"), "no policy search")
        rows.append(row(f"OPT-175B, {without}", *_share_of_best(line)))
    return rows


def _share_of_best(line: Row) -> tuple[float, ...]:
    """Return the paper's and the predicted throughput of OPT-175B over the best policy's with as much page cache."""
    (best,) = (
        known
        for known in _lines(page_cache=line["page_cache"], overlap="1", cpu_attention="1")
        if _throughput_label(known) == "FlexGen opt-175b 32x8 0/50 0/0 0/100" and float(known["disk_read_gb_s"]) >= 1
    )
    keys = ("tokens_per_s", "predicted_tokens_per_s")
    return tuple(round(float(line[key]) / float(best[key]), 3) for key in keys)


def breakdown() -> list[Row]:
    """OPT-175B without overlap: seconds of each phase, and what share of them each part takes."""
    paper = pd.read_csv(PAPER / "breakdown_opt_175b_512_T4.csv", index_col="stage").to_dict("index")
    (line,) = _lines(model="opt-175b", system="FlexGen", overlap="0")
    predicted = predicted_parts(line)
    rows: list[Row] = []
    for stage, figures in paper.items():
        theirs = {"total": figures["total_s"]} | {part: figures[name] for part, name in _PARTS.items() if name}
        sides = theirs, predicted[stage]
        rows.append(row(f"{stage}, seconds", *(_digits(spent["total"]) for spent in sides)))
        for part in _PARTS:
            shares = (round(spent[part] / spent["total"], 3) if part in spent else None for spent in sides)
            rows.append(row(f"{stage}: {part}", *shares))
        sums = (sum(spent[part] for part in _PARTS if part in spent) for spent in sides)
        rows.append(
            row(f"{stage}: all parts", *(round(total / spent["total"], 3) for total, spent in zip(sums, sides)))
        )
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


def accuracy() -> list[Row]:
    """WikiText-2 perplexity in 4 bits over that in 16, and the change of LAMBADA's accuracy."""
    paper = pd.read_csv(PAPER / "approximations_accuracy.csv", index_col="model").to_dict("index")
    ratio, change = "WikiText-2 perplexity, ratio", "LAMBADA accuracy, change"
    rows: list[Row] = []
    for model, figures in paper.items():
        rows.append(row(f"{model}: {ratio}", round(figures["wikitext_ppl_4bit"] / figures["wikitext_ppl_fp16"], 3)))
        rows.append(row(f"{model}: {change}", round(figures["lambada_acc_4bit"] - figures["lambada_acc_fp16"], 3)))
    if measured := stored_rows("precisions"):
        fp16, packed = measured["fp16"], measured["4bit"]
        rows.append(row(f"smollm2-135m: {ratio}", measured=round(packed["perplexity"] / fp16["perplexity"], 3)))
        rows.append(row(f"smollm2-135m: {change}", measured=round(packed["accuracy"] - fp16["accuracy"], 3)))
    return rows


def subscenarios() -> list[Row]:
    """OPT-30B's minutes for each run entry, padded as in the paper, by the policy that the search finds."""
    rows: list[Row] = []
    for line in pd.read_csv(PAPER / "helm_subscenarios_opt_iml_30b_T4.csv").to_dict("records"):
        workload = Workload.uniform(*(int(line[name]) for name in ("prompt_len", "gen_len", "num_sequences")))
        seconds = _searched("opt-30b", workload).prediction.latency_s
        rows.append(row(line["run_entry"], line["minutes"], round(seconds / 60)))
    return rows


def data_wrangling() -> list[Row]:
    """Seconds of each task, by the policy that the search finds."""
    rows: list[Row] = []
    lines = pd.read_csv(PAPER / "data_wrangling_T4.csv").to_dict("records")
    for model in ("opt-30b", "opt-175b"):
        for line in lines:
            workload = Workload.uniform(*(int(line[name]) for name in ("input_len", "output_len", "num_sequences")))
            seconds = _searched(model, workload).prediction.latency_s
            rows.append(row(f"{model}: {line['task']}", line[f"{model.replace('-', '_')}_seconds"], round(seconds)))
    return rows


def mixed_lengths() -> list[Row]:
    """Tokens that were asked for, over tokens that were computed: padding is the rest."""
    tasks = stored_result("clients")["tasks"]
    measured = {f"{task['name']} abstract_algebra": task["prompts"]["efficiency"] for task in tasks}
    return [
        row(line["task"], line["efficiency"], measured=measured.get(line["task"]))
        for line in pd.read_csv(PAPER / "helm_mixed_lengths_T4.csv").to_dict("records")
    ]


def devices() -> list[Row]:
    return on_devices(load_profile("t4"))


def on_devices(hardware: HardwareProfile) -> list[Row]:
    """Generation and decoding throughput of 1 and 4 GPUs of a machine.

    One GPU has the policy that the paper names. For four the paper names none: they have the search's, in the model of
    the authors' engine.
    """
    paper = pd.read_csv(PAPER / "pipeline_4gpu_512_T4.csv").set_index(["system", "num_gpus", "metric"]).loc["FlexGen"]
    rows = []
    for model in ("opt-6.7b", "opt-30b", "opt-175b"):
        line = _main_line("FlexGen", model)
        problem, policy, _ = row_problem(line, hardware)
        found = search(replace(problem, ranks=4), (ZIGZAG,))
        one, four = (predict_row(line, hardware), policy.block_size), (found.prediction, found.policy.block_size)
        for gpus, (costs, sequences) in ((1, one), (4, four)):
            decoding = sequences * (OUTPUT - 1) / costs.decode_s
            for metric, rate in (("generation tokens/s", costs.tokens_per_s), ("decoding tokens/s", decoding)):
                figure = float(paper.loc[(gpus, metric), model.replace("-", "_").replace(".", "_")])
                rows.append(row(f"{model}, {gpus} GPU, {metric}", figure, _digits(rate)))
    return rows


def network() -> list[Row]:
    """OPT-30B offloaded on one T4, and by Petals over four of them."""
    petals = pd.read_csv(PAPER / "petals_512_T4.csv", index_col="model").tokens_per_s_of_one_gpu
    offloaded = {**_predicted(_main_line("FlexGen", "opt-30b")), "label": "offloading"}
    return [offloaded, row("Petals, below 10 ms, 1 Gbit/s", float(petals["opt-30b"]))]


@cache
def _evaluated() -> list[Row]:
    return list(evaluate_csv(PAPER / "throughput.csv", load_profile("t4"))["rows"])


def _main_line(system: str, model: str) -> Row:
    """Return the line of a system and model in the throughput table."""
    (line,) = _lines(table="throughput_512", system=system, model=model)
    return line


def _lines(**wanted: str) -> list[Row]:
    """Return the evaluated lines that have these values."""
    return [line for line in _evaluated() if wanted.items() <= line.items()]


@cache
def _searched(model: str, workload: Workload, precision: Precision = FP16) -> Solution:
    """Return the search's policy for FlexGen on the paper's T4, whose disk has a page cache."""
    entry = resolve(model).entry
    assert entry is not None
    hardware = with_page_cache(with_torch_dequantization(load_profile("t4")))
    problem = SYSTEMS["flexgen"](entry.config, hardware, workload, precision, compute_bytes=2, limits={})
    return search(full_memory(problem), (ZIGZAG,))


def _throughput_label(line: Row) -> str:
    shares = " ".join("/".join(str(line[f"{kind}{tier}"]) for tier in "gc") for kind in "wch")
    return f"{line['system']} {line['model']} {line['gpu_batch_size']}x{line['num_gpu_batches']} {shares}"


def _predicted(line: Row) -> Row:
    label = _throughput_label(line) + (", page cache held back" if line["page_cache"] == "held_back" else "")
    paper = line["tokens_per_s"] if line["tokens_per_s"] == "OOM" else float(line["tokens_per_s"])
    return row(label, paper, _digits(line["predicted_tokens_per_s"]) if line["feasible"] else "OOM")


def _digits(value: float) -> float:
    """Round to three digits, or to a whole number."""
    return float(f"{value:.3g}") if value < 1000 else float(round(value))
