"""Attention of the chosen kernels beside float64."""

from __future__ import annotations

import math
from functools import partial
from statistics import median
from typing import Any

import torch

from flexgen_helm.benchmarks.common import time_calls
from flexgen_helm.benchmarks.gpu.step import FAKE, part
from flexgen_helm.models.attention import AttentionConfig, additive_mask, attend, fused_kernel

# Sequences, heads, queries, keys, elements of a head; whether it is causal; whether a mask hides keys.
_SHAPES = {
    "prompt": (1, 56, 512, 512, 128, True, False),
    "decode": (48, 56, 1, 544, 128, False, False),
    "decode with a mask": (48, 56, 1, 544, 128, False, True),
    "group of 8 heads": (16, 8, 8, 4096, 128, False, False),
    "heads of 80": (8, 32, 1, 600, 80, False, True),
    "heads of 256": (4, 8, 1, 1000, 256, False, False),
    "behind a prefix": (1, 32, 512, 300, 128, False, True),
}
# Largest error of outputs relative to their norm, and of the log-sum-exp.
_BOUNDS = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 1e-2), torch.float32: (1e-5, 1e-4)}


def measure() -> None:
    torch.manual_seed(0)
    for name, shape in _SHAPES.items():
        for dtype in _BOUNDS if name in ("prompt", "decode with a mask") else (torch.float16,):
            part(f"attention, {name}, {str(dtype)[6:]}", _attention, dtype, *shape)


def _attention(
    dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int, dim: int, is_causal: bool, has_mask: bool
) -> dict[str, Any]:
    if FAKE:
        batch, queries, keys = min(batch, 2), -(-queries // 32), queries // 32 if is_causal else keys // 32
    q, k, v = (torch.randn(batch, heads, n, dim, device="cuda", dtype=dtype) for n in (queries, keys, keys))
    hidden, mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool, device="cuda"), None
    if has_mask:
        hidden[..., 1:] = torch.rand(batch, 1, 1, keys - 1, device="cuda") < 0.3
        mask = additive_mask(hidden, dtype)
    config = AttentionConfig(dim**-0.5)
    call = partial(attend, q, k, v, config, is_causal=is_causal, mask=mask)
    out, lse = call()
    if is_causal:
        hidden |= torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(1)
    scores = torch.matmul(q.double(), k.double().transpose(-2, -1)) * config.scale
    scores = scores.masked_fill(hidden, -math.inf)
    exact_lse = scores.logsumexp(-1)
    exact = torch.matmul((scores - exact_lse[..., None]).exp(), v.double())
    error = float((out.double() - exact).norm() / exact.norm())
    lse_error = float((lse.double() - exact_lse).abs().max())
    bound, lse_bound = _BOUNDS[dtype]
    assert error < bound and lse_error < lse_bound, f"error {error:.2g}, of the log-sum-exp {lse_error:.2g}"
    spent = median(time_calls([call] * (1 if FAKE else 20), 3, torch.cuda.synchronize))
    kernel = fused_kernel(q, mask) or "formula"
    rate = 2 * k.nbytes / spent / 1e9
    return {"kernel": kernel, "relative_error": error, "lse_error": lse_error, "us": 1e6 * spent, "kv_gb_s": rate}
