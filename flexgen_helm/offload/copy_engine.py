"""Copies between host memory and the compute device: over CUDA streams, or over a simulated link of a given bandwidth.

A copy blocks its thread, a loader or a writer, until the data has arrived. Computing goes on meanwhile. The two
directions are independent (full duplex).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.offload.rate_limit import RateLimit
from flexgen_helm.offload.staging import pages
from flexgen_helm.planner.constants import COPY_BUFFER_BYTES
from flexgen_helm.progress import Message, report
from flexgen_helm.units import exact_size

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class CopyEngine(ABC):
    """One copy at a time in each direction; any thread may call.

    pins: `host_memory` is pinned; False from the first refusal of the driver on.
    """

    device: torch.device

    def __init__(self) -> None:
        self.pins = True
        self._thread_local = threading.local()

    @abstractmethod
    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy from host memory to `target` (None: new device memory), after the work that `mark_used` marked."""

    @abstractmethod
    def rows_to_device(self, source: Tensor, rows: Tensor) -> Tensor:
        """Copy rows [T] of host memory [N, width] to new device memory [T, width], as `to_device` does."""

    @abstractmethod
    def to_host(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy to `target` (None: new host memory), after the work that was launched on the device before."""

    @abstractmethod
    def mark_used(self) -> None:
        """Make later copies to the device wait for all work that the computing thread has launched so far.

        The computing thread calls it before it releases device memory that such work may still read.
        """

    @abstractmethod
    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate host memory [num_bytes] that copies are fast from and to."""

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory of the device that copies may write to at once and products may read."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def close(self) -> None:
        """Give buffers and cached memory back."""
        self._thread_local = threading.local()

    def thread_buffer(self, num_bytes: int) -> Tensor:
        """Return host memory [at least num_bytes] that belongs to the calling thread until its next call."""
        buffer: Tensor | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._thread_local.buffer = self.host_memory(num_bytes)
        return buffer


class SimulatedCopyEngine(CopyEngine):
    """A gpu in host memory behind a link of `in_gb_s` and `out_gb_s` (GB/s; None: not throttled)."""

    def __init__(self, in_gb_s: float | None, out_gb_s: float | None) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._in, self._out = RateLimit(in_gb_s), RateLimit(out_gb_s)

    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        return self._copy(source, target, self._in)

    def rows_to_device(self, source: Tensor, rows: Tensor) -> Tensor:
        return self.to_device(source.index_select(0, rows))

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        return self._copy(source, target, self._out)

    def mark_used(self) -> None:
        return None  # computing is synchronous

    def host_memory(self, num_bytes: int) -> Tensor:
        return pages(num_bytes)[:num_bytes]

    def _copy(self, source: Tensor, target: Tensor | None, limit: RateLimit) -> Tensor:
        with limit.transfer(source.nbytes):
            return _copy_in_this_thread(source, torch.empty_like(source) if target is None else target)


def _copy_in_this_thread(source: Tensor, target: Tensor) -> Tensor:
    """Copy without torch's threads, which would compete with those that compute."""
    if not (source.is_contiguous() and target.is_contiguous()):
        return target.copy_(source)
    np.copyto(target.view(-1).view(torch.uint8).numpy(), source.view(-1).view(torch.uint8).numpy())
    return target


class CudaCopyEngine(CopyEngine):
    """One CUDA stream a direction. The copying thread waits for its copy; the computing stream never waits.

    Only pinned memory crosses the link: what is not goes through a pinned buffer of the copying thread, in pieces.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_lock, self._out_lock = threading.Lock(), threading.Lock()
        self._used = torch.cuda.Event()

    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        target = self.device_memory(source.shape, source.dtype) if target is None else target
        if source.is_contiguous() and source.is_pinned():
            self._copy_in(source, target)
        else:
            for part, place in _pieces(source, target):
                self._copy_in(self._buffer_like(part).copy_(part), place)
        return target

    def rows_to_device(self, source: Tensor, rows: Tensor) -> Tensor:
        target = self.device_memory((len(rows), *source.shape[1:]), source.dtype)
        step = max(1, COPY_BUFFER_BYTES // max(1, source[:1].nbytes))
        for some_rows, place in zip(rows.split(step), target.split(step)):
            buffer = self.thread_buffer(place.nbytes)[: place.nbytes].view(place.dtype).view(place.shape)
            self._copy_in(torch.index_select(source, 0, some_rows, out=buffer), place)
        return target

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        target = torch.empty(source.shape, dtype=source.dtype) if target is None else target
        is_pinned = target.is_contiguous() and source.is_contiguous() and target.is_pinned()
        for part, place in [(source, target)] if is_pinned else _pieces(source, target):
            arrived = place if is_pinned else self._buffer_like(part)
            with self._out_lock, torch.cuda.stream(self._out):
                self._out.wait_event(computed)
                arrived.copy_(part, non_blocking=True)
                self._out.synchronize()
            if not is_pinned:
                place.copy_(arrived)
        return target

    def mark_used(self) -> None:
        self._used.record(torch.cuda.current_stream(self.device))

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Of the copies' own stream: memory that products used before would have to wait for them.
        with torch.cuda.stream(self._in):
            memory = torch.empty(shape, dtype=dtype, device=self.device)
        memory.record_stream(torch.cuda.current_stream(self.device))  # reused only behind the products that read it
        return memory

    def host_memory(self, num_bytes: int) -> Tensor:
        registered = _RegisteredPages(num_bytes, self.device)
        if self.pins and not registered.is_registered:
            self.pins = False
            report(
                Message(
                    f"the driver refuses to pin {exact_size(num_bytes)} of host memory, so copies to and from the GPU "
                    "are about half as fast: lower --cpu-memory"
                )
            )
        return torch.from_numpy(np.asarray(registered))[:num_bytes]

    def close(self) -> None:
        super().close()
        torch.cuda.empty_cache()  # the next engine plans with what the driver says is free

    def _copy_in(self, source: Tensor, target: Tensor) -> None:
        with self._in_lock, torch.cuda.stream(self._in):
            self._in.wait_event(self._used)
            target.copy_(source, non_blocking=True)
            self._in.synchronize()

    def _buffer_like(self, part: Tensor) -> Tensor:
        return self.thread_buffer(part.nbytes)[: part.nbytes].view(part.dtype).view(part.shape)


class _RegisteredPages:
    """Pinned host memory of exactly the pages that it needs; PyTorch's own takes the next power of two.

    It stays pageable where the driver refuses, as WSL does from half of the memory on; copies then use a buffer.
    """

    is_registered = False

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pages, self._device = pages(num_bytes), device
        self.__array_interface__ = self._pages.numpy().__array_interface__
        address, size = self._pages.data_ptr(), self._pages.numel()
        with torch.cuda.device(device):  # a thread begins with device 0, whose memory the driver would take too
            self.is_registered = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) == 0

    def __del__(self) -> None:
        if self.is_registered:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._pages.data_ptr())


def _pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide two tensors of one shape alike, into pieces of at most `COPY_BUFFER_BYTES`."""
    if one.nbytes <= COPY_BUFFER_BYTES:
        if one.nbytes:
            yield one, other
    elif rows := COPY_BUFFER_BYTES * len(one) // one.nbytes:
        yield from zip(one.split(rows), other.split(rows))
    else:
        for part, place in zip(one, other):
            yield from _pieces(part, place)
