"""Threads of PyTorch that follow the cores which other programs leave free. No torch at import.

OpenMP's threads wait for each other by spinning. If one of them shares its core with another
program, all wait for it at every barrier: beside one busy program two threads on two cores are
slower than one thread. So the number of threads is chosen again every second, from the processor
time that other programs took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

# Seconds between two choices.
_WINDOW_S = 1.0
# Free cores below or above the present number of threads that change it; apart, so that it does not
# swing.
_FEWER_BELOW, _MORE_ABOVE = -0.5, 0.75
# Who sets one of these has chosen threads and waiting.
_USER_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_DYNAMIC",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
)


@dataclass(frozen=True)
class CpuTimes:
    """Processor seconds since some time before.

    clock_s: when they were read.
    all_s: of all programs on the cores that this process may use.
    own_s: of this process.
    """

    clock_s: float
    all_s: float
    own_s: float


def read_cpu_times() -> CpuTimes:
    """Read the counters of the operating system."""
    process = psutil.Process()
    cores = _cores()
    of_cores = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    # Time that the hypervisor took is missing too; that of guests is part of `user`.
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    busy = sum(getattr(times, kind, 0.0) for times in of_cores for kind in kinds)
    used = process.cpu_times()
    return CpuTimes(time.monotonic(), busy, used.user + used.system)


def busy_cores(earlier: CpuTimes, later: CpuTimes) -> float:
    """Return how many cores other programs took, on average between two readings."""
    busy = (later.all_s - earlier.all_s) - (later.own_s - earlier.own_s)
    return max(0.0, busy / (later.clock_s - earlier.clock_s))


class ThreadGovernor:
    """Sets PyTorch's threads for one engine that computes on the processor.

    The number that PyTorch has at the start is never exceeded. Nothing is done if the user has
    chosen threads or waiting by an environment variable.
    """

    def __init__(self, read: Callable[[], CpuTimes] = read_cpu_times) -> None:
        import torch

        self._read, self._torch = read, torch
        self._max_threads = torch.get_num_threads()
        self._active = self._max_threads > 1 and not any(
            os.environ.get(name) for name in _USER_VARIABLES
        )
        self._last = read()

    def adapt(self) -> None:
        """Choose the number of threads anew if the last choice is a second old.

        PyTorch's number of threads is the calling thread's own, so call it from the one that
        computes.
        """
        if not self._active or time.monotonic() - self._last.clock_s < _WINDOW_S:
            return
        now = self._read()
        free = len(_cores()) - busy_cores(self._last, now)
        self._last = now
        threads = self._torch.get_num_threads()
        if not _FEWER_BELOW <= free - threads <= _MORE_ABOVE:
            self._set(min(self._max_threads, max(1, round(free))))

    def release(self) -> None:
        """Give PyTorch back the threads that it had."""
        if self._active:
            self._set(self._max_threads)

    def _set(self, threads: int) -> None:
        if threads != self._torch.get_num_threads():
            self._torch.set_num_threads(threads)


def _cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0)
