"""Rates of the machine at hand, measured when asked for. Nothing here is assumed from a data sheet."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@cache
def matmul_flops(device: "torch.device", dtype: "torch.dtype", size: int = 1024, repeats: int = 3) -> float:
    """Operations a second of a square product in `dtype` (best of `repeats`; a multiply-add counts two).

    A rate a hundred times below another type's is noticed by a product of a few rows, so a slow type costs
    milliseconds, not minutes, to rule out.
    """
    import torch

    def seconds(rows: int) -> float:
        a = torch.ones(rows, size, device=device, dtype=dtype)
        b = torch.ones(size, size, device=device, dtype=dtype)
        best = float("inf")
        for _ in range(repeats + 1):  # the first call also pays for start-up
            _synchronize(device)
            began = time.perf_counter()
            torch.mm(a, b.t())
            _synchronize(device)
            best = min(best, time.perf_counter() - began)
        return best

    few = 16
    if seconds(few) > 0.05:
        rows = few
    else:
        rows = size
    return 2.0 * rows * size * size / seconds(rows)


def compute_dtype(device: "torch.device", rest_dtype: "torch.dtype") -> "torch.dtype":
    """The type that products run in.

    On CPUs float32: the results are promised to 1e-4 of a float32 reference, which 16 bits cannot keep. On an
    accelerator the faster of the checkpoint's 16-bit type and float32, by measurement (some cards emulate bfloat16).
    """
    import torch

    if device.type == "cpu":
        return torch.float32
    return max((rest_dtype, torch.float32), key=lambda dtype: matmul_flops(device, dtype))


def _synchronize(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
