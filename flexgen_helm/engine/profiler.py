"""Measure this machine: rates of processor, GPU, link and disk.

Rates are those of the engine's own parts (its products, its attention, its files): the best of a
few, on operands that no cache holds.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.errors import FlexgenError
from flexgen_helm.hardware.freed_memory import keep_freed_memory, return_freed_memory
from flexgen_helm.hardware.host_memory import host_memory
from flexgen_helm.hardware.profile import (
    PRODUCT_BY_WEIGHT,
    PROFILED,
    Curve,
    Disk,
    HardwareProfile,
    Link,
    Processor,
)
from flexgen_helm.kernels.attention import (
    ScoreOptions,
    Segment,
    SegmentTable,
    TokenGroup,
    attend_segments,
    can_attend_caches,
)
from flexgen_helm.kernels.layer_rows import put_rows
from flexgen_helm.kernels.products import linear
from flexgen_helm.kernels.vector_products import multiplies_as_stored
from flexgen_helm.kv_cache.codec import QuantizedCodec
from flexgen_helm.models.attention import AttentionConfig, attend_cached, attend_causal
from flexgen_helm.models.config import layer_stage
from flexgen_helm.models.decoder import LayerBatch, StageWeights
from flexgen_helm.models.transformers_backend.decoder import decoder_of
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.linear import tiled_linear
from flexgen_helm.offload.pages import pages
from flexgen_helm.planner.problem import between_elements
from flexgen_helm.quant.dequantization import dequantize_into
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.units import exact_size

_HOST = torch.device("cpu")

# Rows of the inputs, and width of the square weights, that products are measured with. A device
# reads weights of the host's width in less time than a launch takes.
_ROWS, _WIDTH, _DEVICE_WIDTH = (1, 4, 16, 64, 256, 1024, 4096), 2048, 8192
# Bytes of operands that together exceed a processor's caches.
_UNCACHED_BYTES = 96 << 20
# Bytes of the measured files, of one transfer, and transfers at once.
_FILE_BYTES, _CHUNK_BYTES, _TRANSFERS = 512 << 20, 16 << 20, 2
_LINK_BYTES = 256 << 20
# Heads, elements of a head, tokens, and decoding sequences of the measured attention: a GPU would
# spend most of the time of short attention on starting its kernels.
_HOST_ATTENTION, _DEVICE_ATTENTION = (16, 64, 256, 32), (32, 128, 2048, 32)
# The matrix that is dequantized, and tokens and heads of the cache that is quantized (100
# launches): on a device both take longer than launching them.
_HOST_PACKED, _DEVICE_PACKED = (512, 2048), (16384, 8192)
_HOST_QUANTIZED, _DEVICE_QUANTIZED = (256, 8, 64), (32768, 8, 128)
# The model whose layers are measured, tokens of a prompt on a host, and positions of a decoding
# token's cache.
_LAYER_MODEL, _LAYER_TOKENS, _LAYER_POSITIONS = "smollm2-135m", 512, 64


def measure(folder: Path) -> HardwareProfile:
    """Measure everything; writes and deletes a gigabyte in `folder`."""
    memory = host_memory()
    # as an engine does: otherwise every product writes to memory that was never touched
    keep_freed_memory()
    with torch.no_grad():
        cpu = _measure_processor(torch.device("cpu"), memory.available, ("float32",))
        gpu = link = None
        if torch.cuda.is_available():
            device = torch.device("cuda")
            free, _ = torch.cuda.mem_get_info(device)
            gpu = _measure_processor(device, free, ("float16", "bfloat16", "float32"))
            link = _measure_link(device)
        folder.mkdir(parents=True, exist_ok=True)
        disk, overlap = _measure_disk(folder, torch.device("cuda" if gpu else "cpu"))
    return_freed_memory()
    return HardwareProfile(
        "measured", cpu, disk, gpu, link, overlap, sources={"everything": PROFILED}
    )


def _measure_processor(device: torch.device, memory_bytes: int, dtypes: Sequence[str]) -> Processor:
    """Measure the rates of the host's processor, or of a GPU.

    memory_bytes: that it has free, which is not measured.
    dtypes: of the products that are measured.
    """
    reads_16_bits = device.type == "cpu" and multiplies_as_stored(torch.float16)
    kind: torch.dtype = torch.float32 if device.type == "cpu" else torch.float16
    attention, reading = _attention_rates(device, kind)
    source = torch.zeros(_UNCACHED_BYTES, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copying = 2.0 * _UNCACHED_BYTES / _best([partial(target.copy_, source)], 3, device)
    step_s, layer_bytes_s = _layer_rates(device, kind)
    unpacking, packing = _packing_rates(device, kind)
    return Processor(
        memory_bytes=memory_bytes,
        memory_bytes_s=copying,
        matmul_flops=_product_curves(device, dtypes, reads_16_bits),
        attention_flops=attention,
        attention_bytes_s=reading,
        upcast_elements_s=_upcast_rate()
        if device.type == "cpu" and not reads_16_bits
        else math.inf,
        dequantize_elements_s=unpacking,
        quantize_elements_s=packing,
        step_s=step_s,
        layer_bytes_s=layer_bytes_s,
    )


class _LayerWeights(StageWeights):
    """Weights of a measured layer: with matrices that multiply, or without, so that products are
    ready at once and the rest of the layer is what takes time.
    """

    repeatable = True

    def __init__(self, layer: _MeasuredLayer, tokens: int, multiplies: bool) -> None:
        self._vectors, needed = layer.vectors, layer.sizes.items() if multiplies else ()
        self._matrices = {
            name: torch.randn(shape).to(layer.device, torch.float16) for name, shape in needed
        }
        self._ready = {name: torch.randn(tokens, out) for name, (out, _) in layer.sizes.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return tiled_linear(x, self._matrices[name], None) if self._matrices else self._ready[name]

    def vector(self, name: str) -> Tensor | None:
        return self._vectors.get(name)

    def use_experts(self, experts: Sequence[int], num_tokens: int) -> None:
        raise AssertionError("the model has none")

    def lookup(self, name: str, rows: Any) -> Tensor:
        raise AssertionError("a layer has no tables")


class _MeasuredLayer:
    """A layer of a small model, with a cache.

    sizes: shapes of its matrices, by name.
    """

    def __init__(self, device: torch.device, kind: torch.dtype) -> None:
        self.config, stage = CATALOG[_LAYER_MODEL].config, layer_stage(0)
        shapes = {
            name.removeprefix(f"{stage}."): shape
            for name, shape in self.config.stage_tensors(stage)
        }
        self.device = device
        self._like: dict[str, Any] = {"device": device, "dtype": kind}
        self.vectors = {
            name: torch.ones(shape, **self._like)
            for name, shape in shapes.items()
            if len(shape) == 1
        }
        self.sizes = {
            name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2
        }
        self._decoder = decoder_of(self.config, device, kind)
        heads = 2, 1, self.config.num_kv_heads, _LAYER_POSITIONS, self.config.head_dim
        self._caches = torch.zeros(heads, **self._like)
        self._row = torch.zeros(1, device=device, dtype=torch.int64)
        self._inputs = {width: torch.randn(1, width) for _, width in self.sizes.values()}
        self._rotary = {
            tokens: self._decoder.rotary(torch.arange(tokens, device=device))
            for tokens in (1, _LAYER_TOKENS)
        }

    def take(self, weights: _LayerWeights, tokens: int) -> None:
        """Take one token that attends to a cache, or a prompt, through the layer."""
        hidden = torch.zeros(tokens, self.config.hidden_size, **self._like)
        attend: Any = self._attend_cache if tokens == 1 else self._store
        batch = LayerBatch(hidden, self._rotary[tokens], attend)
        (out,) = self._decoder.layer(weights, 0, [batch])
        out.sum(-1)

    def multiply(self, weights: _LayerWeights) -> None:
        """Compute the products of one token alone."""
        for name, (_, width) in self.sizes.items():
            weights.linear(name, self._inputs[width])

    def _attend_cache(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for cache, new in zip(self._caches, (k, v)):
            put_rows(cache.movedim(2, 1), self._row, self._row, new)
        return cache_attention(q, *self._caches)()[0]

    @staticmethod
    def _store(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k.clone(), v.clone()
        return q


def _layer_rates(device: torch.device, kind: torch.dtype) -> tuple[float, float]:
    """Return the seconds of a layer besides its products, and the bytes a second that a long batch
    moves there.

    A token is taken through layers whose weights come from memory, as they do in a pass: they leave
    nothing of what the interpreter needs in the nearest caches. On a host the same products alone
    are taken off. On a device a layer of a small model takes as long as its launches, those of
    products included, and a long one is bound by other rates.
    """
    layer = _MeasuredLayer(device, kind)
    matrix_bytes = sum(2 * math.prod(shape) for shape in layer.sizes.values())
    layers = [
        _LayerWeights(layer, 1, multiplies=True)
        for _ in range(max(1, _UNCACHED_BYTES // matrix_bytes))
    ]
    step_s = _best([partial(layer.take, weights, 1) for weights in layers], 5, device)
    if device.type == "cuda":
        return step_s, math.inf
    step_s = max(1e-6, step_s - _best([partial(layer.multiply, weights) for weights in layers], 5))
    prompt = _LayerWeights(layer, _LAYER_TOKENS, multiplies=False)
    long_s = _best([partial(layer.take, prompt, _LAYER_TOKENS)], 10)
    moved = 4.0 * between_elements(layer.config) * _LAYER_TOKENS
    return step_s, moved / max(1e-6, long_s - step_s)


def _product_curves(
    device: torch.device, dtypes: Sequence[str], reads_16_bits: bool
) -> dict[str, Curve]:
    """Measure the FLOP/s of products by rows of x; reads_16_bits: a host takes weights in 16 bits
    as they rest.
    """

    kinds = {name: (name, name) for name in dtypes}  # of a rate -> dtypes of x and of the weight
    if reads_16_bits:
        kinds["float32"] = "float32", "float16"
        kinds |= {name: ("float32", dtype) for dtype, name in PRODUCT_BY_WEIGHT.items()}
    curves, width = {}, _WIDTH if device.type == "cpu" else _DEVICE_WIDTH
    for name, (dtype, weight_dtype) in kinds.items():
        weight = torch.randn(width, width, device=device, dtype=getattr(torch, weight_dtype))
        weights = [weight, *(weight.clone() for _ in range(_UNCACHED_BYTES // weight.nbytes))]
        points = []
        for rows in _ROWS:
            x = torch.randn(rows, width, device=device, dtype=getattr(torch, dtype))
            used = weights[: 2 if rows > 256 else len(weights)]
            seconds = _best([partial(linear, x, weight, None) for weight in used], 3, device)
            points.append((float(rows), 2.0 * rows * width * width / seconds))
        curves[name] = Curve(tuple(points))
    return curves


def _attention_rates(device: torch.device, kind: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of a prompt's attention, and the bytes of the cache that decoding tokens
    read in a second.
    """
    heads, dim, tokens, group = _HOST_ATTENTION if device.type == "cpu" else _DEVICE_ATTENTION
    prompt = [torch.randn(tokens, heads, dim, device=device, dtype=kind) for _ in range(3)]
    q = torch.randn(group, heads, dim, device=device, dtype=kind)
    pair = 2 * group * heads * tokens * dim * kind.itemsize
    caches = [
        torch.randn(2, group, heads, tokens, dim, device=device, dtype=kind)
        for _ in range(max(1, _UNCACHED_BYTES // pair))
    ]
    attending = _best([prompt_attention(*prompt)], 10, device)
    reading = _best([cache_attention(q, *cache) for cache in caches], 3, device)
    return 4.0 * tokens * tokens * heads * dim / attending, pair / reading


def prompt_attention(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """Return a call of the attention that the engine takes for a prompt; q [T, Hq, D], k and v [T,
    Hk, D].
    """
    scale, tokens = q.shape[-1] ** -0.5, len(q)
    if q.dtype != torch.float32 or not can_attend_caches(q.device, q.dtype):
        return partial(attend_causal, q, (k, v), AttentionConfig(scale))
    table = SegmentTable.of([TokenGroup(0, tokens, [Segment(0, 0, tokens)])], range(tokens))
    by_head = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return partial(attend_segments, q, table.with_addresses([by_head]), ScoreOptions(scale))


def cache_attention(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """Return a call of the attention of decoding tokens over whole caches; q [B, Hq, D], k and v
    [B, Hk, S, D].
    """
    scale, last = q.shape[-1] ** -0.5, k.shape[2] - 1
    if can_attend_caches(k.device, k.dtype):
        groups = [TokenGroup(row, 1, [Segment(0, 0, last + 1, row)]) for row in range(len(q))]
        segments = SegmentTable.of(groups, [last] * len(q)).with_addresses([(k, v)])
        return partial(attend_segments, q.float(), segments, ScoreOptions(scale))
    positions = torch.full((len(q),), last, device=q.device)
    return partial(attend_cached, q, (k, v), AttentionConfig(scale), positions)


def _upcast_rate() -> float:
    """Return the elements a second from 16 bits to float32, in tiles of the size that the engine
    upcasts.
    """
    tile = torch.zeros(1 << 20)
    count = _UNCACHED_BYTES // 2 // tile.numel()
    weights = torch.zeros(count, tile.numel(), dtype=torch.float16)
    return count * tile.numel() / _best([lambda: [tile.copy_(part) for part in weights]], 3)


def _packing_rates(device: torch.device, kind: torch.dtype) -> tuple[float, float]:
    """Return the elements a second from 4 bits (of weights) and to 4 bits (of a prompt's cache)."""

    fmt, cache = PRECISIONS["4bit"].weights, PRECISIONS["4bit"].cache
    assert fmt is not None and cache is not None
    on_device = device.type == "cuda"
    packed = quantize(
        torch.randn(_DEVICE_PACKED if on_device else _HOST_PACKED, device=device), fmt
    )
    copies = [packed, *(packed.clone() for _ in range(3))]  # beyond any cache of a device
    out = torch.empty(_DEVICE_PACKED if on_device else _HOST_PACKED, device=device, dtype=kind)
    unpacking = out.numel() / _best(
        [partial(dequantize_into, data, fmt, out) for data in copies], 3, device
    )
    tokens, heads, dim = _DEVICE_QUANTIZED if on_device else _HOST_QUANTIZED
    codec = QuantizedCodec(cache, heads, dim, kind)
    k, v = (torch.randn(tokens, heads, dim, device=device, dtype=kind) for _ in range(2))
    return unpacking, 2 * k.numel() / _best([partial(codec.encode, k, v)], 3, device)


def _measure_link(device: torch.device) -> Link:
    """Measure the copies between a GPU and the host's memory, pinned and pageable."""
    on_gpu = [torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    pinned = [torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.zeros(_LINK_BYTES, dtype=torch.uint8)

    def rate(target: Tensor, source: Tensor) -> float:
        return _LINK_BYTES / _best([partial(target.copy_, source, non_blocking=True)], 3, device)

    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        with torch.cuda.stream(inward):
            on_gpu[0].copy_(pinned[0], non_blocking=True)
        with torch.cuda.stream(outward):
            pinned[1].copy_(on_gpu[1], non_blocking=True)
        inward.synchronize()
        outward.synchronize()

    to_gpu, to_cpu = rate(on_gpu[0], pinned[0]), rate(pinned[1], on_gpu[1])
    alone = _LINK_BYTES / to_gpu + _LINK_BYTES / to_cpu
    small = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    return Link(
        to_gpu,
        to_cpu,
        rate(on_gpu[0], pageable),
        rate(pageable, on_gpu[1]),
        duplex=min(1.0, max(0.5, alone / 2 / _best([both], 3, device))),
        transfer_s=_best([partial(on_gpu[0][:64].copy_, small, non_blocking=True)], 10, device),
    )


def _measure_disk(folder: Path, device: torch.device) -> tuple[Disk, float]:
    """Measure the disk past the page cache, and the share of reads that overlaps with computing."""
    free = shutil.disk_usage(folder).free
    size = min(_FILE_BYTES, free // 4 // _CHUNK_BYTES * _CHUNK_BYTES)
    if size < 4 * _CHUNK_BYTES:
        raise FlexgenError(
            f"{folder} has {exact_size(free)} free, too little to measure its disk; name another "
            "with --offload-dir"
        )
    buffers = [pages(_CHUNK_BYTES).random_() for _ in range(2 * _TRANSFERS)]
    with tempfile.TemporaryDirectory(prefix="profile-", dir=folder) as scratch:
        paths = [Path(scratch) / name for name in ("read", "write")]
        files = [DirectFile(path, size, create=True) for path in paths]
        try:
            with ThreadPoolExecutor(2 * _TRANSFERS) as threads:
                fill, read, write = (
                    partial(_transfer_file, threads, transfer, size, some)
                    for transfer, some in (
                        (files[0].write, buffers[:_TRANSFERS]),
                        (files[0].read, buffers[:_TRANSFERS]),
                        (files[1].write, buffers[_TRANSFERS:]),
                    )
                )
                fill()
                writing, reading = _best([write], 2), _best([read], 3)
                both = _best([lambda: _run_together(write, read)], 2)
                access = _best([partial(files[0].read, 0, buffers[0][:4096])], 20)
                overlap = _hidden_share(read, reading, device)
        finally:
            for file in files:
                file.close(delete=True)
    duplex = min(1.0, max(0.5, (reading + writing) / 2 / both))
    return Disk(free, size / reading, size / writing, duplex, access), overlap


def _transfer_file(
    threads: ThreadPoolExecutor,
    transfer: Callable[[int, Tensor], None],
    size: int,
    buffers: Sequence[Tensor],
) -> None:
    """Transfer a file of `size` bytes by chunks, as many at once as there are buffers."""

    def some_chunks(number: int) -> None:
        for offset in range(0, size, _CHUNK_BYTES)[number :: len(buffers)]:
            transfer(offset, buffers[number])

    list(threads.map(some_chunks, range(len(buffers))))


def _hidden_share(read: Callable[[], None], reading: float, device: torch.device) -> float:
    """Return the share that overlaps of reading, which takes `reading` seconds, and as much
    computing.
    """
    x = torch.randn(512, _WIDTH, device=device)
    weight = torch.randn(_WIDTH, _WIDTH, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            linear(x, weight, None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = max(1, round(reading / (_best([partial(compute, 4)], 3) / 4)))
    computing = _best([partial(compute, times)], 2)
    joined = _best([lambda: _run_together(partial(compute, times), read)], 2)
    return min(1.0, max(0.0, (computing + reading - joined) / min(computing, reading)))


def _run_together(here: Callable[[], None], in_thread: Callable[[], None]) -> None:
    thread = threading.Thread(target=in_thread)
    thread.start()
    here()
    thread.join()


def _best(calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device = _HOST) -> float:
    """Return the least seconds of one call; the calls take turns, and the first round warms up."""
    best = math.inf
    for number in range(repeats + 1):
        began = time.perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - began)
    return best / len(calls)
