"""Messages between the ranks of a pipeline: the only module that knows `torch.distributed`.

    rank 0           commands, requests          -> all ranks
    every rank       plans, errors               -> all ranks
    rank r           hidden states               -> rank r + 1
    the last rank    tokens, log-probabilities   -> all ranks

Messages between two ranks arrive in the order in which they were sent. A lost rank closes its
connections, so every wait for it ends with an error; those who wait for others follow, because each
rank that fails ends too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

# now: imported later, the defaults of its functions would keep the group until exit
import torch.distributed.nn
from torch import Tensor

from flexgen_helm.concurrency import single_flight
from flexgen_helm.engine.rank import Rank, rank_of_process
from flexgen_helm.errors import FlexgenError, PipelineError
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.planner.schedules import ZIGZAG, Schedule
from flexgen_helm.scheduling.lanes import common_limits

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

T = TypeVar("T")

# Rank 0 may be busy with a data set, or wait for its user, while the others wait for it.
_TIMEOUT = timedelta(days=7)
# Batches whose hidden states may wait for the next rank.
_MAX_WAITING = 4
# Tells hidden states and outputs apart where both go from one rank to another.
_HIDDEN, _VALUES = 0, 1
_FAILURE = "flexgen_helm/failure"


class Pipeline:
    """This process's rank of a pipeline. A process that has the whole model is a pipeline of one,
    and sends nothing.

    lock: held from a command to its last message, because all engines share the connections.
    num_engines: that were opened so far.
    """

    def __init__(self, rank: Rank = Rank(0, 1, 0, 1), store: dist.Store | None = None) -> None:
        self.rank = rank
        self.num_engines = 0
        self.lock = RLock()
        self._store = store
        self._failed: PipelineError | None = None
        self._common_error: FlexgenError | None = None
        # Works that are under way, with what they send, by tag.
        self._sent: dict[int, deque[tuple[dist.Work, int, Tensor]]] = {
            _HIDDEN: deque(),
            _VALUES: deque(),
        }

    @property
    def is_whole(self) -> bool:
        """Whether this process computes all stages, and so decides alone what a pass computes."""
        return self.rank.size == 1

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._failed is None

    # Commands

    @contextmanager
    def command(self, name: str, *arguments: object) -> Iterator[None]:
        """Let all ranks do what this one does in the context, one command at a time: see
        `follow`.
        """
        if self.is_whole:
            yield
            return
        with self.lock:
            if self.is_open or name != "close":  # all engines end with their pipeline
                self.send_command(name, *arguments)
            yield

    def send_command(self, name: str, *arguments: object) -> None:
        """Send a command from rank 0 to all others; harmless on the others."""
        if not self.rank.number:
            with self._guarded():
                dist.broadcast_object_list([(name, *arguments)], src=0)

    def receive_command(self) -> tuple[Any, ...]:
        """Wait for rank 0's next command."""
        received: list[Any] = [None]
        with self._guarded("rank 0"):
            dist.broadcast_object_list(received, src=0)
        return tuple(received[0])

    def gather(self, value: T) -> list[T]:
        """Return what every rank has given, in the order of ranks."""
        if self.is_whole:
            return [value]
        values: list[Any] = [None] * self.rank.size
        with self._guarded():
            dist.all_gather_object(values, value)
        return values

    def agree(self, value: T | FlexgenError) -> list[T]:
        """Return what all ranks have, in their order; if one has an error, raise the first of them
        on every rank.

        An error that was raised here is one that all ranks have: it is only raised again.
        """
        if isinstance(value, FlexgenError) and (self.is_whole or value is self._common_error):
            raise value
        values = self.gather(value)
        for number, error in enumerate(values):
            if isinstance(error, FlexgenError):
                where = "" if number == self.rank.number else f"rank {number} of the pipeline: "
                self._common_error = type(error)(f"{where}{error}")
                raise self._common_error
        return [value for value in values if not isinstance(value, FlexgenError)]

    def record(self, num_lanes: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a run's record says of the ranks; record: what it says of this one."""
        return (
            {}
            if self.is_whole
            else {"pipeline": {"lanes": num_lanes, "ranks": self.gather(record)}}
        )

    # Plans

    def plan(self, plan: Callable[[Schedule | None], RunPlan]) -> RunPlan:
        """Return this rank's plan within limits that suit all ranks; one that cannot plan ends the
        run on all.

        plan: makes this rank's, by a schedule that must be followed if one is given.
        """
        plans = self._plans(plan, None)
        if len({found.schedule.is_single_pass for found in plans}) > 1:
            plans = self._plans(plan, ZIGZAG)  # all can follow that
        return replace(
            plans[self.rank.number], limits=common_limits([found.limits for found in plans])
        )

    def _plans(
        self, plan: Callable[[Schedule | None], RunPlan], schedule: Schedule | None
    ) -> list[RunPlan]:
        try:
            return self.agree(plan(schedule))
        except FlexgenError as error:
            self.agree(error)
            raise

    # Hidden states and outputs of a pass

    def send_hidden(self, checksum: int, hidden: Tensor, nonfinite_layer: Tensor) -> None:
        """Send a batch's hidden states [T, H] to the next rank, without waiting for it.

        checksum: of the batch's tokens.
        nonfinite_layer: [T], the first layer after which a value was not finite.
        """
        numbers = torch.cat((nonfinite_layer, nonfinite_layer.new_tensor([checksum])))
        message = torch.cat(
            (numbers.view(torch.uint8), hidden.contiguous().view(-1).view(torch.uint8))
        )
        self._send(message, self.rank.number + 1, _HIDDEN)
        while len(self._sent[_HIDDEN]) > _MAX_WAITING:
            self._wait(*self._sent[_HIDDEN].popleft()[:2])

    def receive_hidden(
        self, checksum: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Wait for a batch's hidden states [T, H] from the rank before; return them and
        `nonfinite_layer`.

        Raises `PipelineError` if that rank has computed other tokens.
        """
        num_numbers = 8 * (shape[0] + 1)
        message = torch.empty(
            num_numbers + shape[0] * shape[1] * dtype.itemsize, dtype=torch.uint8, device=device
        )
        self._receive(message, self.rank.number - 1, _HIDDEN)
        numbers = message[:num_numbers].view(torch.int64)
        if int(numbers[-1]) != checksum:
            raise PipelineError(
                f"ranks {self.rank.number - 1} and {self.rank.number} of the pipeline have "
                "scheduled different tokens; this is a bug of flexgen_helm, please report it with "
                "both ranks' output"
            )
        return message[num_numbers:].view(dtype).view(shape), numbers[:-1]

    def send_values(self, values: list[float]) -> None:
        """Send what the head has computed for a batch from the last rank to all before it, without
        waiting.
        """
        message = torch.tensor(values, dtype=torch.float64)
        for number in range(self.rank.size - 1):
            self._send(message, number, _VALUES)

    def receive_values(self, count: int) -> list[float]:
        """Wait for what the head has computed for the oldest batch that has not been asked for."""
        message = torch.empty(count, dtype=torch.float64)
        self._receive(message, self.rank.size - 1, _VALUES)
        return message.tolist()

    def flush(self) -> None:
        """Wait until what was sent has arrived."""
        for sent in self._sent.values():
            for work, receiver, _ in sent:
                self._wait(work, receiver)
            sent.clear()

    def _send(self, message: Tensor, rank: int, tag: int) -> None:
        sent = self._sent[tag]
        with self._guarded(f"rank {rank}"):
            while sent and sent[0][0].is_completed():
                sent.popleft()
            work = dist.isend(message, rank, tag=tag)
            assert work is not None
            sent.append((work, rank, message))

    def _receive(self, message: Tensor, rank: int, tag: int) -> None:
        with self._guarded(f"rank {rank}"):
            dist.recv(message, rank, tag=tag)

    def _wait(self, work: dist.Work, receiver: int) -> None:
        with self._guarded(f"rank {receiver}"):
            work.wait()

    # The end

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends; nothing can be sent or received afterwards."""
        if not self.is_whole:
            self._end(
                f"rank {self.rank.number} of the pipeline ended: {error or type(error).__name__}"
            )

    def leave(self) -> None:
        """Close the connections in good order, once all ranks do: rank 0 tells those that wait for
        it.
        """
        with suppress(PipelineError), self.lock:
            self.send_command("end")
            self.flush()
            with self._guarded():
                dist.barrier()
                dist.destroy_process_group()
            self._failed = PipelineError("the pipeline has ended")

    def _end(self, cause: str) -> PipelineError:
        """End this rank's connections; return the error that says which rank ended first."""
        if self._failed is None:
            with suppress(Exception):  # the store may be gone with its machine
                assert self._store is not None
                cause = self._store.compare_set(_FAILURE, "", cause).decode()
            self._failed = PipelineError(f"{cause}; the same command goes on from what is finished")
            with suppress(Exception):
                dist.destroy_process_group()
        return self._failed

    @contextmanager
    def _guarded(self, peer: str = "a rank") -> Iterator[None]:
        """Turn an error of a connection into a sentence that names the rank that ended first."""
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch.distributed has no type of its own
            raise self._end(f"{peer} of the pipeline was lost: its connection is closed") from error


@single_flight
def joined_pipeline() -> Pipeline | None:
    """Return this process's pipeline, joined at the first call; None where torchrun has not started
    several.
    """
    rank = rank_of_process()
    if rank is None:
        return None
    store, number, size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(rank.local_number)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=_TIMEOUT)
    return Pipeline(rank, store)


def leave_pipeline() -> None:
    """End this rank's connections in good order."""
    if (pipeline := joined_pipeline()) is not None:
        pipeline.leave()


def follow(engine: type[Engine]) -> None:
    """Open, run and close engines when rank 0 does, until it ends.

    Raises `PipelineError` if a rank is lost, and whatever ends this one.
    """
    pipeline = joined_pipeline()
    assert pipeline is not None and pipeline.rank.number
    engines: dict[int, Engine] = {}
    try:
        while (command := pipeline.receive_command())[0] != "end":
            try:
                match command:
                    case "open", name_or_path, config, name:
                        opened = engine.from_config(name_or_path, config, name=name)
                        engines[opened.number] = opened
                    case "run", number, requests:
                        engines[number].run(requests)
                    case "close", number:
                        engines.pop(number).close()
            except FlexgenError:
                if not pipeline.is_open:
                    raise
                # Rank 0 has raised the same error, and may go on with another engine.
    except BaseException as error:
        pipeline.fail(error)
        raise
    finally:
        for opened in engines.values():
            opened.close()
