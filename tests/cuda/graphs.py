"""CUDA graphs of the device in host memory: capture computes nothing and records, a replay computes what was recorded.

- What is captured allocates from the graph's pool, which has real bytes: memory that a later capture uses again is
  overwritten by its replays. New tensors have no values until a replay.
- Waiting for the device, reading its values, copies across the link, and giving memory back break a capture off, as
  the driver does: the call raises, and so does the capture's end.
- A replay is one launch. It raises if it uses memory outside of its pool that has been freed.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda.memory import Block, Lease
from tests.cuda.ordering import Ordering

if TYPE_CHECKING:
    from tests.cuda.device import CudaTensor, Device

_pools = itertools.count(1)


def new_pool() -> tuple[int, int]:
    """`torch.cuda.graph_pool_handle`."""
    return 0, next(_pools)


@dataclass(frozen=True, eq=False)
class Operand:
    """Memory that a recorded operation reads or writes; owner: None within the graph's own pool, which lives on."""

    span: tuple[int, int]
    block: Block
    ordering: Ordering
    owner: weakref.ref[Lease] | None


@dataclass(eq=False)
class Capture:
    """What one thread records on one stream. pool: key of its allocations; thread: its identifier."""

    stream: Any
    pool: int
    mode: str
    calls: list[tuple[str, Callable[[], None], list[Operand], list[Operand]]] = field(default_factory=list)
    broken: str = ""
    thread: int = field(default_factory=threading.get_ident)

    def record(self, what: str, reads: list[CudaTensor], writes: list[CudaTensor], compute: Callable[[], None]) -> None:
        self.calls.append((what, compute, [*map(self._operand, reads)], [*map(self._operand, writes)]))

    def _operand(self, tensor: CudaTensor) -> Operand:
        owner = None if tensor.block.stream == self.pool else weakref.ref(tensor.lease)
        return Operand(tensor.span, tensor.block, tensor.ordering, owner)


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        from tests.cuda.device import _world

        self._world: Device = _world()
        self._capture: Capture | None = None
        self._is_captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        world = self._world
        stream = world.current_stream()
        assert world.capture is None and not self._is_captured, "a graph is captured once, one at a time"
        if stream == world.default_stream(stream.device):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._capture = world.capture = Capture(stream, -(pool or new_pool())[1], capture_error_mode)

    def capture_end(self) -> None:
        assert self._capture is not None and self._world.capture is self._capture
        self._world.capture = None
        if self._capture.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._is_captured = True

    def replay(self) -> None:
        world = self._world
        assert self._capture is not None and self._is_captured, "replay of a graph without a capture"
        world.forbid("a replay")
        device = self._capture.stream.device
        world.count(world.kernels)
        for what, compute, reads, writes in self._capture.calls:
            if any(operand.owner is not None and operand.owner() is None for operand in (*reads, *writes)):
                raise RuntimeError(f"a graph uses memory that was freed: {what}")
            with _disable_current_modes():
                compute()
            world.count(world.graph_kernels)
            world.access(what, device, reads, writes)

    @property
    def num_kernels(self) -> int:
        return len(self._capture.calls) if self._capture is not None else 0


def placed(values: Tensor, lease: Lease, arena: Tensor) -> Tensor:
    """Return a tensor as `values`, in the bytes of its block, without a value."""
    first = lease.block.start - lease.block.segment.start
    size = values.untyped_storage().nbytes()
    memory = arena[first : first + size].view(values.dtype)
    memory.fill_(float("nan") if values.dtype.is_floating_point else 1)
    offset = memory.storage_offset() + values.storage_offset()
    return torch.as_strided(memory, values.shape, values.stride(), offset)
