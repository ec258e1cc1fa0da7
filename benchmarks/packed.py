"""The part of `benchmarks.offload` that compares 4 or 8 bits with FP16 under the same memory limits:

- behind a link of 0.25 GB/s (a simulated GPU) and from the real disk, with few sequences, so that bytes decide;
- one pass over 1,024 tokens from the disk, where compute decides and dequantization can only cost.

Each precision keeps as many of its weights on the compute device as the limit holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_helm.benchmarks.common import run_row
from flexgen_helm.benchmarks.engine_task import alternate
from flexgen_helm.benchmarks.memory_settings import (
    STORAGE_BYTES,
    block_cache_bytes,
    first_that_fits,
    hidden_bytes,
)
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.placement import StorageSizes, Tier
from flexgen_helm.planner.policy import Policy
from flexgen_helm.quant.precisions import PRECISIONS

# Of the model's FP16 weights: the compute device's room for weights.
WEIGHTS_SHARE = 0.25


@dataclass(frozen=True)
class Case:
    """One comparison.

    ratio: name of the reported ratio, FP16's seconds over the precision's; an overhead is the inverse.
    """

    label: str
    ratio: str
    rows: int
    prompt: int
    output: int
    link_gb_s: tuple[float, float] | None = None
    overhead: bool = False
    precision: str = "4bit"


CASES = (
    Case("behind 0.25 GB/s", "packed_link", 4, 64, 8, (0.25, 0.25)),
    Case("behind 0.25 GB/s (8 bits)", "packed_8bit_link", 4, 64, 8, (0.25, 0.25), precision="8bit"),
    Case("one sequence from the disk", "packed_disk", 1, 64, 32),
    Case("four sequences from the disk", "packed_disk_four", 4, 64, 32),
    Case("1,024 tokens a pass", "packed_compute_bound_overhead", 16, 64, 1, overhead=True),
)


def measure(
    model: str, config: ModelConfig, scratch: Path, repeats: int, cases: Sequence[Case]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure both sides of each case in alternation; returns the result's rows, in seconds, and its ratios."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for case in cases:
        sides: dict[str, dict[str, Any]] = {}
        for precision in ("fp16", case.precision):
            policy, limits = setting(config, precision, case)
            engine: dict[str, Any] = {"policy": policy, "schedule": "zigzag", "precision": precision}
            engine |= {"device": "cpu", "offload_dir": str(scratch / "packed")}
            if case.link_gb_s is not None:
                engine |= {"device": "sim", "link_gb_s": case.link_gb_s}
            block = {"rows": case.rows, "prompt": case.prompt, "output": case.output, "warm": True}
            sides[f"{precision}, {case.label}"] = {"model": model, "engine": engine, "limits": limits, **block}
        for label, records in alternate(sides, repeats).items():
            row = run_row(label, records)
            row["wait_s"] = median(record["time_s"]["wait"] for record in records)
            rows.append(row | {"bytes": records[-1]["bytes"], "policy": sides[label]["engine"]["policy"]})
        fp16, packed = rows[-2]["median"], rows[-1]["median"]
        ratios[case.ratio] = packed / fp16 if case.overhead else fp16 / packed
    return rows, ratios


def setting(config: ModelConfig, precision: str, case: Case) -> tuple[str, dict[str, int]]:
    """Return the precision's policy as text, and the limits, which are the same for both precisions."""
    cache = max(cache_bytes(config, side, case) for side in ("fp16", case.precision))
    reserve = cache + hidden_bytes(config, case.rows, case.prompt)
    weights = STORAGE_BYTES * config.num_parameters
    limit = int(WEIGHTS_SHARE * weights) + reserve
    device: Tier = "cpu" if case.link_gb_s is None else "gpu"
    limits: dict[Tier, int] = {"gpu": 0, "cpu": limit, "disk": 2 * weights}
    if device == "gpu":
        limits |= {"gpu": limit, "cpu": 2 * weights}

    shares = "{},{},100,0,100,0" if device == "gpu" else "0,{},0,100,0,100"
    policies = [Policy.parse(f"{case.rows}x1,{shares.format(near, 100 - near)}") for near in range(100, -1, -1)]
    chosen = first_that_fits(StorageSizes(config, PRECISIONS[precision]), limits, device, reserve, policies)
    return str(chosen), {tier: size for tier, size in limits.items() if size}


def cache_bytes(config: ModelConfig, precision: str, case: Case) -> int:
    """Return an upper bound of the block's KV cache, its residual window included."""
    cache = PRECISIONS[precision].cache
    window = 0 if cache is None else cache.window_copies * cache.window_tokens
    return block_cache_bytes(config, case.rows, case.prompt + case.output + window)
