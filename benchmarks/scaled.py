"""`bench scaled`: the paper's tables of OPT-30B in small, on the simulated GPU of `bench ablation`.

The throughput table and the ablation of policies run each block with its policy, data wrangling and HELM's
sub-scenarios run as many prompts with the policies that the engine searches. Lengths are scaled as in `bench ablation`:
12 new tokens for the paper's 32, and prompts that keep the proportion of cache to weights. Policies with weights or
cache on the disk are left out: the disk is the machine's own and is not scaled. So is compression: a processor unpacks
4 bits for a time that a GPU does not take.
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
from flexgen_helm.benchmarks.ablation import QUICK, Paper, Scaled, Workload, block_arguments, scale, scaled_prompt
from flexgen_helm.benchmarks.common import refuse_engine_flags, run_row
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.planner.policy import Policy
from flexgen_helm.report.throughput import versions

_PAPER = Path(__file__).parent / "paper"
_MODEL = "opt-30b"
# Sequences of a sub-scenario are divided by this.
FEWER = 8
# Most of FP16 weights on the GPU: with the paper's fifth, our staging ring has no room in 16 GB for a model of 60 GB.
_LARGEST_SHARE = 0.1


@dataclass(frozen=True)
class Case:
    """A run of the paper.

    label: table, then what tells its rows apart.
    prompt, output: tokens in the paper.
    policy: None for the one that the engine searches.
    engine: further arguments of the engine.
    """

    label: str
    prompt: int
    output: int
    sequences: int
    policy: Policy | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


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
    for line in pd.read_csv(_PAPER / "throughput.csv", dtype=str).to_dict("records"):
        of_table = line["table"] in ("throughput_512", "ablation_policies") and line["model"] == _MODEL
        if of_table and line["compress"] == "0" and not _on_disk(line):
            yield _of_line(line)
    for line in pd.read_csv(_PAPER / "data_wrangling_T4.csv").to_dict("records"):
        lengths = int(line["input_len"]), int(line["output_len"])
        yield Case(f"data_wrangling: {line['task']}", *lengths, int(line["num_sequences"]))
    for line in pd.read_csv(_PAPER / "helm_subscenarios_opt_iml_30b_T4.csv").to_dict("records"):
        lengths = int(line["prompt_len"]), int(line["gen_len"])
        yield Case(f"subscenarios: {line['run_entry']}", *lengths, int(line["num_sequences"]) // FEWER)


def _of_line(line: Mapping[str, str]) -> Case:
    """Return a row of the paper's throughputs: its system is imitated by schedule, policy and flags of the engine."""
    shares = {kind + tier: int(line[kind + tier]) / 100 for kind in "wch" for tier in "gc"}
    if shares["wg"] < 1:
        shares["wg"] = min(shares["wg"], _LARGEST_SHARE)
        shares["wc"] = 1 - shares["wg"]
    policy = Policy(int(line["gpu_batch_size"]), int(line["num_gpu_batches"]), **shares)
    flags: dict[str, Any] = {name: line[name] == "1" for name in ("overlap", "cpu_attention")}
    flags["schedule"] = line["schedule"]
    lengths = int(line["prompt_len"]), int(line["gen_len"])
    return Case(f"throughput: {throughput_label(line)}", *lengths, policy.block_size, policy, flags)


def throughput_label(line: Mapping[str, Any]) -> str:
    """Return how tables name a row of the paper's throughputs."""
    shares = " ".join("/".join(str(line[f"{kind}{tier}"]) for tier in "gc") for kind in "wch")
    return f"{line['system']} {line['model']} {line['gpu_batch_size']}x{line['num_gpu_batches']} {shares}"


def _on_disk(line: Mapping[str, str]) -> bool:
    return any(int(line[f"{kind}g"]) + int(line[f"{kind}c"]) < 100 for kind in "wch")


def measure(workload: Workload, runs: list[Case], scratch: Path, options: Options) -> dict[str, Any]:
    from flexgen_helm.checkpoint.open import open_checkpoint

    config, paper = open_checkpoint(workload.model, weights="dummy").config, Paper()
    scaled = scale(workload, options)
    records: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(workload.repeats):
        for case in runs:
            own = replace(workload, output=ceil(case.output * workload.output / paper.output))
            prompt = scaled_prompt(config, own, replace(paper, prompt=case.prompt, output=case.output))
            place = replace(scaled, prompt=prompt)
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
            f"simulated gpu of {scaled.gpu_bytes / 1e6:.0f} MB behind {scaled.link_gb_s:.3f} GB/s each way; "
            f"{workload.model} with dummy weights; sub-scenarios have an eighth of the paper's sequences",
        ],
    }
