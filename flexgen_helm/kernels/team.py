"""Runs a compiled loop on PyTorch's own OpenMP threads.

Threads of another pool would compete for the cores with PyTorch's, which spin for a while after
each operation. To start work on OpenMP's team takes a few microseconds, on a Python thread pool
dozens.

The entry point is the one that code compiled by GCC calls (`GOMP_parallel`). Where the OpenMP
library that PyTorch loaded has none, a loop runs on the calling thread alone.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.errors import LoopError

_TORCH_CPU = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
# Status of a thread's part of a loop; 0 before it begins.
BEGUN = 1
DONE = 2
# Compiled loops know the dtypes of stored elements by these numbers.
BFLOAT16, FLOAT16, FLOAT32 = range(3)
DTYPE_CODES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


def empty(shape: Sequence[int]) -> Tensor:
    """Return uninitialized host memory in float32, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


@cache
def constants(*numbers: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers in memory that compiled loops may read for as long as the process runs."""
    return np.array(numbers, np.float32)


def team_size(max_threads: int) -> int:
    """Return how many threads share work that can occupy `max_threads`: 1 to PyTorch's number."""
    return max(1, min(max_threads, torch.get_num_threads()))


def run_on_threads(loop: Any, arguments: Iterable[int], max_threads: int) -> None:
    """Call a loop (`emit.Loop`) on each of `team_size(max_threads)` threads; return when all are
    done.

    The loop gets the address of the header in an array of 64-bit integers:

        status of each thread's part, thread 0 last | header: 2 integers | arguments

    The header is the addresses of OpenMP's `omp_get_thread_num` and `omp_get_num_threads`, or zeros
    for one thread alone. OpenMP may start fewer threads than it was asked for: the status of those
    that it does not start stays 0, and they have no part of the work.

    Raises `LoopError` if a part has begun and is not done: code that C calls cannot raise.
    """
    threads = team_size(max_threads)
    openmp, address = _openmp() if threads > 1 else None, loop.address
    if openmp is None:
        data = array("q", [0, 0, 0, *arguments])
        _c_function(address)(data.buffer_info()[0] + 8)
        statuses = data[:1]
    else:
        parallel, *thread_counts = openmp
        data = array("q", [*[0] * threads, *thread_counts, *arguments])
        parallel(address, data.buffer_info()[0] + 8 * threads, threads, 0)
        statuses = data[:threads]
    if BEGUN in statuses or DONE not in statuses:
        raise LoopError(
            "a compiled loop ended with an error, which is on stderr, so its numbers are not used; "
            "FLEXGEN_HELM_LOOPS=0 computes with PyTorch instead"
        )


def use_one_thread() -> None:
    """Let PyTorch run the operations of the calling thread on that thread alone: for the threads of
    pools, beside the engine's.

    OpenMP counts the threads of all teams in a process. As soon as a second thread has a team, they
    exceed the cores, and all teams sleep instead of spinning: each operation of the engine begins
    after 50 us instead of 7.
    """
    torch.get_num_threads()  # its first call in a thread sets the number, and would undo ours
    if (set_num_threads := _omp_set_num_threads()) is not None:
        set_num_threads(1)


@cache
def _c_function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _omp_set_num_threads() -> Callable[[int], None] | None:
    try:
        return ctypes.CDLL(str(_TORCH_CPU)).omp_set_num_threads
    except (OSError, AttributeError):
        return None


@cache
def _openmp() -> tuple[Callable[..., None], int, int] | None:
    """Return `GOMP_parallel` of the library that PyTorch has loaded, and the addresses of
    `omp_get_thread_num` and `omp_get_num_threads`; None if it has none.
    """
    try:
        loaded = ctypes.CDLL(str(_TORCH_CPU))
        parallel = loaded.GOMP_parallel
        thread_counts = loaded.omp_get_thread_num, loaded.omp_get_num_threads
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    thread_num, num_threads = (ctypes.cast(count, ctypes.c_void_p).value for count in thread_counts)
    assert thread_num and num_threads
    return parallel, thread_num, num_threads
