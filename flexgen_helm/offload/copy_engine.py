"""The link between the host and the device that computes: CUDA, or a simulated one with a set bandwidth.

Copies block the calling thread, which is a loader's or a writer's, until the data has arrived; computing goes on
meanwhile. The two directions are independent (full duplex).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.offload.staging import pages


class CopyEngine(ABC):
    """Copies between host memory and device memory, one at a time in each direction."""

    device: torch.device

    @abstractmethod
    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy from the host to `target` (or new device memory); what was computing on `target` is waited for."""

    @abstractmethod
    def to_host(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy to `target` (or new host memory); what is still computing `source` is waited for."""

    def mark_used(self) -> None:  # noqa: B027
        """Device memory was read by work that may be under way; the computing thread says so before it is reused."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Host memory [num_bytes] that copies are fast from and to."""
        return pages(num_bytes)[:num_bytes]

    def device_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class SimulatedCopyEngine(CopyEngine):
    """A gpu in host memory behind a link of `in_gb_s` and `out_gb_s` (10^9 bytes a second; None: no throttle)."""

    def __init__(self, in_gb_s: float | None, out_gb_s: float | None) -> None:
        self.device = torch.device("cpu")
        self._directions = [(threading.Lock(), in_gb_s), (threading.Lock(), out_gb_s)]

    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        return self._copy(source, target, *self._directions[0])

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        return self._copy(source, target, *self._directions[1])

    def device_memory(self, num_bytes: int) -> Tensor:
        return pages(num_bytes)[:num_bytes]

    def _copy(self, source: Tensor, target: Tensor | None, busy: threading.Lock, gb_s: float | None) -> Tensor:
        with busy:
            began = time.perf_counter()
            arrived = _copied(source, torch.empty_like(source) if target is None else target)
            if gb_s is not None:
                rest = source.numel() * source.element_size() / (gb_s * 1e9) - (time.perf_counter() - began)
                if rest > 0:
                    time.sleep(rest)
        return arrived


def _copied(source: Tensor, target: Tensor) -> Tensor:
    """Copy with this thread alone: torch's own copy would start as many threads as the computing has."""
    if not (source.is_contiguous() and target.is_contiguous()):
        return target.copy_(source)
    np.copyto(target.view(-1).view(torch.uint8).numpy(), source.view(-1).view(torch.uint8).numpy())
    return target


class CudaCopyEngine(CopyEngine):
    """One stream a direction. The copying thread waits for its copy; the computing stream is never held up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._locks = threading.Lock(), threading.Lock()
        self._used = torch.cuda.Event()
        self._used.record(torch.cuda.current_stream(device))

    def to_device(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        with self._locks[0], torch.cuda.stream(self._streams[0]):
            self._streams[0].wait_event(self._used)
            target = torch.empty_like(source, device=self.device) if target is None else target
            target.copy_(source, non_blocking=True)
            self._streams[0].synchronize()
        return target

    def to_host(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        with self._locks[1], torch.cuda.stream(self._streams[1]):
            self._streams[1].wait_event(computed)
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True) if target is None else target
            target.copy_(source, non_blocking=True)
            self._streams[1].synchronize()
        return target

    def used(self) -> None:
        self._used.record(torch.cuda.current_stream(self.device))

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
