"""An engine whose work is done by workers: what the plugin's service sees is an `Engine`.

Requests are sorted by their prompts, so that neighbours share prefixes, and divided into units,
which Ray Data hands out. What a lost worker or a failed unit has not answered is submitted again in
smaller units, so that one request that brings workers down takes few others with it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.concurrency import stop_point
from flexgen_helm.distributed.ray_cluster import RaySession, RayWorkers
from flexgen_helm.distributed.worker import (
    Answered,
    DrawnAt,
    ExpectedIdentity,
    Failure,
    ModelToLoad,
    UnitRecord,
    WorkerEvent,
    WorkerIdentity,
)
from flexgen_helm.engine.fingerprint import Arithmetic, engine_fingerprint
from flexgen_helm.engine.run import OnDrawn, OnResult
from flexgen_helm.errors import Interrupted, UsageError, WorkerError
from flexgen_helm.progress import Message, ModelInUse, PlanLine, Progress, ProgressPhase, report
from flexgen_helm.report.block_records import add_blocks
from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from flexgen_helm.units import count

# Units of each of several workers, so that they end together; fewest requests of one, because
# each costs a plan, and a pass over the weights where they are streamed.
UNITS_PER_WORKER, MIN_UNIT_REQUESTS = 4, 16
# How often a request may be part of a unit that fails; its next unit is so much smaller each time.
MAX_ATTEMPTS, SHRINKING = 3, 4
# Seconds that the driver waits at most for a report before it looks at everything else.
_POLL_S = 0.2
# Seconds without any report after which the user is told what is missing.
_TELL_AFTER_S = 30.0
_UNIT_NUMBERS = itertools.count()


@dataclass(eq=False)
class WorkerRecord:
    """One worker of a run. costs: of its answers. record: of its units, joined."""

    name: str
    costs: list[Cost] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    num_units: int = 0
    is_lost: bool = False

    def as_json(self, identity: WorkerIdentity) -> dict[str, Any]:
        """Return what `flexgen_run.json` says of a worker."""
        return {
            "name": self.name,
            "host": identity.host,
            "pid": identity.pid,
            "hardware": self.record.get("hardware", {"device": identity.device_type}),
            **{key: self.record.get(key) for key in ("policy", "schedule", "limit_bytes")},
            "load_s": identity.load_s,
            "num_units": self.num_units,
            "num_requests": len(self.costs),
            "tokens": sum(cost.prompt_tokens + cost.output_tokens for cost in self.costs),
            "seconds": self.record.get("wall_s", {}).get("generate", 0.0),
            "is_lost": self.is_lost,
        }


class RunningUnit(NamedTuple):
    """indexes: of its requests. attempt: how many units with them have failed before."""

    indexes: Sequence[int]
    attempt: int


class ClusterRun:
    """One call of `ClusterEngine.run`: what is computed, by whom, and what has been answered.

    units: those that run, by their numbers.
    failures: request -> why it is given up.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        workers: RayWorkers,
        on_result: OnResult | None = None,
        on_drawn: OnDrawn | None = None,
    ) -> None:
        self._requests, self._workers = requests, workers
        self._on_result, self._on_drawn = on_result, on_drawn
        self._began = time.monotonic()
        self.units: dict[int, RunningUnit] = {}
        self.results: list[GenerationResult | None] = [None] * len(requests)
        self.failures: dict[int, str] = {}
        self.records: dict[str, WorkerRecord] = {}
        prompts = [tuple(request.prompt_token_ids or ()) for request in requests]
        # of each request: half of the tokens that may be drawn are expected
        self._expected_tokens = [
            len(ids) + request.n * request.max_tokens / 2 for ids, request in zip(prompts, requests)
        ]
        shares = 1 if workers.is_alone else UNITS_PER_WORKER * workers.num_expected
        self._submit(
            sorted(range(len(requests)), key=prompts.__getitem__),
            max(MIN_UNIT_REQUESTS, -(-len(requests) // shares)),
        )

    def _submit(self, indexes: Sequence[int], size: int, attempt: int = 0) -> None:
        """Divide requests into units, and have them computed."""
        parts = [indexes[start : start + size] for start in range(0, len(indexes), size)]
        numbers = list(itertools.islice(_UNIT_NUMBERS, len(parts)))
        self.units |= {number: RunningUnit(part, attempt) for number, part in zip(numbers, parts)}
        requests = [{index: self._requests[index] for index in part} for part in parts]
        self._workers.submit(dict(zip(numbers, requests)))

    def receive(self, name: str, number: int, event: WorkerEvent) -> None:
        """Take an answer, a token of one, or the end of a unit.

        name: of the worker; empty if nobody has begun the unit.
        """
        worker = self.records.setdefault(name, WorkerRecord(name))
        match event:
            case Answered(index, result):
                self.results[index] = result
                worker.costs.append(result.cost)
                if self._on_result is not None:
                    self._on_result(index, result)
            case DrawnAt() if self._on_drawn is not None:
                self._on_drawn(*event)
            case UnitRecord(record):
                worker.num_units += 1
                worker.record = add_blocks(worker.record, record) if worker.record else dict(record)
                self._end(number, worker.name, Failure("answers are missing"))
            case Failure():
                worker.num_units += 1
                worker.is_lost = worker.is_lost or event.is_lost
                self._end(number, worker.name, event)

    def _end(self, number: int, name: str, failure: Failure) -> None:
        """Submit again what a unit has not answered, or give it up."""
        self._workers.forget([number])
        indexes, attempt = self.units.pop(number)
        left = [index for index in indexes if self.results[index] is None]
        if not left:
            return
        who = f"worker {name}" if name else "a worker that has not begun"
        why = f"{who} {'is lost' if failure.is_lost else 'failed'}: {failure.message}"
        if attempt + 1 < MAX_ATTEMPTS:
            report(Message(f"{why}; its work is given out again"))
            self._submit(left, max(1, len(left) // SHRINKING), attempt + 1)
        else:
            self.failures |= dict.fromkeys(left, why if failure.is_lost else failure.message)

    def progress(self) -> Progress:
        """Return how far all workers together are, by answers."""
        answered = [result for result in self.results if result is not None]
        done = sum(result.cost.prompt_tokens + result.cost.output_tokens for result in answered)
        left = sum(
            tokens for tokens, result in zip(self._expected_tokens, self.results) if result is None
        )
        elapsed_s = time.monotonic() - self._began
        return Progress(done, round(done + left), len(answered), len(self.results), elapsed_s)

    def record(self, load_s: float, identities: Mapping[str, WorkerIdentity]) -> dict[str, Any]:
        """Return the run's record: sums and peaks over workers; plan and hardware of the last.

        load_s: until the first worker was ready. `time_s` and `bytes` add up over workers;
        `wall_s` is the driver's.
        """
        elapsed_s = time.monotonic() - self._began
        used = [worker for name, worker in self.records.items() if name in identities]
        record: dict[str, Any] = {}
        for worker in used:
            if worker.record:
                record = add_blocks(record, worker.record) if record else dict(worker.record)
        figures = throughput(
            (result.cost for result in self.results if result is not None), elapsed_s
        )
        if len(used) > 1:  # of units on machines that work side by side no sum is a prediction
            record |= {"predicted_latency_s": None, "predicted": None}
        num_served = sum(result is not None and result.error is None for result in self.results)
        return {
            **record,
            **figures,
            "workload": {
                "num_requests": len(self.results),
                "num_unique": num_served,
                **figures["workload"],
            },
            "wall_s": {"load": load_s, "generate": elapsed_s},
            "workers": [worker.as_json(identities[worker.name]) for worker in used],
        }


class ClusterEngine:
    """Workers that load one model, used as `Engine` is: `run` answers requests.

    fingerprint: of the workers' engines; all have the same.
    last_run: as `Engine.last_run`, and `workers`: a record of each.
    """

    def __init__(self, model: ModelToLoad, session: RaySession) -> None:
        """Wait until one worker is ready; others join when they are.

        Raises `FlexgenError` if they cannot be started.
        """
        self.last_run: dict[str, Any] = {}
        self.fingerprint = ""
        self._began = time.monotonic()
        self._identities: dict[str, WorkerIdentity] = {}
        self._failures: dict[str, Failure] = {}
        self._has_news = False  # or the user has been told what is missing
        self._news: deque[tuple[str, int | None, WorkerEvent]] = deque()
        report(ModelInUse(model.name, model.config.chosen_precision.name))
        report(ProgressPhase("load"))
        self._workers = session.start(model, _expected_identity(model))
        try:
            while not self._identities:
                stop_point()
                self._step()
        except BaseException:
            self.close()
            raise
        self._load_s = time.monotonic() - self._began

    def close(self) -> None:
        """End the workers."""
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

        Raises `WorkerError` when all that can be answered is, if the rest failed several times.
        """
        run = ClusterRun(requests, self._workers, on_result, on_drawn)
        try:
            while run.units:
                if should_stop is not None and should_stop():
                    raise Interrupted("interrupted; what the workers have reported is kept")
                self._step(run)
                report(event := run.progress())
                if progress is not None:
                    progress(event)
        finally:
            self._workers.forget(run.units)
        self.last_run = run.record(self._load_s, self._identities)
        if run.failures:
            raise WorkerError(
                f"{len(run.failures)} of {len(requests)} requests failed {MAX_ATTEMPTS} times, the "
                f"others are answered: {_join_reasons(run.failures.values())}"
            )
        return [result for result in run.results if result is not None]

    def _step(self, run: ClusterRun | None = None) -> None:
        """Take what comes within a moment. Raises if no worker is there and none will come."""
        error = self._workers.error  # before the news, which explain it
        for name, unit, events in self._workers.news(_POLL_S):
            self._news.extend((name, unit, event) for event in events)
        while self._news:  # each once, also where a run's `on_result` raises amid them
            self._has_news = True
            self._receive(*self._news.popleft(), run)
        if error and (run is None or run.units):
            self._raise(error)
        if not self._has_news and time.monotonic() - self._began > _TELL_AFTER_S:
            self._has_news = True
            report(Message("workers wait for Ray, which may be using their cores or GPUs"))

    def _receive(
        self, name: str, unit: int | None, event: WorkerEvent, run: ClusterRun | None
    ) -> None:
        """Pass on what a worker tells: to the user, to this engine, or to the run of its unit."""
        match event:
            case Message():
                report(Message(f"{name}: {event.text}", event.is_warning))
            case ProgressPhase() if not self._identities:
                report(event)
            case WorkerIdentity():
                self.fingerprint = event.fingerprint
                self._identities[name] = event
                hosts = sorted({identity.host for identity in self._identities.values()})
                workers = count(len(self._identities), "worker")
                more = f" and {len(hosts) - 5} more" if len(hosts) > 5 else ""
                line = f"{workers} on {', '.join(hosts[:5])}{more}; each plans for its own machine"
                report(PlanLine(line))
            case Failure() if unit is None:
                self._failures[name] = event
            case _ if run is not None and unit in run.units:
                run.receive(name, unit, event)

    def _raise(self, error: str) -> NoReturn:
        """Say why there are no workers any more, as they said it themselves where they could."""
        if not self._failures:
            raise WorkerError(error)
        failures = self._failures.values()
        is_refused = all(failure.exit_code == UsageError.exit_code for failure in failures)
        why = _join_reasons(failure.message for failure in failures)
        names = ", ".join(list(self._failures)[:5])
        raise (UsageError if is_refused else WorkerError)(f"no worker is left; {names}: {why}")


def _expected_identity(model: ModelToLoad) -> ExpectedIdentity:
    """Return what workers of all kinds may compute with, by this machine's files."""
    config = model.config
    resolved = resolve(model.path, config.revision)
    checkpoint = open_checkpoint(resolved, weights=config.weights, seed=config.seed)
    path = checkpoint.tokenizer_path
    tokenizer = Tokenizer.from_path(path) if path else None
    kinds = itertools.product(("cpu", "cuda"), (torch.float32, torch.float16, torch.bfloat16))
    return ExpectedIdentity(
        frozenset(
            engine_fingerprint(checkpoint, tokenizer, config, Arithmetic(device, str(dtype)))
            for device, dtype in kinds
        )
    )


def _join_reasons(reasons: Iterable[str]) -> str:
    """Join the reasons of failures, each once."""
    return "; ".join(dict.fromkeys(reasons))
