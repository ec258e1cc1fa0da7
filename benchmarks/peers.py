"""The part of `benchmarks.offload` that compares with Accelerate's disk offload, each in a memory
control group.

Only there the page cache counts as the memory that it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.benchmarks import accelerate_task
from flexgen_helm.benchmarks.common import run_row
from flexgen_helm.benchmarks.engine_task import block_bytes, run_engine
from flexgen_helm.benchmarks.process import (
    GroupUnavailable,
    ProcessKilled,
    forget_files,
    in_own_process,
    memory_group,
)
from flexgen_helm.checkpoint.planned_weights import read_model_config

if TYPE_CHECKING:
    from flexgen_helm.benchmarks.offload import Workload

OURS, THEIRS = "ours", "accelerate"


def measure(workload: Workload, scratch: Path, result: dict[str, Any]) -> None:
    """Measure both sides by turns, and add rows, ratios, and notes of what was left out to the
    result.
    """
    folder = scratch / "accelerate"
    try:
        with memory_group(workload.group_bytes):
            reason = accelerate_task.missing()
    except GroupUnavailable as error:
        reason = str(error)
    if reason is not None:
        result["notes"].append(f"Accelerate is left out: {reason}")
        return
    write = {"model": workload.model, "folder": str(folder)}
    in_own_process(accelerate_task.write_weights, write)
    records: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(workload.repeats):
        for rows in workload.peer_rows:
            for side in (OURS, THEIRS):
                try:
                    records[side, rows].append(_run(workload, scratch, side, rows))
                except ProcessKilled as error:
                    result["notes"].append(f"{side}, {rows} rows: {error}, for lack of memory")
    found = {key: _row(*key, repeats) for key, repeats in records.items() if repeats}
    result["rows"] += found.values()
    speeds = {key: row["tokens_per_s"] for key, row in found.items()}
    first = workload.peer_rows[0]
    best = [
        max((v for (s, _), v in speeds.items() if s == side), default=0) for side in (OURS, THEIRS)
    ]
    pairs = {
        f"accelerate_at_batch_{first}": [speeds.get((side, first)) for side in (OURS, THEIRS)],
        "accelerate_at_best_batch": best,
    }
    result["ratios"] |= {
        name: ours / theirs for name, (ours, theirs) in pairs.items() if ours and theirs
    }


def _run(workload: Workload, scratch: Path, side: str, rows: int) -> dict[str, Any]:
    """Run one block in a group, with an empty page cache. Raises `ProcessKilled` for lack of
    memory.
    """
    sizes = {"rows": rows, "prompt": workload.prompt, "output": workload.output}
    block: dict[str, Any] = {"model": workload.model, **sizes}
    forget_files(scratch)
    if side == THEIRS:
        block["folder"] = str(scratch / "accelerate")
        environment = accelerate_task.ENVIRONMENT
        return in_own_process(accelerate_task.generate, block, workload.group_bytes, environment)
    config, _ = read_model_config(workload.model)
    weights = int(workload.weights_share * 2 * config.num_parameters)
    block["limits"] = {"cpu": weights + block_bytes(config, **sizes)}
    policy = f"{rows}x1,0,0,0,100,0,100"
    folder = str(scratch / "ours")
    block["engine"] = {
        "device": "cpu",
        "policy": policy,
        "schedule": "zigzag",
        "offload_dir": folder,
    }
    return in_own_process(run_engine, block, workload.group_bytes)


def _row(side: str, rows: int, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **run_row(f"{side} x {rows} in a group", records),
        "resident_bytes": max(record["resident_bytes"] for record in records),
    }
