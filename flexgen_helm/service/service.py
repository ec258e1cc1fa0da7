"""The engine behind every client of this process: one queue, one thread, one model in memory.

A harness may ask from many threads, one request per thread, as HELM does. The service forms blocks
of their requests:

    preload(model)             load the model while the harness still makes prompts
    submit(model, requests)    queue all requests of a run (or of a suite) as one block
    respond(model, request)    what a client calls: wait for one result, submitted before or not

Requests that were not submitted are gathered until none arrives for `IDLE_FLUSH_S`. Equal requests
are computed once.
Results are stored in the response cache as they finish, and drawn tokens until then, so an
interrupted run repeats only the last few.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flexgen_helm.concurrency import stopped_by
from flexgen_helm.errors import Interrupted
from flexgen_helm.paths import state_dir
from flexgen_helm.progress import Message, ProgressPhase, report
from flexgen_helm.report.verification import Source
from flexgen_helm.request import GenerationRequest, GenerationResult, ThinkingMarks
from flexgen_helm.response_cache import ResponseWriter, response_cache_path
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.units import count

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.tokenizer.chat import ChatFormat

# Seconds without a new request after which those that were gathered become a block.
IDLE_FLUSH_S = 0.05
MAX_GATHERING_S = 0.5  # a steady trickle of requests must not postpone the flush for ever
WAIT_SLICE_S = 0.5  # how soon a waiting thread sees an interruption
# how long `close` waits for the engine to stop and the response cache to be written
SHUTDOWN_S = 6.0


@dataclass(frozen=True)
class KeyedRequest:
    """A request for the service; a harness may derive its own record from it.

    key: equal for requests whose results must be equal, whatever run, file or process they come
        from: `request_key`.
    """

    request: GenerationRequest
    key: str


def request_key(request: GenerationRequest, chat: str | None = None) -> str:
    """Return the digest of a request.

    chat: identity of the chat format that rendered it, which decides how its model thinks.
    """
    ids = request.prompt_token_ids
    parts = [
        () if ids is None else tuple(ids),
        request.max_tokens,
        request.temperature,
        request.top_p,
        request.seed,
        tuple(request.stop),
        request.n,
        request.echo_logprobs,
    ]
    parts += [] if chat is None else [chat]
    # Left out where they have their defaults, so that keys of 0.1.0 stay valid.
    newer = [
        request.prompt,
        request.messages and [*map(dict, request.messages)],
        request.ignore_eos,
        request.thinking if chat is None else None,
    ]
    parts += [newer] if newer != [None, None, False, None] else []
    parts += ["echo_greedy"] if request.echo_greedy else []
    parts += ["top_logprobs", request.top_logprobs] if request.top_logprobs else []
    return hashlib.sha256(json.dumps(parts, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return the number of an array's element, or the fields of a record."""
    if hasattr(value, "item"):
        return value.item()
    # Keys are older than other marks than <think>.
    return {name: field for name, field in vars(value).items() if field != ThinkingMarks()}


@dataclass(frozen=True)
class Response:
    """The response to a request.

    result: also of a request that failed alone (`result.error`).
    is_cached: the result was stored, and not computed now.
    """

    result: GenerationResult
    is_cached: bool


@dataclass(frozen=True)
class LoadedModel:
    """What the service knows of a model since it was loaded.

    fingerprint: of the engine; known before it is loaded, if all answers are stored.
    loaded_at: by `time.monotonic()`. last_run: `Engine.last_run` of the newest block, empty before
        the first.
    """

    fingerprint: str
    loaded_at: float
    last_run: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """One distinct request in the queue or being computed.

    use_cache: the response cache may hold its result and must store it.
    num_users: blocks and waiting threads that want the result; a job without any is given up.
    """

    model: ModelArguments
    request: KeyedRequest
    use_cache: bool
    num_users: int = 0
    is_started: bool = False
    future: Future[Response] = field(default_factory=Future)

    @property
    def identity(self) -> tuple[ModelArguments, str, bool]:
        return self.model.engine_key, self.request.key, self.use_cache

    @property
    def has_failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


class _Work(NamedTuple):
    """What the worker does next: compute the jobs of a model, or preload it where there are none.

    use_cache: whether the response cache may be asked.
    """

    model: ModelArguments
    use_cache: bool
    jobs: list[Job]


class SubmittedBlock:
    """Requests submitted together. Keeps their results until it is closed. A context manager."""

    def __init__(
        self,
        service: Service,
        model: ModelArguments,
        requests: Sequence[KeyedRequest],
        jobs: list[Job],
    ) -> None:
        self.model = model
        # in the order submitted, repeated where they are equal
        self.keys = [request.key for request in requests]
        self._service, self._jobs = service, jobs

    def wait(self, until: float = math.inf) -> bool:
        """Wait until every request has a result or an error, or until a time (`time.time()`);
        return whether they have.

        Raises `Interrupted`.
        """
        return all(self._service._wait(job, until) for job in self._jobs)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call once every request has a result or an error, from whichever thread has the last."""
        lock, left = threading.Lock(), len(self._jobs)

        def one_is_done(_: Future[Response]) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = not left
            if is_last:
                call()

        for job in self._jobs:
            job.future.add_done_callback(one_is_done)

    def responses(self) -> dict[str, Response]:
        """Return the responses so far, by key."""
        done = (job for job in self._jobs if job.future.done() and not job.has_failed)
        return {job.request.key: job.future.result() for job in done}

    def error(self) -> BaseException | None:
        """Return what kept the block from being computed; the error of a single request is in its
        result.
        """
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

    def __init__(self, loader: EngineLoader) -> None:
        self._loader = loader
        # By `ModelArguments.engine_key`, as all that is kept per engine.
        self._loaded: dict[ModelArguments, LoadedModel] = {}
        self._changed = threading.Condition()  # guards jobs and queue, and wakes the worker
        self._jobs: dict[tuple[ModelArguments, str, bool], Job] = {}
        self._queue: list[Job] = []
        # when the queue becomes a block, by `time.monotonic()`
        self._flush_at = self._flush_at_latest = 0.0
        self._worker: threading.Thread | None = None
        self._interrupted = threading.Event()
        self._is_closing, self._close_by = False, 0.0
        self._ended = threading.Event()  # of the worker
        self._to_preload: _Work | None = None
        self._preloaded: set[ModelArguments] = set()
        # The loaded engine and its key; used by the worker only.
        self._engine: tuple[ModelArguments, Engine] | None = None

    # What harnesses call

    def preload(self, model: ModelArguments, use_cache: bool = True) -> None:
        """Load `model` in the background unless another one is loaded. Errors are raised to those
        who need it.

        use_cache: skip loading if the model has stored answers, since all may be stored.
        """
        if model.engine_key in self._preloaded or self._interrupted.is_set():
            return
        self._preloaded.add(model.engine_key)
        with suppress(Exception):
            if use_cache and self._answered_fingerprint(model) is not None:
                return
            # in the caller's thread: it imports while the worker loads
            self._loader.import_modules(model)
        with self._changed:
            self._to_preload = _Work(model, use_cache, [])
            self._wake_worker()

    def submit(
        self,
        model: ModelArguments,
        requests: Sequence[KeyedRequest],
        use_cache: bool = True,
        *,
        gathers: bool = False,
    ) -> SubmittedBlock:
        """Queue `requests` as one block.

        use_cache: the response cache may hold the results and must store them.
        gathers: others may join the block until none arrives any more, as those of `respond`.
        """
        jobs = self._enqueue(model, requests, use_cache, is_block=not gathers)
        return SubmittedBlock(self, model, requests, jobs)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Start no block meanwhile: blocks of one model that are submitted inside are computed as
        one.
        """
        with self._changed:
            yield

    def respond(
        self, model: ModelArguments, request: KeyedRequest, use_cache: bool = True
    ) -> Response:
        """Wait for one response. Raises `Interrupted`, or whatever kept its block from being
        computed.
        """
        jobs = self._enqueue(model, [request], use_cache, is_block=False)
        try:
            self._wait(jobs[0])
            return jobs[0].future.result()
        finally:
            self._release(jobs)

    def _wait(self, job: Job, until: float = math.inf) -> bool:
        """Wait for a job, or until a time (`time.time()`); return whether it is done.

        Raises `Interrupted`, and `RuntimeError` where the worker's thread has ended.
        """
        while not job.future.done():
            if time.time() >= until:
                return False
            if self._interrupted.is_set():
                raise Interrupted(
                    "interrupted; finished results are stored, the same command continues"
                )
            if self._worker is not None and not self._worker.is_alive():
                raise RuntimeError(
                    "the engine's thread has ended, perhaps for want of memory; start again"
                )
            wait([job.future], timeout=WAIT_SLICE_S)
        return True

    def interrupt(self) -> None:
        """Stop all work soon. Takes no lock: a signal handler may call it."""
        self._interrupted.set()

    def resume(self) -> None:
        """Serve again after `interrupt`, unless closed: in a notebook an interruption does not end
        the process.
        """
        if not self._is_closing:
            self._interrupted.clear()

    def loaded(self, model: ModelArguments) -> LoadedModel | None:
        """Return what is known of `model`, None before it was loaded.

        The last result of a block is handed out after `last_run` is set, so whoever has all results
        finds it here.
        """
        return self._loaded.get(model.engine_key)

    def record(self, model: ModelArguments, chat: ChatFormat | None) -> dict[str, Any]:
        """Return what `verify` must know of the answers of `model` (`Source`), {} if it gave none.

        chat: format of its prompts.
        """
        if (loaded := self.loaded(model)) is None:
            return {}
        return {
            **{field.name: loaded.last_run.get(field.name) for field in fields(Source)},
            "model": model.name,
            "precision": model.config.precision,
            "fingerprint": loaded.fingerprint,
            "chat_template": chat and chat.as_json(),
        }

    def loading_s(self, model: ModelArguments, since: float) -> float:
        """Return the seconds from `since` (`time.monotonic()`) until the model was loaded, 0 if it
        was before.
        """
        loaded = self.loaded(model)
        return max(0.0, loaded.loaded_at - since) if loaded else 0.0

    def close(self) -> bool:
        """Stop, write the response cache, free the model; return whether the worker has ended.

        A second call waits for what the first one has left of its time.
        """
        self._interrupted.set()
        with self._changed:
            if not self._is_closing:
                self._close_by = time.monotonic() + SHUTDOWN_S
            self._is_closing = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None:
            # Not `join` alone: a signal in the middle of it has Python take the thread for ended
            # (bpo-45274).
            has_ended = self._ended.wait(max(0.0, self._close_by - time.monotonic()))
            if has_ended:
                worker.join(1.0)  # what it still frees must not meet the end of the interpreter
            return has_ended
        self._loader.close()
        return True

    # The queue

    def _enqueue(
        self,
        model: ModelArguments,
        requests: Sequence[KeyedRequest],
        use_cache: bool,
        is_block: bool,
    ) -> list[Job]:
        """Return one job per distinct request, each with one user more."""
        jobs: dict[str, Job] = {}
        with self._changed:
            for request in requests:
                if request.key in jobs:
                    continue
                new = Job(model, request, use_cache)
                job = self._jobs.get(new.identity, new)
                # a new block tries again; who asks for a part of this one does not
                if is_block and job.has_failed:
                    job = new
                jobs[request.key] = self._jobs[new.identity] = job
                job.num_users += 1
                if job is new:
                    now = time.monotonic()
                    if not self._queue:
                        self._flush_at_latest = now + MAX_GATHERING_S
                    if is_block:
                        # what was submitted together needs no gathering
                        self._flush_at_latest = now
                    self._flush_at = min(now + IDLE_FLUSH_S, self._flush_at_latest)
                    self._queue.append(job)
            self._wake_worker()
        return list(jobs.values())

    def _wake_worker(self) -> None:
        """Start the worker's thread if there is none, and let it look again; `_changed` is held."""
        if self._worker is None:
            worker = threading.Thread(target=self._work, name="flexgen-engine", daemon=True)
            worker.start()  # raises where the system has no more threads
            self._worker = worker
        self._changed.notify_all()

    def _release(self, jobs: list[Job]) -> None:
        """Take one user from each job; forget jobs that nobody wants and nobody computes."""
        with self._changed:
            for job in jobs:
                job.num_users -= 1
                if job.num_users == 0 and (job.future.done() or not job.is_started):
                    self._forget(job)
            if any(job.num_users == 0 and not job.is_started for job in jobs):
                self._queue = [job for job in self._queue if job.num_users]

    def _forget(self, job: Job) -> None:
        """Let an equal request make a new job."""
        if self._jobs.get(job.identity) is job:
            del self._jobs[job.identity]

    def _next_work(self) -> _Work | None:
        """Wait for jobs of one model (of the loaded one first), or for a model to preload; None
        when closing.
        """
        with self._changed:
            while not self._is_closing:
                to_preload, self._to_preload = self._to_preload, None
                if to_preload is not None and self._engine is None and not self._queue:
                    return to_preload
                if self._interrupted.is_set():
                    self._changed.wait(WAIT_SLICE_S)
                elif self._queue and (delay := self._flush_at - time.monotonic()) > 0:
                    self._changed.wait(delay)
                elif self._queue:
                    return self._take_block()
                else:
                    self._changed.wait()
        return None

    def _take_block(self) -> _Work:
        """Take all jobs of one model from the queue: of the loaded one if there are any."""
        loaded = self._engine[0] if self._engine else None
        keys = [job.model.engine_key for job in self._queue]
        key = loaded if loaded in keys else keys[0]
        block = [job for job in self._queue if job.model.engine_key == key]
        self._queue = [job for job in self._queue if job.model.engine_key != key]
        for job in block:
            job.is_started = True
        return _Work(block[0].model, any(job.use_cache for job in block), block)

    # The worker's thread

    def _work(self) -> None:
        """Be the worker until the service is closed."""
        while (work := self._next_work()) is not None:
            try:
                self._serve(*work)
            # the waiting threads must get it, and this thread must live on
            except BaseException as error:
                self._fail(work.jobs, error)
        try:
            self._evict()
            self._loader.close()
        finally:
            self._ended.set()

    def _serve(self, model: ModelArguments, use_cache: bool, block: list[Job]) -> None:
        """Complete the jobs of a block from the response cache, and compute the others; without any
        jobs only load the model.
        """
        if use_cache and (fingerprint := self._answered_fingerprint(model)) is not None:
            if block:
                self._recall(block, fingerprint)
            if all(job.future.done() for job in block):
                return
        engine = self._engine_of(model)
        if not block:
            return
        path = response_cache_path(state_dir(), engine.fingerprint) if use_cache else None
        with closing(ResponseWriter(path, model.name)) as writer:
            self._complete_stored(block, writer)
            if remaining := [job for job in block if not job.future.done()]:
                self._compute(engine, remaining, writer)

    def _answered_fingerprint(self, model: ModelArguments) -> str | None:
        """Return the fingerprint of a model that is not loaded and has answers in the response
        cache; else None.
        """
        if self._engine is not None and self._engine[0] == model.engine_key:
            return None
        with stopped_by(self._interrupted.is_set):
            fingerprint = self._loader.fingerprint(model)
        is_answered = (
            fingerprint is not None and response_cache_path(state_dir(), fingerprint).is_file()
        )
        return fingerprint if is_answered else None

    def _recall(self, block: list[Job], fingerprint: str) -> None:
        """Complete the jobs whose results are stored; the model need not be loaded for them."""
        model = block[0].model
        if (known := self.loaded(model)) is None or known.fingerprint != fingerprint:
            self._loaded[model.engine_key] = LoadedModel(fingerprint, time.monotonic())
        with closing(
            ResponseWriter(response_cache_path(state_dir(), fingerprint), model.name)
        ) as writer:
            self._complete_stored(block, writer)
        # what this thread has opened, it needs no longer
        report(ProgressPhase("load", done=1, total=1))

    def _complete_stored(self, block: list[Job], writer: ResponseWriter) -> None:
        """Complete the jobs whose results are stored."""
        waiting = [job for job in block if job.use_cache and not job.future.done()]
        results = writer.get_many([job.request.key for job in waiting])
        for job in waiting:
            if job.request.key in results:
                self._complete(job, Response(results[job.request.key], is_cached=True))

    def _compute(self, engine: Engine, jobs: list[Job], writer: ResponseWriter) -> None:
        """Compute jobs in one run of the engine; complete and store each when it has finished."""
        pending = dict(enumerate(jobs))
        # Completed at the end: who has all results must find `last_run`.
        last: list[tuple[Job, Response]] = []

        def on_result(index: int, result: GenerationResult) -> None:
            job = pending.pop(index, None)
            if job is None:
                return
            if job.use_cache and result.error is None:
                writer.add(job.request.key, result)
            if pending:
                self._complete(job, Response(result, is_cached=False))
            else:
                last.append((job, Response(result, is_cached=False)))

        def should_stop() -> bool:
            return self._interrupted.is_set() or not any(
                job.num_users for job in list(pending.values()) or jobs
            )

        def on_drawn(index: int, *drawn: Any) -> float | None:
            if (job := pending.get(index)) is not None and job.use_cache:
                return writer.add_drawn(job.request.key, *drawn)
            return None

        drawn_before = writer.take_drawn([job.request.key for job in jobs if job.use_cache])
        if drawn_before:
            tokens = sum(len(drawn) for parts in drawn_before.values() for drawn in parts)
            what = f"{count(tokens, 'drawn token')} of {count(len(drawn_before), 'answer')}"
            report(Message(f"goes on behind {what} of an earlier run", is_warning=False))
        try:
            requests = [
                replace(job.request.request, drawn=drawn_before[job.request.key])
                if job.request.key in drawn_before
                else job.request.request
                for job in jobs
            ]
            results = engine.run(
                requests, on_result=on_result, should_stop=should_stop, on_drawn=on_drawn
            )
            for index, result in enumerate(results):
                on_result(index, result)
            key = jobs[0].model.engine_key
            self._loaded[key] = replace(self._loaded[key], last_run=dict(engine.last_run))
        finally:
            for job, response in last:
                self._complete(job, response)

    def _engine_of(self, model: ModelArguments) -> Engine:
        """Return the engine of a model; load it, in place of another one, if it is not loaded."""
        key = model.engine_key
        if self._engine is None or self._engine[0] != key:
            self._evict()
            with stopped_by(self._interrupted.is_set):
                engine = self._loader.load(model)
            self._engine = (key, engine)
            last_run = self._loaded[key].last_run if key in self._loaded else {}
            self._loaded[key] = LoadedModel(engine.fingerprint, time.monotonic(), last_run)
        return self._engine[1]

    def _evict(self) -> None:
        """Close the loaded engine: clients are never freed, so its memory is taken back here."""
        if self._engine is not None:
            engine, self._engine = self._engine[1], None
            engine.close()

    def _complete(self, job: Job, response: Response) -> None:
        """Give a response to all who wait for a job."""
        job.future.set_result(response)
        with self._changed:
            if not job.num_users:
                self._forget(job)

    def _fail(self, block: list[Job], error: BaseException) -> None:
        """Raise `error` to all who wait for a job of `block`.

        If the engine stopped because the block had lost all its users, jobs that have a new user
        are queued again.
        """
        was_abandoned = isinstance(error, Interrupted) and not self._interrupted.is_set()
        with self._changed:
            for job in block:
                if job.future.done():
                    continue
                if was_abandoned and job.num_users:
                    job.is_started = False
                    self._flush_at = self._flush_at_latest = time.monotonic()
                    self._queue.append(job)
                else:
                    job.future.set_exception(error)
                    if not job.num_users:
                        self._forget(job)
