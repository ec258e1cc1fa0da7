"""What each worker did in a run, and the run's record made of it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexgen_helm.distributed.messages import WorkerIdentity
from flexgen_helm.report.blocks import add_blocks
from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost, GenerationResult, Progress


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
