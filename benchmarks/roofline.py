"""What a block costs at the best measured rates: products and attention by shape, and the disk.

    pass of the block = max(compute, streamed bytes / disk rate)      bound = prefill pass + decode passes

Compute is summed over the batches of the pass, each operation at the best time measured for just its shape; so a
bound of 1 s that is met in 1 s means that nothing between the operations, and no reading, was noticed at all.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.models.config import HEAD, ModelConfig, layer_stage, stage_tensor_shapes

# Rows of one attention call in decoding, as the engine groups them.
GROUP_ROWS = 32
_DISK_CHUNK = 16 << 20
_DISK_THREADS = 2


@dataclass(frozen=True)
class Shapes:
    """Of a block: `batches` batches of `batch_rows` sequences; prefill_rows: sequences of a batch of prompts."""

    batch_rows: int
    batches: int
    prefill_rows: int
    prompt: int
    output: int

    @property
    def rows(self) -> int:
        return self.batch_rows * self.batches


def break_even_rows(product_flops: float, bytes_per_parameter: int, disk_bytes_s: float) -> float:
    """B*: rows at which computing with a weight (2 operations a row) takes as long as reading it."""
    return product_flops * bytes_per_parameter / (2 * disk_bytes_s)


def block_seconds(shapes: Shapes, operations: Mapping[str, float], layers: int) -> dict[str, float]:
    """Least computing seconds {prefill, decode} of a block; operations: as `operation_seconds`."""
    prefill_batches = shapes.rows / shapes.prefill_rows
    heads = operations["head"] * shapes.batches
    prefill = prefill_batches * layers * operations["prefill_products"]
    prefill += shapes.rows * layers * operations["prefill_attention"]
    decode = shapes.batches * layers * operations["decode_products"]
    decode += math.ceil(shapes.rows / GROUP_ROWS) * layers * operations["decode_attention"]
    return {"prefill": prefill + heads, "decode": (decode + heads) * (shapes.output - 1)}


def bound_seconds(
    shapes: Shapes, computing: Mapping[str, float], streamed_bytes: int, disk_bytes_s: float
) -> dict[str, float]:
    """{prefill, decode, total} of a block whose weights are read once a pass."""
    read = streamed_bytes / disk_bytes_s
    passes = shapes.output - 1
    found = {"prefill": max(computing["prefill"], read), "decode": max(computing["decode"], passes * read)}
    return {**found, "total": sum(found.values())}


def measure_rates(*, model: str, folder: str, file_bytes: int) -> dict[str, float]:
    """The rates that B* follows from: {product_flops, disk_bytes_s}."""
    import torch

    from flexgen_helm.hardware.rates import matmul_flops

    disk = read_rate(Path(folder), file_bytes)
    return {"product_flops": matmul_flops(torch.device("cpu"), torch.float32), "disk_bytes_s": disk}


def operation_seconds(
    *, model: str, batch_rows: int, prefill_rows: int, prompt: int, output: int, repeats: int = 4
) -> dict[str, float]:
    """Best seconds of what one batch does in one layer, and of its pass through the head.

    Prefill attention is of one sequence, decode attention of one group of rows at its average length. Several copies
    of each operand take turns, so that none is found in a cache where a real pass would not find it.
    """
    import torch

    from flexgen_helm.checkpoint.open import open_checkpoint
    from flexgen_helm.hardware.rates import linear
    from flexgen_helm.models.attention import AttentionConfig, attend_cached, attend_causal

    config = open_checkpoint(model, weights="dummy").config
    scoring = AttentionConfig(scale=config.head_dim**-0.5)

    def products(matrices: Sequence[tuple[int, int]], tokens: int) -> float:
        seconds = 0.0
        for out_size, in_size in matrices:
            x = torch.randn(tokens, in_size)
            weights = [torch.randn(out_size, in_size) for _ in range(_copies(4 * out_size * in_size))]
            calls = [_bind(linear, x, weight, None) for weight in weights]
            seconds += _best(calls, repeats)
        return seconds

    group = min(GROUP_ROWS, batch_rows)
    length = prompt + output // 2
    heads = (config.num_heads, config.head_dim)
    own = (config.num_kv_heads, config.head_dim)
    past = (group, config.num_kv_heads, length, config.head_dim)
    q = torch.randn(group, *heads)
    last = torch.full((group,), length - 1)
    caches = [(torch.randn(past), torch.randn(past)) for _ in range(_copies(8 * group * length * config.kv_size))]
    sequence = torch.randn(prompt, *heads), torch.randn(prompt, *own), torch.randn(prompt, *own)
    with torch.no_grad():
        return {
            "prefill_products": products(layer_matrices(config), prefill_rows * prompt),
            "decode_products": products(layer_matrices(config), batch_rows),
            "head": products(head_matrices(config), batch_rows),
            "prefill_attention": _best([_bind(attend_causal, *sequence, scoring)], 4 * repeats),
            "decode_attention": _best([_bind(attend_cached, q, k, v, scoring, last, None) for k, v in caches], repeats),
        }


def layer_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every product of one layer."""
    return [(s[0], s[1]) for s in stage_tensor_shapes(config, layer_stage(0)).values() if len(s) == 2]


def head_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    found = [(s[0], s[1]) for s in stage_tensor_shapes(config, HEAD).values() if len(s) == 2]
    return [*found, (config.vocab_size, config.embed_size)] if config.tied_head else found


def read_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second of long reads past the page cache, from a file that is written for it and deleted (best of 2)."""
    from flexgen_helm.offload.disk import DirectFile
    from flexgen_helm.offload.staging import pages

    chunk = min(_DISK_CHUNK, num_bytes)
    buffers = [pages(chunk) for _ in range(_DISK_THREADS)]
    for buffer in buffers:
        buffer.random_()
    path = folder / f"rate-{os.getpid()}"
    offsets = range(0, num_bytes - chunk + 1, chunk)
    file = DirectFile(path, len(offsets) * chunk, create=True)
    try:
        for offset in offsets:
            file.write(offset, buffers[0])

        def read(number: int) -> None:
            for offset in offsets[number::_DISK_THREADS]:
                file.read(offset, buffers[number])

        def everything() -> None:
            list(threads.map(read, range(_DISK_THREADS)))

        with ThreadPoolExecutor(_DISK_THREADS) as threads:
            return len(offsets) * chunk / _best([everything], 2)
    finally:
        file.close(delete=True)


def _copies(num_bytes: int) -> int:
    """As many as exceed a processor's caches together."""
    return max(1, min(64, (96 << 20) // num_bytes))


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _best(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Seconds of one call, the mean over `calls` in the best of the repeats."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for call in calls:
            call()
        best = min(best, (time.perf_counter() - began) / len(calls))
    return best
