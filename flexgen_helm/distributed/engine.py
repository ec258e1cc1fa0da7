"""An engine whose work is done by workers: what the plugin's service sees is an `Engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexgen_helm import __version__
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.distributed.cluster import WorkerEvent, Workers
from flexgen_helm.distributed.dispatcher import Dispatcher, explain_failures
from flexgen_helm.distributed.messages import Failure, ModelToLoad, Order, Report, WorkerIdentity
from flexgen_helm.distributed.records import RunTotals, WorkerRecord
from flexgen_helm.distributed.worker import REPORT_EVERY_S
from flexgen_helm.engine.fingerprint import engine_fingerprint
from flexgen_helm.engine.results import OnResult
from flexgen_helm.errors import Interrupted, UsageError, WorkerError
from flexgen_helm.progress import Message, ModelInUse, PlanLine, ProgressPhase, report
from flexgen_helm.request import GenerationRequest, GenerationResult, Progress
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Seconds that the driver waits at most for a report before it looks at everything else.
_POLL_S = 0.2
# Seconds without any worker after which the user is told what is missing.
_TELL_AFTER_S = 30.0
# Workers that are reported one by one as they come; of more, only that all are there.
_TOLD_WORKERS = 4
# Seconds for workers to stop what nobody wants any more.
_STOP_S = 5.0


class ClusterEngine:
    """Workers that have loaded one model, used as `Engine` is: `run` answers requests.

    fingerprint: of the workers' engines; all have the same.
    last_run: as `Engine.last_run`, and `workers`: a record of each.
    """

    def __init__(self, model: ModelToLoad, workers: Workers) -> None:
        """Wait until one worker is ready; others join when they are. Raises `FlexgenError` if all fail."""
        self.last_run: dict[str, Any] = {}
        self._model, self._workers = model, workers
        self._began = time.monotonic()
        self._records: dict[str, WorkerRecord] = {}  # of those that have been ready
        self._ready: set[str] = set()
        self._failures: dict[str, Failure] = {}
        self._told = False
        config = model.config
        report(ModelInUse(model.name, config.chosen_precision.name))
        report(ProgressPhase("load"))
        try:
            checkpoint = open_checkpoint(resolve(model.path, config.revision), weights=config.weights, seed=config.seed)
            self._checkpoint = checkpoint
            self._tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None
            self.fingerprint = ""
            while not self._ready:
                for event in workers.poll(_POLL_S):
                    self._on_event(event, None)
                self._require_hope()
        except BaseException:
            workers.close()
            raise
        self._load_s = time.monotonic() - self._began

    def close(self) -> None:
        self._workers.close()

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_result: OnResult | None = None,
        should_stop: Callable[[], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[GenerationResult]:
        """Answer requests, as `Engine.run` does.

        Raises `WorkerError` when all that can be answered is, if the rest failed on several workers.
        """
        run = _Run(self, requests, on_result, progress)
        try:
            while not run.dispatcher.is_done:
                if should_stop is not None and should_stop():
                    raise Interrupted("interrupted; what the workers have finished is kept")
                run.step()
                self._require_hope()
        finally:
            run.stop()
        self.last_run = run.totals.as_json(self._load_s, run.results)
        if run.dispatcher.failures:
            why = explain_failures(run.dispatcher.failures.values())
            raise WorkerError(
                f"{len(run.dispatcher.failures)} of {len(requests)} requests failed on several workers, the others "
                f"are answered: {why}"
            )
        return [result for result in run.results if result is not None]

    # Workers

    def _on_event(self, event: WorkerEvent, run: _Run | None) -> None:
        name, news = event.worker, event.report
        if news is None:
            self._ready.discard(name)
            self._failures[name] = Failure(event.lost, 1)
            report(Message(f"worker {name} is lost: {event.lost}; its work is given to others"))
            if run is not None:
                run.lose(name, event.lost)
            return
        for inner in news.events:
            if isinstance(inner, Message):
                report(Message(f"{name}: {inner.text}", inner.is_warning))
            elif isinstance(inner, ProgressPhase) and not self._ready:
                report(inner)
        if news.state == "failed":
            self._refuse(name, news.failure or Failure("it failed", 1))
        elif name in self._ready:
            if run is not None:
                run.receive(name, news)
        elif news.identity is None:
            self._workers.send(name, Order(REPORT_EVERY_S))
        elif (why := self._difference(news.identity)) is not None:
            self._refuse(name, Failure(why, UsageError.exit_code))
        else:
            self._admit(name, news.identity, run)

    def _admit(self, name: str, identity: WorkerIdentity, run: _Run | None) -> None:
        self.fingerprint = self.fingerprint or identity.fingerprint
        self._ready.add(name)
        self._records[name] = WorkerRecord(name, identity)
        if len(self._ready) <= _TOLD_WORKERS or len(self._ready) == self._workers.count():
            report(PlanLine(self._describe()))
        if run is not None:
            run.dispatcher.join(name)

    def _describe(self) -> str:
        hosts = sorted({self._records[name].identity.host for name in self._ready})
        names = ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
        workers = "1 worker" if len(self._ready) == 1 else f"{len(self._ready)} workers"
        return f"{workers} on {names}; each plans for its own machine"

    def _difference(self, identity: WorkerIdentity) -> str | None:
        """Return why a worker's answers cannot stand beside the others', None if they can."""
        if identity.version != __version__:
            return f"it has flexgen-helm {identity.version} and the driver has {__version__}; install the same version"
        if identity.tokenizer != (self._tokenizer.fingerprint if self._tokenizer is not None else None):
            return f"its tokenizer of {self._model.name} differs from the driver's; copy or fetch the model there anew"
        dtype = getattr(torch, identity.dtype)
        expected = engine_fingerprint(
            self._checkpoint, self._tokenizer, self._model.config, identity.device_type, dtype
        )
        if identity.fingerprint != expected:
            return (
                f"its weights of {self._model.name} differ from the driver's, or its transformers does; copy or fetch "
                "the model there anew, and install the same transformers"
            )
        if self.fingerprint and identity.fingerprint != self.fingerprint:
            return (
                f"it computes in {identity.dtype} on {identity.device_type}, and other workers do not, so scores would "
                "depend on who computed them; run the two kinds of machines as two clusters"
            )
        return None

    def _refuse(self, name: str, failure: Failure) -> None:
        self._failures[name] = failure
        self._workers.drop(name)
        report(Message(f"worker {name} is not used: {failure.message}"))

    def _require_hope(self) -> None:
        """Raise if no worker is there and none will come; tell the user what a long wait is for."""
        if self._ready:
            return
        if not self._workers.may_serve():
            failures = self._failures.values()
            is_refused = {failure.exit_code for failure in failures} == {UsageError.exit_code}
            why = explain_failures(failure.message for failure in failures)
            names = ", ".join(list(self._failures)[:5])
            raise (UsageError if is_refused else WorkerError)(f"no worker is left; {names}: {why}")
        is_long = time.monotonic() - self._began > _TELL_AFTER_S
        if is_long and not self._told and (waiting := self._workers.waiting_for()):
            self._told = True
            report(Message(waiting))


class _Run:
    """One call of `ClusterEngine.run`."""

    def __init__(
        self,
        engine: ClusterEngine,
        requests: Sequence[GenerationRequest],
        on_result: OnResult | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._engine, self._requests = engine, requests
        self._on_result, self._progress = on_result, progress
        self.results: list[GenerationResult | None] = [None] * len(requests)
        self.dispatcher = Dispatcher(requests)
        self.totals = RunTotals(engine._records)
        self._units: dict[str, tuple[int, Sequence[int]]] = {}  # worker -> number and places of its unit
        self._num_units = 0
        self._stopping: set[str] = set()
        for name in sorted(engine._ready):
            self.dispatcher.join(name)

    def step(self) -> None:
        """Hand out work, and take what comes within a moment."""
        engine = self._engine
        self.dispatcher.expected_workers = engine._workers.count()
        needless = set(self.dispatcher.needless())
        for name in sorted(engine._ready):
            if engine._workers.is_listening(name):
                self._give_order(name, name in needless)
        for event in engine._workers.poll(_POLL_S):
            engine._on_event(event, self)
        self._report_progress()

    def _give_order(self, name: str, is_needless: bool) -> None:
        if name in self._units:
            number = self._units[name][0]
            self._engine._workers.send(name, Order(REPORT_EVERY_S, stop=number if is_needless else None))
            return
        unit = self.dispatcher.next_unit(name, time.monotonic())
        if unit is not None:
            self._num_units += 1
            self._units[name] = self._num_units, unit.requests
            requests = [self._requests[place] for place in unit.requests]
            self._engine._workers.send(name, Order(REPORT_EVERY_S, self._num_units, requests))

    def receive(self, name: str, news: Report) -> None:
        number, places = self._units.get(name, (None, ()))
        for unit, index, result in news.results:
            if unit == number and self.dispatcher.answer(name, places[index]):
                self.results[places[index]] = result
                self.totals.add(name, result)
                if self._on_result is not None:
                    self._on_result(places[index], result)
        if news.progress is not None:
            self.totals.progress(name, news.progress)
            if (unit_now := self.dispatcher.unit_of(name)) is not None and news.progress.total_tokens:
                unit_now.done_share = min(0.999, news.progress.done_tokens / news.progress.total_tokens)
        if news.finished is None or news.finished != number:
            return
        del self._units[name]
        self.totals.finish(name, news.record)
        if news.failure is not None:
            report(Message(f"worker {name} failed: {news.failure.message}; its work is given to others"))
            self.dispatcher.fail(name, news.failure.message)
        elif news.record:
            self.dispatcher.finish(name, time.monotonic(), _block(news.record))
        else:
            self.dispatcher.stop(name)

    def lose(self, name: str, why: str) -> None:
        self._units.pop(name, None)
        self.totals.lose(name)
        self.dispatcher.leave(name, f"worker {name} was lost: {why}")

    def stop(self) -> None:
        """Let workers stop what nobody wants any more, so that the next run finds them idle."""
        workers, end = self._engine._workers, time.monotonic() + _STOP_S
        while self._units and time.monotonic() < end:
            for name, (number, _) in self._units.items():
                if workers.is_listening(name):
                    workers.send(name, Order(REPORT_EVERY_S, stop=number))
            for event in workers.poll(_POLL_S):
                self._engine._on_event(event, self)

    def _report_progress(self) -> None:
        total = len(self._requests)
        event = self.totals.as_progress(self.dispatcher.num_answered, total, self.dispatcher.waiting_cost)
        report(event)
        if self._progress is not None:
            self._progress(event)


def _block(record: dict[str, Any]) -> int:
    """Return how many sequences a worker's searched plan computes at once; fewer would not stream weights faster."""
    policy = record.get("policy")
    batches = policy.get("num_gpu_batches") if isinstance(policy, dict) else None
    return int(policy["gpu_batch_size"] * batches) if isinstance(policy, dict) and batches else 1
