"""Weights that stream from disk against weights in memory, and against Accelerate:
`python -m benchmarks.offload`.

The shapes of OPT-350M with random weights, and a block of more sequences than the disk needs to be
as fast as the products. With offloading, all weights are on the disk, and host memory is limited to
a quarter of their bytes, for the staging ring, beside the block's cache and hidden states. The
roofline of the offloaded block is the longer of its operations at this machine's product rate and
of its reads at the disk's rate.

Then follow Accelerate's disk offload (`benchmarks.peers`) and 4 bits against FP16
(`benchmarks.packed`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_helm.benchmarks import packed, peers
from flexgen_helm.benchmarks.common import report, run_row, script, summary
from flexgen_helm.benchmarks.engine_task import alternate, block_bytes
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.cli.arguments import OutFile
from flexgen_helm.engine.machine_profile import measured_profile

IN_MEMORY, OFFLOADED, ROW_BY_ROW = "in memory", "offloaded", "row by row"


@dataclass(frozen=True)
class Workload:
    """What is measured. Its fields are written into the result.

    rows: sequences of the block.
    row_batches: batches of the same block under the row-by-row schedule.
    weights_share: bytes for weights, in memory that cannot hold all, over all bytes of the weights.
    group_bytes: limit of the memory control groups.
    peer_rows: block sizes that are tried in the groups; the first is also compared size by size.
    """

    model: str = "opt-350m"
    prompt: int = 64
    output: int = 32
    rows: int = 384
    row_batches: int = 4
    weights_share: float = 0.25
    repeats: int = 3
    group_bytes: int = 2 << 30
    peer_rows: Sequence[int] = (4, 16, 48)


def main(out: OutFile = None, repeats: int = Workload.repeats) -> None:
    """Measure all sides in alternation, with weights on the disk of TMPDIR."""
    workload = Workload(repeats=repeats)
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as folder:
        disk = measured_profile(folder=Path(folder), fresh=True).disk
        result = measure(workload, disk.read_bytes_s, Path(folder))
        peers.measure(workload, Path(folder), result)
        packed.measure(workload, Path(folder), result)
    report(result, out)


def measure(workload: Workload, disk_bytes_s: float, scratch: Path) -> dict[str, Any]:
    """Return the result: rows are seconds of the whole block, of its prefill and of its
    decoding.
    """
    config, _ = read_model_config(workload.model)
    weights = 2 * config.num_parameters
    sizes = {"rows": workload.rows, "prompt": workload.prompt, "output": workload.output}
    limit = int(workload.weights_share * weights) + block_bytes(config, **sizes)
    rows, batches = workload.rows, workload.row_batches
    sides = {
        IN_MEMORY: (f"{rows}x1,0,100", "zigzag", limit + 4 * weights),
        OFFLOADED: (f"{rows}x1,0,0", "zigzag", limit),
        ROW_BY_ROW: (f"{-(-rows // batches)}x{batches},0,0", "row", limit),
    }
    common = {"device": "cpu", "offload_dir": str(scratch / "ours")}
    records = alternate(
        {
            label: {
                "model": workload.model,
                "engine": {**common, "policy": f"{policy},0,100,0,100", "schedule": schedule},
                "limits": {"cpu": most},
                **sizes,
            }
            for label, (policy, schedule, most) in sides.items()
        },
        workload.repeats,
    )
    found = {label: phase_rows(label, repeats) for label, repeats in records.items()}
    phases = ("", "_prefill", "_decode")
    ratios = {
        f"offloaded_to_in_memory{phase}": memory["median"] / disk["median"]
        for phase, memory, disk in zip(phases, found[IN_MEMORY], found[OFFLOADED])
    }
    seconds = found[OFFLOADED][0]["median"]
    operations_s = min(record["roofline_s"] for record in records[OFFLOADED])
    reads_s = 1e9 * found[OFFLOADED][0]["read_gb"] / disk_bytes_s
    ratios["zigzag_to_row_by_row"] = found[ROW_BY_ROW][0]["median"] / seconds
    ratios["roofline_fraction"] = max(operations_s, reads_s) / seconds
    return {
        "name": "offload",
        "workload": asdict(workload),
        "hardware": records[IN_MEMORY][-1]["hardware"],
        "rows": [row for phases in found.values() for row in phases],
        "ratios": ratios,
        "notes": [
            f"host memory is limited to {limit / 1e9:.2f} GB; roofline of the offloaded block: "
            f"{operations_s:.1f} s of operations, {reads_s:.1f} s of reads at "
            f"{disk_bytes_s / 1e9:.1f} GB/s"
        ],
    }


def phase_rows(label: str, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return three rows of the result: of the whole block, of prefill and of decoding."""
    last = records[-1]
    read = median(sum(record["bytes"]["disk_to_cpu"].values()) for record in records)
    whole = {
        **run_row(label, records),
        "read_gb": read / 1e9,
        "wait_s": median(record["time_s"]["wait"] for record in records),
        "resident_bytes": max(record["resident_bytes"] for record in records),
        **{key: last[key] for key in ("time_s", "bytes", "achieved_placement")},
    }
    # The first output token of a sequence comes from prefill.
    tokens = {"prefill": last["prompt_tokens"], "decode": last["output_tokens"] - last["rows"]}
    phases = [
        {
            "label": f"{label}: {phase}",
            **summary(seconds := [record[f"{phase}_s"] for record in records]),
            "tokens_per_s": count / median(seconds),
        }
        for phase, count in tokens.items()
    ]
    return [whole, *phases]


if __name__ == "__main__":
    script(main)
