"""`bench gpu`: one GPU in ten minutes: its links, its products, and large models in little of its memory.

Everything that the planner assumes about a GPU is measured, and what the engine reaches of it: each direction of the
link through the engine's copies, dequantization, products with packed weights, and whole blocks of OPT-6.7B and OPT-30B
with random weights, held to 16 GB so that a small card gives the same cases. Accelerate runs the same shapes where it
is installed. Nothing needs a network, real weights or HELM.

`make gpu-check` runs it from the sources. If the variable OUT names a folder, each row is appended to its results.jsonl
when it is known, so that a run that is cut off has told what it found.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, accelerate_task, kernels, summary
from flexgen_helm.benchmarks.common import machine, refuse_engine_flags, run_row, time_calls, tokens_per_s
from flexgen_helm.benchmarks.engine_task import run_engine
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.report.throughput import versions

GIB = 1 << 30
# Bytes of a copy over the link, as large as a unit of weights that is streamed.
_COPY_BYTES = 32 << 20


@dataclass(frozen=True)
class Case:
    """A block of sequences on one model.

    gpu_bytes: limit of the GPU's memory.
    host_bytes: free host memory without which the case is left out.
    """

    model: str
    precision: str
    gpu_bytes: int
    host_bytes: int
    rows: int
    prompt: int = 256
    output: int = 32

    @property
    def label(self) -> str:
        return f"{self.model} {self.precision}, {self.gpu_bytes / GIB:g} GiB of GPU memory"


@dataclass(frozen=True)
class Workload:
    """cases: blocks of the engine. peer: the case that Accelerate runs too. width, tokens: of measured products."""

    cases: Sequence[Case]
    peer: Case | None
    width: int = kernels.WIDTH
    tokens: Sequence[int] = (1, 8, 64, 1024)
    repeats: int = 2


_STREAMED = Case("opt-6.7b", "fp16", 6 * GIB, 20 * GIB, rows=128)
FULL = Workload(
    (
        Case("opt-6.7b", "fp16", 15 * GIB, 20 * GIB, rows=32),
        Case("opt-6.7b", "4bit", 15 * GIB, 20 * GIB, rows=128),
        _STREAMED,
        Case("opt-30b", "fp16", 15 * GIB, 72 * GIB, rows=64),
    ),
    _STREAMED,
)
_TINY = Case("opt-125m", "fp16", GIB // 2, 0, rows=4, prompt=8, output=3)
QUICK = Workload((_TINY,), None, width=kernels.QUICK_WIDTH, tokens=kernels.QUICK_TOKENS, repeats=1)


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark. Raises `UsageError` without a CUDA device, unless `--device sim` asks for a simulated one."""
    refuse_engine_flags("gpu", options, "device", "offload_dir")
    import torch

    device = str(options.engine.get("device", "cuda"))
    if not torch.cuda.is_available() and device != "sim":
        raise UsageError("bench gpu needs a CUDA device and torch finds none: try it out with --quick --device sim")
    workload = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.", dir=options.engine.get("offload_dir")) as scratch:
        return measure(workload, options.repeats or workload.repeats, device, Path(scratch), options)


def measure(workload: Workload, repeats: int, device: str, scratch: Path, options: Options) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    notes: list[str] = []

    def add(*found: dict[str, Any]) -> None:
        rows.extend(found)
        if folder := os.environ.get("OUT"):
            with (Path(folder) / "results.jsonl").open("a", encoding="utf-8") as sink:
                sink.writelines(json.dumps(row) + "\n" for row in found)

    options.tell("links")
    links = in_own_process(link_rates, {"device": device, "repeats": repeats + 1})
    for name in ("to_gpu", "to_host"):
        add({"label": f"copies {name.replace('_', ' ')} (GB/s)", **summary(links[name])})
        ratios[f"copies_{name}_of_link"] = median(links[name]) / links[f"raw_{name}"]
    options.tell("products and dequantization")
    products = {"width": workload.width, "tokens": list(workload.tokens), "repeats": repeats}
    measured = in_own_process(kernels.measure, products)
    add(*measured["rows"])
    ratios |= measured["ratios"]
    speeds: dict[Case, float] = {}
    for case in workload.cases:
        if (free := psutil.virtual_memory().available) < case.host_bytes:
            needed = f"it needs {case.host_bytes / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} are free"
            notes.append(f"{case.label} was left out: {needed}")
            continue
        records = []
        for repeat in range(repeats):
            records.append(in_own_process(run_engine, engine_arguments(case, device, scratch)))
            options.tell(f"{case.label}: {tokens_per_s(records[-1]):.1f} tokens/s ({repeat + 1} of {repeats})")
        speeds[case] = median(map(tokens_per_s, records))
        add(case_row(case, records, links["raw_to_gpu"]))
    if workload.peer in speeds:
        record, note = peer(workload.peer)
        notes += note
        if record is not None:
            add(run_row(f"Accelerate: {workload.peer.label}", [record]))
            ratios["accelerate_tokens_per_s"] = speeds[workload.peer] / tokens_per_s(record)
    return {
        "name": "gpu",
        "workload": asdict(workload),
        "hardware": {**machine(), "device": links["device"]},
        "versions": versions(),
        "rows": rows,
        "ratios": ratios,
        "notes": [
            f"the link copies {links['raw_to_gpu']:.1f} GB/s to the device and {links['raw_to_host']:.1f} to the host",
            *notes,
        ],
    }


def engine_arguments(case: Case, device: str, scratch: Path) -> dict[str, Any]:
    engine = {"device": device, "precision": case.precision, "offload_dir": str(scratch / "ours")}
    sizes = {"rows": case.rows, "prompt": case.prompt, "output": case.output}
    return {"model": case.model, "engine": engine, "limits": {"gpu": case.gpu_bytes}, "warm": True, **sizes}


def case_row(case: Case, records: Sequence[Mapping[str, Any]], link_gb_s: float) -> dict[str, Any]:
    """Return the row of a block: seconds, tokens/s, and how well transfers and computing overlap.

    overlapped: share of the link's time during which the device computed.
    link_gb_s: the link's rate to the device.
    """
    last = records[-1]
    link_s = sum(last["bytes"]["cpu_to_gpu"].values()) / (link_gb_s * 1e9)
    waiting_s = last["time_s"]["wait"]
    return {
        **run_row(case.label, records),
        "link_s": link_s,
        "waiting_s": waiting_s,
        "overlapped": max(0.0, 1.0 - waiting_s / link_s) if link_s else 1.0,
        "schedule": last["schedule"],
        "placement": last["achieved_placement"],
        "peak_bytes": last["peak_bytes"],
    }


def link_rates(*, device: str, repeats: int) -> dict[str, Any]:
    """Measure GB/s of the engine's copies, each direction, and of the link itself (`raw_…`)."""
    import torch

    from flexgen_helm.offload.copy_engine import CudaCopyEngine, SimulatedCopyEngine

    is_cuda = device != "sim"
    target = torch.device(device if is_cuda else "cpu")
    engine = CudaCopyEngine(target) if is_cuda else SimulatedCopyEngine(None, None)
    synchronize = partial(torch.cuda.synchronize, target) if is_cuda else lambda: None
    on_host, on_device = engine.host_memory(_COPY_BYTES), torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=target)
    pinned = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_cuda)

    def rates(copy: Any) -> list[float]:
        seconds = time_calls([copy] * 8, repeats + 1, synchronize)[1:]  # the first touches the memory
        return [_COPY_BYTES / each / 1e9 for each in seconds]

    return {
        "device": torch.cuda.get_device_name(target) if is_cuda else "sim",
        "to_gpu": rates(lambda: engine.to_device(on_host, on_device)),
        "to_host": rates(lambda: engine.to_host(on_device, on_host)),
        "raw_to_gpu": max(rates(lambda: on_device.copy_(pinned, non_blocking=True))),
        "raw_to_host": max(rates(lambda: pinned.copy_(on_device, non_blocking=True))),
    }


def peer(case: Case) -> tuple[dict[str, Any] | None, list[str]]:
    """Run a case with Accelerate, in batches as large as fit; return its record, or None and the reason."""
    if (reason := accelerate_task.missing()) is not None:
        return None, [f"Accelerate was left out: {reason}"]
    sizes = {"rows": case.rows, "prompt": case.prompt, "output": case.output}
    try:
        arguments = {"model": case.model, "gpu_bytes": case.gpu_bytes, **sizes}
        return in_own_process(accelerate_task.generate_on_gpu, arguments), []
    except FlexgenError as error:
        return None, [f"Accelerate failed: {error}"]
