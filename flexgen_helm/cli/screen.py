"""What a command shows while it works: a live panel on a terminal, else a line now and then. All of
it on stderr.

with Screen():             for a command whose libraries print nothing
with Screen(log=path):     whatever else this process or its children print goes to a file
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from flexgen_helm.cli.console import stop_costs
from flexgen_helm.progress import (
    Event,
    Message,
    ModelInUse,
    Progress,
    ProgressPhase,
    describe,
    observed_by,
    reading,
    time_left,
)
from flexgen_helm.terminal import fill_for, is_terminal
from flexgen_helm.units import count, duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

# Seconds between two lines of progress where stderr is not a terminal.
LINE_EVERY_S = 10.0
_REFRESHES_PER_S = 4
# A command that is done sooner shows no panel.
_PANEL_AFTER_S = 0.7
_MAX_WIDTH = 100
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class _PanelStdout:
    """Stdout of a command with a panel: the first write removes the panel."""

    def __init__(self, stdout: TextIO, remove: Callable[[], None]) -> None:
        self._stdout, self._remove = stdout, remove

    def write(self, text: str) -> int:
        self._remove()
        return self._stdout.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


class _PanelStderr:
    """Stderr of a command: above its panel as soon as there is one. Loggers keep the stream that
    they find at first, so it has to be this one.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen.above, name)


class Screen:
    """Shows the events of a command. A context manager; one at a time.

    log: file for the output of everything else. Without one the panel waits until a command has
        worked for a moment, and makes way for the first line of data on stdout.
    precisions: those that a model is run in, if they are several.

    stdout, stderr: streams to the user, wherever those of the process lead meanwhile.
    """

    def __init__(self, log: Path | None = None, precisions: Sequence[str] = ()) -> None:
        self.stdout, self.stderr = sys.stdout, sys.stderr
        self._log, self._precisions = log, precisions if len(precisions) > 1 else ()
        self._is_terminal = is_terminal(self.stderr)
        self._resources = ExitStack()
        self._began = time.monotonic()
        self._activities: dict[int, ProgressPhase | Progress] = {}  # the newest of each thread
        self._model: ModelInUse | None = None
        self._plan_text = self._ordinal = ""  # which of several precisions it is
        # Guards what was reported. The panel's thread takes it while it draws, so whoever holds it
        # calls nothing of rich.
        self._lock = threading.Lock()
        self._panel_lock = threading.RLock()
        self._live: Live | None = None
        self.above = self.stderr  # prints above the panel, if there is one
        self._ended = threading.Event()

    def __enter__(self) -> Screen:
        with ExitStack() as resources:
            if self._log is not None:
                self.stdout, self.stderr = resources.enter_context(_redirected(self._log))
            resources.enter_context(observed_by(self._on_event))
            if self._is_terminal:
                show = self._show_panel
                if self._log is None:
                    resources.enter_context(
                        redirect_stdout(cast(TextIO, _PanelStdout(self.stdout, self.close)))
                    )
                    resources.enter_context(redirect_stderr(cast(TextIO, _PanelStderr(self))))
            else:
                show = self._print_lines
            thread = threading.Thread(target=show, name="screen", daemon=True)
            resources.callback(self.close)
            thread.start()
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def close(self) -> None:
        """Remove the panel; print no more lines."""
        self._ended.set()
        with self._panel_lock:
            if self._live is not None:
                self._live.stop()
                self._live, self.above = None, self.stderr

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    # Events, from any thread

    def _on_event(self, event: Event) -> None:
        """Note an event, and print it where it is a message or begins a phase of the log."""
        if isinstance(event, Message):
            self.say(event.text)
            return
        thread, is_news = threading.get_ident(), False
        with self._lock:
            if isinstance(event, ProgressPhase):
                before = self._activities.get(thread)
                is_news = not event.is_finished and getattr(before, "name", None) != event.name
                self._activities[thread] = event
                if event.name == "metrics":  # of all models
                    self._model = None
            elif isinstance(event, Progress):
                self._activities[thread] = event
            elif isinstance(event, ModelInUse):
                is_news = self._model != event
                self._model, self._plan_text, self._ordinal = event, "", ""
                if event.precision in self._precisions:
                    self._ordinal = (
                        f", {self._precisions.index(event.precision) + 1} of "
                        f"{len(self._precisions)}"
                    )
            else:
                self._plan_text, is_news = event.text, True
        if self._log is not None and is_news and not self._is_terminal:
            self.say(describe(event))
        with self._panel_lock:
            if is_news and self._live is not None:
                self._live.refresh()  # a phase may be over before the panel is drawn by itself

    def say(self, text: str) -> None:
        """Print a line above the panel."""
        text = fill_for(self.stderr, text)
        with self._panel_lock:
            if self._live is not None:
                self._live.console.print(text, soft_wrap=True)
            else:
                print(text, file=self.stderr, flush=True)

    def _active(self) -> list[ProgressPhase | Progress]:
        """Return what is going on; a thread that finished its phase waits for another one."""
        with self._lock:
            activities = list(self._activities.values())
        return [activity for activity in activities if not activity.is_finished]

    # Lines

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            active = "; ".join(map(describe, self._active() or [ProgressPhase("work")]))
            self.say(f"{duration(self.elapsed_s)}  {active}")

    # Panel

    def _show_panel(self) -> None:
        if self._log is None and self._ended.wait(_PANEL_AFTER_S):
            return
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.live import Live

        width = min(_MAX_WIDTH, Console(file=self.stderr).width)
        console = Console(file=self.stderr, highlight=False, markup=False, emoji=False, width=width)
        with self._panel_lock:
            if not self._ended.is_set():
                self._live = Live(
                    get_renderable=self._draw,
                    console=console,
                    refresh_per_second=_REFRESHES_PER_S,
                    transient=True,
                    redirect_stdout=False,  # stdout is for data
                    redirect_stderr=False,
                )
                self.above = cast(TextIO, FileProxy(console, self.stderr))
                self._live.start(refresh=True)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        title = Text("flexgen-helm", style="bold")
        if self._model is not None:
            title.append(
                f"  {self._model.name}  {self._model.precision}{self._ordinal}",
                style="cyan",
            )
        header = Table.grid(expand=True)
        header.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        header.add_column(justify="right", no_wrap=True)
        header.add_row(title, Text(duration(self.elapsed_s), style="dim"))
        parts: list[RenderableType] = [header]
        notes = []
        for activity in self._active() or [ProgressPhase("work")]:
            parts.append(self._activity_row(activity))
            if isinstance(activity, Progress):
                done = f"{activity.done_requests:,} of {count(activity.total_requests, 'request')}"
                whose = f"{self._model.precision}: " if self._model and self._ordinal else ""
                notes += [
                    f"{whose}{done}, {activity.tokens_per_s:,.3g} tokens/s, {time_left(activity)}",
                    self._plan_text,
                    reading(activity),
                    stop_costs(activity.stop_s),
                ]
                held = ", ".join(
                    f"{tier} {size(num_bytes)}" for tier, num_bytes in activity.memory_bytes.items()
                )
                notes.append(f"memory: {held}" if held else "")
        notes.append(f"log: {self._log}" if self._log is not None else "")
        parts += [
            Padding(Text(note, style="dim", overflow="fold"), (0, 0, 0, 2))
            for note in notes
            if note
        ]
        return Group(*parts)

    def _activity_row(self, activity: ProgressPhase | Progress) -> RenderableType:
        """Return what is going on, a bar, and the amount."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = Text(_SPINNER[int(self.elapsed_s * _REFRESHES_PER_S) % len(_SPINNER)])
        done: float
        if isinstance(activity, Progress):
            done, total = activity.done_tokens, float(activity.total_tokens)
            amount = f"{done:,.0f} of about {total:,.0f} tokens"
            text.append(f" {ProgressPhase('generate').title}")
        else:
            done, total, amount = activity.done, activity.total, activity.amount
            text.append(f" {activity.title}").append(
                f"  {activity.detail}" if activity.detail else "", style="dim"
            )
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(
            text, ProgressBar(total=total, completed=done, width=20) if total else "", amount
        )
        return row


class _LogFile(io.FileIO):
    """A log file that drops what cannot be written, on a full disk: that must cost no results."""

    def write(self, content: Any) -> int:
        with suppress(OSError):
            return super().write(content)
        return len(content)


@contextmanager
def _redirected(log: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Let stdout and stderr of this process, and of its children, lead to a file; yield streams to
    where they led.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as resources:
        file = resources.enter_context(
            io.TextIOWrapper(_LogFile(log, "a"), "utf-8", "replace", line_buffering=True)
        )
        streams = [
            resources.enter_context(_descriptor_redirected(stream, number, file.fileno()))
            for stream, number in ((sys.stdout, 1), (sys.stderr, 2))
        ]
        resources.enter_context(redirect_stdout(file))
        resources.enter_context(redirect_stderr(file))
        yield streams[0], streams[1]


@contextmanager
def _descriptor_redirected(stream: TextIO, number: int, target: int) -> Iterator[TextIO]:
    """Let a file descriptor lead to another one; yield a stream to where it led before.

    stream: Python's stream on the descriptor; yielded as it is if it is on another one.
    number, target: the file descriptors.
    """
    try:
        is_on_it = stream.fileno() == number
    except (AttributeError, OSError, io.UnsupportedOperation):  # replaced by a notebook or a test
        is_on_it = False
    stream.flush()
    saved = os.dup(number)
    os.dup2(target, number)
    if is_on_it:
        stream = os.fdopen(
            os.dup(saved), "w", encoding=stream.encoding, errors="replace", buffering=1
        )
    try:
        yield stream
    finally:
        stream.flush()
        if is_on_it:
            stream.close()
        os.dup2(saved, number)
        os.close(saved)
