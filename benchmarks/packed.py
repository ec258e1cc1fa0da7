"""The part of `benchmarks.offload` that compares 4 bits with FP16 under the same memory limits:

- behind a link of 0.25 GB/s (a simulated GPU) and from the disk, with few sequences, so bytes
  decide;
- one pass over 1,024 tokens from the disk, where compute decides and dequantization can only cost.

The compute device has room for a quarter of the FP16 weights, and the engine places what it can
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.benchmarks.common import run_row
from flexgen_helm.benchmarks.engine_task import alternate, block_bytes
from flexgen_helm.checkpoint.planned_weights import read_model_config

if TYPE_CHECKING:
    from flexgen_helm.benchmarks.offload import Workload


@dataclass(frozen=True)
class Case:
    """One comparison.

    ratio: name of the reported ratio, FP16's seconds over those of 4 bits.
    """

    label: str
    ratio: str
    rows: int
    output: int
    link_gb_s: tuple[float, float] | None = None


CASES = (
    Case("behind 0.25 GB/s", "packed_link", 4, 8, (0.25, 0.25)),
    Case("one sequence from the disk", "packed_disk", 1, 32),
    Case("four sequences from the disk", "packed_disk_four", 4, 32),
    Case("1,024 tokens a pass", "packed_compute_bound", 16, 1),
)


def measure(
    workload: Workload, scratch: Path, result: dict[str, Any], cases: Sequence[Case] = CASES
) -> None:
    """Measure both sides of each case in alternation, and add rows and ratios to the result."""
    config, _ = read_model_config(workload.model)
    weights = 2 * config.num_parameters
    for case in cases:
        sizes = {"rows": case.rows, "prompt": workload.prompt, "output": case.output}
        room = int(workload.weights_share * weights) + 2 * block_bytes(config, **sizes)
        engine: dict[str, Any] = {"device": "cpu", "offload_dir": str(scratch / "packed")}
        limits = {"cpu": room}
        if case.link_gb_s is not None:
            engine |= {"device": "sim", "link_gb_s": case.link_gb_s}
            limits = {"gpu": room, "cpu": 2 * weights}
        sides = {
            f"{precision}, {case.label}": {
                "model": workload.model,
                "engine": {**engine, "precision": precision, "schedule": "zigzag"},
                "limits": limits,
                **sizes,
            }
            for precision in ("fp16", "4bit")
        }
        rows = [
            {**run_row(label, records), **{key: records[-1][key] for key in ("bytes", "policy")}}
            for label, records in alternate(sides, workload.repeats).items()
        ]
        result["rows"] += rows
        result["ratios"][case.ratio] = rows[0]["median"] / rows[1]["median"]
