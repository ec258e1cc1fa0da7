"""Output of the commands: data on stdout, messages on stderr. Progress is in `screen`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import replace_text
from flexgen_helm.terminal import fill_for, table_text
from flexgen_helm.units import rough_duration

if TYPE_CHECKING:
    from rich.console import Console

# Columns of a page that is not a terminal: a file is read with a wider page than 80 columns.
_FILE_WIDTH = 200


# Names in untrusted files may hold sequences that a terminal obeys.
_CONTROLS = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}"
)


def say(text: str) -> None:
    """Print a message on stderr, without control characters; a terminal's lines break at words."""
    print(fill_for(sys.stderr, text.translate(_CONTROLS)), file=sys.stderr, flush=True)


def print_json(content: Any) -> None:
    """Print `content` as JSON on stdout. Raises ValueError for a number that is not finite, which
    is a defect.
    """
    print(json.dumps(content, indent=2, allow_nan=False), flush=True)


def print_table(rows: Sequence[Mapping[str, Any]], *, optional: Sequence[str] = ()) -> None:
    """Print rows, by column, on stdout as a table for people: numbers to the right, missing values
    empty.

    optional: as of `table_text`
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    print_rows([name.replace("_", " ") for name in names], cells, optional)


def print_rows(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    optional: Sequence[str] = (),
    width: int | None = None,
) -> None:
    """Print a table of text on stdout; optional: as of `table_text`; width: None for the
    terminal's.
    """
    console = output()
    console.print(table_text(headings, rows, width or console.width, optional), soft_wrap=True)


def print_command(words: Sequence[str]) -> None:
    """Print a command to copy, in lines that fit."""
    console, lines = output(), [" "]
    for word in map(shlex.quote, words):
        value_room = 30 * word.startswith("--")  # on one line with its flag
        if len(lines[-1]) + len(word) + value_room > console.width - 3:
            lines.append("   ")
        lines[-1] += f" {word}"
    console.print(" \\\n".join(lines), soft_wrap=True)


def stop_costs(seconds: float) -> str:
    """Say what a stop costs; empty if that is not known."""
    return f"a stop costs at most {rough_duration(seconds)} of computing" if seconds else ""


def output() -> Console:
    """Return rich's console on stdout, `_FILE_WIDTH` columns wide if stdout is a file."""
    from rich import console

    class Console(console.Console):
        def on_broken_pipe(self) -> None:
            raise  # rich's default ends the process; `cli.main` handles the error

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(
        highlight=False, markup=False, emoji=False, width=None if has_width else _FILE_WIDTH
    )


def _cell(value: Any) -> str:
    """Return a cell's text; floats show five significant digits."""
    if value is None or value != value:  # NaN
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) >= 100 else f"{value:.5g}"


def read_input(flag: str, path: Path) -> bytes:
    """Return the content of a file that `flag` names, of stdin for `-`."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from error


def write_file(path: Path, text: str, remedy: str = "") -> None:
    """Replace a file as a whole; raises `FlexgenError` with one sentence, and the remedy, if it
    cannot be written.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror or error}"
        raise FlexgenError(f"{what}{remedy and f'; {remedy}'}") from error


def write_json(path: Path, content: Any, remedy: str = "") -> None:
    """Replace a file by JSON. Raises as `print_json` and `write_file` do."""
    write_file(path, json.dumps(content, indent=2, allow_nan=False) + "\n", remedy)
