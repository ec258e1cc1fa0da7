"""What each worker did in a run, and the run's record made of it. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexgen_helm.distributed.messages import WorkerIdentity
from flexgen_helm.report.blocks import add_blocks
from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost, GenerationResult, Progress


@dataclass(eq=False)
class WorkerRecord:
    """One worker of a run.

    costs: of the answers that were the first. record: of its units, joined.
    """

    name: str
    identity: WorkerIdentity
    costs: list[Cost] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    num_units: int = 0
    is_lost: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return what `flexgen_run.json` says of a worker; seconds are those of the answers that count."""
        wall_s = self.record.get("wall_s", {})
        return {
            "name": self.name,
            "host": self.identity.host,
            "pid": self.identity.pid,
            "hardware": self.record.get("hardware", {"device": self.identity.device_type}),
            "policy": self.record.get("policy"),
            "schedule": self.record.get("schedule"),
            "limit_bytes": self.record.get("limit_bytes"),
            "load_s": self.identity.load_s,
            "num_units": self.num_units,
            "num_requests": len(self.costs),
            "tokens": sum(cost.prompt_tokens + cost.output_tokens for cost in self.costs),
            "seconds": wall_s.get("generate", 0.0),
            "is_lost": self.is_lost,
        }


class RunTotals:
    """What all workers have done in one run so far."""

    def __init__(self, workers: Mapping[str, WorkerRecord]) -> None:
        """workers: all that are known; more may come."""
        self._began = time.monotonic()
        self._workers = workers
        self._lost_before = {name for name, worker in workers.items() if worker.is_lost}
        for worker in workers.values():
            worker.costs, worker.record, worker.num_units = [], {}, 0
        self._running: dict[str, Progress] = {}
        self._done_tokens = 0.0

    def add(self, name: str, result: GenerationResult) -> None:
        """Count an answer for its worker."""
        self._workers[name].costs.append(result.cost)

    def progress(self, name: str, progress: Progress) -> None:
        """Note how far a worker's unit is."""
        self._running[name] = progress

    def finish(self, name: str, record: Mapping[str, Any]) -> None:
        """Add the record of a unit that has ended; empty if it was stopped or failed."""
        self._forget(name)
        worker = self._workers[name]
        worker.num_units += 1
        if record:
            worker.record = add_blocks(worker.record, record) if worker.record else dict(record)

    def lose(self, name: str) -> None:
        self._forget(name)
        if name in self._workers:
            self._workers[name].is_lost = True

    def _forget(self, name: str) -> None:
        if (progress := self._running.pop(name, None)) is not None:
            self._done_tokens += progress.done_tokens

    def as_progress(self, num_answered: int, num_requests: int, waiting_cost: float) -> Progress:
        """Return the progress of all workers together; waiting_cost: tokens that nobody computes yet."""
        running = list(self._running.values())
        done = self._done_tokens + sum(progress.done_tokens for progress in running)
        total = self._done_tokens + sum(progress.total_tokens for progress in running) + waiting_cost
        memory: dict[str, int] = {}
        for progress in running:
            for tier, size in progress.memory_bytes.items():
                memory[tier] = memory.get(tier, 0) + size
        elapsed_s = time.monotonic() - self._began
        return Progress(done, round(max(total, done)), num_answered, num_requests, elapsed_s, memory)

    def as_json(self, load_s: float, results: Sequence[GenerationResult | None]) -> dict[str, Any]:
        """Return the run's record: sums and peaks over workers; plan and hardware are those of the first.

        load_s: until the first worker was ready. `time_s` and `bytes` add up over workers; `wall_s` is the driver's.
        """
        seconds = time.monotonic() - self._began
        used = [
            worker
            for name, worker in self._workers.items()
            if worker.num_units or worker.costs or (worker.is_lost and name not in self._lost_before)
        ]
        record: dict[str, Any] = {}
        for worker in used:
            if worker.record:
                record = add_blocks(record, worker.record) if record else dict(worker.record)
        figures = throughput((result.cost for result in results if result is not None), seconds)
        if len(used) > 1:  # of units on machines that work side by side no sum is a prediction
            record |= {"predicted_latency_s": None, "predicted": None}
        num_served = sum(result is not None and result.error is None for result in results)
        workload = {"num_requests": len(results), "num_unique": num_served, **figures["workload"]}
        return {
            **record,
            **figures,
            "workload": workload,
            "wall_s": {"load": load_s, "generate": seconds},
            "workers": [worker.as_json() for worker in used],
        }
