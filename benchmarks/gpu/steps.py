"""What a step of `make gpu-check` does in its process, and what it reports; of tests as pytest's
plugin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from flexgen_helm.benchmarks import accelerate_task
from flexgen_helm.benchmarks.common import tokens_per_s
from flexgen_helm.benchmarks.engine_task import run_blocks
from flexgen_helm.benchmarks.gpu import session
from flexgen_helm.checkpoint.dummy_checkpoint import DummyCheckpoint
from flexgen_helm.engine.machine_profile import profile_named
from flexgen_helm.offload import matrices
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.report.versions import versions

GIB = 1 << 30
# Tried out on the tests' CUDA device in host memory: all is small, and no figure means anything.
FAKE = bool(os.environ.get("FAKE"))
_SIZES = {"prompt": 8, "output": 3} if FAKE else {"prompt": 512, "output": 32}
_GPU = "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current"
# Of each step of tests, those that FAKE tries out.
_QUICK = (
    "(kernel and paper) or (packed and fp16-s-opt) or opt-float16-resident or "
    "gemma2-bfloat16-thirds or thirds-None-copies or thirds-4bit-products"
)
# A result is kept as soon as it is known.
emit = partial(session.emit, Path(os.environ["OUT"]), os.environ["STEP"])


def describe() -> None:
    """Say what the machine is: its GPU, memory, processors and libraries."""
    emit(
        device=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        gpu=subprocess.getoutput(f"nvidia-smi --query-gpu={_GPU} --format=csv,noheader"),
        available_gib=psutil.virtual_memory().available / GIB,
        versions=versions(),
    )


def run_tests(*, tests: str) -> None:
    """Run tests marked `gpu`, a file below `tests` or a part of it, and exit as pytest does."""
    folder = Path(str(import_module("tests").__file__)).parent
    arguments = ["-m", "gpu", "-q", "-rfE", "--tb=short", "--maxfail=60", "-p", "no:cacheprovider"]
    if FAKE:
        arguments += ["-k", _QUICK]
    sys.exit(
        import_module("pytest").main([*arguments, str(folder / tests)], [sys.modules[__name__]])
    )


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.rpartition("/")[2]
    if report.failed:
        emit(test=name, error=report.longreprtext.rstrip().splitlines()[-1][:500])
    elif report.when == "call" and report.passed:
        emit(test=name, s=report.duration)


def profile() -> None:
    """Measure this machine once: plans of all steps follow from it.

    FLEXGEN_HELM_HARDWARE may name what is known.
    """
    known = profile_named(os.environ.get("FLEXGEN_HELM_HARDWARE", "measured")).to_json()
    Path(os.environ["OUT"], "profile.json").write_text(json.dumps(known))
    emit(**known)


def engine(
    *, model: str, rows: int, precision: str = "fp16", gpu: float | None = None, cpu: float = 60
) -> None:
    """Run a block beside its prediction. gpu, cpu: limits of the engine in GiB; None: what is
    free.
    """
    label = f"{model} {precision}{f', {gpu:g} GiB of GPU memory' if gpu else ''}"
    if FAKE:
        folder = Path(os.environ["WORK"], "opt")
        import_module("tests.helpers.tiny_models").VARIANTS["opt"]().save_pretrained(folder)
        model, rows, cpu, gpu = str(folder), 4, 1, gpu and 0.1
    _repeat_weights()
    most = psutil.virtual_memory().available * 9 // 10
    limits = {"cpu": min(int(cpu * GIB), most), "gpu": gpu and int(gpu * GIB)}
    settings = {"device": "cuda", "offload_dir": os.environ["WORK"], "precision": precision}
    (record,) = run_blocks(
        model=model, engine=settings, limits=limits, rows=rows, warm_output=2, **_SIZES
    )
    predicted = record["predicted"] or {}
    found = {f"predicted_{key}": predicted.get(key) for key in ("prefill_s", "decode_s")}
    if not FAKE:
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        found["allocation_retries"] = torch.cuda.memory_stats().get("num_alloc_retries")
    _emit_speed(label, record, **found, record=record)


def transformers(*, model: str, rows: int, peer_of: str, gpu: float | None = None) -> None:
    """Run a block by transformers, with Accelerate if `gpu` GiB bound it."""
    label = f"{model}, transformers"
    if gpu is not None:
        label += f" and Accelerate, {gpu:g} GiB of GPU memory"
        if (reason := accelerate_task.missing()) is not None:
            return emit(left_out=reason)
    if FAKE:
        model, rows = "opt-125m", 2
        # A parameter that is moved has another type.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
    gpu_bytes = gpu and int(gpu * GIB)
    record = accelerate_task.generate_on_gpu(model=model, gpu_bytes=gpu_bytes, rows=rows, **_SIZES)
    _emit_speed(label, record, peer_of=peer_of)


def _emit_speed(label: str, run: dict[str, Any], **more: Any) -> None:
    figures = {key: run[key] for key in ("rows", "prefill_s", "decode_s")}
    emit(label=label, tokens_per_s=tokens_per_s(run), **figures, **more)


def _repeat_weights() -> None:
    """Let random weights repeat what is drawn and packed once, which would take minutes for all."""

    @cache
    def drawn(mean: float, std: float, dtype: torch.dtype) -> Tensor:
        return (torch.randn(1 << 24) * std + mean).to(dtype)

    def rounded(self: DummyCheckpoint, name: str) -> Iterator[Tensor]:
        block = drawn(*self._distribution(name), self._dtype_of(name))
        total = prod(self.shapes[name])
        yield from (block[: total - start] for start in range(0, total, len(block)))

    quantize = matrices.quantize

    @cache
    def packed(shape: torch.Size, fmt: GroupFormat) -> Tensor:
        return quantize(torch.randn(shape).half() * 0.02, fmt)

    DummyCheckpoint._rounded_tiles = rounded  # type: ignore[assignment, method-assign]
    vars(matrices)["quantize"] = lambda tile, fmt: packed(tile.shape, fmt)


def main(function: str, arguments: str) -> None:
    """Call a function of this module with arguments as JSON, on the tests' device if FAKE is
    set.
    """
    fake: Any = nullcontext()
    if FAKE:
        fake = import_module("tests.cuda.device").cuda_in_host_memory(memory=4 * GIB)
    with fake as device:
        globals()[function](**json.loads(arguments))
        if device is not None:
            device.check()


if __name__ == "__main__":
    main(*sys.argv[1:])
