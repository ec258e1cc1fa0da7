"""Engine: the one way in. Loads a model, answers requests, and says what the run did."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.paths import state_dir as home_folder
from flexgen_helm.engine.auto_planner import AutoPlanner
from flexgen_helm.engine.device import open_device, tier_capacities
from flexgen_helm.engine.executor import Executor
from flexgen_helm.engine.run import OnResult, Run
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.hardware.host_memory import keep_freed_memory, return_freed_memory
from flexgen_helm.hardware.rates import compute_dtype, matmul_flops
from flexgen_helm.identity import text_of
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.decoder import Decoder
from flexgen_helm.offload.activations import ActivationStore
from flexgen_helm.offload.copy_engine import CopyEngine, SimulatedCopyEngine
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.offload.weights import TieredWeights
from flexgen_helm.planner import workload as planner_workload
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.constants import UNLIMITED
from flexgen_helm.planner.memory import RunSize, SchedulerLimits, activation_fractions, plan_memory, scheduler_limits
from flexgen_helm.planner.placement import TIERS, StorageSizes, Tier, achieved_fractions, tier_fractions
from flexgen_helm.planner.plan import precision_named
from flexgen_helm.planner.policy import Policy, Schedule, parse_choices
from flexgen_helm.quant.precisions import FP16, CacheFormat, Precision
from flexgen_helm.report.throughput import throughput, versions
from flexgen_helm.request import GenerationRequest, GenerationResult, MemoryLimits, Progress
from flexgen_helm.scheduling.prefix_tree import PrefixCostModel, prefixes_of
from flexgen_helm.scheduling.prepare import PreparedRequests, prepare, shared_prefixes
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Seconds that a batch takes in one layer for one more segment of keys, beside the work itself: a few small operations.
_SEGMENT_S = 1e-4
# What a token takes beside, for each element of its queries: some passes over them and over the outputs that merge, in
# operations of products that take as long (7 % of computing the token for SmolLM2-135M on two cores, 1 % for 7B).
_SEGMENT_FLOPS = 900.0
# A run that was not planned is worth measuring the machine for its prediction from this on; measuring takes half of it.
_WORTH_MEASURING_S = 60.0
# Not measured: what is shared, and with it the last bits of a result, must not change between two processes.
_USUAL_FLOPS = {"cpu": 2e11, "cuda": 1e14}
# Part of every fingerprint: raised when a change of the code can change a result.
RESULTS_VERSION = 4


class Engine:
    """A loaded model. Results do not depend on what else is in the run (see docs/engine.md for the tolerances)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        *,
        name: str,
        device: torch.device,
        link: CopyEngine | None,
        limits: MemoryLimits,
        policy: Policy | None,
        schedule: Schedule | None,
        folder: Path,
        overlap: bool,
        cpu_attention: bool,
        max_latency: float | None = None,
        precision: Precision = FP16,
    ) -> None:
        self.name = name
        self.config = checkpoint.config
        self.tokenizer = tokenizer
        self.precision, self._cache_form = precision.name, precision.cache
        self.last_run: dict[str, Any] = {}
        self._policy = policy
        self._cpu_attention = cpu_attention
        self._device, self._simulated = device, link is not None and device.type == "cpu"
        self._dtype = compute_dtype(device, checkpoint.storage_dtype)
        home: Tier = "cpu" if link is None else "gpu"
        sizes = tier_capacities(limits, device, folder, self._simulated)
        ledgers = {tier: Ledger(tier, sizes[tier]) for tier in TIERS}
        self._tiers = Tiers(device, home, ledgers, link, folder, overlap)
        self.ledger = ledgers[home]
        began = time.perf_counter()
        rest = StorageSizes(self.config, precision)
        self._matrices = rest.matrices
        self._plan = plan_memory(rest, sizes, home, self._dtype.itemsize, policy)
        self._planner = AutoPlanner(
            self.config,
            sizes,
            folder,
            device="cpu" if link is None else "sim" if self._simulated else "cuda",
            rest_dtype=str(checkpoint.storage_dtype).removeprefix("torch."),
            link_gb_s=link.gb_s if isinstance(link, SimulatedCopyEngine) else None,
            overlap=overlap,
            cpu_attention=cpu_attention,
            schedule=schedule,
            max_latency=max_latency,
            precision=precision,
        )
        # Weights that do not all rest beside the computing are placed by the search, as far as it finds a way.
        self._searched = policy is None and (self._plan.streams_weights or max_latency is not None)
        if self._searched and (found := self._planner.weights()) is not None:
            self._plan = plan_memory(rest, sizes, home, self._dtype.itemsize, found)
        self._schedule: Schedule = schedule or ("zigzag" if self._plan.streams_weights else "row")
        self._wanted_schedule = schedule
        try:
            self._weights = TieredWeights(
                checkpoint,
                self._tiers,
                self._plan.weights,
                self._dtype,
                compute_copies=self._plan.compute_copies,
                staging_bytes=self._plan.staging_bytes,
                overlap=overlap,
                precision=precision,
            )
        except BaseException:
            self._tiers.close()
            raise
        self._decoder = Decoder(self.config, device, self._dtype)
        if device.type == "cpu":
            keep_freed_memory()
        self._load_s = time.perf_counter() - began
        self._origin = checkpoint.origin
        self.fingerprint = self._identity(checkpoint, precision)
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: str | Precision | None = None,
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

        precision: None takes the suffix of the name ('fp16' without one); formats of your own are a `Precision`
        (`quant.precisions`). limits: bytes a tier, None = what the
        machine has, less a margin. policy: fractions and block shape, or 'auto' (see docs/planning.md). schedule:
        'row', 'zigzag', 'diagonal', 'prefill-only', or 'auto': zigzag or prefill-only where weights are streamed, else
        row. max_latency: seconds that a block may take, for the search.
        offload_dir: of the disk tier. device: 'auto', 'cpu', 'cuda[:i]', or 'sim', a gpu in host memory whose size
        `limits.gpu` gives, behind a link of `link_gb_s` (in, out) GB/s. overlap: transfers go on while computing does.
        cpu_attention: decoding attends to a cache in host memory there. weights: 'dummy' draws random ones from
        `seed`.

        Raises `UnknownModelError`, `UnsupportedArchitectureError`, `CheckpointError`, `MemoryLimitError` and
        `UsageError`, each before anything long has begun.
        """
        resolved = resolve(name_or_path, revision)
        wanted = precision or resolved.precision
        used = precision_named(wanted) if isinstance(wanted, str) else wanted
        if used.tables is not None:
            raise UsageError("tables and head are not computed packed; take a precision whose tables is None")
        given, order = parse_choices(policy, schedule, max_latency)
        if kv_dtype is not None:
            raise UsageError(f"kv_dtype {kv_dtype!r} is not available in this version; leave it out")
        where, link = open_device(device, link_gb_s, limits)
        checkpoint = open_checkpoint(name_or_path, revision=revision, weights=weights, seed=seed)
        tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None
        return cls(
            checkpoint,
            tokenizer,
            name=resolved.name,
            device=where,
            link=link,
            limits=limits,
            policy=given,
            schedule=order,
            folder=Path(offload_dir) if offload_dir is not None else home_folder() / "offload",
            overlap=overlap,
            cpu_attention=cpu_attention,
            max_latency=max_latency,
            precision=used,
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
            self._tiers.reset()
            delegate = self._cpu_attention and self._tiers.compute_tier == "gpu"
            # Judged by what was asked for: the schedule of the last plan may have suited other requests.
            prepared = prepare(requests, self.config, self.tokenizer, self._wanted_schedule or "zigzag")
            rules = self._prefix_rules()
            # Only a search needs to know beforehand what will be shared; the run itself plans that with its own room.
            asked = _asked(prepared, rules, self._searched, self._cache_form)
            self._plan_block(asked)
            one_layer = self._schedule == "prefill-only"
            cache = KVCache(
                self.config,
                self._tiers,
                self._dtype,
                self._plan.cache,
                cpu_attention=delegate,
                cache_format=self._cache_form,
                one_layer=one_layer,
            )
            limits, waiting = self._block(cache, prepared)
            hidden = ActivationStore(self._tiers, waiting)
            executor = Executor(self._decoder, self._weights, cache, hidden, self._device)
            try:
                eos_ids = self.tokenizer.eos_ids if self.tokenizer else frozenset()
                run = Run(self.config, executor, cache, limits, self._schedule, eos_ids, rules)
                results = run.answer(requests, prepared, on_result, should_stop or _never, progress)
            finally:
                hidden.close()
                cache.close()
            seconds = time.perf_counter() - began
            placed = {
                "weights": achieved_fractions(self._matrices, self._plan.weights),
                "cache": _shares(cache.placed, self._plan.cache),
                "activations": _shares(hidden.placed, waiting),
            }
            self.last_run = self._record(
                results, len(prepared.distinct), seconds, executor, limits, placed, run.halvings
            )
            if asked is not None:
                self._compare(replace(asked, saved_tokens=run.saved_tokens), limits)
            return results

    def close(self) -> None:
        """Give all memory back; harmless when called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._weights.close()
                self._tiers.close()
                for ledger in self._tiers.ledgers.values():
                    ledger.check({})
                return_freed_memory()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _plan_block(self, asked: planner_workload.Workload | None) -> None:
        """For `auto`: block, cache and hidden states for what is asked for, with the weights as they lie."""
        if not self._searched or asked is None:
            return
        lie = achieved_fractions(self._matrices, self._plan.weights)
        found = self._planner.block(asked, Policy(1, 1, wg=lie["gpu"], wc=lie["cpu"]))
        if found is None:  # the rule of thumb for what is left
            self._policy, self._schedule = None, self._wanted_schedule or "zigzag"
            return
        has_gpu = self._tiers.compute_tier == "gpu"
        cache, hidden = (tier_fractions(found.policy, kind, has_gpu) for kind in ("cache", "activations"))
        self._plan = replace(self._plan, cache=cache, activations=hidden)
        self._policy, self._schedule = found.policy, found.schedule

    def _compare(self, asked: planner_workload.Workload, limits: SchedulerLimits) -> None:
        """Put what was predicted beside what was measured, and learn from the difference."""
        policy = self._policy
        if policy is None:
            rows = min(limits.batch_sequences, limits.max_sequences, asked.num_sequences)
            near = {"gpu": (1.0, 0.0), "cpu": (0.0, 1.0)}
            lie = achieved_fractions(self._matrices, self._plan.weights)
            wg, wc = min(1.0, lie["gpu"]), min(1.0 - min(1.0, lie["gpu"]), lie["cpu"])
            cg, cc = near["cpu"] if self._plan.cache["cpu"] else near["gpu"]
            hg, hc = near[self._tiers.compute_tier]
            policy = Policy(
                rows, max(1, min(limits.max_sequences, asked.num_sequences) // rows), wg, wc, cg, cc, hg, hc
            )
        worth = self._searched or self.last_run["latency_s"] > _WORTH_MEASURING_S
        prediction = self._planner.predict(asked, policy, self._schedule, measure=worth)
        if prediction is None:
            return
        self.last_run["predicted_latency_s"] = prediction.latency_s
        self.last_run["predicted"] = {
            "prefill_s": prediction.prefill_s,
            "decode_s": prediction.decode_s,
            "latency_s": prediction.latency_s,
            "seconds": {phase: dict(spent) for phase, spent in prediction.seconds.items()},
        }
        self._planner.learn(prediction, self.last_run)

    def _prefix_rules(self) -> PrefixCostModel:
        """What sharing costs in tokens, in all layers; room is left open."""
        layers = self.config.num_layers / self.config.linear_flops_per_token
        batch, token = _SEGMENT_S * _USUAL_FLOPS[self._device.type], _SEGMENT_FLOPS * self.config.q_size
        return PrefixCostModel(UNLIMITED, overhead=batch * layers, token_overhead=token * layers)

    def _identity(self, checkpoint: Checkpoint, precision: Precision) -> str:
        return engine_fingerprint(
            checkpoint.fingerprint,
            self.tokenizer.fingerprint if self.tokenizer else None,
            precision,
            self._device.type,
            self._dtype,
        )

    def _block(self, cache: KVCache, prepared: PreparedRequests) -> tuple[SchedulerLimits, Mapping[Tier, float]]:
        """Limits of a pass, and where hidden states wait."""
        workload = RunSize(
            max((running.num_fed for running in prepared.distinct), default=1),
            sum(max(len(running.tokens), running.num_completions) for running in prepared.distinct),
        )
        free = {tier: ledger.free or 0 for tier, ledger in self._tiers.ledgers.items()}
        hidden_bytes, home = self.config.hidden_size * self._dtype.itemsize, self._tiers.compute_tier
        sizes = cache_sizes(
            self.config,
            self._cache_form,
            self._dtype.itemsize,
            on_disk=self._plan.cache["disk"] > 0,
            host_attention=self._cpu_attention and home == "gpu",
            one_layer=cache.one_layer,
        )
        limits = scheduler_limits(
            self._plan,
            self._policy,
            self._schedule,
            workload,
            free,
            home,
            sizes,
            hidden_bytes,
        )
        return limits, activation_fractions(self._plan, self._schedule, workload, free, home, hidden_bytes)

    def _record(
        self,
        results: Sequence[GenerationResult],
        unique: int,
        seconds: float,
        executor: Executor,
        limits: SchedulerLimits,
        placed: Mapping[str, Mapping[Tier, float]],
        halvings: int,
    ) -> dict[str, Any]:
        figures = throughput((result.cost for result in results), seconds)
        rate = matmul_flops(self._device, self._dtype)
        spent = self._tiers.stats.seconds()
        waited = sum(found for what, found in spent.items() if what.startswith("wait_"))
        batches_s = figures["prefill_s"] + figures["decode_s"]
        return {
            "model": self.name,
            "origin": self._origin,
            "fingerprint": self.fingerprint,
            "precision": self.precision,
            "policy": {
                "batch_tokens": limits.batch_tokens if self._policy is None else None,
                "gpu_batch_size": limits.batch_sequences,
                "max_rows": limits.max_sequences,
                **({} if self._policy is None else asdict(self._policy)),
            },
            "schedule": self._schedule,
            **figures,
            "workload": {"num_requests": len(results), "num_unique": unique, **figures["workload"]},
            "wall_s": {"load": self._load_s, "generate": seconds},
            "bytes": self._tiers.stats.bytes(),
            "time_s": {
                "compute": batches_s - waited,
                "wait": waited,
                "other": max(0.0, seconds - batches_s),
                **spent,
            },
            "peak_bytes": {tier: ledger.peak for tier, ledger in self._tiers.ledgers.items()},
            "peak_workspace_bytes": executor.peak_workspace_bytes + self._tiers.peak_transfer_bytes,
            "halvings": halvings,
            "predicted_latency_s": None,
            "roofline_s": figures["flops"] / rate,
            "achieved_placement": {kind: dict(shares) for kind, shares in placed.items()},
            "hardware": {
                "device": "sim" if self._simulated else str(self._device),
                "compute_dtype": str(self._dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "matmul_flops": rate,
                "memory_bytes": psutil.virtual_memory().total,
            },
            "versions": versions(),
        }


def engine_fingerprint(
    weights: str, tokenizer: str | None, precision: Precision, device_type: str, dtype: torch.dtype
) -> str:
    """The digest by which answers are cached: of everything that a result depends on beside the request."""
    known = text_of((RESULTS_VERSION, weights, tokenizer, precision.label, device_type))
    # The type stands without quotes, as torch prints it.
    return hashlib.sha256(f"{known[:-1]}, {dtype})".encode()).hexdigest()


def _asked(
    prepared: PreparedRequests, rules: PrefixCostModel, shares: bool, fmt: CacheFormat | None
) -> planner_workload.Workload | None:
    """The lengths of all distinct requests' rows, and what they share, if that is wanted; None where there is none."""
    lengths = [
        (max(1, len(running.tokens)), max(1, running.request.max_tokens))
        for running in prepared.distinct
        for _ in range(max(1, running.num_completions))
    ]
    if not lengths:
        return None
    group = 1 if fmt is None else fmt.prefix_multiple
    saved = 0
    if shares and group is not None:
        forest = shared_prefixes(prepared.distinct, replace(rules, group_tokens=group), by_completion=fmt is not None)
        saved = sum(prefix.saved for prefix in prefixes_of(forest))
    for running in prepared.distinct:
        if fmt is None or running.request.max_tokens <= 1:  # its continuations share the whole prompt
            saved += (max(1, running.num_completions) - 1) * len(running.tokens)
    return planner_workload.Workload.of(lengths, saved)


def _never() -> bool:
    return False


def _shares(placed: Mapping[Tier, int], planned: Mapping[Tier, float]) -> Mapping[Tier, float]:
    """Fractions of bytes by tier; as planned where nothing was placed."""
    total = sum(placed.values())
    return {tier: placed[tier] / total if total else planned[tier] for tier in TIERS}
