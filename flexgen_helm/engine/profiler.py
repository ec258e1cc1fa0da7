"""Measure this machine: what `flexgen-helm profile` prints and a plan for 'measured' uses.

Rates are those of the engine's own parts (its product, its attention, its files), best of a few, each on operands
that no cache holds. The result is kept below `FLEXGEN_HELM_HOME` until the machine changes. torch is imported only
where something is measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flexgen_helm.checkpoint.paths import state_dir as home_folder
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import replace_text
from flexgen_helm.hardware.host_memory import keep_freed_memory, return_freed_memory
from flexgen_helm.hardware.profile import Curve, Disk, HardwareProfile, Link, Processor, load_profile

if TYPE_CHECKING:
    import torch

_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
_WIDTH = 2048  # of the square weights that products are measured with
_COLD = 96 << 20  # bytes of operands that together exceed a processor's caches
_READ_BYTES, _CHUNK, _READERS = 512 << 20, 16 << 20, 2
_LINK_BYTES = 256 << 20
# Small operations of one batch in one layer, or of one group's attention: norms, views, copies of the cache, and the
# interpreter between them, which takes as long again.
_SMALL_OPERATIONS = 200
_VERSION = 4
# Of the processors' time: where other programs take more while a machine is measured, the result is not kept.
_BUSY_SHARE = 0.25
_WATCHED_S = 0.5


def profile_named(name: str, tell: Callable[[str], None]) -> HardwareProfile:
    """A shipped machine, a file, or 'measured': this machine's, from before where it has not changed."""
    return measured_profile(tell=tell) if name == "measured" else load_profile(name)


def measured_profile(
    *, folder: Path | None = None, fresh: bool = False, tell: Callable[[str], None] | None = None
) -> HardwareProfile:
    """This machine's profile. folder: of the disk tier. fresh: measure again even where nothing has changed.

    What is measured beside other programs that compute is used now and not kept, unless it was asked for (`fresh`):
    with two cores small operations become a hundred times slower, and every later plan would believe it.
    """
    folder = folder or home_folder() / "offload"
    kept = None if fresh else saved_profile(folder)
    if kept is not None:
        return kept
    tell = tell or (lambda text: None)
    tell("measuring this machine; other programs should rest for half a minute")
    before = busy_share()
    profile = measure(folder)
    share = max(before, busy_share())
    if share > _BUSY_SHARE:
        fate = "kept as you asked" if fresh else "used now and not kept"
        tell(
            f"other programs take {share:.0%} of the processors, so these rates are too low; they are {fate}: "
            "run `flexgen-helm profile` when the machine rests"
        )
    if fresh or share <= _BUSY_SHARE:
        save_profile(profile, folder)
    return profile


def busy_share() -> float:
    """Share of all processors' time that other programs take, watched for half a second."""
    process = psutil.Process()

    def own() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    began, before = time.perf_counter(), own()
    whole = psutil.cpu_percent(interval=_WATCHED_S) / 100
    mine = (own() - before) / (time.perf_counter() - began) / (psutil.cpu_count() or 1)
    return max(0.0, whole - mine)


def saved_profile(folder: Path) -> HardwareProfile | None:
    """What was measured before; None where nothing was, or the machine is another one now."""
    kept = home_folder() / "profile.json"
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found.get("identity") == machine_identity(folder):
            return HardwareProfile.from_json(found["profile"], str(kept))
    except (OSError, ValueError, KeyError, UsageError):
        pass  # of another version, or damaged
    return None


def save_profile(profile: HardwareProfile, folder: Path) -> None:
    """Store it as this machine's."""
    kept = home_folder() / "profile.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    replace_text(kept, json.dumps({"identity": machine_identity(folder), "profile": profile.to_json()}, indent=2))


def machine_identity(folder: Path) -> dict[str, Any]:
    """What a profile depends on: where one of these differs, it is measured anew."""
    from importlib.metadata import version

    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    processor = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "version": _VERSION,
        "processor": processor,
        "cores": psutil.cpu_count(logical=True),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_bytes": psutil.virtual_memory().total,
        "device": os.stat(existing).st_dev,
        "gpu": [
            line for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")) for line in _lines(path)
        ],
        "torch": version("torch"),
    }


def measure(folder: Path) -> HardwareProfile:
    """Everything anew; writes and deletes half a gigabyte in `folder`."""
    import torch

    memory = psutil.virtual_memory()
    keep_freed_memory()  # as an engine does: else every product's result is memory that is touched for the first time
    with torch.no_grad():
        cpu = _processor(torch.device("cpu"), memory.available, ("float32",))
        gpu = link = None
        if torch.cuda.is_available():
            device = torch.device("cuda")
            free, _ = torch.cuda.mem_get_info(device)
            gpu = _processor(device, free, ("float16", "bfloat16", "float32"))
            link = _link(device)
        folder.mkdir(parents=True, exist_ok=True)
        disk, overlap = _disk(folder, torch.device("cuda" if gpu else "cpu"))
    return_freed_memory()
    return HardwareProfile(
        "measured", cpu, disk, gpu, link, overlap, sources={"everything": "measured by flexgen-helm profile"}
    )


def _processor(device: torch.device, memory_bytes: int, dtypes: Sequence[str]) -> Processor:
    import torch

    from flexgen_helm.hardware.rates import linear
    from flexgen_helm.models.attention import AttentionConfig, attend_cached, attend_causal

    def best(calls: Sequence[Callable[[], Any]], repeats: int = 3) -> float:
        return _best(calls, repeats, device)

    curves = {}
    for name in dtypes:
        dtype: torch.dtype = getattr(torch, name)
        copies = max(1, _COLD // (_WIDTH * _WIDTH * dtype.itemsize))
        weights = [torch.randn(_WIDTH, _WIDTH, device=device, dtype=dtype) for _ in range(copies)]
        points = []
        for rows in _ROWS:
            x = torch.randn(rows, _WIDTH, device=device, dtype=dtype)
            seconds = best([_bind(linear, x, weight, None) for weight in weights[: 2 if rows > 256 else copies]])
            points.append((float(rows), 2.0 * rows * _WIDTH * _WIDTH / seconds))
        curves[name] = Curve(tuple(points))
    kind: torch.dtype = torch.float32 if device.type == "cpu" else torch.float16
    heads, dim, tokens, group = 16, 64, 256, 32
    scoring = AttentionConfig(scale=dim**-0.5)
    prompt = [torch.randn(tokens, heads, dim, device=device, dtype=kind) for _ in range(3)]
    attention = 4.0 * tokens * tokens * heads * dim / best([_bind(attend_causal, *prompt, scoring)], 10)
    q = torch.randn(group, heads, dim, device=device, dtype=kind)
    last = torch.full((group,), tokens - 1, device=device)
    pair = 2 * group * heads * tokens * dim * kind.itemsize
    caches = [
        torch.randn(2, group, heads, tokens, dim, device=device, dtype=kind) for _ in range(max(1, _COLD // pair))
    ]
    reading = pair / best([_bind(attend_cached, q, pair_[0], pair_[1], scoring, last, None) for pair_ in caches])
    source = torch.zeros(_COLD, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copying = 2.0 * _COLD / best([_bind(target.copy_, source)])
    small = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(_SMALL_OPERATIONS):
            small.add(1.0)

    unpacking, packing = _packing_rates(best, device, kind)
    return Processor(
        memory_bytes=memory_bytes,
        memory_bytes_s=copying,
        matmul_flops=curves,
        attention_flops=attention,
        attention_bytes_s=reading,
        upcast_elements_s=_upcast_rate(best) if device.type == "cpu" else math.inf,
        dequantize_elements_s=unpacking,
        quantize_elements_s=packing,
        step_s=best([many], 10),
    )


def _upcast_rate(best: Callable[[Sequence[Callable[[], Any]]], float]) -> float:
    """Elements a second from 16 bits to float32, by tiles of what the engine upcasts at once."""
    import torch

    tile = torch.zeros(1 << 20)
    count = _COLD // 2 // tile.numel()
    weights = torch.zeros(count, tile.numel(), dtype=torch.float16)
    return count * tile.numel() / best([lambda: [tile.copy_(part) for part in weights]])


def _packing_rates(
    best: Callable[[Sequence[Callable[[], Any]]], float], device: torch.device, kind: torch.dtype
) -> tuple[float, float]:
    """Elements a second from 4 bits to the compute type, by a tile of weights; and to 4 bits, by tokens of a cache."""
    import torch

    from flexgen_helm.kv_cache.codec import QuantizedCodec
    from flexgen_helm.quant.kernels import dequantize_into
    from flexgen_helm.quant.packing import quantize
    from flexgen_helm.quant.precisions import PRECISIONS

    fmt, cache = PRECISIONS["4bit"].weights, PRECISIONS["4bit"].cache
    assert fmt is not None and cache is not None
    tile = torch.randn(512, _WIDTH, device=device)
    copies = [quantize(tile, fmt) for _ in range(4)]
    out = tile.to(kind)
    unpacking = tile.numel() / best([_bind(dequantize_into, packed, fmt, out) for packed in copies])
    heads, dim = 8, 64
    codec = QuantizedCodec(cache, heads, dim, kind)
    k, v = (torch.randn(4 * codec.group_tokens, heads, dim, device=device, dtype=kind) for _ in range(2))
    return unpacking, 2 * k.numel() / best([_bind(codec.encode, k, v)])


def _link(device: torch.device) -> Link:
    import torch

    near = [torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    locked = [torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.zeros(_LINK_BYTES, dtype=torch.uint8)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        return _LINK_BYTES / _best([_bind(target.copy_, source, non_blocking=True)], 3, device)

    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        with torch.cuda.stream(inward):
            near[0].copy_(locked[0], non_blocking=True)
        with torch.cuda.stream(outward):
            locked[1].copy_(near[1], non_blocking=True)
        inward.synchronize()
        outward.synchronize()

    to_gpu, to_cpu = rate(near[0], locked[0]), rate(locked[1], near[1])
    alone = _LINK_BYTES / to_gpu + _LINK_BYTES / to_cpu
    small = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    return Link(
        to_gpu,
        to_cpu,
        rate(near[0], pageable),
        rate(pageable, near[1]),
        duplex=min(1.0, max(0.5, alone / 2 / _best([both], 3, device))),
        transfer_s=_best([_bind(near[0][:64].copy_, small, non_blocking=True)], 10, device),
    )


def _disk(folder: Path, device: torch.device) -> tuple[Disk, float]:
    """The disk past the page cache, and the share of computing that reading hides behind."""
    import torch

    from flexgen_helm.hardware.rates import linear
    from flexgen_helm.offload.disk import DirectFile
    from flexgen_helm.offload.staging import pages

    free = shutil.disk_usage(folder).free
    size = min(_READ_BYTES, free // 4 // _CHUNK * _CHUNK)
    if size < 4 * _CHUNK:
        raise FlexgenError(
            f"{folder} has {free:,} bytes free, too few to measure its disk; name another with --offload-dir"
        )
    buffers = [pages(_CHUNK) for _ in range(2 * _READERS)]
    for buffer in buffers:
        buffer.random_()
    offsets = range(0, size, _CHUNK)
    with tempfile.TemporaryDirectory(prefix="profile-", dir=folder) as scratch:
        paths = [Path(scratch) / name for name in ("read", "write")]
        files = [DirectFile(path, size, create=True) for path in paths]
        try:
            with ThreadPoolExecutor(2 * _READERS) as threads:

                def each(transfer: Callable[[int, torch.Tensor], None], first: int) -> Callable[[], None]:
                    def part(number: int) -> None:
                        for offset in offsets[number::_READERS]:
                            transfer(offset, buffers[first + number])

                    def whole() -> None:
                        list(threads.map(part, range(_READERS)))

                    return whole

                fill, put = each(files[0].write, 0), each(files[1].write, _READERS)
                read = each(files[0].read, 0)
                fill()
                writing = _best([put], 2)
                reading = _best([read], 3)
                both = _best([lambda: _together(put, read)], 2)
                access = _best([_bind(files[0].read, 0, buffers[0][:4096])], 20)
                x, weight = torch.randn(512, _WIDTH, device=device), torch.randn(_WIDTH, _WIDTH, device=device)

                def compute(times: int) -> None:
                    for _ in range(times):
                        linear(x, weight, None)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)

                one = _best([_bind(compute, 4)], 3) / 4
                times = max(1, round(reading / one))
                computing = _best([_bind(compute, times)], 2)
                joined = _best([lambda: _together(_bind(compute, times), read)], 2)
        finally:
            for file in files:
                file.close(delete=True)
    hidden = (computing + reading - joined) / min(computing, reading)
    return (
        Disk(
            bytes=free,
            read_bytes_s=size / reading,
            write_bytes_s=size / writing,
            duplex=min(1.0, max(0.5, (reading + writing) / 2 / both)),
            access_s=access,
        ),
        min(1.0, max(0.0, hidden)),
    )


def _together(one: Callable[[], None], other: Callable[[], None]) -> None:
    thread = threading.Thread(target=other)
    thread.start()
    one()
    thread.join()


def _best(calls: Sequence[Callable[[], Any]], repeats: int, device: torch.device | None = None) -> float:
    """Least seconds of one call; the calls take turns, and the first round only warms up."""
    import torch

    wait = torch.cuda.synchronize if device is not None and device.type == "cuda" else None
    best = math.inf
    for number in range(repeats + 1):
        began = time.perf_counter()
        for call in calls:
            call()
        if wait is not None:
            wait()
        if number:
            best = min(best, time.perf_counter() - began)
    return best / len(calls)


def _bind(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **named)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
