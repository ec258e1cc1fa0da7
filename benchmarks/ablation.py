"""What each technique contributes, on a simulated GPU scaled like the paper's machine:
`python -m benchmarks.ablation`.

The paper's machine has a GPU of 16 GB behind a link of 12.89 GiB/s. Its OPT-30B takes 60 GB, and
the GPU's products run at 4.3 TFLOP/s in decoding (its authors' fitted constants). Here a part of
host memory acts as the GPU. Proportions decide what overlap, attention on the CPU and the block
contribute, and all are kept: the GPU's memory to the model's bytes, the link and the disk to the
rate of decoding's products, and the cache to the weights (by the prompts' length).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from flexgen_helm.benchmarks.common import report, script, summary, tokens_per_s
from flexgen_helm.benchmarks.engine_task import alternate
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.cli.arguments import OutFile
from flexgen_helm.engine.machine_profile import measured_profile
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.policy import Policy

# The paper's GPU and model in bytes; rates of the link, of the disk (reads, writes), of decoding's
# products (FLOP/s).
GPU_BYTES, MODEL_BYTES = 16e9, 60e9
LINK_BYTES_S, DISK_BYTES_S, DECODE_FLOPS = 12.89 * (1 << 30), (1.6e9, 1.3e9), 4.3e12
# OPT-30B's hidden size, the lengths, and an element's bytes in its KV cache, of those in ours here.
HIDDEN_SIZE, PROMPT, OUTPUT, CACHE_BYTES = 7168, 512, 32, 2 / 4
_RECORDED = ("policy", "bytes", "time_s", "achieved_placement")


@dataclass(frozen=True)
class Workload:
    """The paper's block on a small model: sequences of a batch, batches, and output tokens."""

    model: str = "opt-125m"
    batch_rows: int = 48
    batches: int = 3
    output: int = 12


@dataclass(frozen=True)
class Scaled:
    """The paper's machine and prompts, scaled.

    link_gb_s: in both directions.
    disk_gb_s: of reads and writes.
    """

    link_gb_s: float
    disk_gb_s: tuple[float, float]
    gpu_bytes: int
    decode_flops: float
    prompt: int


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


def main(out: OutFile = None, repeats: int = 3) -> None:
    """Measure the paper's block with all techniques, and without each, with files in TMPDIR."""
    report(measure(Workload(), repeats, measured_profile(fresh=True)), out)


def measure(workload: Workload, repeats: int, profile: HardwareProfile) -> dict[str, Any]:
    """Return the result. `ratios` are the throughput without each technique over that with all."""
    config, _ = read_model_config(workload.model)
    # Of products in float32 with 16-bit weights from memory.
    rate = profile.cpu.matmul_flops["float32"].at(workload.batch_rows)
    scaled = scale(workload, config, rate)
    full, *_ = sides = variants(workload)
    assert full.paper is not None
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        blocks = {side.label: block_of(workload, scaled, side, scratch) for side in sides}
        records = alternate(blocks, repeats)
    speeds = {label: median(map(tokens_per_s, runs)) for label, runs in records.items()}
    rows = [
        {
            "label": side.label,
            **summary([1 / tokens_per_s(record) for record in records[side.label]]),
            "tokens_per_s": speeds[side.label],
            "ratio": speeds[side.label] / speeds[full.label],
            "paper": None if side.paper is None else side.paper / full.paper,
            **{key: records[side.label][-1][key] for key in _RECORDED},
        }
        for side in sides
    ]
    return {
        "name": "ablation",
        "workload": {**asdict(workload), **asdict(scaled)},
        "hardware": records[full.label][-1]["hardware"],
        "rows": rows,
        "ratios": {row["label"]: row["ratio"] for row in rows},
        "notes": [
            "rows are seconds per generated token",
            "paper: OPT-30B on a T4, 512 + 32 tokens (the small batch is its row 'DeepSpeed "
            "policy'); it has no row for the same block row by row, and none of OPT-30B with the "
            "disk",
            simulated(workload, scaled),
        ],
    }


def scale(workload: Workload, config: ModelConfig, rate: float) -> Scaled:
    """Scale the paper's machine and prompts to a model, and to the rate of decoding's products on
    this machine.

    Prompts have the length at which cache to weights of a layer is as in the paper, halfway through
    the output. A layer's weights grow with the square of the hidden size and its cache with the
    hidden size, so a small model needs short prompts.
    """
    speed = rate / DECODE_FLOPS
    read, write = (speed * disk / 1e9 for disk in DISK_BYTES_S)
    gpu_bytes = int(GPU_BYTES / MODEL_BYTES * 2 * config.num_parameters)
    length = (PROMPT + OUTPUT / 2) * config.hidden_size / HIDDEN_SIZE * CACHE_BYTES
    prompt = max(1, round(length - workload.output / 2))
    return Scaled(speed * LINK_BYTES_S / 1e9, (read, write), gpu_bytes, rate, prompt)


def block_of(workload: Workload, scaled: Scaled, variant: Variant, scratch: str) -> dict[str, Any]:
    """Return the arguments with which `run_engine` runs a variant on the simulated GPU."""
    engine = {
        "device": "sim",
        "link_gb_s": [scaled.link_gb_s] * 2,
        "disk_gb_s": list(scaled.disk_gb_s),
        "offload_dir": scratch,
        "schedule": "zigzag",
        "policy": str(variant.policy),
        **variant.engine,
    }
    return {
        "model": workload.model,
        "engine": engine,
        "limits": {"gpu": scaled.gpu_bytes},
        "rows": variant.blocks * variant.policy.block_size,
        "prompt": scaled.prompt,
        "output": workload.output,
        "warm_output": 1,
    }


def variants(workload: Workload) -> list[Variant]:
    """Return the paper's block with all techniques, then with each technique left out.

    A tenth of the weights are on the GPU, cache and hidden states on the host. With the paper's
    fifth, our staging ring has no room in 16 GB for a model of 60 GB.
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
        f"simulated gpu of {scaled.gpu_bytes / 1e6:.0f} MB behind {scaled.link_gb_s:.3f} GB/s each "
        f"way, and a disk of {read:.3f} and {write:.3f} GB/s; decoding's products "
        f"{scaled.decode_flops / 1e9:.0f} Gflop/s; {scaled.prompt} + {workload.output} tokens"
    )


if __name__ == "__main__":
    script(main)
