"""A worker: it loads the model once, computes one unit at a time, and reports. Ray runs it in a process of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm import __version__
from flexgen_helm.config import EngineConfig
from flexgen_helm.distributed.messages import Failure, ModelToLoad, Order, Report, WorkerIdentity
from flexgen_helm.errors import Interrupted
from flexgen_helm.progress import Event, Message, PlanLine, ProgressPhase, observed_by
from flexgen_helm.request import GenerationRequest, GenerationResult, Progress

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Most seconds that a result waits for its report.
REPORT_EVERY_S = 0.5


class Worker:
    """An engine behind one method, `exchange`: orders go in, results come out.

    The engine has a thread of its own. What it has finished by the time of an order is in the report of that order.
    """

    def __init__(self, model: ModelToLoad, memory_share: float = 1.0, cores: int | None = None) -> None:
        """Begin to load the model.

        memory_share: of the machine's memory and disk, where no limit is given; workers of one machine divide it.
        cores: those that Ray gives to this worker.
        """
        _use_cores(cores)
        self._began = time.monotonic()
        self._model, self._memory_share = model, memory_share
        self._changed = threading.Condition()  # its lock is taken again inside `_add`
        self._order: Order | None = None  # the unit to compute, until it is finished
        self._stop: int | None = None
        self._pending = Report("loading")
        self._report_at = float("inf")  # when the next report is wanted, by `time.monotonic()`
        self._thread = threading.Thread(target=self._work, name="flexgen-engine", daemon=True)
        self._thread.start()

    def exchange(self, order: Order) -> Report:
        """Take an order; wait at most `order.wait_s` seconds for something to report."""
        end = time.monotonic() + order.wait_s
        with self._changed:
            if order.unit is not None:
                self._order = order
            if order.stop is not None:
                self._stop = order.stop
            self._changed.notify_all()
            while (left := min(end, self._report_at) - time.monotonic()) > 0:
                self._changed.wait(left)
            report = self._pending
            self._pending = Report(report.state, report.identity)
            self._report_at = float("inf")
            return report

    def _add(self, delay_s: float | None, **news: Any) -> None:
        """Change the next report, which is wanted `delay_s` seconds from now; None can wait."""
        with self._changed:
            self._pending = replace(self._pending, **news)
            if delay_s is not None:
                self._report_at = min(self._report_at, time.monotonic() + delay_s)
            self._changed.notify_all()

    # The engine's thread

    def _work(self) -> None:
        try:
            with observed_by(self._on_event):
                engine = _load(self._model, self._memory_share)
                self._add(0, state="ready", identity=_identity(engine, time.monotonic() - self._began))
                while True:
                    self._compute(engine, self._next_unit())
        except BaseException as error:
            self._add(0, state="failed", failure=Failure.of(error))

    def _next_unit(self) -> Order:
        with self._changed:
            while self._order is None:
                self._changed.wait()
            return self._order

    def _compute(self, engine: Engine, order: Order) -> None:
        unit = order.unit
        assert unit is not None

        def on_result(index: int, result: GenerationResult) -> None:
            with self._changed:
                self._add(REPORT_EVERY_S, results=(*self._pending.results, (unit, index, result)))

        def on_progress(progress: Progress) -> None:
            self._add(None, progress=progress)

        record: dict[str, Any] = {}
        failure = None
        try:
            requests: list[GenerationRequest] = list(order.requests)
            engine.run(requests, on_result=on_result, should_stop=lambda: self._stop == unit, progress=on_progress)
            record = dict(engine.last_run)
        except Interrupted:
            pass  # nobody wants the rest
        except BaseException as error:
            failure = Failure.of(error)
        with self._changed:
            self._order = None
            self._add(0, finished=unit, record=record, failure=failure)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Message | PlanLine | ProgressPhase):
            with self._changed:
                # Of stages only the newest counts: a download reports a thousand of them.
                kept = [known for known in self._pending.events if isinstance(known, Message)]
                self._add(None, events=(*kept, event))


def _use_cores(cores: int | None) -> None:
    """Undo what Ray says about threads where the worker has the whole machine.

    Ray sets OMP_NUM_THREADS to the number of its logical cores; torch itself takes the physical ones, which is faster.
    """
    if cores is not None and cores == os.cpu_count() and os.environ.get("OMP_NUM_THREADS") == str(cores):
        del os.environ["OMP_NUM_THREADS"]


def _load(model: ModelToLoad, memory_share: float) -> Engine:
    from flexgen_helm.engine.engine import Engine

    return Engine.from_config(model.path, _own_limits(model.config, memory_share), name=model.name)


def _own_limits(config: EngineConfig, share: float) -> EngineConfig:
    """Return the options with this worker's share of the machine's memory and disk where they give no limit."""
    if share >= 1:
        return config
    import torch

    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.device import tier_capacities
    from flexgen_helm.hardware.control_groups import host_memory
    from flexgen_helm.planner.problem import without_margin

    folder = Path(config.offload_dir) if config.offload_dir is not None else state_dir() / "offload"
    total = host_memory().total
    free = tier_capacities(config.limits, torch.device("cpu"), folder)  # keeps the limits that are given
    # Of the total: what is free depends on how much the machine's other workers have loaded already.
    cpu = min(free["cpu"], int(share * without_margin(total, total)))
    limits = replace(
        config.limits,
        cpu=cpu if config.limits.cpu is None else config.limits.cpu,
        disk=int(share * free["disk"]) if config.limits.disk is None else config.limits.disk,
    )
    return replace(config, limits=limits)


def _identity(engine: Engine, load_s: float) -> WorkerIdentity:
    tokenizer = engine.tokenizer.fingerprint if engine.tokenizer is not None else None
    device_type, dtype = engine.identity.device.type, str(engine.identity.dtype).removeprefix("torch.")
    return WorkerIdentity(
        socket.gethostname(), os.getpid(), __version__, tokenizer, engine.fingerprint, device_type, dtype, load_s
    )
