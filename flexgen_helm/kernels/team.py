"""Runs a compiled function on PyTorch's own OpenMP threads.

Threads of another pool would share the cores with PyTorch's, which spin for a while behind each of its operations. A
hand-over to the OpenMP team takes a few microseconds, one to a pool of Python's dozens.

OpenMP's entry is the one that compilers of the GNU project call (`GOMP_parallel`). Where the library that PyTorch
loaded has none, the function runs on Python threads.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class OpenMP:
    """Entries of the library, the last three as addresses."""

    parallel: ctypes._NamedFuncPointer
    thread_num: int
    num_threads: int
    barrier: int


class Recording:
    """The calls of compiled functions on this thread, and memory for what they return (`kernels.program`).

    computes: the calls are also run now.
    kept: what the calls read besides.
    """

    def __init__(self, memory: Tensor, computes: bool = True) -> None:
        """memory: bytes."""
        self.computes = computes
        self.calls: list[tuple[int, list[int]]] = []
        self.kept: list[object] = []
        self._memory, self._used = memory, 0
        self._scratch = memory[:0]

    def scratch(self, num_bytes: int) -> Tensor:
        """Return bytes that a call uses for itself: the next one may get the same. Raises `MemoryError`."""
        if len(self._scratch) < num_bytes:
            self._scratch = self.take(num_bytes)
        return self._scratch

    def take(self, num_bytes: int) -> Tensor:
        """Take bytes that begin at a line of the cache. Raises `MemoryError`."""
        first, self._used = self._used, self._used + -(-num_bytes // 64) * 64
        if self._used > len(self._memory):
            raise MemoryError(f"a recording takes more than {len(self._memory)} bytes")
        return self._memory[first : first + num_bytes]

    def __enter__(self) -> Recording:
        assert recording() is None
        _thread_local.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread_local.recording = None


_thread_local = threading.local()


def recording() -> Recording | None:
    """Return what records the calls of this thread, if anything does."""
    own: Recording | None = getattr(_thread_local, "recording", None)
    return own


@contextmanager
def not_recorded() -> Iterator[None]:
    """Record nothing meanwhile."""
    own = recording()
    _thread_local.recording = None
    try:
        yield
    finally:
        _thread_local.recording = own


def empty(shape: Sequence[int]) -> Tensor:
    """Return memory in float32 for the result of a compiled function."""
    own = recording()
    return torch.empty(shape) if own is None else own.take(4 * prod(shape)).view(torch.float32).view(shape)


def scratch(floats: int) -> Tensor:
    """Return memory in float32 that a compiled function uses for itself."""
    own = recording()
    return torch.empty(floats) if own is None else own.scratch(4 * floats).view(torch.float32)


def keep(*operands: object) -> None:
    """Let a recording keep what a call of it reads, which its caller may drop."""
    if (own := recording()) is not None:
        own.kept.append(operands)


def team_size(most_threads: int) -> int:
    """Return how many threads a function gets for which so many have something to do; all, in a recording."""
    threads = torch.get_num_threads()
    return threads if recording() is not None else max(1, min(most_threads, threads))


def run_on_threads(address: int, arguments: list[int], most_threads: int) -> None:
    """Call the function at `address` on each thread with the header and `arguments`; return when all are done.

    The header has four numbers: the addresses of OpenMP's `omp_get_thread_num` and `omp_get_num_threads`, or zeros and
    then the part that this thread computes and how many parts there are.

    most_threads: that have something to do; at most PyTorch's number of threads is used.
    """
    if (own := recording()) is not None:
        own.calls.append((address, arguments))
        if not own.computes:
            return
    threads = team_size(most_threads)
    openmp = openmp_library() if threads > 1 else None
    if openmp is not None:
        data = array("q", [openmp.thread_num, openmp.num_threads, 0, 0, *arguments])
        openmp.parallel(address, data.buffer_info()[0], threads, 0)
        return
    function = _function(address)
    parts = [array("q", [0, 0, part, threads, *arguments]) for part in range(threads)]
    futures = [thread_pool(threads).submit(function, part.buffer_info()[0]) for part in parts[1:]]
    function(parts[0].buffer_info()[0])
    for future in futures:
        future.result()


_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _function(address: int) -> Callable[[int], None]:
    return _PROTOTYPE(address)


@cache
def openmp_library() -> OpenMP | None:
    """Find OpenMP among the libraries that PyTorch has loaded."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        parallel = loaded.GOMP_parallel
        others = loaded.omp_get_thread_num, loaded.omp_get_num_threads, loaded.GOMP_barrier
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    thread_num, num_threads, barrier = (ctypes.cast(function, ctypes.c_void_p).value for function in others)
    assert thread_num and num_threads and barrier
    return OpenMP(parallel, thread_num, num_threads, barrier)


@lru_cache(maxsize=1)
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return Python threads that compute beside the calling one."""
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="kernels")
