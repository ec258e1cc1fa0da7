"""One HELM run in progress, and the file `flexgen_run.json` that says what it cost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_helm.files import replace_text
from flexgen_helm.plugin.models import ModelArguments
from flexgen_helm.plugin.service import Response, Service, SubmittedBlock
from flexgen_helm.plugin.usage import RUN_FILE, read_json, requests_usage
from flexgen_helm.report.throughput import versions
from flexgen_helm.request import Cost


@dataclass
class HelmRun:
    """Filled by the patches of HELM: the times, then what `record_block` sets. Times are `time.monotonic()`.

    metric_classes: full names of the classes that HELM will score the run with.
    keys: one per request, repeated where requests are equal.
    block: `Engine.last_run` of the block that computed the run; empty if nothing was computed.
    """

    name: str
    folder: Path
    model: ModelArguments
    metric_classes: Sequence[str] = ()
    started: float = field(default_factory=time.monotonic)
    adapt_started: float | None = None
    execute_started: float | None = None
    execute_ended: float | None = None
    load_s: float = 0.0
    keys: list[str] = field(default_factory=list)
    responses: dict[str, Response] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None

    def record_block(self, service: Service, block: SubmittedBlock) -> None:
        """Take the responses of the executed run from its block."""
        self.execute_ended = time.monotonic()
        self.load_s = service.loading_s(self.model, self.execute_started or self.execute_ended)
        self.keys, self.responses = block.keys, block.responses()
        if (loaded := service.loaded(self.model)) is not None:
            self.fingerprint = loaded.fingerprint
            if any(not response.is_cached for response in self.responses.values()):
                self.block = loaded.last_run

    def costs(self) -> dict[str, Cost]:
        return {key: response.result.cost for key, response in self.responses.items()}

    def usage(self) -> dict[str, Any]:
        return requests_usage(self.keys, self.costs())

    def wall_s(self) -> dict[str, float]:
        """Return the seconds of each stage so far.

        `load` is what the run waited for its model, which is loaded while data and prompts are made. In a suite-wide
        block `generate` is only what this run still had to wait.
        """
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
        """Return what the engine says of the block, with this run's own share where it has one."""
        return {
            **self.block,
            "model": self.model.name,
            "fingerprint": self.fingerprint,
            "precision": self.model.config.precision,
            **self.usage(),
            "num_reused": sum(response.is_cached for response in self.responses.values()),
            "wall_s": self.wall_s(),
            "versions": versions(),
        }

    def write(self) -> None:
        """Write `flexgen_run.json`. A run that computed nothing keeps what the file says of its results' block."""
        path = self.folder / RUN_FILE
        before = {} if self.block else read_json(path)
        if before.get("fingerprint") != self.fingerprint:
            before = {}
        write_json(path, {**before, **self.as_json()})


def write_json(path: Path, content: dict[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
