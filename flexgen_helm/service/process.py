"""Signals and the end of a process that has a service.

A harness's threads wait for results, so an interruption would not get through to them. The handlers
here interrupt the service first; every waiting thread then returns.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
# Of this process, once `cli.main` has decided it: Python tells nobody what `sys.exit` was given.
command_exit_code: int | None = None


def interrupt_on_signals(interrupt: Callable[[], None]) -> None:
    """Call `interrupt` in front of the handlers of SIGINT and SIGTERM, once; only the main thread
    may.

    An ignored SIGINT (a background job) stays ignored, and a handler that Python did not install is
    left alone. Of SIGTERM only what Python or our command line do is replaced: ranks of a pipeline
    and Ray have handlers of their own.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _chain(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.default_int_handler):
        _chain(signal.SIGTERM, interrupt)


def _chain(signal_number: int, interrupt: Callable[[], None]) -> None:
    previous = signal.getsignal(signal_number)
    if previous in (signal.SIG_IGN, None) or hasattr(previous, "flexgen_helm"):
        return

    def handler(number: int, frame: FrameType | None) -> None:
        interrupt()
        if callable(previous):
            previous(number, frame)
        else:  # SIG_DFL would end the process without its last words
            raise KeyboardInterrupt

    signal.signal(signal_number, dropped_in_forks(handler))


def dropped_in_forks(handler: Handler) -> Handler:
    """Mark a handler as one that a fork of this process shall not have."""
    handler.flexgen_helm = True  # type: ignore[attr-defined]
    return handler


def _forget_handlers() -> None:
    """Let a fork end at signals: what its parent's handlers interrupt, it has not. A pool ends its
    own by SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        handler, is_term = signal.getsignal(number), number == signal.SIGTERM
        if hasattr(handler, "flexgen_helm") or (is_term and handler is signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_handlers)


def close_at_exit(close: Callable[[], bool]) -> None:
    """Close a service while the interpreter ends; exit at once where its thread does not stop.

    close: `Service.close`.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would end in a traceback
    if not close():
        _leave_at_once()
    # Python searches all that is left for cycles before it ends, 1.5 s with HELM's and PyTorch's
    # modules. Triton needs that search: without it, it prints a page of objects that it takes for
    # leaked.
    if "triton" not in sys.modules:
        gc.freeze()


def _leave_at_once() -> None:
    """End the process with its exit code, without waiting for a thread that is in the middle of
    something.

    Python ends such a thread when it wants the interpreter again; in C++ that is `std::terminate`,
    exit code 134.
    """
    code = command_exit_code
    if code is None:
        last = getattr(sys, "last_type", None)  # set where an exception ended the main thread
        code = 0 if last is None else 130 if issubclass(last, KeyboardInterrupt) else 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    logging.shutdown()
    os._exit(code)
