"""Output of the commands: data on stdout, messages and progress on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import replace_text

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, RenderableType
    from rich.progress import Progress as Bar

    from flexgen_helm.request import Progress

# Seconds between two lines of progress if stderr is not a terminal.
LINE_EVERY_S = 15.0
# Columns of a page that is not a terminal: a file is read with a wider page than 80 columns.
_FILE_WIDTH = 200


def say(text: str) -> None:
    """Print a message on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(content: Any) -> None:
    """Print `content` as JSON on stdout. Raises ValueError for a number that is not finite, which is a defect."""
    print(json.dumps(content, indent=2, allow_nan=False), flush=True)


def print_csv(frame: pandas.DataFrame) -> None:
    """Print `frame` as CSV on stdout, with full precision and without the index."""
    print(frame.to_csv(index=False), end="", flush=True)


def print_table(
    frame: pandas.DataFrame,
    *,
    title: str | None = None,
    formats: Mapping[str, Callable[[Any], RenderableType]] = MappingProxyType({}),
) -> None:
    """Print `frame` on stdout as a table for people: numeric columns to the right, missing values empty.

    formats: column -> function that turns a value into its cell; other floats show five significant digits
    """
    from pandas.api.types import is_numeric_dtype
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in frame.columns:
        justify: Literal["right", "left"] = "right" if is_numeric_dtype(frame[name]) else "left"
        table.add_column(str(name).replace("_", " "), justify=justify, overflow="fold")
    for row in frame.to_dict("records"):
        table.add_row(*(_cell(value, formats.get(str(name))) for name, value in row.items()))
    output().print(table)


def output() -> Console:
    """Return rich's console on stdout, wide if stdout is a file."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, emoji=False, width=None if has_width else _FILE_WIDTH)


def _cell(value: Any, to_cell: Callable[[Any], RenderableType] | None) -> RenderableType:
    if value is None or value != value:  # NaN
        return ""
    if to_cell is not None:
        return to_cell(value)
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) >= 100 else f"{value:.5g}"


def read_input(flag: str, path: Path) -> bytes:
    """Return the content of a file that `flag` names, of stdin for `-`."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from error


def write_file(path: Path, text: str) -> None:
    """Replace a file as a whole; raises `FlexgenError` with one sentence if it cannot be written."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise FlexgenError(f"{path} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, content: Any) -> None:
    """Replace a file by JSON. Raises as `print_json` and `write_file` do."""
    write_file(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


class TokenProgress:
    """The engine's progress on stderr: a bar on a terminal, else a line every `LINE_EVERY_S` seconds.

    The engine calls it, from any thread. A context manager, which removes the bar at the end.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._last_line = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            say(describe(progress))

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = _new_bar()
            self._bar.add_task("tokens", total=progress.total_tokens, requests="", remaining="")
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0],
            completed=progress.done_tokens,
            total=progress.total_tokens,
            requests=f"{progress.done_requests:,}/{progress.total_requests:,} requests",
            remaining=_duration(progress.remaining_s),
        )
        if progress.done_requests == progress.total_requests:
            self.close()  # a suite may have another block, after HELM has printed lines

    def close(self) -> None:
        """Remove the bar; the next call draws a new one."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def __enter__(self) -> TokenProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def describe(progress: Progress) -> str:
    """Return a line of progress. The number of tokens is an upper bound, for completions may end early."""
    return (
        f"{progress.done_tokens:,} of at most {progress.total_tokens:,} tokens, "
        f"{progress.done_requests:,} of {progress.total_requests:,} requests, {_duration(progress.remaining_s)} to go"
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    text = str(timedelta(seconds=round(seconds)))  # h:mm:ss
    return text.removeprefix("0:").removeprefix("0")


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    return Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens, {task.fields[requests]}, {task.fields[remaining]} to go"),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout is for data; rich would send it to stderr
        redirect_stderr=False,
    )
