"""An engine whose work is done by workers: what the plugin's service sees is an `Engine`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexgen_helm import __version__
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.distributed.dispatcher import Dispatcher
from flexgen_helm.distributed.messages import Failure, ModelToLoad, UnitRecord, WorkerIdentity
from flexgen_helm.distributed.ray_cluster import RayWorkers
from flexgen_helm.engine.fingerprint import engine_fingerprint
from flexgen_helm.engine.run import OnResult
from flexgen_helm.errors import Interrupted, UsageError, WorkerError
from flexgen_helm.files import count
from flexgen_helm.progress import Message, ModelInUse, PlanLine, ProgressPhase, report
from flexgen_helm.report.blocks import add_blocks
from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult, Progress
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# What each worker did in a run, and the run's record made of it. No torch.


@dataclass(eq=False)
class WorkerRecord:
    """One worker of a run.

    costs: of the answers that were the first.
    record: of its units, joined.
    progress: of the unit that runs.
    done_tokens: of the units that have ended.
    """

    name: str
    identity: WorkerIdentity
    costs: list[Cost] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    num_units: int = 0
    is_lost: bool = False
    progress: Progress | None = None
    done_tokens: float = 0.0

    def end_unit(self, record: Mapping[str, Any]) -> None:
        """Add the record of a unit that has ended; empty if it was stopped or failed."""
        self.num_units += 1
        self._forget_progress()
        if record:
            self.record = add_blocks(self.record, record) if self.record else dict(record)

    def lose(self) -> None:
        self.is_lost = True
        self._forget_progress()

    def _forget_progress(self) -> None:
        self.done_tokens += self.progress.done_tokens if self.progress is not None else 0
        self.progress = None

    def as_json(self) -> dict[str, Any]:
        """Return what `flexgen_run.json` says of a worker; seconds are those of the answers that count."""
        return {
            "name": self.name,
            "host": self.identity.host,
            "pid": self.identity.pid,
            "hardware": self.record.get("hardware", {"device": self.identity.device_type}),
            **{key: self.record.get(key) for key in ("policy", "schedule", "limit_bytes")},
            "load_s": self.identity.load_s,
            "num_units": self.num_units,
            "num_requests": len(self.costs),
            "tokens": sum(cost.prompt_tokens + cost.output_tokens for cost in self.costs),
            "seconds": self.record.get("wall_s", {}).get("generate", 0.0),
            "is_lost": self.is_lost,
        }


def total_progress(
    workers: Collection[WorkerRecord], waiting_cost: float, num_answered: int, num_requests: int, elapsed_s: float
) -> Progress:
    """Return the progress of all workers together; waiting_cost: tokens that nobody computes yet."""
    running = [worker.progress for worker in workers if worker.progress is not None]
    ended = sum(worker.done_tokens for worker in workers)
    done = ended + sum(progress.done_tokens for progress in running)
    total = ended + sum(progress.total_tokens for progress in running) + waiting_cost
    memory = Counter[str]()
    for progress in running:
        memory.update(progress.memory_bytes)
    return Progress(done, round(max(total, done)), num_answered, num_requests, elapsed_s, memory)


def run_record(
    workers: Collection[WorkerRecord], results: Sequence[GenerationResult | None], load_s: float, elapsed_s: float
) -> dict[str, Any]:
    """Return a run's record: sums and peaks over workers; plan and hardware are those of the first.

    load_s: until the first worker was ready. `time_s` and `bytes` add up over workers; `wall_s` is the driver's.
    """
    used = [worker for worker in workers if worker.num_units or worker.costs or worker.is_lost]
    record: dict[str, Any] = {}
    for worker in used:
        if worker.record:
            record = add_blocks(record, worker.record) if record else dict(worker.record)
    figures = throughput((result.cost for result in results if result is not None), elapsed_s)
    if len(used) > 1:  # of units on machines that work side by side no sum is a prediction
        record |= {"predicted_latency_s": None, "predicted": None}
    num_served = sum(result is not None and result.error is None for result in results)
    return {
        **record,
        **figures,
        "workload": {"num_requests": len(results), "num_unique": num_served, **figures["workload"]},
        "wall_s": {"load": load_s, "generate": elapsed_s},
        "workers": [worker.as_json() for worker in used],
    }


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

    def __init__(self, model: ModelToLoad, workers: RayWorkers) -> None:
        """Wait until one worker is ready; others join when they are. Raises `FlexgenError` if all fail."""
        self.last_run: dict[str, Any] = {}
        self.fingerprint = ""
        self._model, self._workers = model, workers
        self._began = time.monotonic()
        self._ready: dict[str, WorkerIdentity] = {}
        self._busy: set[str] = set()
        self._failures: dict[str, Failure] = {}
        self._told = False
        config = model.config
        report(ModelInUse(model.name, config.chosen_precision.name))
        report(ProgressPhase("load"))
        try:
            checkpoint = open_checkpoint(resolve(model.path, config.revision), weights=config.weights, seed=config.seed)
            self._checkpoint = checkpoint
            self._tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None
            while not self._ready:
                self._step()
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
        run = _Run(requests, on_result)
        for name, identity in self._ready.items():
            run.join(name, identity)
        try:
            while run.dispatcher.open:
                if should_stop is not None and should_stop():
                    raise Interrupted("interrupted; what the workers have finished is kept")
                self._step(run)
                report(event := run.progress())
                if progress is not None:
                    progress(event)
                self._require_hope()
        finally:  # the next run finds the workers idle
            run.is_over, end = True, time.monotonic() + _STOP_S
            while self._busy and time.monotonic() < end:
                self._step(run)
        self.last_run = run_record(run.workers.values(), run.results, self._load_s, run.elapsed_s)
        if failures := run.dispatcher.failures:
            raise WorkerError(
                f"{len(failures)} of {len(requests)} requests failed on several workers, the others are answered: "
                f"{_joined(failures.values())}"
            )
        return [result for result in run.results if result is not None]

    def _step(self, run: _Run | None = None) -> None:
        """Hand out work, and take what comes within a moment."""
        for name in self._workers.listening():
            unit: Sequence[GenerationRequest] = ()
            if run is not None and not run.is_over and name in self._ready and name not in self._busy:
                unit = run.next_unit(name, self._workers.count())
                self._busy |= {name} if unit else set()
            self._workers.send(name, run is not None and run.wants(name), unit)
        for name, news in self._workers.poll(_POLL_S):
            for key, item in news.items():
                self._receive(name, key, item, run)

    def _receive(self, name: str, key: Any, item: Any, run: _Run | None) -> None:
        match item:
            case Message():
                report(Message(f"{name}: {item.text}", item.is_warning))
            case ProgressPhase():
                if not self._ready:
                    report(item)
            case WorkerIdentity():
                if (why := self._difference(item)) is not None:
                    self._refuse(name, Failure(why, UsageError.exit_code))
                    return
                self._admit(name, item)
                if run is not None:
                    run.join(name, item)
            case GenerationResult() | Progress():
                if run is not None:
                    run.receive(name, key, item)
            case UnitRecord() | Failure():
                self._busy.discard(name)
                is_lost = isinstance(item, Failure) and item.is_lost
                if isinstance(item, Failure):
                    self._failures[name] = item
                    if not is_lost and name not in self._ready:
                        self._refuse(name, item)
                        return
                    what = "is lost" if is_lost else "failed"
                    report(Message(f"worker {name} {what}: {item.message}; its work is given to others"))
                if is_lost:
                    self._ready.pop(name, None)
                if run is not None:
                    run.end_unit(name, item)

    def _admit(self, name: str, identity: WorkerIdentity) -> None:
        self.fingerprint = self.fingerprint or identity.fingerprint
        self._ready[name] = identity
        if len(self._ready) <= _TOLD_WORKERS or len(self._ready) == self._workers.count():
            hosts = sorted({identity.host for identity in self._ready.values()})
            names = ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
            report(PlanLine(f"{count(len(self._ready), 'worker')} on {names}; each plans for its own machine"))

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
            why = _joined(failure.message for failure in failures)
            names = ", ".join(list(self._failures)[:5])
            raise (UsageError if is_refused else WorkerError)(f"no worker is left; {names}: {why}")
        is_long = time.monotonic() - self._began > _TELL_AFTER_S
        if is_long and not self._told and (waiting := self._workers.waiting_for()):
            self._told = True
            report(Message(waiting))


class _Run:
    """One call of `ClusterEngine.run`."""

    def __init__(self, requests: Sequence[GenerationRequest], on_result: OnResult | None) -> None:
        self._requests, self._on_result = requests, on_result
        self._began = time.monotonic()
        self.results: list[GenerationResult | None] = [None] * len(requests)
        self.dispatcher = Dispatcher(requests)
        self.workers: dict[str, WorkerRecord] = {}
        self.is_over = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def join(self, name: str, identity: WorkerIdentity) -> None:
        self.workers[name] = WorkerRecord(name, identity)
        self.dispatcher.join(name)

    def wants(self, name: str) -> bool:
        return not self.is_over and not self.dispatcher.is_needless(name)

    def next_unit(self, name: str, num_workers: int) -> Sequence[GenerationRequest]:
        unit = self.dispatcher.next_unit(name, self.elapsed_s, num_workers)
        return [self._requests[index] for index in unit.requests] if unit is not None else ()

    def receive(self, name: str, key: Any, item: GenerationResult | Progress) -> None:
        if (unit := self.dispatcher.units.get(name)) is None:
            return  # of a unit of an earlier run
        if isinstance(item, Progress):
            self.workers[name].progress = item
            return
        unit.num_reported += 1
        if (index := unit.requests[key]) in self.dispatcher.open:
            self.dispatcher.open.remove(index)
            self.results[index] = item
            self.workers[name].costs.append(item.cost)
            if self._on_result is not None:
                self._on_result(index, item)

    def end_unit(self, name: str, end: UnitRecord | Failure) -> None:
        dispatcher, now = self.dispatcher, self.elapsed_s
        if isinstance(end, Failure) and end.is_lost:
            if name in self.workers:
                self.workers[name].lose()
            dispatcher.leave(name, now, f"worker {name} was lost: {end.message}")
        elif name in dispatcher.units:
            record = end.record if isinstance(end, UnitRecord) else {}
            self.workers[name].end_unit(record)
            if record:
                dispatcher.finish(name, now, _block(record))
            else:
                dispatcher.fail(name, now, end.message if isinstance(end, Failure) else "it was stopped")

    def progress(self) -> Progress:
        waiting, total = self.dispatcher.waiting_cost, len(self._requests)
        num_answered = total - len(self.dispatcher.open) - len(self.dispatcher.failures)
        return total_progress(self.workers.values(), waiting, num_answered, total, self.elapsed_s)


def _block(record: Mapping[str, Any]) -> int:
    """Return how many sequences a worker's searched plan computes at once; fewer would not stream weights faster."""
    policy = record.get("policy")
    batches = policy.get("num_gpu_batches") if isinstance(policy, dict) else None
    return int(policy["gpu_batch_size"] * batches) if isinstance(policy, dict) and batches else 1


def _joined(reasons: Iterable[str]) -> str:
    """Join the reasons of failures, each once."""
    return "; ".join(dict.fromkeys(reasons))
