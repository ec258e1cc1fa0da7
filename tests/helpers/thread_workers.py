"""Workers that are threads of this process, as real as those of Ray but for the process: for tests of the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from flexgen_helm.distributed.worker import Failure, Report, Worker
from flexgen_helm.request import GenerationRequest


class ThreadWorkers:
    """What the driver knows of `RayWorkers`.

    make: makes the worker of a name. lose_at: name -> number of its unit that is lost with it.
    hang: names of workers that answer nothing, until another one is lost, and then are lost too.
    """

    def __init__(
        self, names: Sequence[str], make: Callable[[str], Worker], lose_at: dict[str, int] | None = None, hang: str = ""
    ) -> None:
        self.workers = {name: make(name) for name in names}
        self.units: dict[str, list[Sequence[GenerationRequest]]] = {name: [] for name in names}
        self.closed = False
        self._lose_at, self._hang = dict(lose_at or {}), hang
        self._calls: dict[str, Iterator[Report]] = {name: worker.work(()) for name, worker in self.workers.items()}

    def poll(self, timeout_s: float) -> list[tuple[str, Report]]:
        time.sleep(0.001)
        return [(name, self._next(name)) for name in list(self._calls)]

    def _next(self, name: str) -> Report:
        if self.units[name] and name in self._hang:
            return {} if self._lose_at.keys() & self.workers.keys() else self._lose(name, "it has not answered")
        if self.units[name] and len(self.units[name]) == self._lose_at.get(name):
            return self._lose(name, "its machine burns")
        news = next(self._calls[name], None)
        if news is None:
            del self._calls[name]
        return news or {}

    def _lose(self, name: str, why: str) -> Report:
        self.drop(name)
        return {Failure: Failure(why, is_lost=True)}

    def idle(self) -> list[str]:
        return sorted(self.workers.keys() - self._calls.keys())

    def call(self, worker: str, requests: Sequence[GenerationRequest]) -> None:
        self.units[worker].append(requests)
        self._calls[worker] = self.workers[worker].work(requests)

    def cancel(self, worker: str) -> None:
        if (call := self._calls.pop(worker, None)) is not None:
            call.close()  # type: ignore[attr-defined]

    def drop(self, worker: str) -> None:
        del self.workers[worker]
        self._calls.pop(worker, None)

    def count(self) -> int:
        return len(self.workers)

    def may_serve(self) -> bool:
        return bool(self.workers)

    def waiting_for(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True
