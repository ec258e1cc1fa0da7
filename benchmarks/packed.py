"""The part of `bench offload` that compares 4 bits with FP16 under the same limits of memory, three times:

- behind a link of 0.25 GB/s (a simulated gpu) and from the real disk, with few sequences, so that bytes decide;
- one pass over 1,024 tokens from the disk, where computing decides and unpacking can only cost.

Each precision keeps as many weights beside the computing as the limit holds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_helm.benchmarks import summary
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import ModelConfig, tensor_shapes
from flexgen_helm.planner.memory import MemoryPlan, plan_memory
from flexgen_helm.planner.placement import StorageSizes, Tier
from flexgen_helm.planner.policy import Policy
from flexgen_helm.quant.precisions import FP16, PRECISIONS, Precision

COMPUTE_BYTES = 4
SIDES = (FP16, PRECISIONS["4bit"])
# Of the model's FP16 weights: room for them beside the computing.
WEIGHTS_SHARE = 0.25


@dataclass(frozen=True)
class Case:
    """ratio: what is reported, FP16's seconds over those in 4 bits, or the other way round for an overhead."""

    label: str
    ratio: str
    rows: int
    prompt: int
    output: int
    link_gb_s: tuple[float, float] | None = None
    overhead: bool = False


CASES = (
    Case("behind 0.25 GB/s", "packed_link", 4, 64, 8, (0.25, 0.25)),
    Case("one sequence from the disk", "packed_disk", 1, 64, 32),
    Case("four sequences from the disk", "packed_disk_four", 4, 64, 32),
    Case("1,024 tokens a pass", "packed_compute_bound_overhead", 16, 64, 1, overhead=True),
)


def measure(
    model: str, config: ModelConfig, scratch: Path, repeats: int, cases: Sequence[Case], tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows in seconds, and ratios."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for case in cases:
        settings = {side.name: setting(config, side, case) for side in SIDES}
        found: dict[str, list[dict[str, Any]]] = {side.name: [] for side in SIDES}
        for repeat in range(repeats):
            for name, (policy, limits) in settings.items():
                engine: dict[str, Any] = {"policy": policy, "schedule": "zigzag", "precision": name, "device": "cpu"}
                engine["offload_dir"] = str(scratch / "packed")
                if case.link_gb_s is not None:
                    engine |= {"device": "sim", "link_gb_s": case.link_gb_s}
                sizes = {"rows": case.rows, "prompt": case.prompt, "output": case.output}
                arguments = {"model": model, "engine": engine, "limits": limits, **sizes}
                record = in_own_process(run_engine, {**arguments, "warm": True})
                found[name].append(record)
                tell(f"{case.label}, {name}: {record['latency_s']:.2f} s ({repeat + 1} of {repeats})")
        for name, records in found.items():
            seconds = [record["latency_s"] for record in records]
            row = {"label": f"{name}, {case.label}", **summary(seconds), "seconds": seconds}
            row["tokens_per_s"] = median(r["output_tokens"] / r["latency_s"] for r in records)
            row["wait_s"] = median(record["time_s"]["wait"] for record in records)
            rows.append(row | {"bytes": records[-1]["bytes"], "policy": settings[name][0]})
        plain, packed = (median(record["latency_s"] for record in found[side.name]) for side in SIDES)
        ratios[case.ratio] = packed / plain if case.overhead else plain / packed
    return rows, ratios


def setting(config: ModelConfig, precision: Precision, case: Case) -> tuple[str, dict[str, int]]:
    """The policy as text, and the limits, which are the same for both precisions."""
    home: Tier = "cpu" if case.link_gb_s is None else "gpu"
    room = max(cache_bytes(config, side, case) for side in SIDES)
    hidden = case.rows * case.prompt * config.hidden_size * COMPUTE_BYTES
    beside = int(WEIGHTS_SHARE * 2 * config.num_parameters) + room + hidden
    plain = 4 * config.num_parameters
    limits: dict[Tier, int] = {"gpu": 0, "cpu": beside, "disk": plain}
    if home == "gpu":
        limits |= {"gpu": beside, "cpu": plain}

    def policy(percent: int) -> str:
        if home == "gpu":
            return f"{case.rows}x1,{percent},{100 - percent},100,0,100,0"
        return f"{case.rows}x1,0,{percent},0,100,0,100"

    texts = [policy(percent) for percent in range(100, -1, -1)]
    policies = [Policy.parse(text) for text in texts]
    found, _ = first_that_fits(StorageSizes(config, precision), limits, home, room + hidden, policies)
    return texts[policies.index(found)], {tier: size for tier, size in limits.items() if size}


def first_that_fits(
    rest: StorageSizes, limits: Mapping[Tier, int], home: Tier, reserve: int, policies: Sequence[Policy]
) -> tuple[Policy, MemoryPlan]:
    """Of policies that keep fewer and fewer weights beside the computing, the first that leaves `reserve` bytes there.

    Raises `MemoryLimitError` where none does.
    """
    vectors = COMPUTE_BYTES * sum(shape[0] for shape in tensor_shapes(rest.config).values() if len(shape) == 1)
    for policy in policies:
        with suppress(MemoryLimitError):
            plan = plan_memory(rest, limits, home, COMPUTE_BYTES, policy)
            near = sum(rest.matrices[name] for name, tier in plan.weights.items() if tier == home)
            if near + vectors + plan.staging_bytes + reserve <= limits[home]:
                return policy, plan
    raise MemoryLimitError(f"{limits[home]:,} bytes hold no ring for the weights beside {reserve:,} of cache")


def cache_bytes(config: ModelConfig, precision: Precision, case: Case) -> int:
    """Upper bound of the block's cache, its newest tokens included."""
    token = config.kv_bytes_per_token(COMPUTE_BYTES)
    plain = case.rows * (case.prompt + case.output) * token
    tail = (
        0
        if precision.cache is None
        else case.rows * precision.cache.window_copies * precision.cache.window_tokens * token
    )
    return plain + tail
