"""What the service does, as lines in HELM's log."""

from __future__ import annotations

import time

from helm.common.hierarchical_logger import hlog, hwarn

from flexgen_helm.progress import (
    Event,
    Message,
    ModelInUse,
    PlanLine,
    Progress,
    ProgressPhase,
    describe,
)

# Seconds between two lines of a block's progress in HELM's log.
LINE_EVERY_S = 30.0


class HelmLog:
    """An observer that writes to HELM's log: each plan and message, and a line of progress now and
    then.
    """

    def __init__(self) -> None:
        self._model = ""
        self._phase = ""
        self._last_line = time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Message):
            (hwarn if event.is_warning else self._say)(event.text)
        elif isinstance(event, ModelInUse):
            self._model = describe(event)
        elif isinstance(event, PlanLine):
            self._say(f"{self._model}: {event.text}")
        elif isinstance(event, ProgressPhase):
            if (
                event.name != self._phase
                and not event.is_finished
                and event.name in ("fetch", "convert", "measure")
            ):
                self._say(describe(event))
            self._phase = event.name
        elif isinstance(event, Progress) and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._say(describe(event))

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        hlog(f"flexgen_helm: {text}")
