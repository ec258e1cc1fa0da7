"""Engine: the one way in. Loads a model, answers requests, and says what the run did."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import psutil
import torch

from flexgen_helm.checkpoint.catalogue import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.source import Checkpoint
from flexgen_helm.core.errors import FlexgenError, MemoryLimitError, UsageError
from flexgen_helm.core.records import GenerationRequest, GenerationResult, MemoryLimits, Progress
from flexgen_helm.exec.executor import Executor
from flexgen_helm.exec.prepare import prepare
from flexgen_helm.exec.run import OnResult, Run
from flexgen_helm.exec.schedule import ScheduleName
from flexgen_helm.exec.scheduler import BlockLimits
from flexgen_helm.hardware.rates import compute_dtype, matmul_flops
from flexgen_helm.models.decoder import Decoder
from flexgen_helm.policy.policy import Policy
from flexgen_helm.report.throughput import throughput, versions
from flexgen_helm.store.kv import KVCache
from flexgen_helm.store.ledger import Ledger
from flexgen_helm.store.weights import ResidentWeights, weight_bytes
from flexgen_helm.text.tokenizer import Tokenizer

# Part of every fingerprint: raised when a change of the code can change a result.
RESULTS_VERSION = 1
# Real tokens of one batch in memory: large enough for the full product rate, small enough to stay near the cache.
BATCH_TOKENS = 1024
# Rows that decode together: a CPU's products are near their full rate with a hundred, a GPU's want more.
MAX_ROWS = {"cpu": 128, "cuda": 512}
# Prompt tokens that join a pass in memory. Decoding goes on between them, which costs a reading of the weights each
# time (some 2 %), and answers arrive, and are safe, all along instead of at the end of a block.
PASS_TOKENS = 4 * BATCH_TOKENS
UNLIMITED = 1 << 62
# Share of a tier that compute copies of the weights may take, so that the KV cache keeps the rest.
COPIES_SHARE = 0.5
# What a machine keeps for everything that is not ours: a share of its memory, and never less than this.
MARGIN_SHARE, MARGIN_BYTES = 0.1, 1 << 30


class Engine:
    """A loaded model. Results do not depend on what else is in the run (see docs/engine.md for the tolerances)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        *,
        name: str,
        device: torch.device,
        limits: MemoryLimits,
        policy: Policy | None,
        schedule: ScheduleName,
    ) -> None:
        self.name = name
        self.spec = checkpoint.spec
        self.tokenizer = tokenizer
        self.precision = "fp16"
        self.last_run: dict[str, Any] = {}
        self._policy = policy
        self._schedule: ScheduleName = schedule
        self._device = device
        self._dtype = compute_dtype(device, checkpoint.rest_dtype)
        tier = "gpu" if device.type == "cuda" else "cpu"
        limit = limits.gpu if tier == "gpu" else limits.cpu
        self.ledger = Ledger(tier, _capacity(device) if limit is None else limit)
        began = time.perf_counter()
        copies = weight_bytes(self.spec, self._dtype.itemsize, self._dtype.itemsize)
        at_rest = weight_bytes(self.spec, checkpoint.rest_dtype.itemsize, self._dtype.itemsize)
        assert self.ledger.limit is not None
        if at_rest > self.ledger.limit:
            raise MemoryLimitError(
                f"the weights of {name} take {at_rest:,} bytes and the {tier} tier is limited to "
                f"{self.ledger.limit:,}; raise --{tier}-memory or choose a smaller model"
            )
        keep_copies = copies <= COPIES_SHARE * self.ledger.limit
        self._weights = ResidentWeights(checkpoint, self.ledger, device, self._dtype, keep_copies)
        self._decoder = Decoder(self.spec, device, self._dtype)
        self._load_s = time.perf_counter() - began
        self.fingerprint = self._identity(checkpoint)
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: str | None = None,
        limits: MemoryLimits = MemoryLimits(),
        policy: Policy | str = "auto",
        schedule: str = "auto",
        offload_dir: str | os.PathLike[str] | None = None,
        device: str = "auto",
        overlap: bool = True,
        cpu_attention: bool = True,
        weights: Literal["pretrained", "dummy"] = "pretrained",
        seed: int = 0,
        kv_dtype: str | None = None,
        link_gb_s: tuple[float, float] | None = None,
        max_latency: float | None = None,
    ) -> "Engine":
        """Load a model by catalogue name, hub name, folder or .gguf file.

        precision: None takes the suffix of the name ('fp16' without one). limits: bytes a tier, None = what the
        machine has, less a margin. weights: 'dummy' draws random ones from `seed`. `overlap`, `cpu_attention` and
        `offload_dir` matter only to models that are offloaded; here everything rests on the compute device.

        Raises `UnknownModelError`, `UnsupportedArchitectureError`, `CheckpointError`, `MemoryLimitError` and
        `UsageError`, each before anything long has begun.
        """
        resolved = resolve(name_or_path, revision)
        wanted = precision or resolved.precision
        if wanted != "fp16":
            raise UsageError(f"precision {wanted!r} is not available in this version; take fp16 (no suffix)")
        if max_latency is not None:
            raise UsageError("max_latency is not available in this version; leave it out")
        if kv_dtype is not None:
            raise UsageError(f"kv_dtype {kv_dtype!r} is not available in this version; leave it out")
        if link_gb_s is not None or device == "sim":
            raise UsageError("the simulated gpu is not available in this version; take --device cpu")
        if schedule not in ("auto", "row", "zigzag"):
            raise UsageError(f"schedule {schedule!r} is not available in this version; take auto, row or zigzag")
        parsed = None if policy == "auto" else Policy.parse(policy) if isinstance(policy, str) else policy
        where = _device(device)
        if parsed is not None and max(parsed.wd, parsed.cd, parsed.hd) > 0:
            raise UsageError("this version keeps everything in memory: the policy's shares must sum to 100 %")
        checkpoint = open_checkpoint(name_or_path, revision=revision, weights=weights, seed=seed)
        tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None
        return cls(
            checkpoint,
            tokenizer,
            name=resolved.name,
            device=where,
            limits=limits,
            policy=parsed,
            schedule="row" if schedule in ("auto", "row") else "zigzag",
        )

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_result: OnResult | None = None,
        should_stop: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[GenerationResult]:
        """Answer requests; results in the order asked. A bad request fails alone, in its `error`.

        on_result(place, result): called as soon as each is finished, from this thread. should_stop: asked often;
        once true, `Interrupted` is raised and what was reported stays valid. One run at a time; others wait.
        """
        with self._lock:
            if self._closed:
                raise FlexgenError("the engine is closed")
            began = time.perf_counter()
            cache = KVCache(self.spec, self.ledger, self._device, self._dtype)
            executor = Executor(self._decoder, self._weights, cache, self._device)
            try:
                prepared = prepare(requests, self.spec, self.tokenizer)
                limits = self._block_limits(cache)
                eos_ids = self.tokenizer.eos_ids if self.tokenizer else frozenset()
                run = Run(self.spec, executor, cache, limits, self._schedule, eos_ids)
                results = run.answer(requests, prepared, on_result, should_stop or _never, progress)
            finally:
                cache.close()
            seconds = time.perf_counter() - began
            self.last_run = self._record(results, len(prepared.running), seconds, executor, limits)
            return results

    def close(self) -> None:
        """Give all memory back; harmless when called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._weights.close()
                self.ledger.check({})

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _identity(self, checkpoint: Checkpoint) -> str:
        parts = (
            RESULTS_VERSION,
            checkpoint.fingerprint,
            self.tokenizer.fingerprint if self.tokenizer else None,
            self.precision,
            self._device.type,
            self._dtype,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _block_limits(self, cache: KVCache) -> BlockLimits:
        """A rule of thumb until a policy search lands: fill what the tier has left, batches of `BATCH_TOKENS`."""
        free = self.ledger.free
        assert free is not None
        tokens = max(0, free) // cache.bytes_per_token
        pass_tokens = PASS_TOKENS if self._schedule == "row" else UNLIMITED
        if self._policy is None:
            return BlockLimits(BATCH_TOKENS, BATCH_TOKENS, MAX_ROWS[self._device.type], tokens, pass_tokens)
        return BlockLimits(UNLIMITED, self._policy.gpu_batch_size, self._policy.block_size, tokens, pass_tokens)

    def _record(
        self, results: Sequence[GenerationResult], unique: int, seconds: float, executor: Executor, limits: BlockLimits
    ) -> dict[str, Any]:
        figures = throughput((result.cost for result in results), seconds)
        rate = matmul_flops(self._device, self._dtype)
        compute_s = figures["prefill_s"] + figures["decode_s"]
        none = {"weights": 0, "cache": 0, "activations": 0}
        links = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
        shares = {tier: 1.0 if tier == self.ledger.tier else 0.0 for tier in ("gpu", "cpu", "disk")}
        return {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "precision": self.precision,
            "policy": {
                "batch_tokens": limits.batch_tokens if self._policy is None else None,
                "gpu_batch_size": limits.batch_rows,
                "max_rows": limits.max_rows,
            },
            "schedule": self._schedule,
            **figures,
            "workload": {"num_requests": len(results), "num_unique": unique, **figures["workload"]},
            "wall_s": {"load": self._load_s, "generate": seconds},
            "bytes": {link: dict(none) for link in links},
            "time_s": {"compute": compute_s, "wait": 0.0, "other": seconds - compute_s},
            "peak_bytes": {tier: self.ledger.peak if tier == self.ledger.tier else 0 for tier in shares},
            "peak_workspace_bytes": executor.peak_workspace_bytes,
            "predicted_latency_s": None,
            "roofline_s": figures["flops"] / rate,
            "achieved_placement": {kind: dict(shares) for kind in ("weights", "cache", "activations")},
            "hardware": {
                "device": str(self._device),
                "compute_dtype": str(self._dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "matmul_flops": rate,
                "memory_bytes": psutil.virtual_memory().total,
            },
            "versions": versions(),
        }


def _never() -> bool:
    return False


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not known; take auto, cpu or cuda[:i]") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported; take auto, cpu or cuda[:i]")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r} was asked for and this machine has no usable GPU; take --device cpu")
    return device


def _capacity(device: torch.device) -> int:
    """Bytes of the device that we may fill, less a margin."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    return max(0, free - max(MARGIN_BYTES, int(MARGIN_SHARE * total)))
