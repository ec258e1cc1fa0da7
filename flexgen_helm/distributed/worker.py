"""A worker: it loads the model once, computes one unit at a time, and reports. Ray runs it in a process of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm import __version__
from flexgen_helm.config import EngineConfig
from flexgen_helm.distributed.messages import Failure, ModelToLoad, Report, UnitRecord, WorkerIdentity
from flexgen_helm.errors import Interrupted
from flexgen_helm.progress import Event, Message, PlanLine, ProgressPhase, observed_by
from flexgen_helm.request import GenerationRequest, Progress

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Most seconds that a result waits for its report.
REPORT_EVERY_S = 0.5
# The key of what is reported at once.
_END = "end"


class Worker:
    """An engine behind one method, `exchange`: units go in, reports come out.

    The engine has a thread of its own, so that a worker which computes reports too.
    """

    def __init__(self, model: ModelToLoad, memory_share: float = 1.0, cores: int | None = None) -> None:
        """Begin to load the model.

        memory_share: of the machine's memory and disk, where no limit is given; workers of one machine divide it.
        cores: those that Ray gives to this worker.
        """
        _use_cores(cores)
        self._began = time.monotonic()
        self._model, self._memory_share = model, memory_share
        self._changed = threading.Condition()
        self._requests: Sequence[GenerationRequest] = ()  # to begin with
        self._is_wanted = False
        self._news: dict[Any, Any] = {}
        self._thread = threading.Thread(target=self._work, name="flexgen-engine", daemon=True)
        self._thread.start()

    def exchange(self, is_wanted: bool, requests: Sequence[GenerationRequest] = ()) -> Report:
        """Return what has happened since the last call, at an end at once, else after `REPORT_EVERY_S`.

        is_wanted: False stops the unit that is computed.
        requests: a unit to begin with, of an idle worker.
        """
        with self._changed:
            self._is_wanted, self._requests = is_wanted, requests or self._requests
            self._changed.notify_all()
            self._changed.wait_for(lambda: _END in self._news, REPORT_EVERY_S)
            news, self._news = self._news, {}
            return news

    def _add(self, key: Any, value: Any) -> None:
        with self._changed:
            self._news[key] = value
            self._changed.notify_all()

    # The engine's thread

    def _work(self) -> None:
        with observed_by(self._on_event):
            try:
                engine = _load(self._model, self._memory_share)
                self._add(_END, _identity(engine, time.monotonic() - self._began))
            except BaseException as error:
                self._add(_END, Failure.of(error))
                return
            while True:
                self._add(_END, self._compute(engine))

    def _compute(self, engine: Engine) -> UnitRecord | Failure:
        with self._changed:
            self._changed.wait_for(lambda: self._requests)
            requests, self._requests = self._requests, ()
        try:
            engine.run(
                requests,
                on_result=self._add,
                should_stop=lambda: not self._is_wanted,
                progress=partial(self._add, Progress),
            )
        except Interrupted:
            return UnitRecord({})  # nobody wants the rest
        except BaseException as error:
            return Failure.of(error)
        return UnitRecord(dict(engine.last_run))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            self._add(event.text, event)
        elif isinstance(event, PlanLine | ProgressPhase):
            self._add(ProgressPhase, event)


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
    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.device import tier_capacities
    from flexgen_helm.hardware.host_memory import host_memory
    from flexgen_helm.planner.problem import without_margin

    folder = Path(config.offload_dir) if config.offload_dir is not None else state_dir() / "offload"
    total = host_memory().total
    free = tier_capacities(config.limits, folder)  # keeps the limits that are given
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
