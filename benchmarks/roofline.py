"""The roofline of a block: its least time at the best measured rates of products, attention and disk.

    pass of the block = max(compute, streamed bytes / disk rate)      bound = prefill pass + decode passes

Compute is summed over the batches of a pass, each operation at the best time measured for its very shape. A block
that reaches the bound spends no time between operations and hides all reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flexgen_helm.benchmarks.common import time_calls
from flexgen_helm.models.config import HEAD, ModelConfig, layer_stage, stage_tensor_shapes
from flexgen_helm.planner.placement import BLOCK_SEQUENCES

_DISK_CHUNK = 16 << 20
_DISK_THREADS = 2


@dataclass(frozen=True)
class Shapes:
    """A block: `batches` batches of `batch_rows` sequences; prompts are computed in batches of `prefill_rows`."""

    batch_rows: int
    batches: int
    prefill_rows: int
    prompt: int
    output: int

    @property
    def rows(self) -> int:
        return self.batch_rows * self.batches


def break_even_rows(product_flops: float, bytes_per_parameter: int, disk_bytes_s: float) -> float:
    """Return B*, the number of sequences at which computing with a weight (2 FLOP each) takes as long as reading it."""
    return product_flops * bytes_per_parameter / (2 * disk_bytes_s)


def block_seconds(shapes: Shapes, operations: Mapping[str, float], layers: int) -> dict[str, float]:
    """Return the least compute seconds {prefill, decode} of a block; operations: from `operation_seconds`."""
    prefill_batches = shapes.rows / shapes.prefill_rows
    heads = operations["head"] * shapes.batches
    prefill = prefill_batches * layers * operations["prefill_products"]
    prefill += shapes.rows * layers * operations["prefill_attention"]
    decode = shapes.batches * layers * operations["decode_products"]
    decode += math.ceil(shapes.rows / BLOCK_SEQUENCES) * layers * operations["decode_attention"]
    return {"prefill": prefill + heads, "decode": (decode + heads) * (shapes.output - 1)}


def bound_seconds(
    shapes: Shapes, compute: Mapping[str, float], streamed_bytes: int, disk_bytes_s: float
) -> dict[str, float]:
    """Return the bound {prefill, decode, total} in seconds of a block whose weights are read once a pass."""
    read = streamed_bytes / disk_bytes_s
    prefill, decode = max(compute["prefill"], read), max(compute["decode"], (shapes.output - 1) * read)
    return {"prefill": prefill, "decode": decode, "total": prefill + decode}


def measure_rates(*, folder: str, file_bytes: int) -> dict[str, float]:
    """Measure the rates that determine B*: {product_flops, disk_bytes_s}.

    The disk's is of long direct reads (best of 2) from a file in `folder` that is written and deleted here.
    """
    import torch

    from flexgen_helm.kernels.products import matmul_flops, multiplied_dtype
    from flexgen_helm.offload.disk import DirectFile
    from flexgen_helm.offload.staging import pages

    chunk = min(_DISK_CHUNK, file_bytes)
    buffers = [pages(chunk) for _ in range(_DISK_THREADS)]
    for buffer in buffers:
        buffer.random_()
    offsets = range(0, file_bytes - chunk + 1, chunk)
    file = DirectFile(Path(folder) / f"rate-{os.getpid()}", len(offsets) * chunk, create=True)
    try:
        for offset in offsets:
            file.write(offset, buffers[0])

        def read(number: int) -> None:
            for offset in offsets[number::_DISK_THREADS]:
                file.read(offset, buffers[number])

        with ThreadPoolExecutor(_DISK_THREADS) as threads:
            seconds = time_calls([lambda: list(threads.map(read, range(_DISK_THREADS)))], 2)
    finally:
        file.close(delete=True)
    disk_bytes_s = len(offsets) * chunk / min(seconds)
    host = torch.device("cpu"), torch.float32
    rate = matmul_flops(*host, multiplied_dtype(*host, torch.float16))
    return {"product_flops": rate, "disk_bytes_s": disk_bytes_s}


def operation_seconds(
    *, model: str, batch_rows: int, prefill_rows: int, prompt: int, output: int, repeats: int = 4
) -> dict[str, float]:
    """Measure the best seconds of one batch's operations in one layer and in the head.

    prefill_attention is of one sequence, decode_attention of one cache block at its average length. Several copies of
    each operand take turns, so that none is found in a processor's cache, as in a real pass.
    """
    import torch

    from flexgen_helm.checkpoint.open import open_checkpoint
    from flexgen_helm.engine.profiler import cache_attention, prompt_attention
    from flexgen_helm.kernels.products import multiplied_dtype
    from flexgen_helm.offload.linear import tiled_linear

    checkpoint = open_checkpoint(model, weights="dummy")
    config = checkpoint.config
    dtype = multiplied_dtype(torch.device("cpu"), torch.float32, checkpoint.storage_dtype)

    def products(matrices: Sequence[tuple[int, int]], tokens: int) -> float:
        seconds = 0.0
        for out_size, in_size in matrices:
            x = torch.randn(tokens, in_size)
            copies = _copies(dtype.itemsize * out_size * in_size)
            weights = [torch.randn(out_size, in_size).to(dtype) for _ in range(copies)]
            seconds += min(time_calls([partial(tiled_linear, x, weight, None) for weight in weights], repeats))
        return seconds

    group = min(BLOCK_SEQUENCES, batch_rows)
    length = prompt + output // 2
    q_shape, kv_shape = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    cache_shape = (group, config.num_kv_heads, length, config.head_dim)
    q = torch.randn(group, *q_shape)
    num_caches = _copies(8 * group * length * config.kv_size)
    caches = [(torch.randn(cache_shape), torch.randn(cache_shape)) for _ in range(num_caches)]
    sequence = torch.randn(prompt, *q_shape), torch.randn(prompt, *kv_shape), torch.randn(prompt, *kv_shape)
    prefill_attention = [prompt_attention(*sequence)]
    decode_attention = [cache_attention(q, k, v) for k, v in caches]
    with torch.no_grad():
        return {
            "prefill_products": products(layer_matrices(config), prefill_rows * prompt),
            "decode_products": products(layer_matrices(config), batch_rows),
            "head": products(head_matrices(config), batch_rows),
            "prefill_attention": min(time_calls(prefill_attention, 4 * repeats)),
            "decode_attention": min(time_calls(decode_attention, repeats)),
        }


def layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Return (out, in) of every matrix of one layer."""
    return [(s[0], s[1]) for s in stage_tensor_shapes(config, layer_stage(0)).values() if len(s) == 2]


def head_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Return (out, in) of every matrix of the head, a tied embedding included."""
    own = [(s[0], s[1]) for s in stage_tensor_shapes(config, HEAD).values() if len(s) == 2]
    return [*own, (config.vocab_size, config.embed_size)] if config.tied_head else own


def _copies(num_bytes: int) -> int:
    """Return how many operands of `num_bytes` exceed a processor's caches together."""
    return max(1, min(64, (96 << 20) // num_bytes))
