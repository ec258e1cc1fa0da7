"""4-bit dequantization by implementation, and products with packed weights: `python -m benchmarks.kernels`.

Dequantization is measured by the tile that a product uses, in G values/s. Several packed tiles take turns, so that
none is found in a processor's cache. A product is one matrix of a large model's layer times a batch of tokens, with
packed weights, 16-bit weights and weights in the compute dtype; the engine converts them to that dtype by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from flexgen_helm.benchmarks.common import machine, report, script, summary, time_calls
from flexgen_helm.cli.engine_flags import OutFile

WIDTH = 4096
TOKENS = (1, 16, 64, 256, 1024, 4096)
QUICK_WIDTH, QUICK_TOKENS = 256, (1, 8)
# Of operands that take turns.
_COLD_BYTES = 64 << 20


def main(out: OutFile = None, quick: bool = False, repeats: int = 5) -> None:
    """Measure on the compute device. --quick: figures mean nothing."""
    width, tokens = (QUICK_WIDTH, QUICK_TOKENS) if quick else (WIDTH, TOKENS)
    report(measure(width, tokens, 1 if quick else repeats), out)


def measure(width: int, tokens: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return rows of `unpack …` in G values/s, and of `product …` in seconds."""
    import torch

    from flexgen_helm.offload.linear import tiled_linear
    from flexgen_helm.planner.placement import HOST_UPCAST_ELEMENTS
    from flexgen_helm.quant.kernels import dequantize_into, dequantize_with_torch
    from flexgen_helm.quant.packing import quantize
    from flexgen_helm.quant.precisions import PRECISIONS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = torch.float16 if device.type == "cuda" else torch.float32
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(width, width, generator=draw).to(device)
    tile_rows = max(64, min(width, HOST_UPCAST_ELEMENTS // width))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    formats = {name: PRECISIONS[name].weights for name in ("4bit", "paper-4bit")}
    with torch.no_grad():
        for name, fmt in formats.items():
            assert fmt is not None
            packed = quantize(matrix[:tile_rows], fmt)
            copies = [packed.clone() for _ in range(max(2, min(64, _COLD_BYTES // packed.numel())))]
            out = torch.empty(tile_rows, width, dtype=compute, device=device)
            speeds = {}
            for label, function in (("compiled loop", dequantize_into), ("plain torch", dequantize_with_torch)):
                calls = [partial(function, copy, fmt, out) for copy in copies]
                seconds = time_calls(calls, repeats + 1, synchronize)[1:]  # the first one compiles
                speeds[label] = [out.numel() / each / 1e9 for each in seconds]
                rows.append({"label": f"unpack {name}, {label} (G/s)", **summary(speeds[label])})
            ratios[f"loop_to_plain_{name}"] = median(speeds["compiled loop"]) / median(speeds["plain torch"])
        half, fmt = matrix.to(torch.float16), formats["4bit"]
        assert fmt is not None
        num_copies = max(2, _COLD_BYTES // (2 * half.numel()))
        packed = quantize(matrix, fmt)
        operands: dict[str, list[tuple[Any, ...]]] = {
            "packed": [(packed.clone(), None, fmt, width) for _ in range(num_copies)],
            "16 bits": [(half.clone(), None) for _ in range(num_copies)],
            "compute type": [(matrix.to(compute).clone(), None) for _ in range(num_copies)],
        }
        for number in tokens:
            x = torch.randn(number, width, generator=draw).to(device=device, dtype=compute)
            spent = {}
            for label, copied in operands.items():
                calls = [partial(tiled_linear, x, *weight) for weight in copied]
                spent[label] = time_calls(calls, repeats + 1, synchronize)[1:]
                rows.append({"label": f"product {number} tokens, {label}", **summary(spent[label])})
            for label in ("packed", "16 bits"):
                key = f"{label.replace(' ', '_')}_overhead_{number}_tokens"
                ratios[key] = median(spent[label]) / median(spent["compute type"])
    return {
        "name": "kernels",
        "workload": {"width": width, "tile_rows": tile_rows, "tokens": list(tokens), "repeats": repeats},
        "hardware": {
            **machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "rows": rows,
        "ratios": ratios,
        "notes": ["an overhead of 1 is a product with weights stored in the compute type"],
    }


if __name__ == "__main__":
    script(main)
