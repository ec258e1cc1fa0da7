"""What a program is doing, for whoever shows it: as `logging` is for messages, so is this for
progress. No torch.

Code that works calls `report`; it knows nothing of terminals. A command installs an observer with
`observed_by`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from flexgen_helm.units import count, duration, size

PhaseName = Literal[
    "start",
    "fetch",
    "verify",
    "open",
    "tokenizer",
    "prove",
    "prompts",
    "convert",
    "load",
    "measure",
    "plan",
    "generate",
    "metrics",
    "work",
]
_TITLES: dict[PhaseName, str] = {
    "start": "starting HELM",
    "fetch": "downloading",
    "verify": "verifying",
    "open": "opening the model",
    "tokenizer": "building the tokenizer",
    "prove": "comparing a small model of this kind with transformers",
    "prompts": "reading data and making prompts",
    "convert": "converting weights",
    "load": "loading weights",
    "measure": "measuring this machine",
    "plan": "planning",
    "generate": "computing",
    "metrics": "computing metrics",
    "work": "working",
}
# Seconds between two looks at a folder that another program fills.
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class ProgressPhase:
    """A phase of the program that has begun, or how far it is.

    detail: what it works on.
    done, total: of the phase, in `unit`; total is 0 if it is not known.
    """

    name: PhaseName
    detail: str = ""
    done: float = 0
    total: float = 0
    unit: Literal["bytes", "run", "answer"] = "bytes"

    @property
    def is_finished(self) -> bool:
        return bool(self.total) and self.done >= self.total

    @property
    def title(self) -> str:
        return _TITLES[self.name]

    @property
    def amount(self) -> str:
        """What is done of how much, in units for people; empty if that is not known."""
        if not self.total:
            return ""
        if self.unit == "bytes":
            return f"{size(self.done)} of {size(self.total)}"
        return f"{self.done:,.0f} of {count(int(self.total), self.unit)}"


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    done_tokens: computed so far, prompts included; of a batch that is half way through the layers,
        half its tokens.
    total_tokens: expected, from the lengths of the answers so far; at first half of every
        `max_tokens`.
    elapsed_s: seconds since the run began.
    memory_bytes: held now by each tier that holds anything.
    num_passes: begun so far. layer: that the pass is at, from 1 on; num_layers: of how many in this
        process.
    read_bytes: of weights that the pass has read of the disk; pass_bytes: of how many, about; 0 if
        none are there.
    read_bytes_s: of the disk, over the last seconds.
    stop_s: seconds of computing that a stop now would cost at most; 0 where no tokens are kept.
    """

    done_tokens: float
    total_tokens: int
    done_requests: int
    total_requests: int
    elapsed_s: float
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    num_passes: int = 0
    layer: int = 0
    num_layers: int = 0
    read_bytes: int = 0
    pass_bytes: int = 0
    read_bytes_s: float = 0.0
    stop_s: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.done_requests == self.total_requests

    @property
    def tokens_per_s(self) -> float:
        return self.done_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Expected seconds until the end at the mean rate so far; None before the first token."""
        if not self.done_tokens:
            return None
        return self.elapsed_s * (self.total_tokens - self.done_tokens) / self.done_tokens


@dataclass(frozen=True)
class ModelInUse:
    """The model that the following events are about; precision: its name."""

    name: str
    precision: str


@dataclass(frozen=True)
class PlanLine:
    """What was planned for a run, in one line."""

    text: str


@dataclass(frozen=True)
class Message:
    """A sentence for the user.

    is_warning: False for one that only says what is done.
    """

    text: str
    is_warning: bool = True


Event = ProgressPhase | ModelInUse | PlanLine | Message | Progress
Observer = Callable[[Event], None]
_observers: list[Observer] = []
_is_silent: ContextVar[bool] = ContextVar("is_silent", default=False)
logger = logging.getLogger(__name__)


def report(event: Event) -> None:
    """Hand an event to the observers, from any thread; a message that nobody observes is logged."""
    if _is_silent.get():
        return
    for observer in tuple(_observers):
        observer(event)
    if not _observers and isinstance(event, Message):
        logger.warning(event.text)


@contextmanager
def silenced() -> Iterator[None]:
    """Keep what this thread does meanwhile from observers: it is a part of something that they know
    of.
    """
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


def is_observed() -> bool:
    return bool(_observers)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Call `observer` with every event meanwhile, from the thread that reports it."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def watched(phase: ProgressPhase, folder: Path) -> Iterator[None]:
    """Report how much of `phase.total` bytes another program has written below `folder` so far."""
    finished = threading.Event()
    before = _bytes_in(folder)

    def watch() -> None:  # all of it from one thread, which an observer takes for one activity
        report(phase)
        while not finished.wait(_LOOK_EVERY_S):
            report(replace(phase, done=min(phase.total, max(0, _bytes_in(folder) - before))))
        report(replace(phase, done=phase.total))

    watcher = threading.Thread(target=watch, name="watched download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def describe(event: Event) -> str:
    """Return an event as a line for a log; of `Progress`, the total number of tokens is an
    expectation.
    """
    match event:
        case ProgressPhase():
            parts = (event.title, event.detail, event.amount)
            return ": ".join(part for part in parts if part)
        case ModelInUse():
            return f"{event.name} in {event.precision}"
        case Progress():
            line = (
                f"{event.done_tokens:,.0f} of about {event.total_tokens:,} tokens, "
                f"{event.done_requests:,} of {count(event.total_requests, 'request')}, "
                f"{event.tokens_per_s:,.3g} tokens/s, {time_left(event)}"
            )
            return "; ".join(filter(None, (line, reading(event))))
        case _:
            return event.text


def time_left(progress: Progress) -> str:
    seconds = progress.remaining_s
    return "time left not known yet" if seconds is None else f"{duration(seconds)} left"


def reading(progress: Progress) -> str:
    """Say where a pass is, what it has read of the disk, and how fast; empty for weights that are
    in memory.
    """
    if not progress.pass_bytes:
        return ""
    read = f"{size(progress.read_bytes)} of about {size(progress.pass_bytes)}"
    where = f"pass {progress.num_passes:,}, layer {progress.layer} of {progress.num_layers}"
    return f"{where}: {read} read, disk {progress.read_bytes_s / 1e9:.2f} GB/s"


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or deleted meanwhile
            total += path.lstat().st_size
    return total
