"""Unpacking beside the product: compiled loops where they apply, and plain torch where they do not.

Plain operations of torch pass over the values several times, each through memory; a loop passes once, and on a
processor leaves the tile in its cache. All give the same numbers, bit for bit. numba (processors) and Triton (CUDA)
compile at the first call and keep the result on the disk.
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
# Up to so many tokens a product takes codes as they are; beyond, unpacking once and a library's product are faster.
DOT_TOKENS = 8


def unpack_into(packed: Tensor, form: GroupFormat, out: Tensor) -> Tensor:
    """Bytes [stripes, stripe_bytes] -> `out` [rows, width] in the compute type; returns it."""
    if out.is_cuda and (triton := _triton()) is not None and form.bits == 4 and _is_plain(packed, out):
        return triton(packed, form, out)
    loop = _loops().get((form.bits, form.axis, form.scales)) if _has_loop(packed, out) else None
    if loop is None:
        return plain_into(packed, form, out)
    source, target, rows = packed.numpy(), out.numpy(), form.stripe_rows
    _in_parts(source.shape[0], form, lambda some: (source[some], target[some.start * rows : some.stop * rows]), loop)
    return out


def dot(x: Tensor, packed: Tensor, form: GroupFormat, rows: int) -> Tensor | None:
    """x [T, width] of a few tokens times the matrix [rows, width] transposed -> [T, rows], without unpacking it.

    None where no loop does that faster than unpacking and a product: for more tokens, other formats and devices.
    """
    loop = _loops().get((form.bits, form.axis, f"{form.scales} dot"))
    if loop is None or x.shape[0] > DOT_TOKENS or not _has_loop(packed, x):
        return None
    y = torch.empty((x.shape[0], rows), dtype=torch.float32)
    source, given, target, group = packed.numpy(), x.numpy(), y.numpy(), form.group
    _in_parts(
        source.shape[0],
        form,
        lambda some: (source[some], given, target[:, some.start * group : some.stop * group]),
        loop,
    )
    return y


def _in_parts(
    stripes: int, form: GroupFormat, arguments: Callable[[slice], tuple[Any, ...]], loop: Callable[..., None]
) -> None:
    """A loop over stripes, a part in every thread."""
    tables = _tables(form.bits) if form.scales == "word" else (_halves(), _halves())
    threads = torch.get_num_threads()
    step = -(-stripes // threads)
    parts = [arguments(slice(first, min(first + step, stripes))) for first in range(0, stripes, step)]
    others = [_pool(threads).submit(loop, *part, form.group, *tables) for part in parts[1:]]
    loop(*parts[0], form.group, *tables)
    for other in others:
        other.result()


def plain_into(packed: Tensor, form: GroupFormat, out: Tensor) -> Tensor:
    """The same by plain operations of torch, for every device and format."""
    return out.copy_(unpack(packed, form, *out.shape))


def _has_loop(packed: Tensor, out: Tensor) -> bool:
    return packed.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()


def _is_plain(packed: Tensor, out: Tensor) -> bool:
    return packed.stride(1) == 1 and out.is_contiguous()


@lru_cache(maxsize=1)
def _triton() -> Callable[[Tensor, GroupFormat, Tensor], Tensor] | None:
    try:
        from flexgen_helm.quant.triton_loops import unpack_into as found
    except ImportError:  # torch for this machine came without it
        return None
    return found


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
        (4, "out", "pair dot"): loops.columns_pair_dot,
        (4, "out", "word dot"): loops.columns_word_dot,
    }
