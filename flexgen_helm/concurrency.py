"""Tools for threads: stop points, one lock for imports, results computed ahead or once per key; and
the check of the system.
"""

from __future__ import annotations

import importlib
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, update_wrapper
from typing import Generic, ParamSpec, TypeVar

from flexgen_helm.errors import Interrupted, UsageError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_import_lock = threading.RLock()
_should_stop: ContextVar[Callable[[], bool] | None] = ContextVar("should_stop", default=None)


def require_linux() -> None:
    """Raise `UsageError` on another system, whose processors, memory and disks answer in other
    ways.
    """
    if (system := platform.system()) != "Linux":
        raise UsageError(
            f"flexgen_helm runs on Linux, and this is {system}: take a Linux machine, a container, "
            "or WSL 2"
        )


@contextmanager
def stopped_by(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Let `stop_point` raise `Interrupted` in this thread once `should_stop` returns true."""
    token = _should_stop.set(should_stop)
    try:
        yield
    finally:
        _should_stop.reset(token)


def stop_point() -> None:
    """Raise `Interrupted` if nobody wants what this thread is doing; long loops of loading call
    it.
    """
    should_stop = _should_stop.get()
    if should_stop is not None and should_stop():
        raise Interrupted("interrupted while loading")


@contextmanager
def import_lock(*packages: str) -> Iterator[None]:
    """Hold the process-wide import lock, with `packages` imported completely.

        with import_lock("transformers"):
            from transformers import AutoTokenizer

    `transformers` replaces itself in `sys.modules` at the end of its import. A second thread that
    imports a name from it meanwhile gets the unfinished module, and 'cannot import name'. Use the
    lock inside functions only:
    a module that waits for it while it is being imported can deadlock.
    """
    with _import_lock:
        for package in packages:
            # waits for an import in progress, also for one outside this lock
            importlib.import_module(package)
        yield


def computed_ahead(
    function: Callable[[T], R],
    items: Sequence[T],
    most_threads: int,
    begin: Callable[[], object] | None = None,
) -> Iterator[R]:
    """Yield function(item) of each item in order; threads, one a core at most, compute the next
    ones meanwhile.

    function: must not compute ahead itself.
    most_threads: at most so many results, and one more, wait unread.
    begin: is called by each of these threads first.
    """
    threads = min(most_threads, len(os.sched_getaffinity(0)), len(items))
    if threads < 2:
        yield from map(function, items)
        return
    pool, waiting = _pool(threads, begin), deque[Future[R]]()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        wait([future for future in waiting if not future.cancel()])


@cache
def _pool(threads: int, begin: Callable[[], object] | None) -> ThreadPoolExecutor:
    """Return the pool of so many threads that call `begin` first.

    It is kept: a model has hundreds of matrices, and starting threads takes as long as reading one.
    """
    return ThreadPoolExecutor(threads, "ahead", begin)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of the threads


class single_flight(Generic[P, R]):
    """Decorator: `functools.cache` that calls the function once per key, however many threads call
    at once.

    Threads that call while the first call runs wait for its result, or get its exception. A call
    that failed is not cached: the next one tries again. Arguments must be hashable. A call must not
    lead to itself.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._results: dict[Hashable, Future[R]] = {}
        self._lock = threading.Lock()
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, tuple(sorted(kwargs.items())))
        with self._lock:
            result = self._results.get(key)
            if is_first := result is None:
                result = self._results[key] = Future()
        if is_first:
            try:
                result.set_result(self._function(*args, **kwargs))
            except BaseException as error:
                with self._lock:
                    if self._results.get(key) is result:
                        del self._results[key]
                result.set_exception(error)
        return result.result()

    def cache_clear(self) -> None:
        """Forget all results; calls in progress finish, and are not cached."""
        with self._lock:
            self._results = {}
