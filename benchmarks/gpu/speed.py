"""Blocks of a large model with random weights: by the engine beside its prediction, and by transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from flexgen_helm import Policy
from flexgen_helm.benchmarks import accelerate_task
from flexgen_helm.benchmarks.common import tokens_per_s
from flexgen_helm.benchmarks.engine_task import run_blocks
from flexgen_helm.benchmarks.gpu.step import FAKE, GIB, part
from flexgen_helm.checkpoint.checkpoint import DummyCheckpoint
from flexgen_helm.engine.machine_profile import profile_named
from flexgen_helm.offload.matrices import MatrixLoader
from flexgen_helm.offload.transfer_manager import CudaCopyEngine
from flexgen_helm.offload.transfer_stats import RateLimit
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import quantize

_PROMPT, _OUTPUT = (8, 3) if FAKE else (512, 32)
_RECORDED = (
    "latency_s", "prefill_s", "decode_s", "predicted", "time_s", "bytes", "policy", "schedule", "achieved_placement",
    "peak_bytes", "peak_workspace_bytes", "halvings", "preemptions", "hardware",
)  # fmt: skip


def engine(
    *,
    model: str,
    rows: int,
    precision: str = "fp16",
    gpu: float | None = None,
    card: float | None = None,
    cpu: float = 60,
    link: float | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Run a block.

    gpu, cpu: limits of the engine in GiB; None: what is free.
    card: GiB of a smaller card, which PyTorch's allocator and plans are held to.
    link: GB/s of a slower link.
    options: of the engine.
    """
    label = f"{model} {precision}"
    label += (f", {gpu:g} GiB of GPU memory" if gpu else "") + (f", a link of {link:g} GB/s" if link else "")
    if FAKE:
        model, rows, cpu, gpu = _tiny_model(), 4, 1, gpu and 0.1
        if link is not None:  # so little memory that something crosses it
            options = {"policy": Policy(3, 2, *(0.3,) * 6), "schedule": "zigzag", "cpu_attention": False}
    _repeat_weights()
    _plan_for(card, link)
    if card is not None:
        accelerate_task.hold_to(int(card * GIB))
    if link is not None:
        _throttle(link)
    limits = {"cpu": min(int(cpu * GIB), psutil.virtual_memory().available * 9 // 10)}
    if gpu is not None:
        limits["gpu"] = int(gpu * GIB)
    part(label, _block, label, rows, model, {"precision": precision, **(options or {})}, limits)


def _tiny_model() -> str:
    folder = Path(os.environ["WORK"], "opt")
    import_module("tests.helpers.tiny_models").VARIANTS["opt"]().save_pretrained(folder)
    return str(folder)


def _block(label: str, rows: int, model: str, options: dict[str, Any], limits: dict[str, int]) -> dict[str, Any]:
    settings = {"device": "cuda", "offload_dir": os.environ["WORK"], **options}
    sizes = {"rows": rows, "prompt": _PROMPT, "output": _OUTPUT}
    (record,) = run_blocks(model=model, engine=settings, limits=limits, **sizes, warm=True, warm_output=2)
    found = {"label": label, "rows": rows, "tokens_per_s": tokens_per_s({**record, "output_tokens": rows * _OUTPUT})}
    found |= {key: record[key] for key in _RECORDED if key in record}
    if not FAKE:
        found |= {"reserved_bytes": torch.cuda.max_memory_reserved()}
        found |= {"allocation_retries": torch.cuda.memory_stats().get("num_alloc_retries")}
    return found


def transformers(*, model: str, rows: int, peer_of: str, gpu: float | None = None) -> None:
    """Run the prompts and a few tokens of a block by transformers, with Accelerate if `gpu` GiB bound it."""
    label = f"{model}, transformers" + (f" and Accelerate, {gpu:g} GiB of GPU memory" if gpu else "")
    if FAKE:
        model, rows = "opt-125m", 2
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a moved parameter has another type
    part(label, _transformers, label, model, rows, peer_of, gpu)


def _transformers(label: str, model: str, rows: int, peer_of: str, gpu: float | None) -> dict[str, Any]:
    gpu_bytes = None if gpu is None else int(gpu * GIB)
    record = accelerate_task.generate_on_gpu(
        model=model, gpu_bytes=gpu_bytes, rows=rows, prompt=_PROMPT, output=_OUTPUT
    )
    return {"label": label, "peer_of": peer_of, **record, "tokens_per_s": tokens_per_s(record)}


def profile() -> None:
    """Measure this machine once: plans of all steps follow from it. FLEXGEN_HELM_HARDWARE may name what is known."""
    part("rates", _rates)


def _rates() -> dict[str, float]:
    """Rates of link and GPU in bytes, elements and FLOPs a second, and fixed times in seconds."""
    known = profile_named(os.environ.get("FLEXGEN_HELM_HARDWARE", "measured"))
    assert known.gpu is not None and known.link is not None
    found = {key: value for rates in (known.link, known.gpu) for key, value in vars(rates).items()}
    products = {f"{dtype}_flops": curve.best for dtype, curve in known.gpu.matmul_flops.items()}
    return {key: value for key, value in found.items() if isinstance(value, float)} | products


def _plan_for(card: float | None, link: float | None) -> None:
    """Let plans be made for a card of so many GiB, behind a link of so many GB/s."""
    known = profile_named(os.environ.get("FLEXGEN_HELM_HARDWARE", "measured"))
    (Path(os.environ["OUT"]) / "profile.json").write_text(json.dumps(known.to_json()))
    gpu, to_host = known.gpu, known.link
    assert gpu is not None and to_host is not None
    if card is not None:
        gpu = replace(gpu, memory_bytes=int(card * GIB))
    if link is not None:
        rates = {key: min(value, link * 1e9) for key, value in vars(to_host).items() if key.endswith("bytes_s")}
        to_host = replace(to_host, **rates)
    path = Path(os.environ["WORK"]) / "profile.json"
    path.write_text(json.dumps(replace(known, gpu=gpu, link=to_host).to_json()))
    os.environ["FLEXGEN_HELM_HARDWARE"] = str(path)


def _throttle(gb_s: float) -> None:
    """Hold each direction of the link to a rate, as that of an older card."""
    limits, copy = {"cpu": RateLimit(gb_s), "cuda": RateLimit(gb_s)}, CudaCopyEngine._copy

    def slow(self: CudaCopyEngine, source: Tensor, target: Tensor) -> Tensor:
        with limits[target.device.type].transfer(source.nbytes):
            return copy(self, source, target)

    CudaCopyEngine._copy = slow  # type: ignore[method-assign]


def _repeat_weights() -> None:
    """Let random weights repeat what is drawn once: drawing (250 M/s) and packing (4 M/s a core) take minutes."""
    blocks: dict[Any, Tensor] = {}

    def rounded(self: DummyCheckpoint, name: str) -> Iterator[Tensor]:
        key = mean, std, dtype = *self._distribution(name), self._dtype_of(name)
        if key not in blocks:
            blocks[key] = (torch.randn(1 << (16 if FAKE else 24)) * std + mean).to(dtype)
        total = prod(self.shapes[name])
        for start in range(0, total, len(blocks[key])):
            yield blocks[key][: total - start]

    unpacked = MatrixLoader._tiles

    def tiles(self: MatrixLoader, name: str) -> Any:
        fmt = self.format_of(name)
        if not isinstance(fmt, GroupFormat):
            return unpacked(self, name)
        rows, width = self._checkpoint.shapes[name]
        stripes = fmt.num_stripes(rows)
        count = min(stripes, max(1, (1 << 20) // (fmt.stripe_rows * width)))
        if (key := (fmt, width, count)) not in blocks:
            blocks[key] = quantize(torch.randn(count * fmt.stripe_rows, width).half() * 0.02, fmt)
        return (blocks[key][: stripes - first] for first in range(0, stripes, count))

    DummyCheckpoint._rounded_tiles = rounded  # type: ignore[assignment, method-assign]
    MatrixLoader._tiles = tiles  # type: ignore[method-assign]
