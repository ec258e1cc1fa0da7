"""Workers that are threads of this process, as real as those of Ray but for the process: for tests of the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flexgen_helm.distributed.messages import Failure, Report
from flexgen_helm.distributed.worker import Worker
from flexgen_helm.progress import Event
from flexgen_helm.request import GenerationRequest


class ThreadWorker(Worker):
    """A worker that reports what its own thread does, because observers are those of the process."""

    def _on_event(self, event: Event) -> None:
        if threading.current_thread() is self._thread:
            super()._on_event(event)


class ThreadWorkers:
    """What the driver knows of `RayWorkers`.

    make: makes the worker of a name. lose_at: name -> number of its unit that is lost with it.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], Any], lose_at: dict[str, int] | None = None) -> None:
        self.workers = {name: make(name) for name in names}
        self.units: dict[str, list[Sequence[GenerationRequest]]] = {name: [] for name in names}
        self.closed = False
        self._lose_at = dict(lose_at or {})
        self._pool = ThreadPoolExecutor(8)
        self._replies: dict[str, Future[Report]] = {}

    def poll(self, timeout_s: float) -> list[tuple[str, Report]]:
        end = time.monotonic() + timeout_s
        while not (done := [name for name, reply in self._replies.items() if reply.done()]):
            if time.monotonic() > end:
                return []
            time.sleep(0.001)
        return [(name, self._receive(name)) for name in done]

    def _receive(self, name: str) -> Report:
        reply = self._replies.pop(name)
        if self.units[name] and len(self.units[name]) == self._lose_at.get(name):
            del self.workers[name]
            return {"end": Failure("its machine burns", is_lost=True)}
        return reply.result()

    def listening(self) -> list[str]:
        return sorted(self.workers.keys() - self._replies.keys())

    def send(self, worker: str, is_wanted: bool, requests: Sequence[GenerationRequest]) -> None:
        assert worker in self.listening()
        self.units[worker] += [requests] if requests else []
        self._replies[worker] = self._pool.submit(self.workers[worker].exchange, is_wanted, requests)

    def drop(self, worker: str) -> None:
        del self.workers[worker]
        self._replies.pop(worker, None)

    def count(self) -> int:
        return len(self.workers)

    def may_serve(self) -> bool:
        return bool(self.workers)

    def waiting_for(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown(wait=False)
