"""`bench offload`: a block whose weights stream from the disk beside the same block in memory, and beside Accelerate.

Fixed workload: the shapes of OPT-350M with random weights, 64 prompt and 32 output tokens, a block of at least twice
B*, the rows at which computing with a weight takes as long as reading it from this disk. Offloaded, host memory is
limited to a quarter of the weights' bytes plus the block's cache; staging and waiting hidden states are inside.

Accelerate's disk offload and ours then run in memory control groups of the same size, because only there the page
cache counts as the memory that it is. Last, 4 bits beside FP16 (`benchmarks.packed`).
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, accelerate_task, packed, summary
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.memory_group import GroupUnavailable, MemoryGroup, forget_files
from flexgen_helm.benchmarks.process import ProcessKilled, in_own_process
from flexgen_helm.benchmarks.roofline import (
    Shapes,
    block_seconds,
    bound_seconds,
    break_even_rows,
    measure_rates,
    operation_seconds,
)
from flexgen_helm.errors import UsageError
from flexgen_helm.models.config import ModelConfig, tensor_shapes
from flexgen_helm.planner.constants import MAX_BATCH_TOKENS
from flexgen_helm.planner.memory import plan_memory
from flexgen_helm.planner.placement import StorageSizes
from flexgen_helm.planner.policy import Policy
from flexgen_helm.report.throughput import versions

BUSY_LOAD = 0.5  # runnable processes before we begin
REST_BYTES, COMPUTE_BYTES = 2, 4
NO_LIMIT = 1 << 50
IN_MEMORY, OFFLOADED, ROW_BY_ROW = "in memory", "offloaded", "row by row"
OURS, THEIRS = "ours", "accelerate"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """rows: of the block, None for twice B* and at least `least_rows`, because every pass converts each weight from 16
    bits once, whatever the disk. batches: of the block; row_batches: of the same rows where they go row by row.
    group_bytes: of the memory control group. peer_rows: block sizes that are tried there, the first of which is also
    compared size by size. disk_file: bytes that the disk's rate is measured with. packed: comparisons with 4 bits."""

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
    disk_file: int = 1 << 30
    packed: Sequence[packed.Case] = packed.CASES


QUICK = Workload(
    model="opt-125m",
    prompt=8,
    output=3,
    rows=4,
    repeats=1,
    group_bytes=1 << 30,
    peer_rows=(2,),
    disk_file=32 << 20,
    packed=tuple(replace(case, rows=2, prompt=8, output=min(case.output, 2)) for case in packed.CASES),
)


@dataclass(frozen=True)
class Setting:
    """limit: bytes of host memory; policy: with the block's shape; streamed_bytes: read in each pass; weights: bytes
    of all."""

    limit: int
    policy: Policy
    streamed_bytes: int
    weights: int


def run(options: Options) -> dict[str, Any]:
    """Measure all sides in alternation; see `flexgen_helm.benchmarks` for the format.

    Rows are seconds: of the whole block, of its prompts' pass, of the passes behind it. `bound` is the roofline.
    """
    refused = sorted(set(options.engine) - {"offload_dir"})
    if refused:
        raise UsageError(f"bench offload has a fixed workload and takes --offload-dir alone: leave out {refused}")
    workload = QUICK if options.quick else Workload()
    workload = replace(workload, rows=options.instances or workload.rows, repeats=options.repeats or workload.repeats)
    busy = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        result = measure(workload, Path(scratch), options.tell)
    if busy > BUSY_LOAD:
        result["notes"].append(f"other programs were computing when this began (load {busy:.1f}): figures are noise")
    return result


def measure(workload: Workload, scratch: Path, tell: Tell) -> dict[str, Any]:
    from flexgen_helm.checkpoint.open import open_checkpoint

    config = open_checkpoint(workload.model, weights="dummy").config
    rates = in_own_process(
        measure_rates, {"model": workload.model, "folder": str(scratch), "file_bytes": workload.disk_file}
    )
    least = break_even_rows(rates["product_flops"], REST_BYTES, rates["disk_bytes_s"])
    rows = workload.rows or max(workload.least_rows, 2 * math.ceil(least))
    batch_rows = math.ceil(rows / workload.batches)
    prefill_rows = min(batch_rows, max(1, MAX_BATCH_TOKENS // workload.prompt))
    shapes = Shapes(batch_rows, workload.batches, prefill_rows, workload.prompt, workload.output)
    setting = offloaded(config, shapes, workload.weights_share)
    tell(
        f"products {rates['product_flops'] / 1e9:.0f} Gflop/s, disk {rates['disk_bytes_s'] / 1e9:.2f} GB/s: "
        f"B* = {least:.0f} rows; a block of {shapes.batch_rows} x {shapes.batches}"
    )
    policies = {
        IN_MEMORY: replace(setting.policy, wc=1.0, hc=1.0),
        OFFLOADED: setting.policy,
        ROW_BY_ROW: replace(
            setting.policy,
            gpu_batch_size=math.ceil(shapes.rows / workload.row_batches),
            num_gpu_batches=workload.row_batches,
        ),
    }
    needed, available = in_memory_limit(config, shapes), psutil.virtual_memory().available
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in (IN_MEMORY, OFFLOADED, ROW_BY_ROW)}
    operations: list[dict[str, float]] = []
    sizes = {"prompt": workload.prompt, "output": workload.output}
    for repeat in range(workload.repeats):
        arguments = {"model": workload.model, "batch_rows": batch_rows, "prefill_rows": prefill_rows, **sizes}
        operations.append(in_own_process(operation_seconds, arguments))
        for label in found:
            near = label == IN_MEMORY
            engine = {
                "device": "cpu",
                "policy": policy_text(policies[label]),
                "schedule": "row" if label == ROW_BY_ROW else "zigzag",
                "offload_dir": str(scratch / "ours"),
            }
            limits = {"cpu": in_memory_limit(config, shapes) if near else setting.limit}
            arguments = {"model": workload.model, "engine": engine, "limits": limits, "rows": shapes.rows, **sizes}
            arguments["warm"] = True
            record = in_own_process(run_engine, arguments)
            found[label].append(record)
            tell(
                f"{label}: {record['latency_s']:.1f} s, of which {record['time_s']['wait']:.1f} s waiting "
                f"({repeat + 1} of {workload.repeats})"
            )
    best = {name: min(measured[name] for measured in operations) for name in operations[0]}
    rates["disk_bytes_s"] = max(rates["disk_bytes_s"], *(read_speed(record) for record in found[OFFLOADED]))
    computing = block_seconds(shapes, best, config.num_layers)
    bounds = {
        label: bound_seconds(
            shapes, computing, 0 if label == IN_MEMORY else setting.streamed_bytes, rates["disk_bytes_s"]
        )
        for label in found
    }
    peers, notes = against_accelerate(workload, config, scratch, tell)
    if needed > available:
        notes.append(f"the block in memory may take {needed:,} bytes and the machine had {available:,} free")
    result = assemble(workload, shapes, setting, rates, best, least, found, bounds, peers, notes)
    rows_, ratios = packed.measure(workload.model, config, scratch, workload.repeats, workload.packed, tell)
    result["rows"] += rows_
    result["ratios"] |= ratios
    return result


def offloaded(config: ModelConfig, shapes: Shapes, share: float) -> Setting:
    """Memory for `share` of the weights and the block's cache; staging and hidden states take theirs from the first.

    Hidden states that would leave no room for themselves wait on the disk.
    """
    weights = config.num_parameters * REST_BYTES
    cache = shapes.rows * (shapes.prompt + shapes.output - 1) * config.kv_bytes_per_token(COMPUTE_BYTES)
    limit = int(share * weights) + cache
    policy = Policy(shapes.batch_rows, shapes.batches, wc=0.0, hc=0.0)
    rest = StorageSizes(config)
    sizes = rest.matrices
    limits = {"gpu": 0, "cpu": limit, "disk": NO_LIMIT}
    staging = plan_memory(rest, limits, "cpu", COMPUTE_BYTES, policy).staging_bytes  # type: ignore[arg-type]
    vectors = COMPUTE_BYTES * sum(prod(shape) for shape in tensor_shapes(config).values() if len(shape) == 1)
    room = limit - cache - staging - vectors
    hidden = shapes.rows * shapes.prompt * config.hidden_size * COMPUTE_BYTES
    reserve = cache
    if room >= hidden:
        policy, reserve = replace(policy, hc=1.0), cache + hidden
    shares = [replace(policy, wc=percent / 100) for percent in range(50, -1, -1)]  # most of the weights stream
    policy, plan = packed.first_that_fits(rest, limits, "cpu", reserve, shares)
    streamed = {name for name, tier in plan.weights.items() if tier == "disk" and name != "embed.positions.weight"}
    if not config.tied_head:
        streamed.discard("embed.tokens.weight")  # rows are gathered; a tied one is the head too
    return Setting(limit, policy, sum(sizes[name] for name in streamed), weights)


def in_memory_limit(config: ModelConfig, shapes: Shapes) -> int:
    """Room for the same block beside weights in the compute type (which may take half of a tier), whatever the
    machine has: a block that comes in two halves would be no comparison."""
    cache = shapes.rows * (shapes.prompt + shapes.output - 1) * config.kv_bytes_per_token(COMPUTE_BYTES)
    hidden = shapes.rows * shapes.prompt * config.hidden_size * COMPUTE_BYTES
    return 2 * COMPUTE_BYTES * config.num_parameters + cache + hidden


def policy_text(policy: Policy) -> str:
    shares = (policy.wg, policy.wc, policy.cg, policy.cc, policy.hg, policy.hc)
    return f"{policy.gpu_batch_size}x{policy.num_gpu_batches},{','.join(f'{100 * share:g}' for share in shares)}"


def read_speed(record: Mapping[str, Any]) -> float:
    """Bytes a second that the run itself read: a lower bound of what the disk can do."""
    return float(sum(record["bytes"]["disk_to_cpu"].values())) / float(record["latency_s"])


def against_accelerate(
    workload: Workload, config: ModelConfig, scratch: Path, tell: Tell
) -> tuple[dict[str, dict[int, list[dict[str, Any]]]], list[str]]:
    """Side -> rows of the block -> measurements, and notes about what was left out.

    Every size is tried once; the first one and each side's best are then repeated.
    """
    peers: dict[str, dict[int, list[dict[str, Any]]]] = {OURS: {}, THEIRS: {}}
    why = accelerate_task.missing()
    if why is None and config.architecture != "opt":
        why = "only OPT's shapes are built for it"
    try:
        MemoryGroup(workload.group_bytes).close()
    except GroupUnavailable as error:
        why = str(error)
    if why is not None:
        tell(f"SKIPPED, Accelerate: {why}")
        return peers, [f"SKIPPED, Accelerate: {why}"]
    notes: list[str] = []
    folder = scratch / "accelerate"
    folder.mkdir()
    in_own_process(accelerate_task.write_weights, {"model": workload.model, "folder": str(folder)})

    def one(side: str, rows: int) -> bool:
        sizes = {"model": workload.model, "rows": rows, "prompt": workload.prompt, "output": workload.output}
        shapes = Shapes(rows, 1, rows, workload.prompt, workload.output)
        with MemoryGroup(workload.group_bytes) as group:
            forget_files(scratch)
            try:
                if side == THEIRS:
                    arguments = {**sizes, "folder": str(folder)}
                    record = in_own_process(accelerate_task.generate, arguments, group, accelerate_task.ENVIRONMENT)
                else:
                    setting = offloaded(config, shapes, workload.weights_share)
                    engine = {"device": "cpu", "policy": policy_text(setting.policy), "schedule": "zigzag"}
                    engine["offload_dir"] = str(scratch / "ours")
                    arguments = {**sizes, "engine": engine, "limits": {"cpu": setting.limit}, "warm": True}
                    record = in_own_process(run_engine, arguments, group)
            except ProcessKilled:
                notes.append(f"{side}, {rows} rows: more than {workload.group_bytes:,} bytes, ended by the kernel")
                tell(notes[-1])
                return False
            record["group_peak_bytes"] = group.peak
        peers[side].setdefault(rows, []).append(record)
        tell(f"{side}, {rows} rows in {workload.group_bytes / 2**30:g} GiB: {speed(record):.2f} token/s")
        return True

    # A size that is too large for a side is not tried again, nor a larger one.
    for side in (OURS, THEIRS):
        for rows in workload.peer_rows:
            if not one(side, rows):
                break
    again = {side: sorted({workload.peer_rows[0], best_rows(peers[side])} & set(peers[side])) for side in peers}
    for _ in range(workload.repeats - 1):
        for side in (OURS, THEIRS):
            for rows in again[side]:
                one(side, rows)
    return peers, notes


def speed(record: Mapping[str, Any]) -> float:
    """Output tokens a second of the whole workload."""
    return float(record["output_tokens"]) / float(record["latency_s"])


def best_rows(measured: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """The block size with the highest throughput, 0 where there is none."""
    return max(measured, key=lambda rows: median(speed(record) for record in measured[rows]), default=0)


def rows_of(label: str, records: Sequence[Mapping[str, Any]], bound: Mapping[str, float]) -> list[dict[str, Any]]:
    """Three lines of the table: seconds of the block, of its prompts' pass, and of the passes behind it."""
    read = [sum(record["bytes"]["disk_to_cpu"].values()) / 1e9 for record in records]
    computed = [record["prefill_s"] + record["decode_s"] for record in records]
    phases: dict[str, tuple[list[float], list[float], float]] = {
        "": ([r["latency_s"] for r in records], [speed(r) for r in records], bound["total"] / median(computed)),
        ": prefill": _phase(records, "prefill_s", lambda r: r["prompt_tokens"], bound["prefill"]),
        ": decode": _phase(records, "decode_s", decoded_tokens, bound["decode"]),
    }
    rows: list[dict[str, Any]] = [
        {
            "label": label + phase,
            **summary(seconds),
            "tokens_per_s": median(speeds),
            "of_bound": fraction,
            "seconds": seconds,
        }
        for phase, (seconds, speeds, fraction) in phases.items()
    ]
    rows[0] |= {
        "read_gb": median(read),
        "wait_s": median(record["time_s"]["wait"] for record in records),
        "time_s": [record["time_s"] for record in records],
        "resident_bytes": max(record["resident_bytes"] for record in records),
        "bytes": records[-1]["bytes"],
        "placement": records[-1]["achieved_placement"],
    }
    return rows


def _phase(
    records: Sequence[Mapping[str, Any]], seconds: str, tokens: Callable[[Mapping[str, Any]], float], bound: float
) -> tuple[list[float], list[float], float]:
    spent = [record[seconds] for record in records]
    return spent, [tokens(record) / record[seconds] for record in records], bound / median(spent)


def decoded_tokens(record: Mapping[str, Any]) -> float:
    """Tokens of the passes behind the first, which is the prompts' and yields one a row too."""
    return float(record["output_tokens"] - record["rows"])


def assemble(
    workload: Workload,
    shapes: Shapes,
    setting: Setting,
    rates: Mapping[str, float],
    operations: Mapping[str, float],
    break_even: float,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    bounds: Mapping[str, Mapping[str, float]],
    peers: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The result in the format of benchmarks."""
    rows = {label: rows_of(label, records, bounds[label]) for label, records in found.items()}
    near, zigzag, row = rows[IN_MEMORY], rows[OFFLOADED], rows[ROW_BY_ROW]
    whole, prefill, decode = (there["median"] / here["median"] for there, here in zip(near, zigzag))
    ratios = {
        "offloaded_to_in_memory": whole,
        "offloaded_to_in_memory_prefill": prefill,
        "offloaded_to_in_memory_decode": decode,
        "zigzag_to_row_by_row": row[0]["median"] / zigzag[0]["median"],
        "roofline_fraction": zigzag[0]["of_bound"],
        **peer_ratios(peers, workload.peer_rows[0]),
    }
    said = [
        f"B* = {break_even:.0f} rows ({rates['product_flops'] / 1e9:.0f} Gflop/s, {rates['disk_bytes_s'] / 1e9:.2f} "
        f"GB/s); the block has {shapes.rows} rows in {shapes.batches} batches",
        f"host memory is limited to {setting.limit / 1e9:.2f} GB: {workload.weights_share:.0%} of {setting.weights:,} "
        f"bytes of weights, and the block's cache; policy {policy_text(setting.policy)}",
        f"roofline of the offloaded block: {bounds[OFFLOADED]['prefill']:.1f} s prefill + "
        f"{bounds[OFFLOADED]['decode']:.1f} s decode; reached {zigzag[0]['of_bound']:.0%}",
        *notes,
    ]
    hardware = {"machine": platform.machine(), "cores": psutil.cpu_count(logical=False)}
    return {
        "name": "offload",
        "workload": asdict(workload),
        "block": {**asdict(shapes), "break_even_rows": break_even, "limit_cpu_bytes": setting.limit},
        "hardware": {**hardware, **found[IN_MEMORY][-1]["hardware"]},
        "versions": {**versions(), **_version("accelerate")},
        "rows": [*(row for some in rows.values() for row in some), *peer_rows(peers)],
        "ratios": ratios,
        "bound": {
            "streamed_bytes_per_pass": setting.streamed_bytes,
            "rates": dict(rates),
            "operation_seconds": dict(operations),
            "seconds": {label: dict(bound) for label, bound in bounds.items()},
        },
        "notes": said,
    }


def peer_rows(peers: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    return [
        {
            "label": f"{side} x {rows} in a group",
            **summary([record["latency_s"] for record in records]),
            "tokens_per_s": median(speed(record) for record in records),
            "resident_bytes": max(record["resident_bytes"] for record in records),
            "group_peak_bytes": [record["group_peak_bytes"] for record in records],
            "seconds": [record["latency_s"] for record in records],
        }
        for side, sizes in peers.items()
        for rows, records in sizes.items()
    ]


def peer_ratios(peers: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]], small: int) -> dict[str, float]:
    """Our throughput over Accelerate's at the small size, and each at its best; only where both were measured."""

    def typical(side: str, rows: int) -> float | None:
        records = peers[side].get(rows)
        return median(speed(record) for record in records) if records else None

    found = {}
    pairs = {f"accelerate_at_batch_{small}": (small, small)}
    pairs["accelerate_at_best_batch"] = (best_rows(peers[OURS]), best_rows(peers[THEIRS]))
    for name, (ours, theirs) in pairs.items():
        mine, other = typical(OURS, ours), typical(THEIRS, theirs)
        if mine is not None and other is not None:
            found[name] = mine / other
    return found


def _version(package: str) -> dict[str, str]:
    from importlib import metadata

    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {}
