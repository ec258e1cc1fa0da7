"""The process-wide engine behind every HELM client: one queue, one thread, one model in memory at a time.

HELM asks from a pool of threads, one request a thread, and constructs as many clients. Here their questions meet:

    expect(model)                questions for it will come: it is loaded while prompts are still being made
    announce(model, questions)   a run's (or a suite's) requests, known beforehand: computed in one block at once
    answer(model, question)      what a client calls; waits for the answer, announced or not

Questions that nobody announced are gathered until no new one came for `IDLE_FLUSH_S`. Equal questions are computed
once. Finished answers go to the journal before a run ends, so an interrupted run repeats at most the last few.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import Interrupted
from flexgen_helm.plugin.engine import EngineLike, import_engine, load_engine
from flexgen_helm.plugin.models import ModelArguments
from flexgen_helm.plugin.response_writer import ResponseWriter
from flexgen_helm.request import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from flexgen_helm.plugin.convert import PreparedRequest

IDLE_FLUSH_S = 0.05
LONGEST_GATHERING_S = 0.5  # a steady trickle of questions must not postpone the flush for ever
WAIT_SLICE_S = 0.5  # how soon a waiting thread sees an interruption
SHUTDOWN_S = 6.0  # how long the exit waits for the engine to stop and the journal to be written


engine_factory: Callable[[ModelArguments], EngineLike] = load_engine  # tests put their own here


@dataclass(frozen=True)
class Answer:
    """reused: it came out of the journal, nothing was computed."""

    result: GenerationResult
    reused: bool


@dataclass(eq=False)
class Job:
    """One distinct question. Counted by `holders`: blocks and waiting threads that want its answer."""

    model: ModelArguments
    key: str
    request: GenerationRequest
    durable: bool
    holders: int = 0
    started: bool = False
    future: Future[Answer] = field(default_factory=Future)


class SubmittedBlock:
    """Questions announced together; keeps their answers until it is closed. A context manager."""

    def __init__(self, service: Service, model: ModelArguments, keys: list[str], jobs: list[Job]) -> None:
        self.model = model
        self.keys = keys  # one a question, in the order announced
        self._service, self._jobs = service, jobs

    def wait(self) -> None:
        """Until every question has an answer or an error. Raises Interrupted."""
        for job in self._jobs:
            self._service._wait(job)

    def answers(self) -> dict[str, Answer]:
        """By key, those that are there and no errors."""
        done = (job for job in self._jobs if job.future.done() and job.future.exception() is None)
        return {job.key: job.future.result() for job in done}

    def error(self) -> BaseException | None:
        """What kept questions from being computed at all; the error of a single request is in its answer."""
        errors = (job.future.exception() for job in self._jobs if job.future.done())
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        jobs, self._jobs = self._jobs, []
        self._service._release(jobs)

    def __enter__(self) -> SubmittedBlock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Service:
    """See the module's docstring. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.progress: Callable[[Any], None] | None = None
        self._accounts: dict[ModelArguments, dict[str, Any]] = {}
        self._fingerprints: dict[ModelArguments, str] = {}
        self._loaded_at: dict[ModelArguments, float] = {}
        self._changed = threading.Condition()
        self._jobs: dict[tuple[ModelArguments, str, bool], Job] = {}
        self._queue: list[Job] = []
        self._ready = False  # an announced block is in the queue
        self._held = False  # and waits for others
        self._first_arrival = self._last_arrival = 0.0
        self._worker: threading.Thread | None = None
        self._stop = threading.Event()
        self._closing = False
        self._expected: ModelArguments | None = None
        self._told: set[ModelArguments] = set()  # models that were expected before
        self._engine: tuple[ModelArguments, EngineLike] | None = None  # touched by the worker only

    # What clients and hooks call

    def preload(self, model: ModelArguments) -> None:
        """Load `model` in the background if no other one is loaded. What goes wrong is told to those who ask."""
        if model in self._told or self._stop.is_set():
            return
        self._told.add(model)
        if engine_factory is load_engine:
            with suppress(Exception):
                import_engine(model)  # here, so that two threads never import at once
        with self._changed:
            self._expected = model
            self._awake()

    def submit(
        self, model: ModelArguments, questions: Iterable[PreparedRequest], durable: bool = True, hold: bool = False
    ) -> SubmittedBlock:
        """Queue `questions` for the next block.

        durable: the journal may answer and must remember. hold: more is coming, start at `flush`.
        """
        asked = list(questions)
        with self._changed:
            self._held = self._held or hold
            jobs = self._enlist(model, asked, durable, announced=True)
        return SubmittedBlock(self, model, [question.key for question in asked], jobs)

    def flush(self) -> None:
        """Start what was announced with `hold`."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def answer(self, model: ModelArguments, question: PreparedRequest, durable: bool = True) -> Answer:
        """Wait for one answer. Raises Interrupted, or whatever kept the whole block from being computed."""
        jobs = self._enlist(model, [question], durable, announced=False)
        try:
            self._wait(jobs[0])
            return jobs[0].future.result()
        finally:
            self._release(jobs)

    def _wait(self, job: Job) -> None:
        while not job.future.done():
            if self._stop.is_set():
                raise Interrupted("interrupted; finished answers are kept, the same command continues")
            wait([job.future], timeout=WAIT_SLICE_S)

    def stop(self) -> None:
        """Interrupt everything soon. Takes no lock: a signal handler may call it."""
        self._stop.set()

    def resume(self) -> None:
        """Serve again after `stop` (a notebook, where an interruption does not end the process)."""
        self._stop.clear()

    def fingerprint(self, model: ModelArguments) -> str | None:
        """Of the engine that the model's answers are from; None before it was loaded."""
        return self._fingerprints.get(model)

    def loading_s(self, model: ModelArguments, since: float) -> float:
        """Seconds after `since` (`time.monotonic()`) until the model was there; 0 where it was there before."""
        return max(0.0, self._loaded_at.get(model, since) - since)

    def usage(self, model: ModelArguments) -> dict[str, Any]:
        """`engine.last_run` of the model's newest block, {} where nothing was computed.

        The last answer of a block is given out after its account, so whoever has all answers finds it here.
        """
        return self._accounts.get(model, {})

    def close(self) -> None:
        """Stop, write the journal, free the model."""
        self._stop.set()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None:
            worker.join(SHUTDOWN_S)

    # The queue

    def _enlist(
        self, model: ModelArguments, questions: Iterable[PreparedRequest], durable: bool, announced: bool
    ) -> list[Job]:
        jobs: dict[str, Job] = {}
        with self._changed:
            for question in questions:
                if question.key in jobs:
                    continue
                identity = (model, question.key, durable)
                job = self._jobs.get(identity)
                if job is None:
                    job = self._jobs[identity] = Job(model, question.key, question.request, durable)
                    self._queue.append(job)
                    self._ready = self._ready or announced
                    self._last_arrival = time.monotonic()
                    if len(self._queue) == 1:
                        self._first_arrival = self._last_arrival
                job.holders += 1
                jobs[question.key] = job
            self._awake()
        return list(jobs.values())

    def _awake(self) -> None:
        """Tell the worker that something changed; begin with one."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="flexgen-engine", daemon=True)
            self._worker.start()
        self._changed.notify_all()

    def _release(self, jobs: list[Job]) -> None:
        with self._changed:
            for job in jobs:
                job.holders -= 1
                if job.holders == 0 and (job.future.done() or not job.started):
                    self._forget(job)
            if any(job.holders == 0 and not job.started for job in jobs):
                self._queue = [job for job in self._queue if job.holders]

    def _forget(self, job: Job) -> None:
        identity = (job.model, job.key, job.durable)
        if self._jobs.get(identity) is job:
            del self._jobs[identity]

    def _seconds_to_flush(self) -> float | None:
        """0 = now, None = nothing to do before something changes."""
        if self._stop.is_set():
            return WAIT_SLICE_S
        if not self._queue or self._held:
            return None
        if self._ready:
            return 0.0
        due = min(self._last_arrival + IDLE_FLUSH_S, self._first_arrival + LONGEST_GATHERING_S)
        return max(0.0, due - time.monotonic())

    def _next_block(self) -> list[Job] | ModelArguments:
        """Wait for jobs of one model, the loaded one first, or for a model to load; empty when the service closes."""
        with self._changed:
            while not self._closing:
                expected, self._expected = self._expected, None
                if expected is not None and self._engine is None and not self._queue:
                    return expected
                delay = self._seconds_to_flush()
                if delay == 0.0:
                    loaded = self._engine[0] if self._engine else None
                    models = {job.model for job in self._queue}
                    model = loaded if loaded in models else self._queue[0].model
                    block = [job for job in self._queue if job.model == model]
                    self._queue = [job for job in self._queue if job.model != model]
                    self._ready = self._ready and bool(self._queue)
                    for job in block:
                        job.started = True
                    return block
                self._changed.wait(delay)
        return []

    # The worker's thread

    def _work(self) -> None:
        while block := self._next_block():
            if isinstance(block, ModelArguments):
                with suppress(Exception):  # whoever asks meets it again
                    self._engine_for(block)
                continue
            try:
                self._serve(block)
            except BaseException as error:  # the waiters must hear of it, and the thread must live on
                self._fail(block, error)
        self._evict()

    def _serve(self, block: list[Job]) -> None:
        engine = self._engine_for(block[0].model)
        keeper = ResponseWriter(engine.fingerprint, any(job.durable for job in block))
        try:
            known = keeper.get_many([job.key for job in block if job.durable])
            for job in block:
                if job.durable and job.key in known:
                    self._settle(job, Answer(known[job.key], reused=True))
            todo = [job for job in block if not job.future.done()]
            if todo:
                self._compute(engine, todo, keeper)
        finally:
            keeper.close()

    def _compute(self, engine: EngineLike, todo: list[Job], keeper: ResponseWriter) -> None:
        waiting = dict(enumerate(todo))
        last: list[tuple[Job, Answer]] = []

        def on_result(index: int, result: GenerationResult) -> None:
            job = waiting.pop(index, None)
            if job is None:
                return
            if job.durable and result.error is None:
                keeper.add(job.key, result)
            if waiting:
                self._settle(job, Answer(result, reused=False))
            else:
                last.append((job, Answer(result, reused=False)))

        def should_stop() -> bool:
            return self._stop.is_set() or not any(job.holders for job in list(waiting.values()) or todo)

        try:
            requests = [job.request for job in todo]
            results = engine.run(requests, on_result=on_result, should_stop=should_stop, progress=self.progress)
            for index, result in enumerate(results):
                on_result(index, result)
            self._accounts[todo[0].model] = dict(engine.last_run)
        finally:
            for job, answer in last:
                self._settle(job, answer)

    def _engine_for(self, model: ModelArguments) -> EngineLike:
        if self._engine is None or self._engine[0] != model:
            self._evict()
            self._engine = (model, engine_factory(model))
            self._fingerprints[model] = self._engine[1].fingerprint
            self._loaded_at[model] = time.monotonic()
        return self._engine[1]

    def _evict(self) -> None:
        """HELM never frees a client, so the memory of the previous model is taken back here."""
        if self._engine is not None:
            engine, self._engine = self._engine[1], None
            engine.close()

    def _settle(self, job: Job, answer: Answer) -> None:
        job.future.set_result(answer)
        with self._changed:
            if not job.holders:
                self._forget(job)

    def _fail(self, block: list[Job], error: BaseException) -> None:
        """Everybody who waits for a job of `block` gets `error`.

        A block that was left by all its holders is interrupted too; who asked again meanwhile is served next.
        """
        left = isinstance(error, Interrupted) and not self._stop.is_set()
        with self._changed:
            for job in block:
                if job.future.done():
                    continue
                if left and job.holders:
                    job.started, self._ready = False, True
                    self._queue.append(job)
                else:
                    job.future.set_exception(error)
                    self._forget(job)


_service: Service | None = None
_service_lock = threading.Lock()


def get_service() -> Service:
    """The one service of this process."""
    global _service
    with _service_lock:
        if _service is None:
            _service = Service()
            # Python searches all that is left for cycles before it ends, 1.5 s with HELM's and PyTorch's modules.
            atexit.register(gc.freeze)
            atexit.register(_service.close)  # runs before
        return _service
