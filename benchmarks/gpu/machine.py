"""What a machine is: its GPU, memory, processor and libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from flexgen_helm.benchmarks.gpu.step import GIB, part

_LIBRARIES = ("torch", "triton", "transformers", "numpy", "numba", "tokenizers", "safetensors", "accelerate", "pytest")
_GPU = "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,clocks.max.mem"


def describe() -> None:
    part("versions", _versions)
    part("machine", _machine)


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
