"""A worker: it loads the model once, computes units of requests, and reports. Ray runs it in a process. No torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Flag
from typing import TYPE_CHECKING, Any

from flexgen_helm import __version__
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import FlexgenError
from flexgen_helm.progress import Event, Message, ProgressPhase, observed_by
from flexgen_helm.request import GenerationRequest, Progress

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Most seconds that a result waits for its report.
REPORT_EVERY_S = 0.5


@dataclass(frozen=True)
class ModelToLoad:
    """What `Engine.from_config` takes, the same on every machine.

    path: a name of the catalog or the hub, or an absolute path. name: what the user calls the model.
    """

    path: str
    config: EngineConfig
    name: str

    def with_absolute_paths(self) -> ModelToLoad:
        """Return the record for processes that have other working folders; names of models are no paths."""
        folder = self.config.offload_dir
        config = self.config if folder is None else replace(self.config, offload_dir=str(Path(folder).absolute()))
        path = resolve(self.path, config.revision).path
        return ModelToLoad(self.path if path is None else str(path.absolute()), config, self.name)


@dataclass(frozen=True)
class WorkerIdentity:
    """What the driver compares before it takes answers from a worker, and what its records say.

    version: of flexgen_helm. tokenizer: its fingerprint. fingerprint: of the engine; answers are cached by it.
    device_type, dtype: as torch names them. load_s: seconds until the model was ready.
    """

    host: str
    pid: int
    version: str
    tokenizer: str | None
    fingerprint: str
    device_type: str
    dtype: str
    load_s: float


@dataclass(frozen=True)
class Failure:
    """Why a worker is lost, or could not load its model or compute a unit. exit_code: as of `FlexgenError`."""

    message: str
    exit_code: int = 1
    is_lost: bool = False


@dataclass(frozen=True)
class UnitRecord:
    """A unit has ended. record: `Engine.last_run`."""

    record: Mapping[str, Any]


# What has happened at a worker since its last report: by their index results of its unit, by index, completion and
# step the tokens that were drawn of others, and of each kind of other
# news (`Progress`, `ProgressPhase`, `WorkerIdentity`, `UnitRecord`, `Failure`) the newest, because a download reports
# a thousand stages; messages by their text. Empty ones say that the process lives.
Report = Mapping[Any, Any]


class Worker:
    """An engine behind one method, `work`.

    The engine has a thread to itself, so that a worker which computes reports too.
    """

    def __init__(self, model: ModelToLoad, memory_share: float = 1.0, cores: int | None = None) -> None:
        """Nothing is loaded yet.

        memory_share: of the machine's memory and disk, where no limit is given; workers of one machine divide it.
        cores: those that Ray gives to this worker.
        """
        # Ray sets OMP_NUM_THREADS to the number of its logical cores. A worker with the whole machine is faster with
        # the physical ones, which torch itself takes.
        if cores is not None and cores == os.cpu_count() and os.environ.get("OMP_NUM_THREADS") == str(cores):
            del os.environ["OMP_NUM_THREADS"]
        self._model, self._memory_share = model, memory_share
        self._engine: Engine | None = None
        self._thread = ThreadPoolExecutor(1, "flexgen-engine")

    def work(self, requests: Sequence[GenerationRequest]) -> Iterator[Report]:
        """Load the model the first time, and compute requests, if any; a report comes twice a second.

        To close the generator stops the unit.
        """
        news: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        stop = Flag()
        done = self._thread.submit(self._compute, requests, news, stop)
        try:
            while True:
                is_last = done in wait([done], REPORT_EVERY_S).done
                yield dict(news.get() for _ in range(news.qsize()))
                if is_last:
                    return
        finally:
            stop.set()

    def _compute(self, requests: Sequence[GenerationRequest], news: SimpleQueue[tuple[Any, Any]], stop: Flag) -> None:
        def observe(event: Event) -> None:
            if isinstance(event, Message):
                news.put((event.text, event))
            elif isinstance(event, ProgressPhase):
                news.put((ProgressPhase, event))

        with observed_by(observe):
            try:
                if self._engine is None:
                    began = time.monotonic()
                    self._engine = _load(self._model, self._memory_share)
                    news.put((WorkerIdentity, identity_of(self._engine, time.monotonic() - began)))
                if requests:
                    self._engine.run(
                        requests,
                        on_result=lambda index, result: news.put((index, result)),
                        should_stop=stop.is_set,
                        on_drawn=lambda index, completion, step, drawn: news.put(((index, completion, step), drawn)),
                        progress=lambda progress: news.put((Progress, progress)),
                    )
                    news.put((UnitRecord, UnitRecord(dict(self._engine.last_run))))
            except FlexgenError as error:
                news.put((Failure, Failure(str(error), error.exit_code)))
            except BaseException as error:
                news.put((Failure, Failure(f"{type(error).__name__}: {error}")))


def _load(model: ModelToLoad, memory_share: float) -> Engine:
    from flexgen_helm.engine.engine import Engine

    return Engine.from_config(model.path, limits_of_share(model.config, memory_share), name=model.name)


def limits_of_share(config: EngineConfig, share: float) -> EngineConfig:
    """Return the options with this share of the machine's memory and disk where they give no limit."""
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


def identity_of(engine: Engine, load_s: float) -> WorkerIdentity:
    """Return what a driver compares."""
    tokenizer = engine.tokenizer.fingerprint if engine.tokenizer is not None else None
    device_type, dtype = engine.identity.device.type, str(engine.identity.dtype).removeprefix("torch.")
    return WorkerIdentity(
        socket.gethostname(), os.getpid(), __version__, tokenizer, engine.fingerprint, device_type, dtype, load_s
    )
