"""Engine: the one way in. Loads a model, answers requests, and says what the run did."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.config import EngineConfig, with_options_of
from flexgen_helm.engine.batch_invariance import require_batch_invariance
from flexgen_helm.engine.device import dtype_name
from flexgen_helm.engine.executor import Executor, ModelStages, Observer
from flexgen_helm.engine.kernel_checks import compare_kernels
from flexgen_helm.engine.opening import OpenedModel, open_model, report_rounding
from flexgen_helm.engine.pipeline import Pipeline, joined_pipeline
from flexgen_helm.engine.placing import place_model
from flexgen_helm.engine.proof import require_proof
from flexgen_helm.engine.run import OnDrawn, OnResult, ResultCollector, Run, finish
from flexgen_helm.engine.run_record import EngineIdentity, add_prediction, run_record
from flexgen_helm.engine.scoring import Score, ScoredPair, score_pairs
from flexgen_helm.errors import FlexgenError, Float16Error, UsageError
from flexgen_helm.hardware.exact_products import exact_products
from flexgen_helm.hardware.freed_memory import (
    ResidentMemory,
    keep_freed_memory,
    return_freed_memory,
)
from flexgen_helm.hardware.threads import ThreadGovernor
from flexgen_helm.offload.transfer_stats import PassReads
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.progress import ModelInUse, PlanLine, Progress, ProgressPhase, report
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.scheduling.lanes import into_lanes
from flexgen_helm.scheduling.prefix_tree import EVERY_BEGINNING, prefix_cost
from flexgen_helm.scheduling.prepare import EncodedRequests, prepare
from flexgen_helm.scheduling.run_size import drawn_workload, run_size

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
        self._pipeline, self.number = pipeline, pipeline.num_engines
        self.name, self.options, self.model_config = model.name, options, checkpoint.config
        self.tokenizer, self.chat = model.tokenizer, model.chat
        self.precision, self.cache_format = model.precision.name, model.precision.cache
        self.last_run: dict[str, Any] = {}
        is_host = device.type == "cpu"
        if not is_host:
            compare_kernels(device, model.dtype, model.precision, self.model_config.head_dim)
        self.prefix_cost = prefix_cost(self.model_config, device.type)
        processors = model.logits_processors()
        threads = ThreadGovernor() if is_host else None
        placed = place_model(model, pipeline.rank)
        self._planner, self.placement = placed.planner, placed.placement
        self._tiers, ledgers = placed.tiers, placed.tiers.ledgers
        self.ledger = ledgers[model.compute_tier]
        resident = ResidentMemory(ledgers["cpu"].limit) if is_host else None
        self._weights = placed.load_weights(model, threads)
        if is_host:
            keep_freed_memory()
        self.fingerprint = model.fingerprint
        report_rounding(model)
        load_s = time.perf_counter() - began
        self.identity = EngineIdentity.of(model, placed.part.experts, is_proved, load_s)
        self._model = ModelStages(
            self.model_config,
            model.decoder_of(placed.part),
            self._weights,
            self._tiers,
            device,
            pipeline,
            model.eos_ids,
            threads,
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
                if len(set(dtypes := pipeline.agree(engine.identity.dtype))) > 1:
                    names = ", ".join(map(dtype_name, dtypes))
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
        self.prefix_cost = EVERY_BEGINNING

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_result: OnResult | None = None,
        should_stop: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
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
        on_drawn: called with index of the request, completion, step and token when one is drawn; a
            run whose requests have these tokens in `drawn` goes on from there.

        One run at a time: a second thread waits.
        """
        answers = ResultCollector(len(requests), on_result, progress, on_drawn)
        return self._run(requests, answers, should_stop or (lambda: False))

    def observe(
        self,
        requests: Sequence[GenerationRequest],
        observer: Observer,
        on_result: OnResult | None = None,
    ) -> list[GenerationResult]:
        """Answer requests as `run` does, while an observer is shown hidden states, and the logits
        of prompt tokens that `echo_logprobs` scores.

        Raises `UsageError` where other processes have a part of the model.
        """
        if not self._pipeline.is_whole:
            raise UsageError(
                "logits stay on the rank that has the head, and the model is on "
                f"{self._pipeline.rank.size} ranks; take one process"
            )
        answers = ResultCollector(len(requests), on_result)
        return self._run(requests, answers, lambda: False, observer)

    def _run(
        self,
        requests: Sequence[GenerationRequest],
        answers: ResultCollector,
        should_stop: Callable[[], bool],
        observer: Observer | None = None,
    ) -> list[GenerationResult]:
        """Answer requests on all ranks, one run at a time."""
        if os.getpid() != self._pid:
            raise FlexgenError(
                f"the engine belongs to process {self._pid}, from which this one was forked "
                "without its threads; open an engine in this process"
            )
        with self._lock:
            if self._closed:
                raise FlexgenError("the engine is closed")
            with exact_products(), self._pipeline.command("run", self.number, tuple(requests)):
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
        should_stop: Callable[[], bool],
        observer: Observer | None,
    ) -> list[GenerationResult]:
        """Prepare and plan the requests, compute them, and record what it took."""
        began = time.perf_counter()
        report(ModelInUse(self.name, self.precision))
        report(ProgressPhase("plan"))
        self._tiers.reset()
        prepared = prepare(
            requests, self.model_config, self.tokenizer, self.options.fixed_schedule, self.chat
        )
        for request in prepared.distinct:
            request.resume(self._model.eos_ids)
        plan = self._plan(prepared)
        lanes, limits = [prepared.distinct], plan.limits
        if not self._pipeline.is_whole:
            lanes, limits = into_lanes(
                prepared.distinct, limits, self._pipeline.rank.size, plan.schedule
            )
        lane_plan = replace(plan, limits=limits)
        answers.began, answers.progress = time.perf_counter(), self._reporter(answers.progress)
        with self._executor(plan, answers, observer) as executor:
            for index, error in prepared.refused.items():
                answers.deliver(index, GenerationResult(error=error))
            finish(
                [Run(executor, lane_plan, lane, answers, self.prefix_cost) for lane in lanes],
                should_stop,
            )
            results = answers.results()
        seconds = time.perf_counter() - began
        self.last_run = run_record(self.identity, plan, executor, answers, seconds)
        self._learn(plan, prepared, executor, answers)
        return results

    def _plan(self, prepared: EncodedRequests) -> RunPlan:
        """Plan the run of distinct requests, within limits that suit all ranks."""
        requests = prepared.distinct
        size = run_size(requests, self.prefix_cost, self._planner.searches, self.cache_format)
        free = {tier: ledger.free for tier, ledger in self._tiers.ledgers.items()}
        plan = self._pipeline.plan(partial(self._planner.plan, size, free))
        report(PlanLine(plan.describe(len(requests), size.prompt_tokens)))
        return plan

    @contextmanager
    def _executor(
        self, plan: RunPlan, answers: ResultCollector, observer: Observer | None
    ) -> Iterator[Executor]:
        """Open the stores of a run, and what computes on them; close all after it, and give its
        threads back.
        """
        model, is_done = self._model, False
        executor = Executor(model, plan, self.cache_format, self.options.cpu_attention, observer)
        if answers.goes_on and plan.schedule.is_single_pass:
            executor.keep_states(self.fingerprint, answers.begin_pass)
        try:
            yield executor
            self._pipeline.flush()
            is_done = True
        except BaseException as error:
            self._pipeline.fail(error)
            raise
        finally:
            executor.close(is_done)
            if model.threads is not None:
                model.threads.release()

    def _learn(
        self,
        plan: RunPlan,
        prepared: EncodedRequests,
        executor: Executor,
        answers: ResultCollector,
    ) -> None:
        """Add the prediction of a run to its record, and correct the machine's rates by it."""
        requests = prepared.distinct
        if not requests or executor.num_resumed:  # else the seconds are of a part of the work
            return
        drawn = drawn_workload(requests, sum(run.saved_tokens for run in answers.runs))
        at_once = sum(run.most_at_once for run in answers.runs)
        pipeline = self._pipeline
        prediction = self._planner.learn(
            plan, drawn, at_once, self.last_run, is_whole=pipeline.is_whole
        )
        if prediction is not None:
            add_prediction(self.last_run, prediction, self._planner.product_flops)

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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _reporter(self, progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        """Return a function that adds what is in memory, and read of the disk, to a run's progress
        and hands it on.
        """
        ledgers = self._tiers.ledgers
        on_disk = sum(self.placement.bytes_on("disk").values())
        reads = PassReads(self._tiers.stats, on_disk, self.placement.staging.num_bytes)

        def with_memory(bare: Progress) -> None:
            in_use: dict[str, int] = {
                tier: ledger.in_use for tier, ledger in ledgers.items() if ledger.in_use
            }
            event = replace(bare, memory_bytes=in_use, **reads.progress(bare.num_passes))
            report(event)
            if progress is not None:
                progress(event)

        return with_memory
