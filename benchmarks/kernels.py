"""`bench kernels`: what unpacking 4 bits costs on this device, by implementation, and a product with packed weights.

Unpacking is measured by the tile that a product takes, as thousand millions of values a second; several packed tiles
take turns, so that none is found in a cache. A product is one matrix of a large model's layer times a batch of
tokens: packed, in 16 bits, and in the compute type, each brought to the compute type by tile as the engine does.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import psutil

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.offload import BUSY_LOAD
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.errors import UsageError
from flexgen_helm.report.throughput import versions

WIDTH = 4096
TOKENS = (1, 16, 64, 256, 1024, 4096)
QUICK_WIDTH, QUICK_TOKENS = 256, (1, 8)
_COLD_BYTES = 64 << 20


def run(options: Options) -> dict[str, Any]:
    """Rows of `unpack …` are thousand millions of values a second, rows of `product …` seconds."""
    if options.engine:
        raise UsageError(f"bench kernels takes no engine flags: leave out {sorted(options.engine)}")
    busy = psutil.getloadavg()[0]
    repeats = options.repeats or (1 if options.quick else 5)
    width, tokens = (QUICK_WIDTH, QUICK_TOKENS) if options.quick else (WIDTH, TOKENS)
    result = in_own_process(measure, {"width": width, "tokens": list(tokens), "repeats": repeats})
    if busy > BUSY_LOAD:
        result["notes"].append(f"other programs were computing when this began (load {busy:.1f}): figures are noise")
    return result


def measure(*, width: int, tokens: Sequence[int], repeats: int) -> dict[str, Any]:
    import torch

    from flexgen_helm.offload.linear import TILE_ELEMENTS, tiled_linear
    from flexgen_helm.quant.kernels import dequantize_into, dequantize_with_torch
    from flexgen_helm.quant.packing import quantize
    from flexgen_helm.quant.precisions import PRECISIONS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = torch.float16 if device.type == "cuda" else torch.float32
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(width, width, generator=draw).to(device)
    tile_rows = max(64, min(width, TILE_ELEMENTS // width))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}

    def timed(calls: Sequence[Callable[[], Any]]) -> list[float]:
        """Seconds of one call, the mean over `calls`, of each repeat; the first is not counted."""
        found = []
        for _ in range(repeats + 1):
            _settle(device)
            began = time.perf_counter()
            for call in calls:
                call()
            _settle(device)
            found.append((time.perf_counter() - began) / len(calls))
        return found[1:]

    with torch.no_grad():
        for name in ("4bit", "paper-4bit"):
            fmt = PRECISIONS[name].weights
            assert fmt is not None
            packed = quantize(matrix[:tile_rows], fmt)
            copies = [packed.clone() for _ in range(max(2, min(64, _COLD_BYTES // packed.numel())))]
            out = torch.empty(tile_rows, width, dtype=compute, device=device)
            speeds = {}
            for label, function in (("compiled loop", dequantize_into), ("plain torch", dequantize_with_torch)):
                seconds = timed([_bind(function, each, fmt, out) for each in copies])
                speeds[label] = [out.numel() / each / 1e9 for each in seconds]
                rows.append({"label": f"unpack {name}, {label} (G/s)", **summary(speeds[label])})
            ratios[f"loop_to_plain_{name}"] = median(speeds["compiled loop"]) / median(speeds["plain torch"])
        fmt = PRECISIONS["4bit"].weights
        assert fmt is not None
        half = matrix.to(torch.float16)
        count = max(2, _COLD_BYTES // (2 * half.numel()))
        sides: dict[str, list[Callable[[Any], Any]]] = {
            "packed": [_packed(quantize(matrix, fmt), fmt, width, tiled_linear) for _ in range(count)],
            "16 bits": [_plain(half.clone(), tiled_linear) for _ in range(count)],
            "compute type": [_plain(matrix.to(compute), tiled_linear) for _ in range(count)],
        }
        for number in tokens:
            x = torch.randn(number, width, generator=draw).to(device=device, dtype=compute)
            spent = {}
            for label, calls in sides.items():
                spent[label] = timed([_bind(call, x) for call in calls])
                rows.append({"label": f"product {number} tokens, {label}", **summary(spent[label])})
            for label in ("packed", "16 bits"):
                key = f"{label.replace(' ', '_')}_overhead_{number}_tokens"
                ratios[key] = median(spent[label]) / median(spent["compute type"])
    return {
        "name": "kernels",
        "workload": {"width": width, "tile_rows": tile_rows, "tokens": list(tokens), "repeats": repeats},
        "hardware": {
            "machine": platform.machine(),
            "cores": psutil.cpu_count(logical=False),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "versions": versions(),
        "rows": rows,
        "ratios": ratios,
        "notes": ["an overhead of 1 is a product whose weights rest in the compute type"],
    }


def _settle(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _packed(packed: Any, fmt: Any, rows: int, product: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: product(x, packed, None, fmt, rows)


def _plain(weight: Any, product: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: product(x, weight, None)
