"""An engine whose work is done by workers: what the plugin's service sees is an `Engine`.

Requests are sorted by their prompts, so that neighbours share prefixes. An idle worker gets a unit: requests that
failed elsewhere, or the next neighbours. Units get smaller towards the end, so that workers end together. What a lost
worker or a failed unit has not answered waits again, in smaller units and for other workers, so that one request that
brings workers down takes few others with it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexgen_helm import __version__
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.distributed.ray_cluster import RayWorkers
from flexgen_helm.distributed.worker import Failure, ModelToLoad, UnitRecord, WorkerIdentity
from flexgen_helm.engine.fingerprint import engine_fingerprint
from flexgen_helm.engine.run import OnDrawn, OnResult
from flexgen_helm.errors import Interrupted, UsageError, WorkerError
from flexgen_helm.files import count
from flexgen_helm.progress import Message, ModelInUse, PlanLine, ProgressPhase, report
from flexgen_helm.report.throughput import add_blocks, throughput
from flexgen_helm.request import Cost, DrawnToken, GenerationRequest, GenerationResult, Progress
from flexgen_helm.tokenizer.tokenizer import Tokenizer

# Most seconds of a unit: its end is a good moment to hand out the next one. Most requests of one before a rate is
# known, and fewest, because each unit costs a plan.
UNIT_S, FIRST_UNIT_REQUESTS, MIN_UNIT_REQUESTS = 300.0, 256, 16
# How often a request may be part of a unit that fails, and how much smaller its next unit is each time.
MAX_ATTEMPTS, SHRINKING = 3, 4
# Seconds that the driver waits at most for a report before it looks at everything else.
_POLL_S = 0.2
# Seconds without any worker after which the user is told what is missing.
_TELL_AFTER_S = 30.0
# Workers that are reported one by one as they come; of more, only that all are there.
_TOLD_WORKERS = 4


@dataclass(frozen=True)
class Unit:
    """Requests that a worker computes together, by index. failed_on: the workers where they failed."""

    requests: Sequence[int]
    failed_on: tuple[str, ...] = ()
    began: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class WorkerRecord:
    """One worker of a run.

    costs: of its answers. record: of its units, joined. rate: requests a second of its last unit.
    block: sequences that its plan computes at once; fewer would not stream weights faster.
    progress: of the unit that runs. done_tokens: of the units that have ended.
    """

    name: str
    identity: WorkerIdentity
    costs: list[Cost] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    num_units: int = 0
    is_lost: bool = False
    rate: float = 0.0
    block: int = 1
    progress: Progress | None = None
    done_tokens: float = 0.0

    def end_unit(self, unit: Unit, end: UnitRecord | Failure) -> None:
        """Add the record of a unit that has ended."""
        self.num_units += 1
        self.done_tokens += self.progress.done_tokens if self.progress is not None else 0
        self.progress = None
        if isinstance(end, UnitRecord):
            self.rate = len(unit.requests) / max(time.monotonic() - unit.began, 1e-3)
            self.record = add_blocks(self.record, end.record) if self.record else dict(end.record)
            policy = end.record.get("policy")
            if isinstance(policy, dict) and policy.get("num_gpu_batches"):
                self.block = policy["gpu_batch_size"] * policy["num_gpu_batches"]

    def as_json(self) -> dict[str, Any]:
        """Return what `flexgen_run.json` says of a worker."""
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


class ClusterRun:
    """One call of `ClusterEngine.run`: what waits, who computes what, and what has been answered.

    running: worker -> its unit. failures: request -> why it is given up.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        on_result: OnResult | None = None,
        on_drawn: OnDrawn | None = None,
    ) -> None:
        self._requests, self._on_result, self._on_drawn = requests, on_result, on_drawn
        self._began = time.monotonic()
        prompts = [tuple(request.prompt_token_ids or ()) for request in requests]
        # Half of the tokens that may be drawn are expected.
        self._costs = [len(ids) + request.n * request.max_tokens / 2 for ids, request in zip(prompts, requests)]
        self._fresh = sorted(range(len(requests)), key=prompts.__getitem__)
        self._failed: list[Unit] = []
        self.running: dict[str, Unit] = {}
        self.results: list[GenerationResult | None] = [None] * len(requests)
        self.failures: dict[int, str] = {}
        self.workers: dict[str, WorkerRecord] = {}

    @property
    def is_over(self) -> bool:
        return not (self._fresh or self._failed or self.running)

    def join(self, name: str, identity: WorkerIdentity) -> None:
        self.workers[name] = WorkerRecord(name, identity)

    def next_unit(self, name: str, num_workers: int) -> Sequence[GenerationRequest]:
        """Return what an idle worker shall compute now; empty if there is nothing for it.

        num_workers: how many there will be soon; the first one leaves work for the rest.
        """
        worker = self.workers[name]
        alive = {worker.name for worker in self.workers.values() if not worker.is_lost}
        # Not where it failed before, unless it failed everywhere.
        unit = next((unit for unit in self._failed if name not in unit.failed_on or alive <= {*unit.failed_on}), None)
        if unit is not None:
            self._failed.remove(unit)
            unit = Unit(unit.requests, unit.failed_on)
        elif self._fresh:
            fewest = max(MIN_UNIT_REQUESTS, worker.block)
            share = len(self._fresh) // (1 if num_workers == 1 else 2 * num_workers)
            most = max(fewest, round(worker.rate * UNIT_S)) if worker.num_units else FIRST_UNIT_REQUESTS
            size = min(max(share, fewest), most)
            unit, self._fresh = Unit(self._fresh[:size]), self._fresh[size:]
        else:
            return ()
        self.running[name] = unit
        return [self._requests[index] for index in unit.requests]

    def receive(self, name: str, key: Any, item: GenerationResult | DrawnToken | Progress) -> None:
        """Take an answer, by its index in the worker's unit, a token of one, or the worker's progress."""
        worker = self.workers[name]
        if isinstance(item, Progress):
            worker.progress = item
            return
        if isinstance(item, DrawnToken):
            index, completion, step = key
            if self._on_drawn is not None:
                self._on_drawn(self.running[name].requests[index], completion, step, item)
            return
        index = self.running[name].requests[key]
        self.results[index] = item
        worker.costs.append(item.cost)
        if self._on_result is not None:
            self._on_result(index, item)

    def end_unit(self, name: str, end: UnitRecord | Failure) -> None:
        """Note that a worker is idle or lost; what it has not answered waits again, or is given up."""
        is_lost = isinstance(end, Failure) and end.is_lost
        if name in self.workers:
            self.workers[name].is_lost = is_lost
        if (unit := self.running.pop(name, None)) is None:
            return
        self.workers[name].end_unit(unit, end)
        left = [index for index in unit.requests if self.results[index] is None]
        failed_on = (*unit.failed_on, name)
        if len(failed_on) < MAX_ATTEMPTS:
            size = max(1, len(left) // SHRINKING)
            self._failed += [Unit(left[start : start + size], failed_on) for start in range(0, len(left), size)]
        else:
            why = end.message if isinstance(end, Failure) else "answers are missing"
            self.failures |= dict.fromkeys(left, f"worker {name} was lost: {why}" if is_lost else why)

    def progress(self) -> Progress:
        """Return the progress of all workers together."""
        running = [worker.progress for worker in self.workers.values() if worker.progress is not None]
        ended = sum(worker.done_tokens for worker in self.workers.values())
        done = ended + sum(progress.done_tokens for progress in running)
        waiting = [self._fresh, *(unit.requests for unit in self._failed)]
        total = ended + sum(progress.total_tokens for progress in running)
        total += sum(self._costs[index] for requests in waiting for index in requests)
        memory = Counter[str]()
        for progress in running:
            memory.update(progress.memory_bytes)
        num_answered = sum(result is not None for result in self.results)
        elapsed_s = time.monotonic() - self._began
        stop_s = max((progress.stop_s for progress in running), default=0.0)
        done_requests = num_answered, len(self.results)
        return Progress(done, round(max(total, done)), *done_requests, elapsed_s, memory, stop_s=stop_s)

    def record(self, load_s: float) -> dict[str, Any]:
        """Return the run's record: sums and peaks over workers; plan and hardware are those of the first.

        load_s: until the first worker was ready. `time_s` and `bytes` add up over workers; `wall_s` is the driver's.
        """
        elapsed_s = time.monotonic() - self._began
        used = [worker for worker in self.workers.values() if worker.num_units or worker.is_lost]
        record: dict[str, Any] = {}
        for worker in used:
            if worker.record:
                record = add_blocks(record, worker.record) if record else dict(worker.record)
        figures = throughput((result.cost for result in self.results if result is not None), elapsed_s)
        if len(used) > 1:  # of units on machines that work side by side no sum is a prediction
            record |= {"predicted_latency_s": None, "predicted": None}
        num_served = sum(result is not None and result.error is None for result in self.results)
        return {
            **record,
            **figures,
            "workload": {"num_requests": len(self.results), "num_unique": num_served, **figures["workload"]},
            "wall_s": {"load": load_s, "generate": elapsed_s},
            "workers": [worker.as_json() for worker in used],
        }


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
        self._failures: dict[str, Failure] = {}
        self._told = False
        self._news: deque[tuple[str, Any, Any]] = deque()  # of workers, by name: key and item
        config = model.config
        report(ModelInUse(model.name, config.chosen_precision.name))
        report(ProgressPhase("load"))
        try:
            checkpoint = open_checkpoint(resolve(model.path, config.revision), weights=config.weights, seed=config.seed)
            self._checkpoint = checkpoint
            self._tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None
            while not self._ready:
                self._step()
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
        on_drawn: OnDrawn | None = None,
    ) -> list[GenerationResult]:
        """Answer requests, as `Engine.run` does.

        Raises `WorkerError` when all that can be answered is, if the rest failed on several workers.
        """
        run = ClusterRun(requests, on_result, on_drawn)
        for name, identity in self._ready.items():
            run.join(name, identity)
        try:
            while not run.is_over:
                if should_stop is not None and should_stop():
                    raise Interrupted("interrupted; what the workers have reported is kept")
                self._step(run)
                report(event := run.progress())
                if progress is not None:
                    progress(event)
        finally:
            for name in run.running:
                self._workers.cancel(name)
            self._take_news(None)  # losses and new workers; answers of this run are none of the next one's
        self.last_run = run.record(self._load_s)
        if run.failures:
            raise WorkerError(
                f"{len(run.failures)} of {len(requests)} requests failed on several workers, the others are answered: "
                f"{_joined(run.failures.values())}"
            )
        return [result for result in run.results if result is not None]

    def _step(self, run: ClusterRun | None = None) -> None:
        """Hand out work, and take what comes within a moment. Raises if no worker is there and none will come."""
        if run is not None:
            for name in self._workers.idle():
                if name in self._ready and (unit := run.next_unit(name, self._workers.count())):
                    self._workers.call(name, unit)
        for name, report_of_worker in self._workers.poll(_POLL_S):
            self._news.extend((name, key, item) for key, item in report_of_worker.items())
        self._take_news(run)
        if not self._ready:
            self._require_hope()

    def _take_news(self, run: ClusterRun | None) -> None:
        """Take what workers have reported, each once, also where a run's `on_result` raises amid it."""
        while self._news:
            self._receive(*self._news.popleft(), run)

    def _receive(self, name: str, key: Any, item: Any, run: ClusterRun | None) -> None:
        match item:
            case Message():
                report(Message(f"{name}: {item.text}", item.is_warning))
            case ProgressPhase() if not self._ready:
                report(item)
            case WorkerIdentity():
                if (why := self._difference(item)) is not None:
                    self._refuse(name, Failure(why, UsageError.exit_code))
                    return
                self._admit(name, item)
                if run is not None:
                    run.join(name, item)
            case GenerationResult() | DrawnToken() | Progress() if run is not None:
                run.receive(name, key, item)
            case Failure() if not item.is_lost and name not in self._ready:
                self._refuse(name, item)
            case UnitRecord() | Failure():
                if isinstance(item, Failure):
                    self._failures[name] = item
                    what = "is lost" if item.is_lost else "failed"
                    report(Message(f"worker {name} {what}: {item.message}; its work is given to others"))
                    if item.is_lost:
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
        """Raise if no worker will come; tell the user what a long wait is for."""
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


def _joined(reasons: Iterable[str]) -> str:
    """Join the reasons of failures, each once."""
    return "; ".join(dict.fromkeys(reasons))
