"""Weights that stream from disk against weights in memory, and against Accelerate: `python -m benchmarks.offload`.

Fixed workload: the shapes of OPT-350M with random weights, 64 prompt and 32 output tokens. The block has at least
twice B* sequences, B* being the number at which computing with a weight takes as long as reading it from this disk.
With offloading, host memory is limited to a quarter of the weights' bytes plus the block's cache; the staging ring and
waiting hidden states are included. The roofline of the offloaded block is the longer of its operations at this
machine's product rate (`roofline_s` of its record) and of its reads at the disk's rate.

Then follow Accelerate's disk offload (`benchmarks.peers`) and 4 bits against FP16 (`benchmarks.packed`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_helm.benchmarks import packed, peers
from flexgen_helm.benchmarks.common import machine, report, run_row, script, summary
from flexgen_helm.benchmarks.engine_task import alternate
from flexgen_helm.benchmarks.memory_settings import STORAGE_BYTES, in_memory_limit, offload_setting
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import OutFile
from flexgen_helm.engine.machine_profile import measured_profile
from flexgen_helm.hardware.profile import HardwareProfile

IN_MEMORY, OFFLOADED, ROW_BY_ROW = "in memory", "offloaded", "row by row"


@dataclass(frozen=True)
class Workload:
    """What is measured. Its fields are written into the result.

    rows: sequences of the block; None for twice B* and at least 384, because every pass upcasts each weight once,
        however fast the disk.
    row_batches: batches of the same block under the row-by-row schedule.
    weights_share: share of the weights that host memory holds with offloading.
    group_bytes: limit of the memory control groups.
    peer_rows: block sizes that are tried in the groups; the first is also compared size by size.
    packed: comparisons with 4 bits.
    """

    model: str = "opt-350m"
    prompt: int = 64
    output: int = 32
    rows: int | None = None
    row_batches: int = 4
    weights_share: float = 0.25
    repeats: int = 3
    group_bytes: int = 2 << 30
    peer_rows: Sequence[int] = (4, 16, 48)
    packed: Sequence[packed.Case] = packed.CASES


QUICK = Workload(
    model="opt-125m",
    prompt=8,
    output=3,
    rows=4,
    repeats=1,
    group_bytes=1 << 30,
    peer_rows=(2,),
    packed=tuple(replace(case, rows=2, prompt=8, output=min(case.output, 2)) for case in packed.CASES[:3:2]),
)


def main(out: OutFile = None, quick: bool = False, repeats: int | None = None, offload_dir: Path | None = None) -> None:
    """Measure all sides in alternation. --quick: figures mean nothing."""
    workload = QUICK if quick else Workload()
    workload = replace(workload, repeats=repeats or workload.repeats)
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=offload_dir) as folder:
        scratch = Path(folder)
        report(measure(workload, measured_profile(folder=scratch, fresh=not quick), scratch), out)


def measure(workload: Workload, profile: HardwareProfile, scratch: Path) -> dict[str, Any]:
    """Return the result: rows are seconds of the whole block, of its prefill and of its decoding."""
    config, _ = read_model_config(workload.model)
    sizes = {"prompt": workload.prompt, "output": workload.output}
    # Of products in float32 with 16-bit weights.
    rates = {"product_flops": profile.cpu.matmul_flops["float32"].best, "disk_bytes_s": profile.disk.read_bytes_s}
    break_even = break_even_rows(rates["product_flops"], STORAGE_BYTES, rates["disk_bytes_s"])
    rows = workload.rows or max(384, 2 * math.ceil(break_even))
    limit, policy = offload_setting(config, rows, **sizes, share=workload.weights_share)
    by_rows = replace(
        policy, gpu_batch_size=math.ceil(rows / workload.row_batches), num_gpu_batches=workload.row_batches
    )
    sides = {
        IN_MEMORY: (replace(policy, wc=1.0, hc=1.0), "zigzag", in_memory_limit(config, rows, **sizes)),
        OFFLOADED: (policy, "zigzag", limit),
        ROW_BY_ROW: (by_rows, "row", limit),
    }
    notes = [
        f"B* = {break_even:.0f} rows at {rates['product_flops'] / 1e9:.0f} Gflop/s and "
        f"{rates['disk_bytes_s'] / 1e9:.2f} GB/s; the block has {rows} rows",
        f"host memory is limited to {limit / 1e9:.2f} GB: {workload.weights_share:.0%} of the weights, and the block's "
        f"cache; policy {policy}",
    ]
    say("\n".join(notes))
    common = {"device": "cpu", "offload_dir": str(scratch / "ours")}
    blocks = {
        label: {
            "model": workload.model,
            "engine": {**common, "policy": str(side), "schedule": schedule},
            "limits": {"cpu": most},
            "rows": rows,
            **sizes,
            "warm": True,
        }
        for label, (side, schedule, most) in sides.items()
    }
    records = alternate(blocks, workload.repeats)
    peer_records, peer_notes = peers.measure(workload, config, scratch)
    result = assemble(workload, rates, records, peer_records, notes + peer_notes)
    rows_of_packed, ratios = packed.measure(workload.model, config, scratch, workload.repeats, workload.packed)
    result["rows"] += rows_of_packed
    result["ratios"] |= ratios
    return result


def break_even_rows(product_flops: float, bytes_per_parameter: int, disk_bytes_s: float) -> float:
    """Return B*, the number of sequences at which computing with a weight (2 FLOP each) takes as long as reading it."""
    return product_flops * bytes_per_parameter / (2 * disk_bytes_s)


def read_bytes(record: Mapping[str, Any]) -> int:
    return sum(record["bytes"]["disk_to_cpu"].values())


def phase_rows(label: str, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return three rows of the result: of the whole block, of prefill and of decoding."""
    whole: dict[str, Any] = {
        **run_row(label, records),
        "read_gb": median(map(read_bytes, records)) / 1e9,
        "wait_s": median(record["time_s"]["wait"] for record in records),
        "resident_bytes": max(record["resident_bytes"] for record in records),
        **{key: records[-1][key] for key in ("time_s", "bytes", "achieved_placement")},
    }
    last = records[-1]  # the first output token of a sequence comes from prefill
    tokens = {"prefill": last["prompt_tokens"], "decode": last["output_tokens"] - last["rows"]}
    rows = [whole]
    for phase, count in tokens.items():
        seconds = [record[f"{phase}_s"] for record in records]
        rows.append({"label": f"{label}: {phase}", **summary(seconds), "tokens_per_s": count / median(seconds)})
    return rows


def assemble(
    workload: Workload,
    rates: Mapping[str, float],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    peer_records: peers.Records,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the result. rates: product_flops and disk_bytes_s of this machine."""
    rows = {label: phase_rows(label, repeats) for label, repeats in records.items()}
    whole, prefill, decode = (
        memory["median"] / disk["median"] for memory, disk in zip(rows[IN_MEMORY], rows[OFFLOADED])
    )
    offloaded, seconds = records[OFFLOADED], rows[OFFLOADED][0]["median"]
    # A run that read faster than the measurement raises the disk's rate.
    disk_bytes_s = max(rates["disk_bytes_s"], *(read_bytes(record) / record["latency_s"] for record in offloaded))
    operations_s = min(record["roofline_s"] for record in offloaded)
    reads_s = min(map(read_bytes, offloaded)) / disk_bytes_s
    reached = max(operations_s, reads_s) / seconds
    return {
        "name": "offload",
        "workload": asdict(workload),
        "hardware": {**machine(), **records[IN_MEMORY][-1]["hardware"]},
        "rows": [*(row for phases in rows.values() for row in phases), *peers.rows(peer_records)],
        "ratios": {
            "offloaded_to_in_memory": whole,
            "offloaded_to_in_memory_prefill": prefill,
            "offloaded_to_in_memory_decode": decode,
            "zigzag_to_row_by_row": rows[ROW_BY_ROW][0]["median"] / seconds,
            "roofline_fraction": reached,
            **peers.ratios(peer_records, workload.peer_rows[0]),
        },
        "bound": {
            "rates": {**rates, "disk_bytes_s": disk_bytes_s},
            "seconds": {"operations": operations_s, "reads": reads_s},
        },
        "notes": [
            *notes,
            f"roofline of the offloaded block: {operations_s:.1f} s of operations, {reads_s:.1f} s of reads; reached "
            f"{reached:.0%}",
        ],
    }


if __name__ == "__main__":
    script(main)
