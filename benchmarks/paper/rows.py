"""The rows of the paper's tables: the paper's figures from the CSV files here, predictions, and
measurements.

A row has a label, and under `paper`, `predicted` and `measured` a figure or None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks.paper.systems import (
    COMPRESSED,
    SYSTEMS,
    with_page_cache,
    with_torch_dequantization,
)
from flexgen_helm.benchmarks.paper.tables import (
    evaluate_csv,
    full_memory,
    label_of,
    predict_row,
    row_problem,
)
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.hardware.profile import HardwareProfile, load_profile
from flexgen_helm.planner.affine import CACHE, HIDDEN, WEIGHTS, fraction_vector
from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.policy import BlockShape
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.search import Solution, search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16, Precision

PAPER = Path(__file__).parent
RESULTS = PAPER.parent / "results"
# Lengths of the paper's throughput tables.
PROMPT, OUTPUT = 512, 32
Row = dict[str, Any]


def row(
    label: str, paper: Any = None, predicted: Any = None, measured: Any = None, **more: Any
) -> Row:
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
    return evaluated("throughput_512") + [
        row(
            f"{result['hardware']['device']}: {line['label']}",
            measured=_digits(line["tokens_per_s"]),
        )
        for line in result["rows"]
    ]


def evaluated(table: str) -> list[Row]:
    """Return the rows of a table of throughputs."""
    return [_predicted(line) for line in _lines() if line["table"] == table]


def frontier() -> list[Row]:
    """Throughput by sequences of a block; for FlexGen the paper names no policies: they are the
    search's.
    """
    rows: list[Row] = []
    for line in _csv("frontier"):
        system, model, sequences = line["system"], line["model"], line["effective_batch_size"]
        if system.startswith("FlexGen"):
            precision = COMPRESSED if system == "FlexGen (c)" else FP16
            workload = Workload.uniform(PROMPT, OUTPUT, sequences)
            costs = _searched(model, workload, precision).prediction
        else:
            small = {**_main_line(system, model), "gpu_batch_size": str(sequences)}
            costs = predict_row(small, load_profile("t4"))
        latencies = {"paper_s": line["latency_s"], "predicted_s": round(costs.block_s)}
        label = f"{system} {model}, block of {sequences}"
        rows.append(row(label, line["tokens_per_s"], _digits(costs.tokens_per_s), **latencies))
    return rows


def techniques() -> list[Row]:
    """Throughput without each technique, over the throughput with all of them.

    Both are lines of throughput.csv; of OPT-175B they have as much page cache.
    """
    rows, lines, measured = [], [{}, {}, *_lines()], stored_rows("ablation")
    for named in _csv("techniques"):
        line, whole = lines[named["line"]], lines[named["of"]]
        paper, predicted = (
            round(float(line[key]) / float(whole[key]), 3)
            for key in ("tokens_per_s", "predicted_tokens_per_s")
        )
        ours = measured.get(named["measured"])
        rows.append(row(named["label"], paper, predicted, ours and round(ours["ratio"], 3)))
    return rows


def breakdown() -> list[Row]:
    """OPT-175B without overlap: seconds of each phase, and what share of them each part takes."""
    (line,) = (
        line
        for line in _lines()
        if (line["model"], line["overlap"], line["system"]) == _WITHOUT_OVERLAP
    )
    rows: list[Row] = []
    for paper in _csv("breakdown"):
        phase = paper.pop("phase")
        sides = [paper, dict(predicted_parts(line, phase))]
        totals = [spent.pop("total") for spent in sides]
        rows.append(row(f"{phase}, seconds", *map(_digits, totals)))
        shares = [
            {part: spent[part] / total for part in spent} for spent, total in zip(sides, totals)
        ]
        for spent in shares:
            spent["all parts"] = sum(spent.values())
        for part in shares[1]:
            figures = (round(spent[part], 3) if part in spent else None for spent in shares)
            rows.append(row(f"{phase}: {part}", *figures))
    return rows


_WITHOUT_OVERLAP = ("opt-175b", "0", "FlexGen")


def predicted_parts(line: Row, phase: str) -> Iterator[tuple[str, float]]:
    """Yield predicted seconds of a phase's parts, and of all; without overlap, they add up."""
    problem, policy, schedule = row_problem(line, load_profile("t4"))
    shape = BlockShape(policy.gpu_batch_size, policy.num_gpu_batches, schedule)
    costs, fractions = block_costs(problem, shape), fraction_vector(policy, has_gpu=True)
    times, passes = costs.prefill, 1.0
    if phase == "decoding":
        times, passes = costs.decode, costs.decode_passes

    def seconds(columns: Mapping[Any, int], *resources: str) -> float:
        read = (
            times[name][column] * fractions[column]
            for name in resources
            for column in columns.values()
        )
        return passes * float(sum(read))

    yield "compute", passes * float(times["compute"] @ fractions)
    yield "weights read", seconds(WEIGHTS, "to_gpu", "disk_read")
    yield "cache read", seconds(CACHE, "to_gpu", "disk_read")
    yield "cache written", seconds(CACHE, "to_cpu", "disk_write")
    yield "hidden states", seconds(HIDDEN, "to_gpu", "to_cpu", "disk_read", "disk_write")
    yield "total", line["predicted_decode_s" if phase == "decoding" else "predicted_prefill_s"]


def accuracy() -> list[Row]:
    """WikiText-2 perplexity in 4 bits over that in 16, and the change of LAMBADA's accuracy."""
    rows = [row(**line) for line in _csv("accuracy")]
    if measured := stored_rows("precisions"):
        fp16, packed = measured["fp16"], measured["4bit"]
        ratio = round(packed["perplexity"] / fp16["perplexity"], 3)
        change = round(packed["accuracy"] - fp16["accuracy"], 3)
        rows.append(row("smollm2-135m: WikiText-2 perplexity, ratio", measured=ratio))
        rows.append(row("smollm2-135m: LAMBADA accuracy, change", measured=change))
    return rows


def searched(table: str) -> list[Row]:
    """Times of workloads by the policy that the search finds; the paper names none."""
    rows: list[Row] = []
    for line in _csv("searched"):
        if line["table"] == table:
            workload = Workload.uniform(
                *(line[key] for key in ("prompt_len", "gen_len", "num_sequences"))
            )
            seconds = _searched(line["model"], workload).prediction.latency_s
            rows.append(row(line["label"], line["paper"], round(seconds / line["unit_s"])))
    return rows


def mixed_lengths() -> list[Row]:
    """Tokens that were asked for, over tokens that were computed: padding is the rest."""
    tasks = stored_result("clients")["tasks"]
    measured = {f"{task['name']} abstract_algebra": task["prompts"]["efficiency"] for task in tasks}
    return [
        row(line["task"], line["efficiency"], measured=measured.get(line["task"]))
        for line in _csv("mixed_lengths")
    ]


def on_devices(hardware: HardwareProfile) -> list[Row]:
    """Generation and decoding throughput of 1 and 4 GPUs of a machine.

    One GPU has the policy that the paper names. For four the paper names none: they have the
    search's, in the model of the authors' engine.
    """
    rows: list[Row] = []
    for line in _csv("devices"):
        model, gpus = line["model"], line["gpus"]
        main_line = _main_line("FlexGen", model)
        problem, policy, _ = row_problem(main_line, hardware)
        costs = predict_row(main_line, hardware)
        if gpus > 1:
            found = search(replace(problem, ranks=gpus), ZIGZAG)
            costs, policy = found.prediction, found.policy
        for metric, rate in (
            ("generation", costs.tokens_per_s),
            ("decoding", policy.block_size * (OUTPUT - 1) / costs.decode_s),
        ):
            label = f"{model}, {gpus} GPU, {metric} tokens/s"
            rows.append(row(label, line[metric], _digits(rate)))
    return rows


def network() -> list[Row]:
    """OPT-30B offloaded on one T4, and by Petals over four of them."""
    offloaded = {**_predicted(_main_line("FlexGen", "opt-30b")), "label": "offloading"}
    return [offloaded, row("Petals, below 10 ms, 1 Gbit/s", 2.84)]


TABLES: Mapping[str, Callable[[], list[Row]]] = {
    "throughput": throughput,
    "frontier": frontier,
    "techniques": techniques,
    "policies": partial(evaluated, "ablation_policies"),
    "breakdown": breakdown,
    "ssd": partial(evaluated, "ssd_speed"),
    "subscenarios": partial(searched, "subscenarios"),
    "data_wrangling": partial(searched, "data_wrangling"),
    "mixed_lengths": mixed_lengths,
    "devices": lambda: on_devices(load_profile("t4")),
    "network": network,
    "accuracy": accuracy,
}


def _csv(name: str) -> list[Row]:
    return pd.read_csv(PAPER / f"{name}.csv").to_dict("records")


@cache
def _lines() -> list[Row]:
    """Return the lines of throughput.csv with their predictions."""
    return list(evaluate_csv(PAPER / "throughput.csv", load_profile("t4"))["rows"])


def _main_line(system: str, model: str) -> Row:
    """Return the line of a system and model in the throughput table."""
    return next(line for line in _lines() if (line["system"], line["model"]) == (system, model))


@cache
def _searched(model: str, workload: Workload, precision: Precision = FP16) -> Solution:
    """Return the search's policy for FlexGen on the paper's T4, whose disk has a page cache."""
    entry = resolve(model).entry
    assert entry is not None
    hardware = with_page_cache(with_torch_dequantization(load_profile("t4")))
    problem = SYSTEMS["flexgen"](
        entry.config, hardware, workload, precision, compute_bytes=2, limits={}
    )
    return search(full_memory(problem), ZIGZAG)


def _predicted(line: Row) -> Row:
    paper = line["tokens_per_s"] if line["tokens_per_s"] == "OOM" else float(line["tokens_per_s"])
    predicted = _digits(line["predicted_tokens_per_s"]) if line["feasible"] else "OOM"
    return row(label_of(line), paper, predicted)


def _digits(value: float) -> float:
    """Round to three digits, or to a whole number."""
    return float(f"{value:.3g}") if value < 1000 else float(round(value))
