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
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.memory_settings import COMPUTE_BYTES, STORAGE_BYTES, policy_text
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.policy import Policy
from flexgen_helm.report.throughput import versions

GIB = 1 << 30


@dataclass(frozen=True)
class Paper:
    """The paper's machine and workload: OPT-30B on a T4.

    disk_bytes_s: of reads and writes.
    cache_bytes: of one element of the KV cache.
    """

    gpu_bytes: float = 16e9
    model_bytes: float = 60e9
    link_bytes_s: float = 12.89 * GIB
    disk_bytes_s: tuple[float, float] = (1.6e9, 1.3e9)
    decode_flops: float = 4.3e12
    hidden_size: int = 7168
    prompt: int = 512
    output: int = 32
    cache_bytes: int = 2


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
    scaled = scale(workload, options)
    records: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(workload.repeats):
        for variant in variants(workload):
            record = in_own_process(run_engine, block_arguments(workload, scaled, variant, scratch))
            records.setdefault(variant.label, []).append(record)
            options.tell(f"{variant.label}: {tokens_per_s(record):.2f} token/s ({repeat + 1} of {workload.repeats})")
    return assemble(workload, variants(workload), records, scaled)


def scale(workload: Workload, options: Options) -> Scaled:
    """Scale the paper's machine and prompts to the workload's model and this machine."""
    from flexgen_helm.checkpoint.open import open_checkpoint

    config, paper = open_checkpoint(workload.model, weights="dummy").config, Paper()
    prompt = workload.prompt or scaled_prompt(config, workload, paper)
    rate = workload.decode_flops
    if rate is None:  # of products in float32 with 16-bit weights from memory
        rate = machine_profile(options).cpu.matmul_flops["float32"].at(workload.batch_rows)
    link, gpu = scaled_machine(config, paper, rate)
    disk = scaled_disk(paper, rate)
    options.tell(
        f"decoding's products {rate / 1e9:.0f} Gflop/s: a link of {link:.3f} GB/s, a disk of {disk[0]:.3f} and "
        f"{disk[1]:.3f} GB/s, a gpu of {gpu / 1e6:.0f} MB, {prompt} prompt tokens"
    )
    return Scaled(link, disk, gpu, rate, prompt)


def block_arguments(workload: Workload, scaled: Scaled, variant: Variant, scratch: Path) -> dict[str, Any]:
    """Return the arguments with which `run_engine` runs a variant on the simulated GPU."""
    machine: dict[str, Any] = {
        "device": "sim",
        "link_gb_s": [scaled.link_gb_s] * 2,
        "disk_gb_s": list(scaled.disk_gb_s),
        "offload_dir": str(scratch),
        "schedule": "zigzag",
        "policy": policy_text(variant.policy),
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
    full = Policy(workload.batch_rows, workload.batches, wg=0.1, wc=0.9, cg=0.0, cc=1.0, hg=0.0, hc=1.0)
    small = Policy(max(1, workload.batch_rows // 6), 1, wg=0.0, wc=1.0, cg=1.0, cc=0.0, hg=1.0, hc=0.0)
    return [
        Variant("all techniques", full, {}, 7.32),
        Variant("no weights on the gpu", replace(full, wg=0.0, wc=1.0), {}, 7.26),
        Variant("no overlap", full, {"overlap": False}, 5.86),
        Variant("no cpu attention", full, {"cpu_attention": False}, 4.03),
        Variant("row by row, same block", full, {"schedule": "row"}, None),
        Variant("row by row, small batch", small, {"schedule": "row"}, 1.57, blocks=2),
        Variant("half on the disk", replace(full, wc=0.4), {}, None),
    ]


def scaled_prompt(config: ModelConfig, workload: Workload, paper: Paper) -> int:
    """Return the prompt tokens at which cache to weights of a layer is as in the paper, halfway through the output.

    A layer's weights grow with the square of the hidden size and its cache with the hidden size, so a small model
    needs short prompts. Our cache has 4 bytes per element here, the paper's 2.
    """
    positions = paper.prompt + paper.output / 2
    length = positions * config.hidden_size / paper.hidden_size * paper.cache_bytes / COMPUTE_BYTES
    return max(1, round(length - workload.output / 2))


def scaled_machine(config: ModelConfig, paper: Paper, rate: float) -> tuple[float, int]:
    """Return GB/s of the link in each direction, and bytes of the GPU."""
    link = paper.link_bytes_s * rate / paper.decode_flops
    return link / 1e9, int(paper.gpu_bytes / paper.model_bytes * STORAGE_BYTES * config.num_parameters)


def scaled_disk(paper: Paper, rate: float) -> tuple[float, float]:
    """Return GB/s of reads and writes of a disk that is to decoding's products as the paper's is."""
    read, write = (own * rate / paper.decode_flops / 1e9 for own in paper.disk_bytes_s)
    return read, write


def simulated(scaled: Scaled) -> str:
    """Say what the simulated machine is, for people."""
    read, write = scaled.disk_gb_s
    return (
        f"simulated gpu of {scaled.gpu_bytes / 1e6:.0f} MB behind {scaled.link_gb_s:.3f} GB/s each way, and a disk of "
        f"{read:.3f} and {write:.3f} GB/s"
    )


def assemble(
    workload: Workload,
    variants_: Sequence[Variant],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    scaled: Scaled,
) -> dict[str, Any]:
    """Return the result in the format of benchmarks."""
    full = variants_[0]
    assert full.paper is not None
    speeds = {label: median(map(tokens_per_s, own)) for label, own in records.items()}
    rows, ratios = [], {}
    for variant in variants_:
        own = records[variant.label]
        ratio = speeds[variant.label] / speeds[full.label]
        ratios[variant.label.replace(",", "").replace(" ", "_")] = ratio
        row: dict[str, Any] = {
            "label": variant.label,
            **summary([1 / tokens_per_s(record) for record in own]),
            "tokens_per_s": speeds[variant.label],
            "ratio": ratio,
            **({} if variant.paper is None else {"paper": variant.paper / full.paper}),
            "seconds": [record["latency_s"] for record in own],
            "policy": [policy_text(variant.policy)],
            "bytes": own[-1]["bytes"],
            "time_s": own[-1]["time_s"],
            "placement": own[-1]["achieved_placement"],
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
            f"{simulated(scaled)}; decoding's products {scaled.decode_flops / 1e9:.0f} Gflop/s; {scaled.prompt} + "
            f"{workload.output} tokens",
        ],
    }
