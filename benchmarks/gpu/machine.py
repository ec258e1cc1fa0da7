"""What a machine is: its GPU, memory, processor and libraries, and its rates by the planner's profile."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from flexgen_helm.benchmarks.common import time_calls
from flexgen_helm.benchmarks.gpu.step import FAKE, GIB, part

_LIBRARIES = ("torch", "triton", "transformers", "numpy", "numba", "tokenizers", "safetensors", "accelerate", "pytest")
_GPU = "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,clocks.max.mem"


def describe() -> None:
    part("versions", _versions)
    part("machine", _machine)
    part("host memory", _page_rates)


def try_fast_paths() -> None:
    """Have the engine's own trial of the device, which the engines of later steps find done."""
    part("fast paths", _fast_paths)


def _fast_paths() -> dict[str, Any]:
    import torch

    from flexgen_helm.engine.device_trial import known_failures, require_trial

    if FAKE:
        return {"left_out": "a child process has no device in host memory"}
    device = torch.device("cuda", 0)
    require_trial(device, unverified=False)
    if failed := known_failures(device):
        raise RuntimeError(f"switched off: {failed}")
    return {"failed": failed}


def _versions() -> dict[str, Any]:
    found = {"python": sys.version.split()[0]}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"versions": found}


def _machine() -> dict[str, Any]:
    import torch

    from flexgen_helm.engine.machine_profile import processor_name

    torch.zeros(1, device="cuda")
    memory = psutil.virtual_memory()
    gpu = None
    with suppress(OSError):
        query = ["nvidia-smi", f"--query-gpu={_GPU}", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "device": torch.cuda.get_device_name(),
        "gpu": gpu,
        "capability": torch.cuda.get_device_capability(),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": memory.total / GIB,
        "available_gib": memory.available / GIB,
        "disk_free_gib": psutil.disk_usage(os.environ["WORK"]).free / GIB,
        "huge_pages": huge.read_text().strip() if huge.is_file() else None,
    }


def _page_rates() -> dict[str, float]:
    """Measure how fast fresh pages arrive, in GB/s: with one thread and with all."""
    import torch

    from flexgen_helm.offload.staging import pages

    found = {}
    for threads in (1, os.cpu_count() or 1):
        torch.set_num_threads(threads)
        block = pages(GIB >> 6 if FAKE else 2 * GIB)
        for label in ("first", "second"):
            (seconds,) = time_calls([partial(block.fill_, 1)], 1)
            found[f"{label}_touch_{threads}_threads_gb_s"] = block.numel() / seconds / 1e9
    return found
