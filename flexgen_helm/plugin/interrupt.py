"""Ctrl-C that ends a run within seconds.

HELM's thread pool joins its threads before an interruption gets through, and those threads wait for answers. The
handler tells the service first; every waiter then returns by itself.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from flexgen_helm.plugin.service import get_service


class _Handler:
    """Stops the service, then does what the previous handler did."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        get_service().stop()
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
    if current in (signal.SIG_IGN, None) or isinstance(current, _Handler):
        return
    get_service()  # made here, not in the handler, where its lock could already be held
    signal.signal(signal.SIGINT, _Handler(current))
