"""The account of one HELM run: what its answers cost, as statistics and as `flexgen_run.json`.

Every answer carries its own share of the work, so the account is the same whether a run was computed alone, in a
suite-wide block, or partly in an earlier process whose journal supplied the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_helm.files import replace_text
from flexgen_helm.plugin.models import ModelArguments
from flexgen_helm.plugin.service import Answer
from flexgen_helm.report.throughput import throughput, versions
from flexgen_helm.request import Cost

RUN_FILE = "flexgen_run.json"


def usage(keys: Sequence[str], costs: Mapping[str, Cost]) -> dict[str, Any]:
    """Workload, throughputs and times of the requests `keys` (repeated where requests are equal).

    A repetition was asked for but not computed: it counts with its tokens and costs nothing.
    """
    charged: list[Cost] = []
    seen: set[str] = set()
    for key in keys:
        if key not in costs:
            continue
        cost = costs[key]
        repeated = Cost(
            prompt_tokens=cost.prompt_tokens,
            output_tokens=cost.output_tokens,
            padded_prompt_tokens=cost.prompt_tokens,
            padded_output_tokens=cost.output_tokens,
        )
        charged.append(repeated if key in seen else cost)
        seen.add(key)
    found = throughput(charged, sum(cost.prefill_s + cost.decode_s for cost in charged))
    found["workload"] = {"num_requests": len(charged), "num_unique": len(seen), **found["workload"]}
    return found


@dataclass
class RunRecord:
    """One HELM run while it runs. Filled by the hooks, in this order: times, keys and answers, the engine's part.

    metric_classes: full names of the classes that HELM will score it with.
    """

    name: str
    directory: Path
    model: ModelArguments
    metric_classes: Sequence[str] = ()
    started: float = field(default_factory=time.monotonic)
    adapt_started: float | None = None
    execute_started: float | None = None
    execute_ended: float | None = None
    load_s: float = 0.0
    keys: list[str] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None

    def costs(self) -> dict[str, Cost]:
        return {key: answer.result.cost for key, answer in self.answers.items()}

    def usage(self) -> dict[str, Any]:
        return usage(self.keys, self.costs())

    def wall_s(self) -> dict[str, float]:
        """Seconds by stage up to now. `load` is what the run waited for its model, which is loaded beside the stages
        before; in a suite-wide block `generate` is only what this run still had to wait."""
        now = time.monotonic()
        execute_started = self.execute_started or now
        adapt_started = self.adapt_started or execute_started
        execute_ended = self.execute_ended or now
        return {
            "data": adapt_started - self.started,
            "adapt": execute_started - adapt_started,
            "load": self.load_s,
            "generate": max(0.0, execute_ended - execute_started - self.load_s),
            "metrics": now - execute_ended,
        }

    def as_json(self) -> dict[str, Any]:
        """The engine's account of the block, with this run's own share in place of the block's where it has one."""
        own = {
            "model": self.model.name,
            "fingerprint": self.fingerprint,
            "precision": self.model.config.precision,
            **self.usage(),
            "num_reused": sum(answer.reused for answer in self.answers.values()),
            "wall_s": self.wall_s(),
        }
        return {**self.engine, **own, "versions": versions()}

    def write(self) -> None:
        """A run that computed nothing keeps what the file says of the block that its answers are from."""
        path = self.directory / RUN_FILE
        write_json(path, {**({} if self.engine else self._before(path)), **self.as_json()})

    def _before(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        same = isinstance(content, dict) and content.get("fingerprint") == self.fingerprint
        return content if same else {}


# The run that the current thread is in; None outside of runs of ours.
current_run: ContextVar[RunRecord | None] = ContextVar("flexgen_run", default=None)


_observers: list[Callable[[RunRecord], None]] = []


@contextmanager
def observe_runs(observer: Callable[[RunRecord], None]) -> Iterator[None]:
    """Tell `observer` each record whose run has executed, even where its metrics fail afterwards."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def announce_record(record: RunRecord) -> None:
    for observer in _observers:
        observer(record)


def write_json(path: Path, content: dict[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def merged(records: Iterable[RunRecord]) -> dict[str, Any]:
    """The account of several runs; a question that occurs in two of them was computed once."""
    keys: list[str] = []
    costs: dict[str, Cost] = {}
    for record in records:
        prefix = f"{record.model}\0"
        keys += [prefix + key for key in record.keys]
        costs.update({prefix + key: cost for key, cost in record.costs().items()})
    return usage(keys, costs)
