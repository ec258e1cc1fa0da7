"""`bench offload`: a block whose weights stream from disk against the same block in memory, and against Accelerate.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, packed, peers, summary
from flexgen_helm.benchmarks.common import machine, machine_profile, refuse_engine_flags, run_row
from flexgen_helm.benchmarks.engine_task import alternate
from flexgen_helm.benchmarks.memory_settings import STORAGE_BYTES, in_memory_limit, offload_setting
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.report.throughput import versions

IN_MEMORY, OFFLOADED, ROW_BY_ROW = "in memory", "offloaded", "row by row"


@dataclass(frozen=True)
class Workload:
    """What is measured. Its fields are written into the result.

    rows: sequences of the block; None for twice B* and at least `least_rows`, because every pass upcasts each weight
        once, however fast the disk.
    batches: batches of the block.
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
    least_rows: int = 384
    batches: int = 1
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


@dataclass(frozen=True)
class Block:
    """The measured block. Its fields are written into the result.

    break_even_rows: B*.
    limit_cpu_bytes: limit of host memory with offloading.
    """

    rows: int
    batch_rows: int
    batches: int
    prompt: int
    output: int
    break_even_rows: float
    limit_cpu_bytes: int
    policy: str


def run(options: Options) -> dict[str, Any]:
    """Measure all sides in alternation; see `flexgen_helm.benchmarks` for the format.

    Rows are seconds of the whole block, of its prefill and of its decoding.
    """
    refuse_engine_flags("offload", options, "offload_dir")
    workload = QUICK if options.quick else Workload()
    workload = replace(workload, rows=options.instances or workload.rows, repeats=options.repeats or workload.repeats)
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        return measure(workload, machine_profile(options, Path(scratch)), Path(scratch), options.tell)


def measure(workload: Workload, profile: HardwareProfile, scratch: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    from flexgen_helm.checkpoint.open import open_checkpoint

    config = open_checkpoint(workload.model, weights="dummy").config
    sizes = {"prompt": workload.prompt, "output": workload.output}
    # Of products in float32 with 16-bit weights.
    rates = {"product_flops": profile.cpu.matmul_flops["float32"].best, "disk_bytes_s": profile.disk.read_bytes_s}
    break_even = break_even_rows(rates["product_flops"], STORAGE_BYTES, rates["disk_bytes_s"])
    rows = workload.rows or max(workload.least_rows, 2 * math.ceil(break_even))
    batch_rows = math.ceil(rows / workload.batches)
    rows = batch_rows * workload.batches
    limit, policy = offload_setting(config, rows, **sizes, share=workload.weights_share, batches=workload.batches)
    block = Block(
        rows,
        batch_rows,
        workload.batches,
        **sizes,
        break_even_rows=break_even,
        limit_cpu_bytes=limit,
        policy=str(policy),
    )
    tell(
        f"products and disk: {_rates_text(rates)}; B* = {break_even:.0f} rows; a block of {batch_rows} x "
        f"{workload.batches}"
    )
    row_batch_rows = math.ceil(rows / workload.row_batches)
    policies = {
        IN_MEMORY: replace(policy, wc=1.0, hc=1.0),
        OFFLOADED: policy,
        ROW_BY_ROW: replace(policy, gpu_batch_size=row_batch_rows, num_gpu_batches=workload.row_batches),
    }
    needed, available = in_memory_limit(config, rows, **sizes), psutil.virtual_memory().available
    sides = {
        label: {
            "model": workload.model,
            "engine": {
                "device": "cpu",
                "policy": str(policy),
                "schedule": "row" if label == ROW_BY_ROW else "zigzag",
                "offload_dir": str(scratch / "ours"),
            },
            "limits": {"cpu": needed if label == IN_MEMORY else limit},
            "rows": rows,
            **sizes,
            "warm": True,
        }
        for label, policy in policies.items()
    }
    records = alternate(sides, workload.repeats, tell)
    peer_records, notes = peers.measure(workload, config, scratch, tell)
    if needed > available:
        notes.append(f"the block in memory may take {needed:,} bytes and the machine had {available:,} free")
    result = assemble(workload, block, rates, records, peer_records, notes)
    rows_of_packed, ratios = packed.measure(workload.model, config, scratch, workload.repeats, workload.packed, tell)
    result["rows"] += rows_of_packed
    result["ratios"] |= ratios
    return result


def break_even_rows(product_flops: float, bytes_per_parameter: int, disk_bytes_s: float) -> float:
    """Return B*, the number of sequences at which computing with a weight (2 FLOP each) takes as long as reading it."""
    return product_flops * bytes_per_parameter / (2 * disk_bytes_s)


def _rates_text(rates: Mapping[str, float]) -> str:
    return f"{rates['product_flops'] / 1e9:.0f} Gflop/s, {rates['disk_bytes_s'] / 1e9:.2f} GB/s"


def read_bytes(record: Mapping[str, Any]) -> int:
    return sum(record["bytes"]["disk_to_cpu"].values())


def phase_rows(label: str, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return three rows of the result: of the whole block, of prefill and of decoding."""
    whole: dict[str, Any] = {
        **run_row(label, records),
        "read_gb": median(map(read_bytes, records)) / 1e9,
        "wait_s": median(record["time_s"]["wait"] for record in records),
        "time_s": [record["time_s"] for record in records],
        "resident_bytes": max(record["resident_bytes"] for record in records),
        "bytes": records[-1]["bytes"],
        "placement": records[-1]["achieved_placement"],
    }

    def phase(name: str, tokens: Callable[[Mapping[str, Any]], int]) -> dict[str, Any]:
        seconds = [record[f"{name}_s"] for record in records]
        speed = median(tokens(record) / record[f"{name}_s"] for record in records)
        return {"label": f"{label}: {name}", **summary(seconds), "tokens_per_s": speed, "seconds": seconds}

    # The first output token of a sequence comes from prefill.
    decode = phase("decode", lambda record: record["output_tokens"] - record["rows"])
    return [whole, phase("prefill", lambda record: record["prompt_tokens"]), decode]


def assemble(
    workload: Workload,
    block: Block,
    rates: Mapping[str, float],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    peer_records: peers.Records,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the result in the format of benchmarks.

    rates: product_flops and disk_bytes_s of this machine.
    """
    rows = {label: phase_rows(label, repeats) for label, repeats in records.items()}
    in_memory, zigzag, row_by_row = rows[IN_MEMORY], rows[OFFLOADED], rows[ROW_BY_ROW]
    whole, prefill, decode = (resident["median"] / row["median"] for resident, row in zip(in_memory, zigzag))
    packages = versions()
    with suppress(metadata.PackageNotFoundError):
        packages["accelerate"] = metadata.version("accelerate")
    offloaded = records[OFFLOADED]
    # A run that read faster than the measurement raises the disk's rate.
    disk_bytes_s = max(rates["disk_bytes_s"], *(read_bytes(record) / record["latency_s"] for record in offloaded))
    operations_s = min(record["roofline_s"] for record in offloaded)
    reads_s = min(map(read_bytes, offloaded)) / disk_bytes_s
    roofline_s = max(operations_s, reads_s)
    reached = roofline_s / zigzag[0]["median"]
    return {
        "name": "offload",
        "workload": asdict(workload),
        "block": asdict(block),
        "hardware": {**machine(), **records[IN_MEMORY][-1]["hardware"]},
        "versions": packages,
        "rows": [*(row for phases in rows.values() for row in phases), *peers.rows(peer_records)],
        "ratios": {
            "offloaded_to_in_memory": whole,
            "offloaded_to_in_memory_prefill": prefill,
            "offloaded_to_in_memory_decode": decode,
            "zigzag_to_row_by_row": row_by_row[0]["median"] / zigzag[0]["median"],
            "roofline_fraction": reached,
            **peers.ratios(peer_records, workload.peer_rows[0]),
        },
        "bound": {
            "rates": {**rates, "disk_bytes_s": disk_bytes_s},
            "seconds": {"operations": operations_s, "reads": reads_s},
        },
        "notes": [
            f"B* = {block.break_even_rows:.0f} rows ({_rates_text(rates)}); the block has {block.rows} rows in "
            f"{block.batches} batches",
            f"host memory is limited to {block.limit_cpu_bytes / 1e9:.2f} GB: {workload.weights_share:.0%} of the "
            f"weights, and the block's cache; policy {block.policy}",
            f"roofline of the offloaded block: {operations_s:.1f} s of operations, {reads_s:.1f} s of reads; reached "
            f"{reached:.0%}",
            *notes,
        ],
    }
