"""Copies between host memory and the compute device: over CUDA streams, or over a simulated link of
a given bandwidth.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.rate_limit import RateLimit
from flexgen_helm.progress import Message, report
from flexgen_helm.shared_sizes import COPY_BUFFER_BYTES
from flexgen_helm.units import exact_size

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
# PyTorch's segments (2 and 20 MiB for every stream) and cuBLAS's workspaces have room in any limit.
_LEAST_LIMIT = 512 << 20

# An event behind work that was launched on the device; None where computing is synchronous.
Launched = torch.cuda.Event | None


class CopyEngine(ABC):
    """A thread has one copy under way; any thread may call.

    pins: `host_memory` is pinned; False from the first refusal of the driver on.
    """

    device: torch.device

    def __init__(self) -> None:
        self.pins = True
        self._thread_local = threading.local()

    @abstractmethod
    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy from host memory to `target`, which nothing reads any more; None: to new device
        memory.
        """

    @abstractmethod
    def rows_to_device(self, source: Tensor, rows: Tensor) -> Tensor:
        """Copy rows [T] of host memory [N, width] to new device memory [T, width], as `to_device`
        does.
        """

    @abstractmethod
    def to_host(
        self, source: Tensor, target: Tensor | None = None, after: Launched = None
    ) -> Tensor:
        """Copy to `target` (None: new host memory), after work that was launched; None: all of it
        until now.
        """

    @abstractmethod
    def launched(self) -> Launched:
        """Return an event behind all work that was launched on the device; None where computing is
        synchronous.
        """

    @abstractmethod
    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate zeroed host memory [num_bytes] that copies are fast from and to."""

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory of the device that copies may write to at once and products may read."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def close(self) -> None:
        """Give buffers and cached memory back."""
        self._thread_local = threading.local()

    def thread_buffer(self, num_bytes: int) -> Tensor:
        """Return host memory [at least num_bytes] that belongs to the calling thread until its next
        call.
        """
        buffer: Tensor | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._thread_local.buffer = self.host_memory(num_bytes)
        return buffer


class SimulatedCopyEngine(CopyEngine):
    """A gpu in host memory behind a link of `in_gb_s` and `out_gb_s` (GB/s; None: not
    throttled).
    """

    def __init__(self, in_gb_s: float | None, out_gb_s: float | None) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._in, self._out = RateLimit(in_gb_s), RateLimit(out_gb_s)

    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        return self._copy(source, target, self._in)

    def rows_to_device(self, source: Tensor, rows: Tensor) -> Tensor:
        return self.to_device(source.index_select(0, rows))

    def to_host(
        self, source: Tensor, target: Tensor | None = None, after: Launched = None
    ) -> Tensor:
        return self._copy(source, target, self._out)

    def launched(self) -> Launched:
        return None

    def host_memory(self, num_bytes: int) -> Tensor:
        return pages(num_bytes)[:num_bytes]

    def _copy(self, source: Tensor, target: Tensor | None, limit: RateLimit) -> Tensor:
        with limit.transfer(source.nbytes):
            return _copy_in_this_thread(
                source, torch.empty_like(source) if target is None else target
            )


def _copy_in_this_thread(source: Tensor, target: Tensor) -> Tensor:
    """Copy without torch's threads, which would compete with those that compute."""
    if not (source.is_contiguous() and target.is_contiguous()):
        return target.copy_(source)
    np.copyto(target.view(-1).view(torch.uint8).numpy(), source.view(-1).view(torch.uint8).numpy())
    return target


class CudaCopyEngine(CopyEngine):
    """A CUDA stream for each copying thread, which waits for its copy; the computing stream never
    waits.

    So the link is busy while one of several threads wakes. What is not pinned crosses it in pieces,
    through a buffer of the copying thread, unless the driver refuses to pin that too.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._memory_stream = torch.cuda.Stream(device)

    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        target = self.device_memory(source.shape, source.dtype) if target is None else target
        if not self.pins or (source.is_contiguous() and source.is_pinned()):
            return self._copy(source, target)
        for source_piece, target_piece in _pieces(source, target):
            self._copy(self._buffer_like(source_piece).copy_(source_piece), target_piece)
        return target

    def rows_to_device(self, source: Tensor, rows: Tensor) -> Tensor:
        target = self.device_memory((len(rows), *source.shape[1:]), source.dtype)
        step = max(1, COPY_BUFFER_BYTES // max(1, source[:1].nbytes))
        for some_rows, target_piece in zip(rows.split(step), target.split(step)):
            self._copy(
                torch.index_select(source, 0, some_rows, out=self._buffer_like(target_piece)),
                target_piece,
            )
        return target

    def to_host(
        self, source: Tensor, target: Tensor | None = None, after: Launched = None
    ) -> Tensor:
        event = after or self.launched()
        assert event is not None
        self._stream().wait_event(event)
        target = torch.empty(source.shape, dtype=source.dtype) if target is None else target
        if not self.pins or (
            target.is_contiguous() and source.is_contiguous() and target.is_pinned()
        ):
            return self._copy(source, target)
        for source_piece, target_piece in _pieces(source, target):
            target_piece.copy_(self._copy(source_piece, self._buffer_like(source_piece)))
        return target

    def launched(self) -> Launched:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Of a stream without work: memory that products used before would have to wait for them.
        with torch.cuda.stream(self._memory_stream):
            memory = torch.empty(shape, dtype=dtype, device=self.device)
        # reused only behind the products that read it
        memory.record_stream(torch.cuda.current_stream(self.device))
        return memory

    def host_memory(self, num_bytes: int) -> Tensor:
        registered = _RegisteredPages(num_bytes, self.device)
        if self.pins and not registered.is_registered:
            self.pins = False
            report(
                Message(
                    f"the driver refuses to pin {exact_size(num_bytes)} of host memory, so copies "
                    "to and from the GPU are about half as fast: lower --cpu-memory"
                )
            )
        return torch.from_numpy(np.asarray(registered))[:num_bytes]

    def limit_device_memory(self, num_bytes: float) -> None:
        """Let this process allocate no more device memory, for whatever use, until `close`;
        infinity: no limit.

        Limits of several engines add up.
        """
        _limits[self] = max(num_bytes, _LEAST_LIMIT)
        _enforce(self.device, num_bytes)

    def close(self) -> None:
        super().close()
        _enforce(self.device, _limits.pop(self, math.inf))
        torch.cuda.empty_cache()  # the next engine plans with what the driver says is free

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._thread_local, "stream", None)
        if stream is None:
            stream = self._thread_local.stream = torch.cuda.Stream(self.device)
        return stream

    def _copy(self, source: Tensor, target: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream()):
            # what the host attended to waits for a piece, not for all
            for source_piece, target_piece in _pieces(source, target):
                target_piece.copy_(source_piece, non_blocking=True)
        # Wait asleep: a thread that spins would take a processor from those that compute.
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._stream())
        copied.synchronize()
        return target

    def _buffer_like(self, piece: Tensor) -> Tensor:
        return self.thread_buffer(piece.nbytes)[: piece.nbytes].view(piece.dtype).view(piece.shape)


_limits: WeakKeyDictionary[CudaCopyEngine, float] = WeakKeyDictionary()


def _enforce(device: torch.device, changed: float) -> None:
    """Let PyTorch refuse what exceeds the sum of a device's limits; a program's own cap stays where
    none was given.
    """
    index = device.index or 0
    limits = [
        limit for engine, limit in list(_limits.items()) if (engine.device.index or 0) == index
    ]
    if min([changed, *limits]) < math.inf:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (sum(limits) or math.inf) / total), device
        )


class _RegisteredPages:
    """Pinned host memory of exactly the pages that it needs; PyTorch's own takes the next power of
    two.

    It stays pageable where the driver refuses, as WSL does from half of the memory on; copies then
    use a buffer.
    """

    is_registered = False

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pages, self._device = pages(num_bytes), device
        self.__array_interface__ = self._pages.numpy().__array_interface__
        address, size = self._pages.data_ptr(), self._pages.numel()
        # a thread begins with device 0, whose memory the driver would take too
        with torch.cuda.device(device):
            self.is_registered = (
                int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) == 0
            )
            if not self.is_registered:
                # the error stays this thread's last one, and the next launch reports it
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)

    def __del__(self) -> None:
        if self.is_registered:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._pages.data_ptr())


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide two tensors of one shape alike, into pieces of at most `COPY_BUFFER_BYTES`."""
    if source.nbytes <= COPY_BUFFER_BYTES:
        if source.nbytes:
            yield source, target
    elif rows := COPY_BUFFER_BYTES * len(source) // source.nbytes:
        yield from zip(source.split(rows), target.split(rows))
    else:
        for source_piece, target_piece in zip(source, target):
            yield from _pieces(source_piece, target_piece)
