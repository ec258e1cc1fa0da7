"""Ctrl-C that ends a run within seconds.

HELM's thread pool joins its threads before an interruption gets through, and those threads wait for results. The
handler interrupts the service first; every waiting thread then returns.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from flexgen_helm.plugin.context import get_context


def install() -> None:
    """Chain in front of the current SIGINT handler, once; only the main thread may.

    An ignored SIGINT (a background job) stays ignored, and a handler that Python did not install is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous in (signal.SIG_IGN, None) or hasattr(previous, "flexgen_helm"):
        return

    def handler(number: int, frame: FrameType | None) -> None:
        get_context().service.interrupt()
        if callable(previous):
            previous(number, frame)
        else:  # SIG_DFL would end the process without its last words
            raise KeyboardInterrupt

    handler.flexgen_helm = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, handler)
