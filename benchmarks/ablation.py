"""`bench ablation`: what each technique contributes, on a simulated GPU scaled like the paper's machine.

The paper's machine has a GPU of 16 GB behind a link of 12.89 GiB/s. Its OPT-30B takes 60 GB, and the GPU's products run
at 4.3 TFLOP/s in decoding (its authors' fitted constants). Here a part of host memory acts as the GPU. Proportions
decide what overlap, attention on the CPU and the block contribute, and all are kept: the GPU's memory to the model's
bytes, the link and the disk to the rate of decoding's products, and the cache to the weights (by the prompts' length).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.common import machine_profile, refuse_engine_flags, tokens_per_s
from flexgen_helm.benchmarks.engine_task import alternate
from flexgen_helm.benchmarks.memory_settings import COMPUTE_BYTES, STORAGE_BYTES
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.policy import Policy
from flexgen_helm.report.throughput import versions

# The paper's GPU and model in bytes; rates of the link, of the disk (reads, writes), of decoding's products (FLOP/s).
GPU_BYTES, MODEL_BYTES = 16e9, 60e9
LINK_BYTES_S, DISK_BYTES_S, DECODE_FLOPS = 12.89 * (1 << 30), (1.6e9, 1.3e9), 4.3e12
# OPT-30B's hidden size, the lengths, and bytes of an element of the KV cache.
HIDDEN_SIZE, PROMPT, OUTPUT, CACHE_BYTES = 7168, 512, 32, 2


@dataclass(frozen=True)
class Workload:
    """The paper's block on a small model.

    prompt: tokens; None keeps the proportion of cache to weights.
    decode_flops: rate of decoding's products; None measures it.
    """

    model: str = "opt-125m"
    batch_rows: int = 48
    batches: int = 3
    prompt: int | None = None
    output: int = 12
    repeats: int = 3
    decode_flops: float | None = None


@dataclass(frozen=True)
class Scaled:
    """The paper's machine and prompts, scaled.

    link_gb_s: each way.
    disk_gb_s: of reads and writes.
    """

    link_gb_s: float
    disk_gb_s: tuple[float, float]
    gpu_bytes: int
    decode_flops: float
    prompt: int


QUICK = Workload(batch_rows=2, batches=2, prompt=6, output=3, repeats=1, decode_flops=1e12)


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    engine: arguments that differ from the first row's.
    paper: tokens/s of the paper's row; None if it has none.
    blocks: number of measured blocks.
    """

    label: str
    policy: Policy
    engine: Mapping[str, Any]
    paper: float | None
    blocks: int = 1


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark; rows are in seconds per generated token, and have `tokens_per_s` too.

    `ratios` are the throughput without each technique over the throughput with all of them.
    """
    refuse_engine_flags("ablation", options, "offload_dir")
    workload = QUICK if options.quick else Workload()
    workload = replace(workload, repeats=options.repeats or workload.repeats)
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        return measure(workload, Path(scratch), options)


def measure(workload: Workload, scratch: Path, options: Options) -> dict[str, Any]:
    config = open_checkpoint(workload.model, weights="dummy").config
    rate = workload.decode_flops
    if rate is None:  # of products in float32 with 16-bit weights from memory
        rate = machine_profile(options).cpu.matmul_flops["float32"].at(workload.batch_rows)
    scaled = scale(workload, config, rate)
    options.tell(simulated(workload, scaled))
    sides = {variant.label: block_arguments(workload, scaled, variant, scratch) for variant in variants(workload)}
    return assemble(workload, alternate(sides, workload.repeats, options.tell), scaled)


def scale(workload: Workload, config: ModelConfig, rate: float) -> Scaled:
    """Scale the paper's machine and prompts to a model, and to the rate of decoding's products on this machine.

    Prompts have the length at which cache to weights of a layer is as in the paper, halfway through the output. A
    layer's weights grow with the square of the hidden size and its cache with the hidden size, so a small model needs
    short prompts. Our cache has 4 bytes per element here, the paper's 2.
    """
    speed = rate / DECODE_FLOPS
    read, write = (speed * disk / 1e9 for disk in DISK_BYTES_S)
    gpu_bytes = int(GPU_BYTES / MODEL_BYTES * STORAGE_BYTES * config.num_parameters)
    length = (PROMPT + OUTPUT / 2) * config.hidden_size / HIDDEN_SIZE * CACHE_BYTES / COMPUTE_BYTES
    prompt = workload.prompt or max(1, round(length - workload.output / 2))
    return Scaled(speed * LINK_BYTES_S / 1e9, (read, write), gpu_bytes, rate, prompt)


def block_arguments(workload: Workload, scaled: Scaled, variant: Variant, scratch: Path) -> dict[str, Any]:
    """Return the arguments with which `run_engine` runs a variant on the simulated GPU."""
    machine: dict[str, Any] = {
        "device": "sim",
        "link_gb_s": [scaled.link_gb_s] * 2,
        "disk_gb_s": list(scaled.disk_gb_s),
        "offload_dir": str(scratch),
        "schedule": "zigzag",
        "policy": str(variant.policy),
    }
    return {
        "model": workload.model,
        "engine": {**machine, **variant.engine},
        "limits": {"gpu": scaled.gpu_bytes},
        "rows": variant.blocks * variant.policy.block_size,
        "prompt": scaled.prompt,
        "output": workload.output,
    }


def variants(workload: Workload) -> list[Variant]:
    """Return the paper's block with all techniques, then with each technique left out.

    A tenth of the weights are on the GPU, cache and hidden states on the host. With the paper's fifth, our staging
    ring has no room in 16 GB for a model of 60 GB.
    """
    full = Policy.parse(f"{workload.batch_rows}x{workload.batches},10,90,0,100,0,100")
    small = Policy.parse(f"{max(1, workload.batch_rows // 6)}x1,0,100,100,0,100,0")
    return [
        Variant("all techniques", full, {}, 7.32),
        Variant("no weights on the gpu", replace(full, wg=0.0, wc=1.0), {}, 7.26),
        Variant("no overlap", full, {"overlap": False}, 5.86),
        Variant("no cpu attention", full, {"cpu_attention": False}, 4.03),
        Variant("row by row, same block", full, {"schedule": "row"}, None),
        Variant("row by row, small batch", small, {"schedule": "row"}, 1.57, blocks=2),
        Variant("half on the disk", replace(full, wc=0.4), {}, None),
    ]


def simulated(workload: Workload, scaled: Scaled) -> str:
    """Say what the simulated machine is, for people."""
    read, write = scaled.disk_gb_s
    return (
        f"simulated gpu of {scaled.gpu_bytes / 1e6:.0f} MB behind {scaled.link_gb_s:.3f} GB/s each way, and a disk of "
        f"{read:.3f} and {write:.3f} GB/s; decoding's products {scaled.decode_flops / 1e9:.0f} Gflop/s; "
        f"{scaled.prompt} + {workload.output} tokens"
    )


def assemble(workload: Workload, records: Mapping[str, Sequence[Mapping[str, Any]]], scaled: Scaled) -> dict[str, Any]:
    """Return the result in the format of benchmarks."""
    full, *_ = sides = variants(workload)
    assert full.paper is not None
    speeds = {label: median(map(tokens_per_s, repeats)) for label, repeats in records.items()}
    rows, ratios = [], {}
    for variant in sides:
        repeats = records[variant.label]
        ratio = speeds[variant.label] / speeds[full.label]
        ratios[variant.label.replace(",", "").replace(" ", "_")] = ratio
        row: dict[str, Any] = {
            "label": variant.label,
            **summary([1 / tokens_per_s(record) for record in repeats]),
            "tokens_per_s": speeds[variant.label],
            "ratio": ratio,
            **({} if variant.paper is None else {"paper": variant.paper / full.paper}),
            "seconds": [record["latency_s"] for record in repeats],
            "policy": [str(variant.policy)],
            "bytes": repeats[-1]["bytes"],
            "time_s": repeats[-1]["time_s"],
            "placement": repeats[-1]["achieved_placement"],
        }
        rows.append(row)
    return {
        "name": "ablation",
        "workload": {**asdict(workload), **asdict(scaled)},
        "hardware": records[full.label][-1]["hardware"],
        "versions": versions(),
        "rows": rows,
        "ratios": ratios,
        "notes": [
            "paper: OPT-30B on a T4, 512 + 32 tokens (the small batch is its row 'DeepSpeed policy'); it has no "
            "row for the same block row by row, and none of OPT-30B with the disk",
            simulated(workload, scaled),
        ],
    }
