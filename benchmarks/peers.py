"""The part of `benchmarks.offload` that compares with Accelerate's disk offload, each in a memory control group.

Only there the page cache counts as the memory that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flexgen_helm.benchmarks import accelerate_task
from flexgen_helm.benchmarks.common import ProcessKilled, run_row, tokens_per_s
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.memory_group import GroupUnavailable, MemoryGroup, forget_files
from flexgen_helm.benchmarks.memory_settings import offload_setting
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.cli.console import say
from flexgen_helm.models.config import ModelConfig

if TYPE_CHECKING:
    from flexgen_helm.benchmarks.offload import Workload

OURS, THEIRS = "ours", "accelerate"
# Side -> sequences of the block -> records of its runs.
Records = Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]


def measure(
    workload: Workload, config: ModelConfig, scratch: Path
) -> tuple[dict[str, dict[int, list[dict[str, Any]]]], list[str]]:
    """Return the records of both sides, and notes about what was left out.

    Both sides take turns; a side's larger blocks are left out once one had too little memory.
    """
    records: dict[str, dict[int, list[dict[str, Any]]]] = {OURS: {}, THEIRS: {}}
    notes: list[str] = []
    group_bytes = workload.group_bytes
    try:
        MemoryGroup(group_bytes).close()
        reason = accelerate_task.missing()
    except GroupUnavailable as error:
        reason = str(error)
    if reason is not None:
        say(f"SKIPPED, Accelerate: {reason}")
        return records, [f"SKIPPED, Accelerate: {reason}"]
    sizes = {"prompt": workload.prompt, "output": workload.output}
    folder = scratch / "accelerate"
    folder.mkdir()
    in_own_process(accelerate_task.write_weights, {"model": workload.model, "folder": str(folder)})

    def run(side: str, rows: int) -> bool:
        """Run one block; returns whether it had enough memory."""
        block = {"model": workload.model, "rows": rows, **sizes}
        with MemoryGroup(group_bytes) as group:
            forget_files(scratch)
            try:
                if side == THEIRS:
                    arguments = {**block, "folder": str(folder)}
                    record = in_own_process(accelerate_task.generate, arguments, group, accelerate_task.ENVIRONMENT)
                else:
                    limit, policy = offload_setting(config, rows, **sizes, share=workload.weights_share)
                    engine = {"device": "cpu", "policy": str(policy), "schedule": "zigzag"}
                    engine["offload_dir"] = str(scratch / "ours")
                    arguments = {**block, "engine": engine, "limits": {"cpu": limit}, "warm": True}
                    record = in_own_process(run_engine, arguments, group)
            except ProcessKilled:
                notes.append(f"{side}, {rows} rows: more than {group_bytes:,} bytes, ended by the kernel")
                say(notes[-1])
                return False
            record["group_peak_bytes"] = group.peak
        records[side].setdefault(rows, []).append(record)
        say(f"{side}, {rows} rows in {group_bytes / 2**30:g} GiB: {tokens_per_s(record):.2f} token/s")
        return True

    sizes_left = {side: list(workload.peer_rows) for side in records}
    for _ in range(workload.repeats):
        for rows in workload.peer_rows:
            for side, left in sizes_left.items():
                if rows in left and not run(side, rows):
                    sizes_left[side] = [size for size in left if size < rows]  # larger blocks need more memory still
    return records, notes


def best_size(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """Return the block size with the highest throughput, 0 if there is none."""
    return max(records, key=lambda rows: median(map(tokens_per_s, records[rows])), default=0)


def rows(records: Records) -> list[dict[str, Any]]:
    return [
        {
            **run_row(f"{side} x {size} in a group", repeats),
            "resident_bytes": max(record["resident_bytes"] for record in repeats),
            "group_peak_bytes": [record["group_peak_bytes"] for record in repeats],
        }
        for side, sizes in records.items()
        for size, repeats in sizes.items()
    ]


def ratios(records: Records, small: int) -> dict[str, float]:
    """Return our throughput over Accelerate's, at `small` sequences and each at its best, if both were measured."""
    pairs = {
        f"accelerate_at_batch_{small}": (small, small),
        "accelerate_at_best_batch": (best_size(records[OURS]), best_size(records[THEIRS])),
    }
    return {
        name: median(map(tokens_per_s, records[OURS][ours])) / median(map(tokens_per_s, records[THEIRS][theirs]))
        for name, (ours, theirs) in pairs.items()
        if ours in records[OURS] and theirs in records[THEIRS]
    }
