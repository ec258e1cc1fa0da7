"""A worker of Ray Data: it loads the model once, computes units of requests, reports. No torch."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from flexgen_helm import __version__
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import FlexgenError, UsageError, WorkerError
from flexgen_helm.progress import Event, Message, ProgressPhase, observed_by
from flexgen_helm.request import DrawnToken, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Most seconds that a result waits for its report.
REPORT_EVERY_S = 0.5
# How often a process may begin to load the model: one that dies again and again is no coincidence.
MAX_STARTS = 3


@dataclass(frozen=True)
class ModelToLoad:
    """What `Engine.from_config` takes, the same on every machine.

    path: a name of the catalog or the hub, or an absolute path.
    name: what the user calls the model.
    """

    path: str
    config: EngineConfig
    name: str

    def with_absolute_paths(self) -> ModelToLoad:
        """Return the record for processes with other working folders; names are no paths."""
        folder = self.config.offload_dir
        config = (
            self.config
            if folder is None
            else replace(self.config, offload_dir=str(Path(folder).absolute()))
        )
        path = resolve(self.path, config.revision).path
        return ModelToLoad(self.path if path is None else str(path.absolute()), config, self.name)


@dataclass(frozen=True)
class WorkerIdentity:
    """What is compared before a worker gives answers, and what records say of it.

    version: of flexgen_helm. fingerprint: of the engine; answers are cached by it.
    device_type, dtype: as torch names them. load_s: seconds until the model was ready.
    """

    host: str
    pid: int
    version: str
    fingerprint: str
    device_type: str
    dtype: str
    load_s: float


@dataclass(frozen=True)
class Failure:
    """Why a worker is lost, or could not load its model or compute a unit.

    exit_code: as of `FlexgenError`.
    """

    message: str
    exit_code: int = 1
    is_lost: bool = False


@dataclass(frozen=True)
class UnitRecord:
    """A unit has ended. record: `Engine.last_run`."""

    record: Mapping[str, Any]


class Answered(NamedTuple):
    """The result of a request, by its index in the run."""

    request_index: int
    result: GenerationResult


class DrawnAt(NamedTuple):
    """A token of a request that is not finished; request_index: of it in the run."""

    request_index: int
    completion: int
    step: int
    token: DrawnToken


# What happens at a worker, and all that has happened since its last report.
WorkerEvent = Answered | DrawnAt | Message | ProgressPhase | WorkerIdentity | UnitRecord | Failure
Report = Sequence[WorkerEvent]
Outbox = SimpleQueue[WorkerEvent]


@dataclass(frozen=True)
class Expected:
    """What the driver would compute with: a worker that differs is refused.

    fingerprints: an engine may have, by its device and number type.
    """

    fingerprints: frozenset[str]
    version: str = __version__

    def difference(self, identity: WorkerIdentity, first: str, model: str) -> str | None:
        """Return why a worker's answers cannot stand beside those of the rest, None if they can.

        first: fingerprint of the first worker.
        """
        if identity.version != self.version:
            return (
                f"it has flexgen-helm {identity.version} and the driver has {self.version}; "
                "install the same version"
            )
        if identity.fingerprint not in self.fingerprints:
            return (
                f"its weights or tokenizer of {model}, or its transformers, differ from the "
                "driver's; copy or fetch the model there anew, and install the same transformers"
            )
        if identity.fingerprint != first:
            return (
                f"it computes in {identity.dtype} on {identity.device_type}, and other workers do "
                "not, so scores would depend on who computed them; run the two kinds of machines "
                "as two clusters"
            )
        return None


class Worker:
    """What Ray Data calls with units: an engine, and a thread that tells the board of it."""

    def __init__(self, board: Any, model: ModelToLoad, expected: Expected, cores: int) -> None:
        """Load the model; what forbids that is told and raised.

        board: Ray's handle of the `Board`. cores: those that Ray gives to this worker.
        """
        import ray

        leave_threads_to_torch(cores)
        self._board = board
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        actor = ray.get_runtime_context().get_actor_id()
        with self._reporting() as (outbox, _):
            if ray.get(board.start.remote(actor)) > MAX_STARTS:
                raise WorkerError(
                    f"its process ended {MAX_STARTS} times while it loaded the model, perhaps "
                    "because memory ran out; lower --cpu-memory"
                )
            began = time.monotonic()
            from flexgen_helm.engine.engine import Engine  # torch, which takes seconds

            self._engine = Engine.from_config(
                model.path,
                limits_of_share(model.config, _share_of_machine(model.config.device, cores)),
                name=model.name,
            )
            identity = identity_of(self._engine, time.monotonic() - began)
            first = ray.get(board.is_ready.remote(actor, identity.fingerprint))
            if (why := expected.difference(identity, first, model.name)) is not None:
                raise UsageError(why)
            outbox.put(identity)

    def __call__(self, rows: Mapping[str, Any]) -> Mapping[str, Any]:
        """Compute units, by their numbers; the board knows their requests."""
        import ray

        for unit in rows["unit"].tolist():
            if requests := ray.get(self._board.begin.remote(unit, self._name)):
                with suppress(Exception), self._reporting(unit) as (outbox, stop):
                    self.compute(requests, outbox, stop)
        return rows

    def compute(
        self, requests: Mapping[int, GenerationRequest], outbox: Outbox, stop: threading.Event
    ) -> None:
        """Answer requests, by their index in the run."""
        indexes = list(requests)
        self._engine.run(
            list(requests.values()),
            on_result=lambda i, result: outbox.put(Answered(indexes[i], result)),
            should_stop=stop.is_set,
            on_drawn=lambda i, completion, step, token: outbox.put(
                DrawnAt(indexes[i], completion, step, token)
            ),
        )
        outbox.put(UnitRecord(dict(self._engine.last_run)))

    @contextmanager
    def _reporting(self, unit: int | None = None) -> Iterator[tuple[Outbox, threading.Event]]:
        """Tell the board twice a second what is put, and at last how it failed.

        The event is set when the unit is not wanted any more.
        """
        outbox, stop, is_over = Outbox(), threading.Event(), threading.Event()

        def observe(event: Event) -> None:
            if isinstance(event, (Message, ProgressPhase)):
                outbox.put(event)

        arguments = (unit, outbox, stop, is_over)
        thread = threading.Thread(target=self._tell, args=arguments, daemon=True)
        thread.start()
        try:
            with observed_by(observe):
                yield outbox, stop
        except FlexgenError as error:
            outbox.put(Failure(str(error), error.exit_code))
            raise
        except BaseException as error:
            outbox.put(Failure(f"{type(error).__name__}: {error}"))
            raise
        finally:
            is_over.set()
            thread.join()

    def _tell(
        self, unit: int | None, outbox: Outbox, stop: threading.Event, is_over: threading.Event
    ) -> None:
        """Tell the board what is put, until all is over; runs in a thread."""
        import ray

        is_last = False
        while not is_last:
            is_last = is_over.wait(REPORT_EVERY_S)
            report = _without_repetition([outbox.get() for _ in range(outbox.qsize())])
            try:
                is_wanted = ray.get(self._board.tell.remote(self._name, unit, report))
            except ray.exceptions.ActorDiedError:
                os._exit(0)  # the driver has ended: nobody waits for this process
            if not is_wanted:
                stop.set()


def _without_repetition(events: Report) -> Report:
    """Keep each message once, and the newest phase: a download reports a thousand."""
    phases = [event for event in events if isinstance(event, ProgressPhase)]
    messages = dict.fromkeys(event for event in events if isinstance(event, Message))
    others = (event for event in events if not isinstance(event, (ProgressPhase, Message)))
    return [*phases[-1:], *messages, *others]


def leave_threads_to_torch(cores: int) -> None:
    """Undo what Ray sets where a worker has all cores of its machine.

    OMP_NUM_THREADS is the number of logical cores then; torch takes the physical ones, and is
    faster.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if cores == os.cpu_count() and threads == str(cores):
        del os.environ["OMP_NUM_THREADS"]


def _share_of_machine(device: str, cores: int) -> float:
    """Return the share of its machine that a worker may use: its GPU's, or its cores'."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return 1 / resources["GPU"] if device == "cuda" else cores / resources["CPU"]


def limits_of_share(config: EngineConfig, share: float) -> EngineConfig:
    """Return the options with a share of the machine's memory and disk where no limit is given."""
    if share >= 1:
        return config
    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.device import tier_capacities
    from flexgen_helm.hardware.host_memory import host_memory
    from flexgen_helm.tiers import without_margin

    folder = Path(config.offload_dir) if config.offload_dir is not None else state_dir() / "offload"
    total = host_memory().total
    free = tier_capacities(config.limits, folder)  # keeps the limits that are given
    # Of the total: what is free depends on what the machine's other workers have loaded.
    cpu = min(free["cpu"], int(share * without_margin(total, total)))
    limits = replace(
        config.limits,
        cpu=cpu if config.limits.cpu is None else config.limits.cpu,
        disk=int(share * free["disk"]) if config.limits.disk is None else config.limits.disk,
    )
    return replace(config, limits=limits)


def identity_of(engine: Engine, load_s: float) -> WorkerIdentity:
    """Return what a driver compares."""
    device_type, dtype = engine.identity.device.type, str(engine.identity.dtype)
    return WorkerIdentity(
        socket.gethostname(),
        os.getpid(),
        __version__,
        engine.fingerprint,
        device_type,
        dtype.removeprefix("torch."),
        load_s,
    )
