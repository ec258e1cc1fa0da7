"""Engine: the one way in. Loads a model, answers requests, and says what the run did."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.paths import GIVEN_FOLDERS, state_dir
from flexgen_helm.config import EngineConfig, with_options_of
from flexgen_helm.engine.device import (
    dtype_reason,
    gpu_capacity,
    require_room,
    tier_capacities,
)
from flexgen_helm.engine.executor import Executor, ModelStages, Observer
from flexgen_helm.engine.fingerprint import what_decides_bits
from flexgen_helm.engine.kept_states import KeptStates
from flexgen_helm.engine.logits_processors import LogitsProcessors
from flexgen_helm.engine.machine_profile import EngineProfile
from flexgen_helm.engine.opening import OpenedModel, open_model
from flexgen_helm.engine.pipeline import Pipeline, divide_layers, joined_pipeline
from flexgen_helm.engine.proof import compare_kernels, require_batch_invariance, require_proof
from flexgen_helm.engine.run import OnDrawn, OnResult, ResultCollector, Run, finish
from flexgen_helm.engine.run_record import EngineIdentity, add_prediction, run_record
from flexgen_helm.engine.scoring import Score, ScoredPair, score_pairs
from flexgen_helm.errors import FlexgenError, Float16Error, UsageError
from flexgen_helm.files import require_writable
from flexgen_helm.files import size as size_text
from flexgen_helm.hardware.host_memory import ResidentMemory, keep_freed_memory, return_freed_memory
from flexgen_helm.hardware.process_state import exact_products
from flexgen_helm.hardware.threads import ThreadGovernor
from flexgen_helm.kernels.products import compute_dtype
from flexgen_helm.kernels.vector_products import multiplies_as_stored
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.transformers_backend.decoder import decoder_of
from flexgen_helm.offload.activations import ActivationStore
from flexgen_helm.offload.matrices import WeightsAtRest
from flexgen_helm.offload.staging import Ledger
from flexgen_helm.offload.transfer_manager import CudaCopyEngine, TransferManager
from flexgen_helm.offload.transfer_stats import DiskRates, PassReads, RateLimit
from flexgen_helm.offload.weights import TieredWeights
from flexgen_helm.planner.placement import Machine, StorageSizes
from flexgen_helm.planner.planner import Planner
from flexgen_helm.planner.policy import Choices
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.workspace import Workspace
from flexgen_helm.progress import Message, ModelInUse, PlanLine, ProgressPhase, report
from flexgen_helm.request import GenerationRequest, GenerationResult, Progress
from flexgen_helm.scheduling.prefix_tree import PrefixCostModel, prefix_cost
from flexgen_helm.scheduling.prepare import drawn_workload, into_lanes, prepare, run_size
from flexgen_helm.tiers import TIERS, UNLIMITED, Tier

# What to do about values that are not finite where float16 stands in for bfloat16.
_FLOAT16_ADVICE = (
    "float16 took the place of the model's bfloat16, which this GPU has no products for, and was "
    "too small: take --device cpu, or a GPU of compute capability 8.0 or later"
)


_CORRUPT_ADVICE = "the checkpoint may be corrupt: check it with flexgen-helm doctor"


class Engine:
    """A loaded model. Results do not depend on what else is in the run (tolerances:
    docs/explanation/exactness.md).
    """

    def __init__(
        self, model: OpenedModel, pipeline: Pipeline, is_proved: bool | None = None
    ) -> None:
        """Place the weights, and load them.

        pipeline: the ranks that have the model's other layers.
        is_proved: a small model of this kind equals `transformers` here; None where nothing was
            compared.
        """
        began = time.perf_counter()
        checkpoint, options, device = model.checkpoint, model.options, model.device
        generation = model.generation
        self._pipeline, self.number = pipeline, pipeline.num_engines
        self.name, self.config = model.name, checkpoint.config
        self.tokenizer, self.chat = model.tokenizer, model.chat
        self.precision, self.cache_format = model.precision.name, model.precision.cache
        self.last_run: dict[str, Any] = {}
        self._options, self._device = options, device
        self._dtype = model.compute_dtype or compute_dtype(device, checkpoint.storage_dtype)
        if device.type == "cuda":
            compare_kernels(device, self._dtype, model.precision, self.config.head_dim)
        self.prefix_cost = prefix_cost(self.config, device.type)
        eos_ids = model.tokenizer.eos_ids if model.tokenizer else generation.eos_ids
        processors = None
        if generation.applied:
            processors = LogitsProcessors(generation, eos_ids, self.config.vocab_size, device)
        self._threads = ThreadGovernor() if device.type == "cpu" else None
        folder = offload_folder(options)
        at_rest = WeightsAtRest(checkpoint, model.precision, folder)
        capacities = tier_capacities(options.limits, folder, pipeline.rank.local_size)
        if device.type == "cuda":
            converts = model.precision.packs or self._dtype != checkpoint.storage_dtype
            workspace = Workspace(
                self.config, self._dtype.itemsize, "gpu", self.cache_format, converts=converts
            )
            capacities["gpu"] = gpu_capacity(options.limits.gpu, device, workspace)
        resident = ResidentMemory(capacities["cpu"]) if device.type == "cpu" else None

        def with_weights(sizes: Mapping[str, int]) -> dict[Tier, int]:
            """Add the room on the disk that these matrices have already."""
            return {
                **capacities,
                "disk": capacities["disk"] + at_rest.num_bytes(sizes, options.limits.disk is None),
            }

        matrices = StorageSizes(self.config, model.precision).matrices
        if pipeline.is_whole:
            beyond_memory = sum(matrices.values()) - capacities["gpu"] - capacities["cpu"]
            require_room(folder, beyond_memory - at_rest.num_bytes(matrices, True))
        everything = with_weights(matrices)
        self._planner, self._part = self._planner_and_part(model, everything, folder)
        self.placement = self._planner.place(self.name)
        # for the other tiers nothing changes
        limits = with_weights(self.placement.bytes_on("disk"))
        ledgers = {tier: Ledger(tier, limits[tier]) for tier in TIERS}
        disk = None if options.disk_gb_s is None else DiskRates(*map(RateLimit, options.disk_gb_s))
        self._tiers = TransferManager(
            device, model.compute_tier, ledgers, model.link, folder, options.overlap, disk
        )
        if isinstance(model.link, CudaCopyEngine):
            model.link.limit(math.inf if options.limits.gpu is None else options.limits.gpu)
        self.ledger = ledgers[model.compute_tier]
        self._weights = self._load_weights(checkpoint)
        if device.type == "cpu":
            keep_freed_memory()
        self.fingerprint = model.fingerprint(self._dtype)
        if checkpoint.rounded and model.precision.weights is None:
            shares = ", ".join(
                f"{share:.0%} in {dtype}" for dtype, share in checkpoint.rounded.items()
            )
            to = str(checkpoint.storage_dtype).removeprefix("torch.")
            report(
                Message(
                    f"matrices of {self.name} are rounded to {to}: {shares}; transformers in "
                    "float32 keeps them"
                )
            )
        if (expanded := checkpoint.expanded) and model.precision.weights is None:
            costs = (
                f"{size_text(now)} of {kind} take {size_text(more)}"
                for kind, (now, more) in expanded.items()
            )
            report(
                Message(
                    f"matrices of {self.name} do not rest as published, but in 16 bits: "
                    f"{', '.join(costs)}"
                )
            )
        if checkpoint.formats and model.precision.weights is not None:
            report(
                Message(
                    f"weights of {self.name} are quantized; {self.precision} rounds them again, "
                    "fp16 does not"
                )
            )
        self.identity = EngineIdentity(
            self.name,
            checkpoint.origin,
            self.fingerprint,
            self.precision,
            device,
            self._dtype,
            self._dtype if model.precision.weights is not None else checkpoint.storage_dtype,
            model.why_not_float16 or dtype_reason(device, self._dtype, checkpoint),
            model.is_simulated,
            time.perf_counter() - began,
            self._part.experts,
            is_proved,
            dict(checkpoint.rounded),
            {"applied": generation.applied, "ignored": generation.ignored},
            what_decides_bits(options),
        )
        self._model = ModelStages(
            self.config,
            decoder_of(self._part, device, self._dtype),
            self._weights,
            device,
            pipeline,
            eos_ids,
            self._threads,
            resident,
            processors,
            _FLOAT16_ADVICE if checkpoint.as_float16 else _CORRUPT_ADVICE,
        )
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._closed = False

    @classmethod
    @with_options_of(EngineConfig)
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **options: Any) -> "Engine":
        """Load a model.

        Options that are left out are those of the name: its precision suffix, and its entry in the
        file that FLEXGEN_HELM_MODELS names. Raises what `from_config` raises, before anything long
        has begun.

        name_or_path: Catalog name, repository of the hub, folder, or .gguf file.
        """
        given = {name: value for name, value in options.items() if value is not None}
        resolved = resolve(name_or_path, given.get("revision"))
        return cls.from_config(name_or_path, EngineConfig(**{**resolved.options, **given}))

    @classmethod
    def from_config(
        cls, name_or_path: str | os.PathLike[str], config: EngineConfig, *, name: str | None = None
    ) -> "Engine":
        """Load a model under exactly these options.

        name: what the user calls the model; None for its own name.

        Raises `UnknownModelError`, `UnsupportedArchitectureError`, `CheckpointError`,
        `MemoryLimitError` and `UsageError`.
        """
        pipeline = joined_pipeline() or Pipeline()
        engine: Engine | None = None
        with exact_products(), pipeline.command("open", name_or_path, config, name):
            try:  # an error of one rank is raised on all, and none keeps its part
                engine = cls._open(name_or_path, config, name, pipeline)
                if len(set(dtypes := pipeline.agree(engine._dtype))) > 1:
                    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                    raise UsageError(
                        f"the ranks of the pipeline compute in {names}; take devices that compute "
                        "alike"
                    )
                return engine
            except FlexgenError as error:
                if engine is None:
                    pipeline.agree(error)
                else:
                    engine._close()
                raise
            finally:
                pipeline.num_engines += 1

    @classmethod
    def _open(
        cls,
        name_or_path: str | os.PathLike[str],
        config: EngineConfig,
        name: str | None,
        pipeline: Pipeline,
    ) -> "Engine":
        model = open_model(name_or_path, config, name, pipeline.rank)
        is_proved = require_proof(model, cls)
        if config.batch_invariant:
            require_batch_invariance(model, cls)
        try:
            return cls(model, pipeline, is_proved)
        except Float16Error as error:  # found while the weights were read
            return cls(model.in_float32(error, pipeline.rank), pipeline, is_proved)

    def share_every_beginning(self) -> None:
        """Share what prompts have in common however short it is: for comparisons, not for speed."""
        self.prefix_cost = PrefixCostModel(UNLIMITED, 0.0)

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_result: OnResult | None = None,
        should_stop: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
        observer: Observer | None = None,
        on_drawn: OnDrawn | None = None,
    ) -> list[GenerationResult]:
        """Answer requests; return results in the same order. A bad request fails alone, in its
        `error`.

        requests: all requests that can be computed together; a larger block is faster.
        on_result: called with the index and result of each request as soon as it is finished, from
            this thread.
        should_stop: called before every work item; once it returns true, `Interrupted` is raised
            and delivered results stay valid.
        progress: called after every batch, and up to ten times a second between.
        observer: is shown the logits of prompt tokens that `echo_logprobs` scores, and hidden
            states.
        on_drawn: called with index of the request, completion, step and token when one is drawn; a
            run whose requests have these tokens in `drawn` goes on from there.

        Raises `UsageError` for an observer where other processes have a part of the model.
        One run at a time: a second thread waits.
        """
        if os.getpid() != self._pid:
            raise FlexgenError(
                f"the engine belongs to process {self._pid}, from which this one was forked "
                "without its threads; open an engine in this process"
            )
        with self._lock:
            if self._closed:
                raise FlexgenError("the engine is closed")
            if observer is not None and not self._pipeline.is_whole:
                raise UsageError(
                    "logits stay on the rank that has the head, and the model is on "
                    f"{self._pipeline.rank.size} ranks; take one process"
                )
            with exact_products(), self._pipeline.command("run", self.number, tuple(requests)):
                answers = ResultCollector(
                    len(requests), on_result, self._reporter(progress), on_drawn
                )
                return self._answer(requests, answers, should_stop, observer)

    def score(self, pairs: Sequence[ScoredPair], *, truncate: bool = False) -> list[Score]:
        """Return of each (context, continuation) the log-probability of the continuation and
        whether it is greedy.

        pairs: a context is a text, token ids, or messages, which go through the chat template; a
            continuation is a text or token ids. Two texts meet as in lm-evaluation-harness: white
            space that ends the context moves to the continuation, both are encoded as one, and the
            continuation's ids follow as many as the context has alone. An empty context is BOS, or
            EOS where there is no BOS.
        truncate: a pair beyond the window loses its first tokens, as in lm-evaluation-harness;
            otherwise it fails.

        A pair fails alone: its log-probability is then NaN, its `error` says why. All pairs are one
        `run`.
        """
        return score_pairs(self, pairs, truncate)

    def _answer(
        self,
        requests: Sequence[GenerationRequest],
        answers: ResultCollector,
        should_stop: Callable[[], bool] | None,
        observer: Observer | None,
    ) -> list[GenerationResult]:
        """Prepare and plan the requests, compute them, and record what it took."""
        began = time.perf_counter()
        report(ModelInUse(self.name, self.precision))
        report(ProgressPhase("plan"))
        self._tiers.reset()
        schedule = self._options.fixed_schedule or ZIGZAG
        prepared = prepare(requests, self.config, self.tokenizer, schedule, self.chat)
        distinct, pipeline = prepared.distinct, self._pipeline
        for request in distinct:
            request.resume(self._model.eos_ids)
        size = run_size(distinct, self.prefix_cost, self._planner.searches, self.cache_format)
        free: dict[Tier, int] = {tier: ledger.free for tier, ledger in self._tiers.ledgers.items()}
        plan = pipeline.plan(partial(self._planner.plan, size, free))
        report(PlanLine(plan.describe(len(distinct), size.prompt_tokens)))
        lanes, limits = [distinct], plan.limits
        if not pipeline.is_whole:
            lanes, limits = into_lanes(distinct, limits, pipeline.rank.size, plan.schedule)
        answers.began = time.perf_counter()
        with self._stores(plan) as (cache, activations):
            kept = None
            if (
                answers.goes_on
                and observer is None
                and pipeline.is_whole
                and plan.schedule.is_single_pass
            ):
                kept = self._kept_states(answers)
            executor = Executor(self._model, cache, activations, observer, plan.expert_tokens, kept)
            is_done = False
            try:
                for index, error in prepared.refused.items():
                    answers.deliver(index, GenerationResult(error=error))
                lane_plan = replace(plan, limits=limits)
                runs = [Run(executor, lane_plan, lane, answers, self.prefix_cost) for lane in lanes]
                finish(runs, should_stop or (lambda: False))
                results = answers.results()
                pipeline.flush()
                is_done = True
            except BaseException as error:
                pipeline.fail(error)
                raise
            finally:
                if kept is not None:
                    kept.close(is_done)
        seconds = time.perf_counter() - began
        costs = [result.cost for result in results]
        for request in distinct:  # earlier runs have drawn these
            for index in request.indices if request.num_resumed else ():
                drawn = sum(completion.num_drawn for completion in request.completions)
                new = costs[index].output_tokens * (drawn - request.num_resumed) // drawn
                costs[index] = replace(
                    costs[index], output_tokens=new, padded_output_tokens=float(new)
                )
        self.last_run = run_record(self.identity, plan, self._tiers, costs, seconds)
        self.last_run |= {
            "peak_workspace_bytes": executor.peak_workspace_bytes + self._tiers.peak_transfer_bytes,
            "halvings": sum(run.halvings for run in runs),
            "preemptions": sum(run.num_preempted for run in runs),
            "achieved_placement": {
                "weights": dict(plan.weights),
                "cache": _fractions(cache.placed, plan.cache),
                "activations": _fractions(activations.placed, plan.activations),
            },
        }
        self.last_run["workload"]["num_unique"] = len(distinct)
        first = self._part.layers_before
        keys = "hardware", "achieved_placement", "peak_bytes", "limit_bytes", "time_s", "bytes"
        rank = {
            "layers": [first, first + self._part.num_layers],
            **{key: self.last_run[key] for key in keys},
        }
        self.last_run |= pipeline.record(len(runs), rank)
        if distinct and not (kept and kept.num_read):  # else the seconds are of a part of the work
            workload = drawn_workload(distinct, sum(run.saved_tokens for run in runs))
            at_once = sum(run.most_at_once for run in runs)
            prediction = self._planner.learn(
                plan, workload, at_once, self.last_run, is_whole=pipeline.is_whole
            )
            if prediction is not None:
                add_prediction(
                    self.last_run, prediction, self._planner.product_flops, pipeline.rank.size
                )
        return results

    def _kept_states(self, answers: ResultCollector) -> KeptStates | None:
        """Return where the hidden states of a pass go; None if a layer hands more on to the next
        one.
        """
        numbers = [number for number in self.config.cache_layers if number is not None]
        if any(self.config.layer_states) or len(numbers) > len({*numbers}):
            return None
        return KeptStates(
            self._tiers.folder, self.fingerprint, self._tiers.ledgers["disk"], answers.begin_pass
        )

    @contextmanager
    def _stores(self, plan: RunPlan) -> Iterator[tuple[KVCache, ActivationStore]]:
        """Open the cache and the hidden states of a run; close them after it, and give its threads
        back.
        """
        cache = KVCache(
            self._part,
            self._tiers,
            self._dtype,
            plan.cache,
            room=plan.cache_room,
            cpu_attention=self._options.cpu_attention and self._tiers.compute_tier == "gpu",
            cache_format=self.cache_format,
            one_layer=plan.schedule.is_single_pass,
            names_tiers=self._pipeline.is_whole,
        )
        activations = ActivationStore(self._tiers, plan.activations)
        try:
            yield cache, activations
        finally:
            activations.close()
            cache.close()
            if self._threads is not None:
                self._threads.release()

    def close(self) -> None:
        """Give all memory back; harmless when called again."""
        with self._lock:
            if not self._closed:
                with self._pipeline.command("close", self.number):
                    self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._weights.close()
            self._tiers.close()
            for ledger in self._tiers.ledgers.values():
                ledger.check({})
            return_freed_memory()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _planner_and_part(
        self, model: OpenedModel, capacities: Mapping[Tier, int], folder: Path
    ) -> tuple[Planner, ModelConfig]:
        """Return the planner, and the layers of this rank, for which it plans."""
        options, pipeline = model.options, self._pipeline
        profile = EngineProfile(capacities, folder, options, model.link)
        dtype = str(self._dtype).removeprefix("torch.")
        as_stored = None
        if model.compute_tier == "cpu" and multiplies_as_stored(model.checkpoint.storage_dtype):
            as_stored = str(model.checkpoint.storage_dtype).removeprefix("torch.")
        machine = Machine(
            capacities, model.compute_tier, dtype, options.overlap, options.cpu_attention, as_stored
        )
        choices = Choices(options.fixed_policy, options.fixed_schedule, options.max_latency)
        planner = Planner(self.config, model.precision, machine, choices, profile)
        asked = None if pipeline.is_whole else options.pipeline_layers
        ranges = divide_layers(self.config, pipeline.rank.size, asked)
        part = self.config.part(ranges[pipeline.rank.number])
        planner.take_layers(part)
        return planner, part

    def _load_weights(self, checkpoint: Checkpoint) -> TieredWeights:
        """Load the weights into their tiers, which are closed after an error."""
        try:
            weights = TieredWeights(
                checkpoint, self._tiers, self.placement, self._dtype, self._threads
            )
            weights.batch_invariant = self._options.batch_invariant
            return weights
        except BaseException:
            self._tiers.close()
            raise
        finally:
            if self._threads is not None:
                self._threads.release()

    def _reporter(self, progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """Return a function that adds what is in memory, and read of the disk, to a run's progress
        and hands it on.
        """
        ledgers = self._tiers.ledgers
        on_disk = sum(self.placement.bytes_on("disk").values())
        reads = PassReads(self._tiers.stats, on_disk, self.placement.all_staging_bytes)

        def with_memory(bare: Progress) -> None:
            in_use: dict[str, int] = {
                tier: ledger.in_use for tier, ledger in ledgers.items() if ledger.in_use
            }
            event = replace(bare, memory_bytes=in_use, **reads.of(bare.num_passes))
            report(event)
            if progress is not None:
                progress(event)

        return with_memory


def offload_folder(options: EngineConfig) -> Path:
    """Return the folder of the disk tier. Raises `UsageError` for one that was named and cannot be
    written.
    """
    if options.offload_dir is None:
        return state_dir() / "offload"
    folder = GIVEN_FOLDERS["--offload-dir"] = Path(options.offload_dir)
    require_writable(folder, "offload_dir")
    return folder


def _fractions(placed: Mapping[Tier, int], planned: Mapping[Tier, float]) -> Mapping[Tier, float]:
    """Return fractions of bytes by tier; as planned where nothing was placed."""
    total = sum(placed.values())
    return {tier: placed[tier] / total if total else planned[tier] for tier in TIERS}
