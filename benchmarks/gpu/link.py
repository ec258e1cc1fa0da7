"""The link between host and GPU: pinning, copies raw and by the engine, several loaders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.benchmarks.common import time_calls
from flexgen_helm.benchmarks.gpu.step import FAKE, GIB, part
from flexgen_helm.offload.transfer_manager import CudaCopyEngine, _RegisteredPages

_PINNED = GIB >> 6 if FAKE else 2 * GIB
_LARGEST = (1 if FAKE else 256) << 20
_COPIES = (64 << 10, 1 << 20, 8 << 20, 32 << 20, 256 << 20)  # bytes


def measure() -> None:
    engine = CudaCopyEngine(torch.device("cuda"))
    first, second = (engine.host_memory(_LARGEST).fill_(1) for _ in range(2))
    target = torch.zeros(_LARGEST, dtype=torch.uint8, device="cuda")
    part("pinning", _pinning)
    part("copies", _copies, engine, first, target)
    part("pageable copies", _copies, engine, torch.ones(_LARGEST, dtype=torch.uint8), target)
    part("loaders", _loaders, engine, first, second, target)
    part("refused pinning", _refused, first)


def _rate(num_bytes: float, *calls: Callable[[], Any]) -> float:
    """Return GB/s: `num_bytes` a call."""
    return num_bytes / median(time_calls(calls, 4, torch.cuda.synchronize)[1:]) / 1e9


def _pinning() -> dict[str, Any]:
    """GB/s of registering pages that are new, and that were touched, and of PyTorch's own pinned memory."""
    runtime = torch.cuda.cudart()
    made: list[_RegisteredPages] = []
    seconds = {}

    def timed(label: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = call()
        seconds[f"{label}_gb_s"] = _PINNED / (time.perf_counter() - began) / 1e9
        return found

    timed("untouched", lambda: made.append(_RegisteredPages(_PINNED, torch.device("cuda"))))
    pages = made[0]._pages
    timed("unregister", made.clear)
    code = int(timed("touched", lambda: runtime.cudaHostRegister(pages.data_ptr(), pages.numel(), 1)))
    if not code:
        runtime.cudaHostUnregister(pages.data_ptr())
    timed("torch_pinned", lambda: torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True))
    return {**seconds, "code": code}


def _copies(engine: CudaCopyEngine, host: Tensor, device: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"pins": engine.pins, "is_pinned": host.is_pinned()}
    for size in (size for size in _COPIES if size <= _LARGEST):
        here, there = host[:size], device[:size]
        calls = {
            "to_gpu": partial(there.copy_, here, non_blocking=True),
            "to_host": partial(here.copy_, there, non_blocking=True),
            "engine_to_gpu": partial(engine.to_device, here, there),
            "engine_to_host": partial(engine.to_host, there, here),
        }
        for label, call in calls.items():
            found[f"{label}_{size >> 10}k_gb_s"] = _rate(size, *[call] * max(1, min(16, _LARGEST // size)))
    return found


def _loaders(engine: CudaCopyEngine, first: Tensor, second: Tensor, device: Tensor) -> dict[str, float]:
    """GB/s of one loader, of two, of two beside products, and of a loader beside a writer."""
    half, times = _LARGEST // 2, 16
    up = partial(engine.to_device, first[:half], device[:half])
    up_too = partial(engine.to_device, first[half:], device[half:])
    down = partial(engine.to_host, device[half:], second[half:])
    is_done = threading.Event()

    def repeat(call: Callable[[], Any]) -> None:
        for _ in range(times):
            call()

    def in_threads(*calls: Callable[[], Any]) -> float:
        threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(calls) * times * half / (time.perf_counter() - began) / 1e9

    def compute() -> None:
        x = torch.randn(64 if FAKE else 4096, 64 if FAKE else 4096, device="cuda", dtype=torch.float16)
        while not is_done.is_set():
            for _ in range(20):
                torch.mm(x, x)
            torch.cuda.synchronize()

    in_threads(up)
    found = {"one_gb_s": in_threads(up), "two_gb_s": in_threads(up, up_too), "both_ways_gb_s": in_threads(up, down)}
    products = threading.Thread(target=compute)
    products.start()
    found["two_beside_products_gb_s"] = in_threads(up, up_too)
    is_done.set()
    products.join()
    return found


def _refused(registered: Tensor) -> dict[str, Any]:
    """Register what is registered: the driver's error may stay behind for the next launch, and for none after it."""
    code = int(torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), 4096, 1))
    raised = None
    try:
        torch.zeros(4, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raised = str(error).splitlines()[0]
    assert float(torch.ones(4, device="cuda").sum()) == 4
    return {"code": code, "next_launch_raises": raised}
