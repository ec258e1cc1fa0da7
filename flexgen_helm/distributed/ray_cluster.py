"""Workers by Ray Data: one for each GPU of the cluster, or for each machine. No torch.

A dataset whose rows are units of requests is mapped by actors that hold an engine. Ray Data starts
them, gives idle ones the next unit, starts more where there is room, and restarts those that die.
The rows come from a generator, so that actors live from the first run of an engine to the last.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from flexgen_helm import __version__
from flexgen_helm.distributed.board import Board, News, RequestUnit
from flexgen_helm.distributed.worker import ExpectedIdentity, ModelToLoad, Worker
from flexgen_helm.errors import UsageError

_ADDRESS = re.compile(r"([^/:\s]+):(\d{1,5})")
# Seconds for the head to accept a connection, and for Ray to begin; Ray itself tries for minutes.
_CONNECT_S, _START_S = 10.0, 90.0
_CLOSE_S = 5.0
# Seconds between the end of the last worker and that of the connection.
_SETTLE_S = 1.5
# Seconds without a report after which a worker counts as lost: Ray sees what dies, not what hangs.
SILENCE_S = 180.0
# Bytes of Ray's store of large objects, which stays nearly empty: requests and answers are small.
# By default it may take 30 % of the memory, and the model needs that.
_OBJECT_STORE_BYTES = 128 << 20
# The longest path of a socket in Ray's folder of temporary files, with a process id behind it;
# bytes of any such path.
_SOCKET, _MOST_SOCKET_BYTES = "/ray/session_2026-01-01_00-00-00_000000_/sockets/plasma_store", 107


@dataclass(frozen=True)
class RayOptions:
    """What `flexgen-helm run` says about Ray.

    address: `auto`, `local` or that of the head. workers: most that are started; None takes what is
        there. cores: of each worker; None takes the largest machine's, or a GPU's share of them.
    """

    address: str
    workers: int | None = None
    cores: int | None = None

    def check(self) -> None:
        """Raise `UsageError` for what cannot be used; imports nothing."""
        if self.address not in ("auto", "local") and _ADDRESS.fullmatch(self.address) is None:
            raise UsageError(
                f"--ray {self.address} is no address; write auto, local, or HOST:PORT of the head"
            )
        for flag, value in (("--ray-workers", self.workers), ("--ray-cores", self.cores)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} is {value}; it must be 1 or more")
        if find_spec("ray") is None:
            raise UsageError(
                "--ray needs Ray, which is not installed here; run: pip install 'flexgen-helm[ray]'"
            )
        folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
        excess = len(os.fsencode(f"{folder}{_SOCKET}{os.getpid()}")) - _MOST_SOCKET_BYTES
        if self.address == "local" and excess > 0:
            raise UsageError(
                f"--ray local makes sockets in {folder} (TMPDIR), whose name is {excess} bytes too "
                "long for that; run: export RAY_TMPDIR=/tmp"
            )


@dataclass(frozen=True)
class PoolSize:
    """Cores and GPUs of each worker, and how many of them a cluster has room for."""

    cores: int
    gpus: int
    room: int


def pool_size(nodes: Sequence[Mapping[str, Any]], on_gpus: bool, cores: int | None) -> PoolSize:
    """Return what `ray.nodes()` has room for.

    on_gpus: one for each GPU; else one for each machine as large as the largest, or for every
        `cores` of its cores.
    """
    machines = [node.get("Resources", {}) for node in nodes if node.get("Alive")]
    sizes = [(int(machine.get("CPU", 0)), int(machine.get("GPU", 0))) for machine in machines]
    if on_gpus:
        shares = [node_cores // gpus for node_cores, gpus in sizes if gpus]
        return PoolSize(cores or max(1, min(shares, default=1)), 1, sum(gpus for _, gpus in sizes))
    worker_cores = cores or max(1, max((node_cores for node_cores, _ in sizes), default=1))
    return PoolSize(worker_cores, 0, sum(node_cores // worker_cores for node_cores, _ in sizes))


class RaySession:
    """A connection to a Ray cluster, or to one that was started on this machine. Models that take
    turns share it.
    """

    def __init__(self, options: RayOptions) -> None:
        """Raises `UsageError` for options that cannot be used; connects to nothing yet."""
        options.check()
        self._options = options
        self._is_ours = False
        self._connected: Future[None] = Future()
        self._closed = threading.Event()
        # Linux ends the processes of a local cluster with the thread that started them, so this one
        # lives on.
        self._thread = threading.Thread(target=self._hold_connection, name="ray", daemon=True)

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
                f"Ray ({self._options.address}) has not answered for {_START_S:.0f} s; `ray "
                "status` shows whether it runs, and `ray stop` removes what an earlier one left"
            ) from None

    def close(self) -> None:
        """Disconnect; end the cluster if it was started here."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(4 * _CLOSE_S)

    def _hold_connection(self) -> None:
        """Connect, and disconnect when the session is closed; runs in a thread."""
        try:
            self._init()
        except Exception as error:
            self._connected.set_exception(error)
            return
        self._connected.set_result(None)
        self._closed.wait()
        if self._is_ours:
            import ray

            # What asks Ray for anything after this, as a dataset's thread or a late reply, ends the
            # process silently.
            for thread in threading.enumerate():
                if type(thread).__name__ == "StreamingExecutor":
                    thread.shutdown(force=True)  # type: ignore[attr-defined]
                    thread.join(_CLOSE_S)
            time.sleep(_SETTLE_S)
            ray.shutdown()

    def _init(self) -> None:
        """Connect. Raises `UsageError` for a cluster that cannot be reached."""
        import ray
        import ray.data

        _separate_random_generator()
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._is_ours = not ray.is_initialized()
        if not self._is_ours:
            return
        local: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            # Ray's own is 15, with which a worker has a thirtieth of a core beside any program that
            # computes.
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
            raise UsageError(
                f"--device {wanted} and --ray exclude each other: Ray gives each worker one; say "
                f"{kind}"
            )
        return wanted

    def start(self, model: ModelToLoad, expected: ExpectedIdentity) -> RayWorkers:
        """Start workers for a model. Raises `UsageError` where there is room for none."""
        return RayWorkers(self._options, model, expected)


def _separate_random_generator() -> None:
    """Give Ray's modules a random generator of their own.

    They draw names and ports from Python's global one while they connect. HELM's scenarios draw
    instances from it at the same time, which would be others than those of one process.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "ray" and getattr(module, "random", None) is random:
            setattr(module, "random", random.Random())  # noqa: B010


def _no_cluster(address: str, error: Exception) -> str:
    """Return a sentence for an error of connecting, with what to do."""
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    if address == "local":
        return f"Ray cannot be started on this machine: {first_line}"
    if "oken" in str(error):  # InvalidAuthToken, AuthenticationError
        return (
            f"the Ray cluster at {address} asks for a token ({first_line}); run: export "
            "RAY_AUTH_MODE=token, with the token that `ray get-auth-token` prints there in "
            "~/.ray/auth_token here"
        )
    what = (
        "no Ray cluster runs here" if address == "auto" else f"there is no Ray cluster at {address}"
    )
    return f"{what} ({first_line}); start one with `ray start --head`, or take --ray local"


class RayWorkers:
    """The workers of one model, until it is closed.

    num_expected: how many there is room for now. is_alone: there will never be a second one.
    error: why there are no workers any more; empty while there may be.
    """

    def __init__(self, options: RayOptions, model: ModelToLoad, expected: ExpectedIdentity) -> None:
        import ray
        import ray.data
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.error = ""
        size = pool_size(ray.nodes(), model.config.device == "cuda", options.cores)
        if options.workers is None and not size.room:
            what = "GPU" if size.gpus else f"machine with {size.cores} cores for us"
            raise UsageError(
                f"the Ray cluster has no {what}; `ray status` shows what it has, and --ray-workers "
                "1 waits for one"
            )
        self.num_expected = max(1, min(size.room, options.workers or size.room))
        self.is_alone = options.workers == 1
        on_this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=on_this_node)
        self._board: Any = board.remote(SILENCE_S)
        _quieten_ray_data()
        pool = ray.data.ActorPoolStrategy(
            min_size=self.num_expected,
            max_size=options.workers,
            max_tasks_in_flight_per_actor=1,  # the next unit waits for whoever is idle first
        )
        feed: Any = _units  # Ray's types know no generators
        # One row begins one generator, whose rows are the units.
        units = ray.data.from_items([0]).map_batches(feed, fn_args=(self._board,), num_cpus=0)
        self._dataset = units.map_batches(
            Worker,
            fn_constructor_args=(self._board, model, expected, size.cores),
            batch_size=None,
            compute=pool,
            num_cpus=size.cores,
            num_gpus=size.gpus,
        )
        self._thread = threading.Thread(target=self._drive, name="ray data", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        """Take the dataset's rows, which keeps the actors at work; runs in a thread."""
        try:
            for _ in self._dataset.iter_internal_ref_bundles():
                pass
        except Exception as error:
            self.error = _explain_end(error)  # not itself, which keeps actors alive

    def submit(self, units: Mapping[int, RequestUnit]) -> None:
        """Have units computed, by numbers that were never used."""
        import ray

        ray.get(self._board.submit.remote(units))

    def forget(self, units: Iterable[int]) -> None:
        """Stop units, whether or not they have begun."""
        import ray

        ray.get(self._board.forget.remote(list(units)))

    def news(self, timeout_s: float) -> list[News]:
        """Return what workers told since, after `timeout_s` seconds at the latest."""
        import ray

        return ray.get(self._board.news.remote(timeout_s))

    def close(self) -> None:
        """End all workers, also what hangs: without the board they cannot go on."""
        import ray

        ray.get(self._board.close.remote())
        self._thread.join(_CLOSE_S)
        ray.kill(self._board)


def _explain_end(error: Exception) -> str:
    """Return a sentence for an error of Ray Data: why all workers of a model have ended."""
    text = str(error)
    if "No module named 'flexgen_helm" in text or "Can't get attribute" in text:
        return (
            f"flexgen-helm {__version__} is not installed for the Python that Ray uses on the "
            "workers' machines; install it there"
        )
    last_line = text.strip().rpartition("\n")[2]
    return f"the workers have ended ({type(error).__name__}): {last_line}"


def _units(_: Any, board: Any) -> Iterator[Mapping[str, list[int]]]:
    """Yield units as they come; the rows of the dataset."""
    import ray

    while (unit := ray.get(board.next_unit.remote())) is not None:
        yield {"unit": [unit]}


def _quieten_ray_data() -> None:
    """Set what Ray Data takes from its context: each row is handed on at once, in silence."""
    from ray.data import DataContext
    from ray.data.context import AutoscalingConfig

    context = DataContext.get_current()
    context.target_max_block_size = context.target_min_block_size = 1
    context.execution_no_progress_timeout_s = -1  # a unit may take hours
    context.enable_progress_bars = context.print_on_execution_start = False
    # With one unit in flight an actor is used by 1 at most.
    context.autoscaling_config = AutoscalingConfig(actor_pool_util_upscaling_threshold=1.0)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
