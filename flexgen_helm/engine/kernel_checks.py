"""Compare fast kernels of a GPU with plain PyTorch there, before results need them. What differs is
switched off by name, and PyTorch takes its place.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from flexgen_helm.hardware.fast_paths import ATTENTION, TRITON, switch_off
from flexgen_helm.models.attention import AttentionConfig, additive_mask, attend, attend_unfused
from flexgen_helm.quant.block_products import decode_into
from flexgen_helm.quant.dequantization import dequantize_into, dequantize_with_torch
from flexgen_helm.quant.formats import BlockFormat, StoredFormat
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import Precision

# Largest difference of attention, relative to the largest value.
_ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def compare_kernels(
    device: torch.device, dtype: torch.dtype, precision: Precision, head_dim: int
) -> None:
    """Compare the kernels that dequantize, and fused attention; switch off what differs.

    Once in a process for each format, and for each size of heads.

    dtype: of products.
    precision: whose formats are dequantized.
    head_dim: elements of a head.
    """
    formats = {precision.weights, precision.tables, *precision.published.by_name.values()}
    if precision.cache is not None:
        formats |= {precision.cache.keys, precision.cache.values}
    for fmt in formats - {None}:
        if not _dequantizes_alike(device, dtype, fmt):
            switch_off(TRITON, "a dequantized matrix has wrong bits")
    if fault := _attention_fault(device, dtype, head_dim):
        switch_off(ATTENTION, fault)


@cache
def _dequantizes_alike(device: torch.device, dtype: torch.dtype, fmt: StoredFormat) -> bool:
    """Return whether the kernel dequantizes a random matrix to the bits that PyTorch does."""
    rows, width, generator = 192, 2048, torch.Generator().manual_seed(0)
    found, expected = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
    if isinstance(fmt, BlockFormat):  # any bytes, of scales that are no numbers too
        packed = torch.randint(
            256, (rows, fmt.stripe_bytes(width)), dtype=torch.uint8, generator=generator
        ).to(device)
        decode_into(packed, fmt, expected)
    else:
        packed = quantize(torch.randn(rows, width, generator=generator), fmt).to(device)
        dequantize_with_torch(packed, fmt, expected)
    dequantize_into(packed, fmt, found)
    return torch.equal(found.nan_to_num(), expected.nan_to_num())


@cache
def _attention_fault(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Say what is wrong with outputs or log-sum-exps of fused attention; "" for nothing."""
    generator, config = torch.Generator().manual_seed(0), AttentionConfig(head_dim**-0.5)
    largest = 0.0
    # A prompt, decoding sequences, and those behind a window.
    for batch, queries, keys, has_window in (
        (1, 70, 70, False),
        (3, 1, 130, False),
        (3, 1, 130, True),
    ):
        shapes = [(batch, 4, tokens, head_dim) for tokens in (queries, keys, keys)]
        q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        is_hidden = (torch.arange(keys, device=device) < keys // 3).expand(batch, 1, 1, keys)
        mask = additive_mask(is_hidden, dtype) if has_window else None
        try:
            found = attend(q, (k, v), config, queries > 1, mask)
        # of private operators, which another PyTorch does not have, or has otherwise
        except (AttributeError, TypeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return f"{type(error).__name__}: {error}".splitlines()[0]
        keys_values, mask = (k.float(), v.float()), None if mask is None else mask.float()
        expected = attend_unfused(q.float(), keys_values, config, queries > 1, mask)
        for value, exact in zip(found, expected):
            difference = largest_magnitude(value.float() - exact) / largest_magnitude(exact)
            largest = max(largest, difference)
    return (
        f"wrong by {largest:.2g} of the largest value"
        if largest > _ATTENTION_TOLERANCE[dtype]
        else ""
    )


def largest_magnitude(values: Tensor) -> float:
    """Return the largest absolute value; infinite where one is not finite, so that no tolerance
    allows it.
    """
    return float(values.abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
