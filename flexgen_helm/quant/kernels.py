"""Unpacking on processors: compiled loops beside the product, and plain torch where they do not apply.

Plain operations of torch pass over the values several times, each through memory; the loop passes once and leaves a
tile in the processor's cache. Both give the same numbers, bit for bit. numba compiles at the first call and keeps
the result beside this file (or in its own cache where that cannot be written).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.quant.arithmetic import word_steps, word_zeros
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packed import unpack

_HOST = torch.device("cpu")


def unpack_into(packed: Tensor, form: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width] in the compute type; returns it."""
    loop = _loops().get((form.bits, form.axis, form.scales)) if _has_loop(packed, out) else None
    if loop is None:
        return out.copy_(unpack(packed, form, *out.shape))
    tables = _tables(form.bits) if form.scales == "word" else (_halves(), _halves())
    source, target = packed.numpy(), out.numpy()
    stripes, threads = source.shape[0], torch.get_num_threads()
    step = -(-stripes // threads)
    parts = [
        (source[first : first + step], target[first * form.stripe_rows : (first + step) * form.stripe_rows])
        for first in range(0, stripes, step)
    ]
    others = [_pool(threads).submit(loop, *part, form.group, *tables) for part in parts[1:]]
    loop(*parts[0], form.group, *tables)
    for other in others:
        other.result()
    return out


def _has_loop(packed: Tensor, out: Tensor) -> bool:
    return packed.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="unpacking")


@lru_cache(maxsize=8)
def _tables(bits: int) -> tuple[Any, Any]:
    return word_steps(_HOST).numpy(), word_zeros(bits, _HOST).numpy()


@lru_cache(maxsize=1)
def _halves() -> Any:
    """float32 of every FP16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@lru_cache(maxsize=1)
def _loops() -> dict[tuple[int, str, str], Callable[..., None]]:
    """(bits, axis, scales) -> loop(packed, out, group, tables)."""
    try:
        from flexgen_helm.quant import loops
    except ImportError:  # a machine without numba
        return {}
    return {
        (4, "in", "pair"): loops.rows_pair,
        (4, "in", "word"): loops.rows_word,
        (4, "out", "pair"): loops.columns_pair,
        (4, "out", "word"): loops.columns_word,
    }
