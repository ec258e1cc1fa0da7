"""Workers by Ray: one for each GPU of the cluster, or for each machine. The one module that imports Ray; no torch.

Ray starts the processes, notices when they die, and starts machines where its autoscaler may. Which machine gets
which worker is decided here, because each is to have its whole machine (or GPU), and machines differ in size: a
worker asks for the cores of its machine, and for one machine only.
"""

from __future__ import annotations

import logging
import os
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from flexgen_helm import __version__
from flexgen_helm.distributed.worker import Failure, ModelToLoad, Report, Worker
from flexgen_helm.errors import UsageError
from flexgen_helm.request import GenerationRequest

_ADDRESS = re.compile(r"([^/:\s]+):(\d{1,5})")
# Seconds for the head to accept a connection, and for Ray to begin; Ray itself tries for minutes.
_CONNECT_S, _START_S = 10.0, 90.0
_CLOSE_S = 5.0
# Bytes of Ray's store of large objects, which stays nearly empty: requests and answers are small. By default it may
# take 30 % of the memory, and the model needs that.
_OBJECT_STORE_BYTES = 128 << 20
# The longest path of a socket in Ray's folder of temporary files, with a process id behind it; bytes of any such path.
_SOCKET, _MOST_SOCKET_BYTES = "/ray/session_2026-01-01_00-00-00_000000_/sockets/plasma_store", 107
# Seconds between two looks for machines that joined.
_LOOK_EVERY_S = 5.0
# How often a worker is started in one slot: one that dies again and again is not a coincidence.
_MAX_STARTS = 3
# Seconds without a report after which a worker counts as lost: its thread that reports never computes. And without
# news in its reports: an engine that computes says so several times a second, one that loads every few seconds.
_SILENCE_S, _STUCK_S = 180.0, 1800.0


@dataclass(frozen=True)
class RayOptions:
    """What `flexgen-helm run` says about Ray.

    address: `auto`, `local` or that of the head. workers: most that are started, and as many machines or GPUs as
        Ray's autoscaler is asked for; None takes what is there. cores: of each worker; None takes a machine's, or its
        GPU's share of them.
    """

    address: str
    workers: int | None = None
    cores: int | None = None

    def check(self) -> None:
        """Raise `UsageError` for what cannot be used; imports nothing."""
        if self.address not in ("auto", "local") and _ADDRESS.fullmatch(self.address) is None:
            raise UsageError(f"--ray {self.address} is no address; write auto, local, or HOST:PORT of the head")
        for flag, value in (("--ray-workers", self.workers), ("--ray-cores", self.cores)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} is {value}; it must be 1 or more")
        if find_spec("ray") is None:
            raise UsageError("--ray needs Ray, which is not installed here; run: pip install 'flexgen-helm[ray]'")
        folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
        excess = len(os.fsencode(f"{folder}{_SOCKET}{os.getpid()}")) - _MOST_SOCKET_BYTES
        if self.address == "local" and excess > 0:
            raise UsageError(
                f"--ray local makes sockets in {folder} (TMPDIR), whose name is {excess} bytes too long for that; "
                "run: export RAY_TMPDIR=/tmp"
            )


@dataclass(frozen=True)
class WorkerSlot:
    """Where one worker is started.

    share: of the machine's memory and disk.
    """

    node: str
    host: str
    number: int
    cores: int
    gpus: int
    share: float

    @property
    def name(self) -> str:
        return f"{self.host}/{self.number}"


def worker_slots(nodes: Sequence[Mapping[str, Any]], on_gpus: bool, cores: int | None) -> list[WorkerSlot]:
    """Return where workers can be, from what `ray.nodes()` says.

    on_gpus: one for each GPU; else one for each machine, or for every `cores` of its cores.
    """
    found = []
    for node in nodes:
        resources = node.get("Resources", {})
        node_cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        if not node.get("Alive"):
            continue
        if on_gpus:
            count = gpus
            worker_cores = cores or (node_cores // gpus if gpus else 0)
        else:
            worker_cores = cores or node_cores
            count = node_cores // worker_cores if worker_cores else 0
        found += [
            WorkerSlot(node["NodeID"], node["NodeManagerHostname"], number, worker_cores, int(on_gpus), 1 / count)
            for number in range(count)
        ]
    return found


class RaySession:
    """A connection to a Ray cluster, or to one that was started on this machine. Models that take turns share it."""

    def __init__(self, options: RayOptions) -> None:
        """Raises `UsageError` for options that cannot be used; connects to nothing yet."""
        options.check()
        self._options = options
        self._is_ours = False
        self._connected: Future[None] = Future()
        self._closed = threading.Event()
        # Linux ends the processes of a local cluster with the thread that started them, so this one lives on.
        self._thread = threading.Thread(target=self._live, name="ray", daemon=True)

    def connect_soon(self) -> None:
        """Begin to connect, in the background; once."""
        if self._thread.ident is None:
            self._thread.start()

    def connect(self) -> None:
        """Wait until the cluster is there. Raises `UsageError` if it cannot be reached."""
        self.connect_soon()
        try:
            self._connected.result(_START_S)
        except TimeoutError:
            raise UsageError(
                f"Ray ({self._options.address}) has not answered for {_START_S:.0f} s; `ray status` shows whether it "
                "runs, and `ray stop` removes what an earlier one left"
            ) from None

    def close(self) -> None:
        """Disconnect; end the cluster if it was started here."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _live(self) -> None:
        try:
            self._init()
        except Exception as error:
            self._connected.set_exception(error)
            return
        self._connected.set_result(None)
        self._closed.wait()
        if self._is_ours:
            import ray

            ray.shutdown()

    def _init(self) -> None:
        import ray

        _separate_random_generator()
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._is_ours = not ray.is_initialized()
        if not self._is_ours:
            return
        local: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            # Ray's own is 15, with which a worker has a thirtieth of a core beside any program that computes.
            "_system_config": {"worker_niceness": 0},
        }
        address = self._options.address
        try:
            if (known := _ADDRESS.fullmatch(address)) is not None:
                socket.create_connection((known[1], int(known[2])), _CONNECT_S).close()
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(local if address == "local" else {}),
            )
        except Exception as error:
            raise UsageError(_no_cluster(address, error)) from error

    def device(self, wanted: str) -> str:
        """Return the device of all workers; `auto` is cuda if the cluster has a GPU, else cpu."""
        import ray

        if wanted == "auto":
            return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
        if ":" in wanted:
            kind = wanted.partition(":")[0]
            raise UsageError(f"--device {wanted} and --ray exclude each other: Ray gives each worker one; say {kind}")
        return wanted

    def start(self, model: ModelToLoad) -> RayWorkers:
        """Start workers for a model. Raises `UsageError` where there is room for none."""
        return RayWorkers(self._options, model)


def _separate_random_generator() -> None:
    """Give Ray's modules a random generator of their own.

    They draw names and ports from Python's global one while they connect. HELM's scenarios draw instances from it at
    the same time, which would be others than those of one process.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "ray" and getattr(module, "random", None) is random:
            setattr(module, "random", random.Random())  # noqa: B010


def _no_cluster(address: str, error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    if address == "local":
        return f"Ray cannot be started on this machine: {first_line}"
    if "oken" in str(error):  # InvalidAuthToken, AuthenticationError
        return (
            f"the Ray cluster at {address} asks for a token ({first_line}); run: export RAY_AUTH_MODE=token, with the "
            "token that `ray get-auth-token` prints there in ~/.ray/auth_token here"
        )
    what = "no Ray cluster runs here" if address == "auto" else f"there is no Ray cluster at {address}"
    return f"{what} ({first_line}); start one with `ray start --head`, or take --ray local"


class RayActor:
    """A `Worker` in a process of Ray's; `ray.cancel` stops its unit."""

    def __init__(self, *arguments: Any) -> None:
        self._worker = Worker(*arguments)

    def work(self, requests: Sequence[GenerationRequest]) -> Iterator[Report]:
        import ray

        with closing(self._worker.work(requests)) as reports:  # type: ignore[type-var]
            for news in reports:
                if ray.get_runtime_context().is_canceled():
                    return
                yield news


@dataclass(eq=False)
class _Call:
    """A call of a worker. reports: Ray's generator of them. heard, moved: when the last one came, and the last news."""

    reports: Any
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)


class RayWorkers:
    """Processes that load one model. Their names say where they are; a restarted one has another name.

    A worker that dies ends its call with a `Failure`, and another one is started in its slot, up to three times.
    """

    def __init__(self, options: RayOptions, model: ModelToLoad) -> None:
        self._options, self._model = options, model
        self._actors: dict[str, tuple[WorkerSlot, Any]] = {}
        self._calls: dict[str, _Call] = {}
        self._begun: set[str] = set()  # workers that have reported once
        self._starts: Counter[tuple[str, int]] = Counter()
        self._look_at = 0.0
        self._on_gpus = model.config.device == "cuda"
        if options.workers is None and not self._slots():
            what = "GPU" if self._on_gpus else f"machine with {options.cores or 1} cores for us"
            raise UsageError(
                f"the Ray cluster has no {what}; `ray status` shows what it has, and --ray-workers 1 waits for one"
            )
        self._request_machines(options.workers or 0)
        self._fill()

    def poll(self, timeout_s: float) -> list[tuple[str, Report]]:
        """Return reports and losses of workers, after `timeout_s` seconds at the latest; start new ones meanwhile."""
        import ray

        if time.monotonic() >= self._look_at:
            self._fill()
        names = {call.reports: name for name, call in self._calls.items()}
        if not names:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(names), num_returns=1, timeout=timeout_s)
        if ready:  # else it would return one of several
            ready, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        found = [(names[reports], self._receive(names[reports])) for reports in ready]
        now = time.monotonic()
        for name, call in list(self._calls.items()):
            if name in self._begun and now - call.heard > _SILENCE_S:  # one that has not begun is Ray's to wait for
                found.append((name, self._lose(name, f"it has not answered for {_SILENCE_S:.0f} s")))
            elif name in self._begun and now - call.moved > _STUCK_S:
                found.append((name, self._lose(name, f"it has made no progress for {_STUCK_S:.0f} s")))
        return found

    def _receive(self, name: str) -> Report:
        import ray

        call = self._calls[name]
        try:
            news: Report = ray.get(next(call.reports))
        except StopIteration:
            del self._calls[name]
            return {}
        except ray.exceptions.RayError as error:
            return self._lose(name, _explain(error, self._actors[name][0].host))
        self._begun.add(name)
        call.heard = time.monotonic()
        call.moved = call.heard if news else call.moved
        return news

    def _lose(self, name: str, why: str) -> Report:
        import ray

        ray.kill(self._actors.pop(name)[1])
        self._calls.pop(name, None)
        self._look_at = 0.0
        return {Failure: Failure(why, is_lost=True)}

    def idle(self) -> list[str]:
        """Return the workers that can be called."""
        return sorted(self._actors.keys() - self._calls.keys())

    def call(self, worker: str, requests: Sequence[GenerationRequest]) -> None:
        """Call `Worker.work` of an idle worker; its reports come with `poll`."""
        self._calls[worker] = _Call(self._actors[worker][1].work.remote(requests))

    def cancel(self, worker: str) -> None:
        """Stop what a worker computes; nothing more of it is reported, and the next call waits for its end."""
        import ray

        if (call := self._calls.pop(worker, None)) is not None:
            ray.cancel(call.reports)

    def drop(self, worker: str) -> None:
        """End a worker that cannot be used, and start none in its slot."""
        slot = self._actors[worker][0]
        self._starts[slot.node, slot.number] = _MAX_STARTS
        self._lose(worker, "")

    def count(self) -> int:
        """Return how many workers there are, those included that still load the model."""
        return len(self._actors)

    def may_serve(self) -> bool:
        """Return whether there is a worker, or one will be started without anyone's doing."""
        return bool(self._actors or self._vacant()) or self._options.workers is not None

    def waiting_for(self) -> str:
        """Return what the cluster lacks for more workers; empty if nothing is known."""
        if waiting := len(self._actors.keys() - self._begun):
            return f"{waiting} of {len(self._actors)} workers wait for Ray, which may be using their cores or GPUs"
        return "workers wait for machines that join the Ray cluster" if not self._actors else ""

    def close(self) -> None:
        """End all workers."""
        import ray

        for _, actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._request_machines(0)

    # Slots

    def _slots(self) -> list[WorkerSlot]:
        import ray

        return worker_slots(ray.nodes(), self._on_gpus, self._options.cores)

    def _vacant(self) -> list[WorkerSlot]:
        taken = {(slot.node, slot.number) for slot, _ in self._actors.values()}
        free = [
            slot
            for slot in self._slots()
            if (key := (slot.node, slot.number)) not in taken and self._starts[key] < _MAX_STARTS
        ]
        most = len(free) if self._options.workers is None else self._options.workers - len(self._actors)
        return free[: max(0, most)]

    def _fill(self) -> None:
        """Start a worker in every slot without one, and have it load the model."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._look_at = time.monotonic() + _LOOK_EVERY_S
        for slot in self._vacant():
            self._starts[slot.node, slot.number] += 1
            starts = self._starts[slot.node, slot.number]
            name = slot.name if starts == 1 else f"{slot.name}, start {starts}"
            actor = ray.remote(RayActor).options(
                num_cpus=slot.cores,
                num_gpus=slot.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
            )
            self._actors[name] = slot, actor.remote(self._model, slot.share, slot.cores)
            self.call(name, ())

    def _request_machines(self, count: int) -> None:
        """Ask Ray's autoscaler, if it has one, for room for so many workers; 0 takes the wish back."""
        if self._options.workers is None:
            return
        from ray.autoscaler.sdk import request_resources

        cores = self._options.cores or max((slot.cores for slot in self._slots()), default=1)
        bundle = {"CPU": cores, **({"GPU": 1} if self._on_gpus else {})}
        request_resources(bundles=[bundle] * count)


def _explain(error: Exception, host: str) -> str:
    text = str(error)
    if "No module named 'flexgen_helm" in text:
        return f"flexgen-helm {__version__} is not installed for the Python that Ray uses on {host}; install it there"
    if "OutOfMemory" in type(error).__name__ or "memory usage threshold" in text:
        return f"Ray ended it because the memory of {host} ran out; lower --cpu-memory"
    return f"its process on {host} ended ({type(error).__name__})"
