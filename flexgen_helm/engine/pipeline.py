"""Messages between the ranks of a pipeline: the only module that knows `torch.distributed`.

    rank 0           commands, requests          -> all ranks
    every rank       plans, errors               -> all ranks
    rank r           hidden states               -> rank r + 1
    the last rank    tokens, log-probabilities   -> all ranks

Messages between two ranks arrive in the order in which they were sent. A lost rank closes its connections, so every
wait for it ends with an error; those who wait for others follow, because each rank that fails ends too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import RLock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported later, the defaults of its functions would keep the group until exit
from torch import Tensor

from flexgen_helm.concurrency import single_flight
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.exchange import Exchange
from flexgen_helm.errors import FlexgenError, PipelineError
from flexgen_helm.hardware.process_state import Rank, rank_of_process
from flexgen_helm.request import GenerationRequest

T = TypeVar("T")

# Rank 0 may be busy with a data set, or wait for its user, while the others wait for it.
_TIMEOUT = timedelta(days=7)
# Batches whose hidden states may wait for the next rank.
_MAX_WAITING = 4
# Tells hidden states and outputs apart where both go from one rank to another.
_HIDDEN, _VALUES = 0, 1
_FAILURE = "flexgen_helm/failure"


@dataclass(frozen=True)
class OpenEngine:
    """Arguments of `Engine.from_config`."""

    name_or_path: str | os.PathLike[str]
    config: EngineConfig
    name: str | None


@dataclass(frozen=True)
class AnswerRequests:
    """engine: its number, in the order in which engines were opened."""

    engine: int
    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True)
class CloseEngine:
    engine: int


@dataclass(frozen=True)
class EndPipeline:
    """Rank 0 has ended."""


Command = OpenEngine | AnswerRequests | CloseEngine | EndPipeline


class Pipeline(Exchange):
    """This process's rank of a pipeline.

    lock: held from a command to its last message, because all engines share the connections.
    """

    def __init__(self, rank: Rank, store: dist.Store) -> None:
        super().__init__(rank)
        self.lock = RLock()
        self._store = store
        self._failed: PipelineError | None = None
        self._common_error: FlexgenError | None = None
        # Works that are under way, with what they send.
        self._hidden: deque[tuple[dist.Work, Tensor]] = deque()
        self._values: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        return self.rank.number == 0

    @property
    def is_last(self) -> bool:
        return self.rank.number == self.rank.size - 1

    # Commands

    @contextmanager
    def command(self, command: object) -> Iterator[None]:
        with self.lock:
            if self.is_open or not isinstance(command, CloseEngine):  # all engines end with their pipeline
                self.send_command(command)
            yield

    def send_command(self, command: object) -> None:
        """Send a command from rank 0 to all others; harmless on the others."""
        if self.is_first:
            self._guarded(lambda: dist.broadcast_object_list([command], src=0))

    def receive_command(self) -> Command:
        """Wait for rank 0's next command."""
        received: list[Any] = [None]
        self._guarded(lambda: dist.broadcast_object_list(received, src=0), "rank 0")
        command: Command = received[0]
        return command

    def gather(self, own: T) -> list[T]:
        """Return what every rank has given, in the order of ranks."""
        everyone: list[Any] = [None] * self.rank.size
        self._guarded(lambda: dist.all_gather_object(everyone, own))
        return everyone

    def agree(self, own: T | FlexgenError) -> list[T]:
        """Return what all ranks have; if one has an error, raise the first of them on every rank.

        An error that was raised here is one that all ranks have: it is only raised again.
        """
        if isinstance(own, FlexgenError) and own is self._common_error:
            raise own
        everyone = self.gather(own)
        for number, other in enumerate(everyone):
            if isinstance(other, FlexgenError):
                where = "" if number == self.rank.number else f"rank {number} of the pipeline: "
                self._common_error = type(other)(f"{where}{other}")
                raise self._common_error
        return [other for other in everyone if not isinstance(other, FlexgenError)]

    def record(self, num_lanes: int, own: Mapping[str, Any]) -> dict[str, Any]:
        return {"pipeline": {"lanes": num_lanes, "ranks": self.gather(own)}}

    # Hidden states and outputs of a pass

    def send_hidden(self, checksum: int, hidden: Tensor, nonfinite_layer: Tensor) -> None:
        """Send a batch's hidden states [T, H] to the next rank, without waiting for it.

        checksum: of the batch's tokens.
        nonfinite_layer: [T], the first layer after which a value was not finite.
        """
        numbers = torch.cat((nonfinite_layer, nonfinite_layer.new_tensor([checksum])))
        message = torch.cat((numbers.view(torch.uint8), hidden.contiguous().view(-1).view(torch.uint8)))
        self._send(self._hidden, message, self.rank.number + 1, _HIDDEN)
        while len(self._hidden) > _MAX_WAITING:
            self._wait(self._hidden.popleft()[0])

    def receive_hidden(
        self, checksum: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Wait for a batch's hidden states [T, H] from the rank before; return them and `nonfinite_layer`.

        Raises `PipelineError` if that rank has computed other tokens.
        """
        num_numbers = 8 * (shape[0] + 1)
        message = torch.empty(num_numbers + shape[0] * shape[1] * dtype.itemsize, dtype=torch.uint8, device=device)
        self._receive(message, self.rank.number - 1, _HIDDEN)
        numbers = message[:num_numbers].view(torch.int64)
        if int(numbers[-1]) != checksum:
            raise PipelineError(
                f"ranks {self.rank.number - 1} and {self.rank.number} of the pipeline have scheduled different tokens; "
                "this is a bug of flexgen_helm, please report it with both ranks' output"
            )
        return message[num_numbers:].view(dtype).view(shape), numbers[:-1]

    def send_values(self, values: list[float]) -> None:
        """Send what the head has computed for a batch from the last rank to all others, without waiting for them."""
        message = torch.tensor(values, dtype=torch.float64)
        for other in range(self.rank.size - 1):
            self._send(self._values, message, other, _VALUES)

    def receive_values(self, count: int) -> list[float]:
        """Wait for what the head has computed for the oldest batch that has not been asked for."""
        message = torch.empty(count, dtype=torch.float64)
        self._receive(message, self.rank.size - 1, _VALUES)
        return message.tolist()

    # The end

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends; nothing can be sent or received afterwards."""
        self._end(f"rank {self.rank.number} of the pipeline ended: {error or type(error).__name__}")

    def _end(self, cause: str) -> PipelineError:
        """End this rank's connections; return the error that says which rank ended first."""
        if self._failed is None:
            with suppress(Exception):  # the store may be gone with its machine
                cause = self._store.compare_set(_FAILURE, "", cause).decode()
            self._failed = PipelineError(f"{cause}; the same command goes on from what is finished")
            with suppress(Exception):
                dist.destroy_process_group()
        return self._failed

    def leave(self) -> None:
        """Close the connections of a pipeline that is not needed any more, once all ranks do."""
        with self.lock:
            self.flush()
            self._guarded(dist.barrier)
            self._guarded(dist.destroy_process_group)
            self._failed = PipelineError("the pipeline has ended")

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._failed is None

    def flush(self) -> None:
        """Wait until what was sent has arrived."""
        for work, _ in (*self._hidden, *self._values):
            self._wait(work)
        self._hidden.clear()
        self._values.clear()

    def _send(self, sent: deque[tuple[dist.Work, Tensor]], message: Tensor, rank: int, tag: int) -> None:
        def send() -> None:
            while sent and sent[0][0].is_completed():
                sent.popleft()
            work = dist.isend(message, rank, tag=tag)
            assert work is not None
            sent.append((work, message))

        self._guarded(send, f"rank {rank}")

    def _receive(self, message: Tensor, rank: int, tag: int) -> None:
        self._guarded(lambda: dist.recv(message, rank, tag=tag), f"rank {rank}")

    def _wait(self, work: dist.Work) -> None:
        self._guarded(work.wait, f"rank {self.rank.number + 1}")

    def _guarded(self, action: Callable[[], object], peer: str = "a rank") -> None:
        """Turn an error of a connection into a sentence that names the rank that ended first."""
        if self._failed is not None:
            raise self._failed
        try:
            action()
        except (RuntimeError, ValueError) as error:  # torch.distributed has no type of its own
            raise self._end(f"{peer} of the pipeline was lost: its connection is closed") from error


@single_flight
def joined_pipeline() -> Pipeline | None:
    """Return this process's pipeline, joined at the first call; None where torchrun has not started several."""
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


def process_exchange() -> Exchange:
    """Return what this process exchanges with others: its pipeline, or nothing."""
    return joined_pipeline() or Exchange()


def leave_pipeline() -> None:
    """End this rank's connections in good order: rank 0 tells the others, which wait for it."""
    pipeline = joined_pipeline()
    if pipeline is not None:
        with suppress(PipelineError), pipeline.lock:
            pipeline.send_command(EndPipeline())
            pipeline.leave()
