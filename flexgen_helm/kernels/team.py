"""Runs a compiled loop on PyTorch's own OpenMP threads.

Threads of another pool would share the cores with PyTorch's, which spin for a while behind each of
its operations. A hand-over to the OpenMP team takes a few microseconds, one to a pool of Python's
dozens.

OpenMP's entry is the one that compilers of the GNU project call (`GOMP_parallel`). Where the
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
# How far a thread is with its part of a loop.
BEGUN, DONE = 1, 2
# What compiled loops call the types of stored elements.
BFLOAT16, FLOAT16, FLOAT32 = range(3)
KINDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


def empty(shape: Sequence[int]) -> Tensor:
    """Return memory of the host in float32, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


@cache
def constants(*numbers: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers where compiled loops read them, for as long as the process runs."""
    return np.array(numbers, np.float32)


def team_size(most_threads: int) -> int:
    """Return how many threads a function gets for which so many have something to do."""
    return max(1, min(most_threads, torch.get_num_threads()))


def run_on_threads(loop: Any, arguments: Iterable[int], most_threads: int) -> None:
    """Call a loop (`emit.Loop`) on each thread with the header and `arguments`; return when all are
    done.

    The header has two numbers: the addresses of OpenMP's `omp_get_thread_num` and
    `omp_get_num_threads`, or zeros for one thread alone. Before it is a word for each part of the
    work, the first one last: 0, `BEGUN`, or `DONE`. OpenMP may start fewer threads than it was
    asked for.

    most_threads: that have something to do; at most PyTorch's number of threads is used.

    Raises `LoopError` if a part has begun and was not done: what C calls cannot raise.
    """
    threads = team_size(most_threads)
    openmp, address = _openmp() if threads > 1 else None, loop.address
    if openmp is None:
        data = array("q", [0, 0, 0, *arguments])
        _function(address)(data.buffer_info()[0] + 8)
        states = data[:1]
    else:
        parallel, *counts = openmp
        data = array("q", [*[0] * threads, *counts, *arguments])
        parallel(address, data.buffer_info()[0] + 8 * threads, threads, 0)
        states = data[:threads]
    if BEGUN in states or DONE not in states:
        raise LoopError(
            "a compiled loop ended with an error, which is on stderr, so its numbers are not used; "
            "FLEXGEN_HELM_LOOPS=0 computes with PyTorch instead"
        )


def stay_alone() -> None:
    """Let PyTorch's operations of the calling thread, which is no engine's, run on it alone; for
    thread pools.

    OpenMP counts the threads of all teams in a process. As soon as a second thread has a team, they
    exceed the cores, and all teams sleep instead of spinning: each operation of the engine begins
    50 us later, not 7.
    """
    torch.get_num_threads()  # sets this thread's number the first time
    if (alone := _omp_set_num_threads()) is not None:
        alone(1)


@cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _omp_set_num_threads() -> Callable[[int], None] | None:
    try:
        return ctypes.CDLL(str(_TORCH_CPU)).omp_set_num_threads
    except (OSError, AttributeError):
        return None


@cache
def _openmp() -> tuple[Callable[..., None], int, int] | None:
    """Find `GOMP_parallel` among the libraries that PyTorch has loaded, and the addresses of what
    counts threads.
    """
    try:
        loaded = ctypes.CDLL(str(_TORCH_CPU))
        parallel = loaded.GOMP_parallel
        counts = loaded.omp_get_thread_num, loaded.omp_get_num_threads
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    thread_num, num_threads = (ctypes.cast(function, ctypes.c_void_p).value for function in counts)
    assert thread_num and num_threads
    return parallel, thread_num, num_threads
