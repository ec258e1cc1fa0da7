"""`bench scaled`: the paper's tables of OPT-30B and OPT-175B in small, on the simulated machine of `bench ablation`.

Throughputs run each block with its policy: those of the main table, the ablations of policies and techniques, and the
slow SSD. Data wrangling and HELM's sub-scenarios run as many prompts as OPT-30B's, with the policies that the engine
searches. Lengths are scaled as in `bench ablation`: 12 new tokens for the paper's 32, and prompts that keep the
proportion of cache to weights. The disk is read past the page cache. Compression is left out: a processor unpacks 4
bits for a time that a GPU does not take.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import pandas as pd

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.ablation import (
    OPT_175B,
    QUICK,
    Paper,
    Scaled,
    Workload,
    block_arguments,
    scale,
    scaled_disk,
    scaled_prompt,
    simulated,
)
from flexgen_helm.benchmarks.common import refuse_engine_flags, run_row
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.planner.policy import Policy
from flexgen_helm.report.throughput import versions

_PAPER = Path(__file__).parent / "paper"
_MODEL, _LARGE_MODEL = "opt-30b", "opt-175b"
_PAPERS = {_MODEL: Paper(), _LARGE_MODEL: OPT_175B}
# Smaller throughputs have two decimals in the paper, and cannot be compared.
_LEAST_TOKENS_PER_S = 0.05
# Sequences of a sub-scenario are divided by this.
FEWER = 8
# Most of FP16 weights on the GPU: with the paper's fifth, our staging ring has no room in 16 GB for a model of 60 GB.
_LARGEST_SHARE = 0.1
_TECHNIQUES = {"overlap": "no overlap", "cpu_attention": "no cpu attention"}


@dataclass(frozen=True)
class Case:
    """A run of the paper.

    label: table, then what tells its rows apart.
    prompt, output: tokens in the paper.
    policy: None for the one that the engine searches.
    engine: further arguments of the engine.
    model: whose proportions the run keeps.
    disk_gb_s: of the paper's machine.
    """

    label: str
    prompt: int
    output: int
    sequences: int
    policy: Policy | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: str = _MODEL
    disk_gb_s: tuple[float, float] | None = None


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark once, or as often as --repeats says; rows are in seconds of all prompts."""
    refuse_engine_flags("scaled", options, "offload_dir")
    workload = replace(QUICK if options.quick else Workload(), repeats=options.repeats or 1)
    found = list(cases())
    if options.quick:  # one of each kind, with few sequences
        first = replace(found[0], policy=found[0].policy and replace(found[0].policy, gpu_batch_size=1))
        found = [replace(case, sequences=2) for case in (first, found[-1])]
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        return measure(workload, found, Path(scratch), options)


def cases() -> Iterator[Case]:
    """Yield the runs of the paper that a simulated GPU can have in small."""
    lines = pd.read_csv(_PAPER / "throughput.csv", dtype=str).to_dict("records")
    # The same run with and without a page cache is one run here.
    yield from {case.label: case for case in map(_of_line, filter(_can_run, lines))}.values()
    for line in pd.read_csv(_PAPER / "data_wrangling_T4.csv").to_dict("records"):
        lengths = int(line["input_len"]), int(line["output_len"])
        yield Case(f"data_wrangling: {line['task']}", *lengths, int(line["num_sequences"]))
    for line in pd.read_csv(_PAPER / "helm_subscenarios_opt_iml_30b_T4.csv").to_dict("records"):
        lengths = int(line["prompt_len"]), int(line["gen_len"])
        yield Case(f"subscenarios: {line['run_entry']}", *lengths, int(line["num_sequences"]) // FEWER)


def _can_run(line: Mapping[str, str]) -> bool:
    """Return whether a row of the paper's throughputs is run; OPT-30B without a technique is in `bench ablation`."""
    model, value = line["model"], line["tokens_per_s"]
    if line["compress"] != "0" or model not in _PAPERS or value == "OOM":
        return False
    return float(value) >= _LEAST_TOKENS_PER_S and (line["table"], model) != ("ablation_techniques", _MODEL)


def _of_line(line: Mapping[str, str]) -> Case:
    """Return a row of the paper's throughputs: its system is imitated by schedule, policy and flags of the engine."""
    shares = {kind + tier: int(line[kind + tier]) / 100 for kind in "wch" for tier in "gc"}
    if shares["wg"] < 1:
        surplus = max(0.0, shares["wg"] - _LARGEST_SHARE)
        shares["wg"], shares["wc"] = shares["wg"] - surplus, shares["wc"] + surplus
    policy = Policy(int(line["gpu_batch_size"]), int(line["num_gpu_batches"]), **shares)
    flags: dict[str, Any] = {name: line[name] == "1" for name in ("overlap", "cpu_attention")}
    flags["schedule"] = line["schedule"]
    lengths = int(line["prompt_len"]), int(line["gen_len"])
    disk = float(line["disk_read_gb_s"]), float(line["disk_write_gb_s"])
    return Case(scaled_label(line), *lengths, policy.block_size, policy, flags, line["model"], disk)


def scaled_label(line: Mapping[str, Any]) -> str:
    """Return how the result names a row of the paper's throughputs."""
    return f"throughput: {throughput_label(line)}{left_out(line)}"


def left_out(line: Mapping[str, Any]) -> str:
    """Return what a row of FlexGen's throughputs does without, as the end of a label."""
    techniques = [name for key, name in _TECHNIQUES.items() if line["system"] == "FlexGen" and line[key] == "0"]
    slow = [f"a disk of {line['disk_read_gb_s']} GB/s"] if float(line["disk_read_gb_s"]) < 1 else []
    return "".join(f", {text}" for text in (*techniques, *slow))


def throughput_label(line: Mapping[str, Any]) -> str:
    """Return how tables name a row of the paper's throughputs."""
    shares = " ".join("/".join(str(line[f"{kind}{tier}"]) for tier in "gc") for kind in "wch")
    return f"{line['system']} {line['model']} {line['gpu_batch_size']}x{line['num_gpu_batches']} {shares}"


def measure(workload: Workload, runs: list[Case], scratch: Path, options: Options) -> dict[str, Any]:
    from flexgen_helm.checkpoint.open import open_checkpoint

    config = open_checkpoint(workload.model, weights="dummy").config
    scaled = scale(workload, options)
    records: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(workload.repeats):
        for case in runs:
            own = replace(workload, output=ceil(case.output * workload.output / Paper().output))
            paper = replace(_PAPERS[case.model], prompt=case.prompt, output=case.output)
            place = replace(scaled, prompt=scaled_prompt(config, own, paper))
            if case.disk_gb_s is not None:
                read, write = (1e9 * rate for rate in case.disk_gb_s)
                place = replace(
                    place, disk_gb_s=scaled_disk(replace(paper, disk_bytes_s=(read, write)), scaled.decode_flops)
                )
            arguments = block_arguments(own, place, case.policy, scratch, rows=case.sequences, **case.engine)
            records.setdefault(case.label, []).append(in_own_process(run_engine, arguments))
            seconds = records[case.label][-1]["latency_s"]
            options.tell(f"{case.label}: {seconds:.2f} s ({repeat + 1} of {workload.repeats})")
    return assemble(workload, scaled, records)


def assemble(workload: Workload, scaled: Scaled, records: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the result in the format of benchmarks."""
    rows = [
        {
            **run_row(label, own),
            "policy": own[-1]["policy"],
            **{name: own[-1][name] for name in ("rows", "prompt_tokens", "output_tokens")},
        }
        for label, own in records.items()
    ]
    return {
        "name": "scaled",
        "workload": {**asdict(workload), **asdict(scaled)},
        "hardware": next(iter(records.values()))[-1]["hardware"],
        "versions": versions(),
        "rows": rows,
        "ratios": {},
        "notes": [
            f"{simulated(scaled)}; {workload.model} with dummy weights; sub-scenarios have an eighth of the paper's "
            "sequences",
        ],
    }
