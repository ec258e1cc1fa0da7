"""`bench blocks`: the paper's frontier and breakdown on the simulated machine of `bench ablation`.

The frontier runs OPT-30B's blocks of all sizes with the policy of the paper's largest. The breakdown runs OPT-175B's
block without overlap, with half of the weights and all of the cache on the disk, and with few and with many new tokens.
The runs differ in decode passes; the rest is prefill. Transfers are timed one by one, and computing is the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.ablation import (
    OPT_175B,
    QUICK,
    Scaled,
    Workload,
    block_arguments,
    scale,
    scaled_prompt,
    simulated,
)
from flexgen_helm.benchmarks.common import refuse_engine_flags, run_row
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.memory_settings import policy_text
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.planner.policy import Policy
from flexgen_helm.report.throughput import versions

# Batch size and batches of the frontier, the largest last.
SIZES = ((1, 1), (4, 1), (16, 1), (32, 1), (32, 2), (48, 3))
_QUICK_SIZES = ((1, 1), (2, 2))
_FEW_TOKENS = 2
# Timers of a run record that are a part of the breakdown.
_TIMERS = {
    "weights read": ("load_weights",),
    "cache read": ("load_cache",),
    "cache written": ("store_cache",),
    "hidden states": ("load_activations", "store_activations"),
}


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark. Rows of the frontier are in seconds; those of the breakdown in seconds of a phase or part."""
    refuse_engine_flags("blocks", options, "offload_dir")
    workload = QUICK if options.quick else replace(Workload(), repeats=2)
    workload = replace(workload, repeats=options.repeats or workload.repeats)
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        return measure(workload, Path(scratch), options)


def measure(workload: Workload, scratch: Path, options: Options) -> dict[str, Any]:
    from flexgen_helm.checkpoint.open import open_checkpoint

    scaled = scale(workload, options)
    sizes = _QUICK_SIZES if options.quick else SIZES
    blocks = [Policy(*size, wg=0.1, wc=0.9, cg=0.0, cc=1.0, hg=0.0, hc=1.0) for size in sizes]
    rows, batches = (4, 2) if options.quick else (32, 8)
    on_disk = Policy(rows, batches, wg=0.0, wc=0.5, cg=0.0, cc=0.0, hg=0.0, hc=1.0)
    config = open_checkpoint(workload.model, weights="dummy").config
    large = replace(scaled, prompt=workload.prompt or scaled_prompt(config, workload, OPT_175B))
    few = replace(workload, output=_FEW_TOKENS)
    cases = [(f"block of {own.block_size}", workload, scaled, own, True) for own in blocks]
    cases += [("few tokens", few, large, on_disk, False), ("many tokens", workload, large, on_disk, False)]
    records: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(workload.repeats):
        for label, own, machine, policy, overlap in cases:
            arguments = block_arguments(own, machine, policy, scratch, overlap=overlap)
            records.setdefault(label, []).append(in_own_process(run_engine, arguments))
            seconds = records[label][-1]["latency_s"]
            options.tell(f"{label}: {seconds:.2f} s ({repeat + 1} of {workload.repeats})")
    parts = breakdown(records.pop("few tokens"), records.pop("many tokens"), workload.output)
    what = f"{policy_text(on_disk)} without overlap, {large.prompt} + {workload.output} tokens"
    return assemble(workload, scaled, records, parts, what)


def breakdown(
    few: Sequence[Mapping[str, Any]], many: Sequence[Mapping[str, Any]], output: int
) -> dict[str, dict[str, float]]:
    """Return phase -> part, or 'total' -> seconds, from runs with `_FEW_TOKENS` and with `output` new tokens.

    Prompts read no cache, and each step reads more of it than the last; all other parts are alike in each step.
    """
    less, more = _medians(few), _medians(many)
    step = {part: (more[part] - less[part]) / (output - _FEW_TOKENS) for part in more}
    phases = {
        "prefill": {part: less[part] - (_FEW_TOKENS - 1) * step[part] for part in step},
        "decoding": {part: (output - 1) * step[part] for part in step},
    }
    phases["prefill"]["cache read"], phases["decoding"]["cache read"] = 0.0, more["cache read"]
    for spent in phases.values():
        spent["total"] = sum(spent.values())
    return phases


def _medians(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each part of a run; computing is what transfers leave of the whole."""
    parts = {part: median(_seconds(own, timers) for own in records) for part, timers in _TIMERS.items()}
    return {"compute": median(own["latency_s"] for own in records) - sum(parts.values()), **parts}


def _seconds(record: Mapping[str, Any], timers: Sequence[str]) -> float:
    return sum(float(record["time_s"].get(timer, 0.0)) for timer in timers)


def assemble(
    workload: Workload,
    scaled: Scaled,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    parts: Mapping[str, Mapping[str, float]],
    what: str,
) -> dict[str, Any]:
    """Return the result in the format of benchmarks; what: the breakdown has run."""
    rows = [run_row(label, own) for label, own in records.items()]
    largest = rows[-1]["tokens_per_s"]
    rows = [{**row, "of_largest": row["tokens_per_s"] / largest} for row in rows]
    rows += [
        {"label": f"{phase}: {part}", "seconds": seconds, "share": seconds / spent["total"]}
        for phase, spent in parts.items()
        for part, seconds in spent.items()
    ]
    return {
        "name": "blocks",
        "workload": {**asdict(workload), **asdict(scaled), "breakdown": what},
        "hardware": next(iter(records.values()))[-1]["hardware"],
        "versions": versions(),
        "rows": rows,
        "ratios": {},
        "notes": [
            f"{simulated(scaled)}; {workload.model}, {scaled.prompt} + {workload.output} tokens",
            f"breakdown: {what}",
        ],
    }
