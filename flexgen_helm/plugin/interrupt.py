"""Ctrl-C that ends a run within seconds.

HELM's thread pool joins its threads before an interruption gets through, and those threads wait for results. The
handler interrupts the service first; every waiting thread then returns.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from flexgen_helm.plugin.context import get_context


class _Handler:
    """Interrupts the service, then does what the previous handler did."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        get_context().service.interrupt()
        if callable(self.previous):
            self.previous(number, frame)
        else:  # SIG_DFL would end the process without its last words
            raise KeyboardInterrupt


def install() -> None:
    """Chain in front of the current SIGINT handler, once; only the main thread may.

    An ignored SIGINT (a background job) stays ignored, and a handler that Python did not install is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGINT)
    if current not in (signal.SIG_IGN, None) and not isinstance(current, _Handler):
        signal.signal(signal.SIGINT, _Handler(current))
