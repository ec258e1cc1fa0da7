"""Ctrl-C and SIGTERM that end a run within seconds.

HELM's thread pool joins its threads before an interruption gets through, and those threads wait for results. The
handlers interrupt the service first; every waiting thread then returns.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from flexgen_helm.plugin.context import get_context


def install() -> None:
    """Chain in front of the current handlers, once; only the main thread may.

    An ignored SIGINT (a background job) stays ignored, and a handler that Python did not install is left alone. Of
    SIGTERM only what Python or our command line do is replaced: ranks of a pipeline and Ray have handlers of their own.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _chain(signal.SIGINT)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.default_int_handler):
        _chain(signal.SIGTERM)


def _chain(signal_number: int) -> None:
    previous = signal.getsignal(signal_number)
    if previous in (signal.SIG_IGN, None) or hasattr(previous, "flexgen_helm"):
        return

    def handler(number: int, frame: FrameType | None) -> None:
        get_context().service.interrupt()
        if callable(previous):
            previous(number, frame)
        else:  # SIG_DFL would end the process without its last words
            raise KeyboardInterrupt

    handler.flexgen_helm = True  # type: ignore[attr-defined]
    signal.signal(signal_number, handler)
