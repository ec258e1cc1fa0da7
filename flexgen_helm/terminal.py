"""Text for terminals: sentences and tables that break at words. Needs neither rich nor pandas."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

_GAP = 2
# A cell of at most so many characters stays on one line.
_UNBROKEN = 16
# A number stays with its unit. Names break after commas and colons, and paths in sentences after slashes.
_IN_SENTENCE = re.compile(r"(?<=[^\d\s]\s)(?=\S)|(?<=/)(?=\w)")
_IN_NAME = re.compile(r"(?<=[,:])(?=[^\W\d])")
_NUMBER = re.compile(r"([-+×<]? ?\d|$)")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose lines can be redrawn; with TERM=dumb they cannot."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def fill(text: str, width: int) -> str:
    """Break lines at words, never within one; a line that begins with a blank is a command, and stays."""
    return "\n".join(
        line
        if line.startswith(" ")
        else textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def fill_for(stream: TextIO, text: str) -> str:
    """Break lines at words if a stream is a terminal."""
    if not is_terminal(stream):
        return text
    try:
        return fill(text, os.get_terminal_size(stream.fileno()).columns or 80)
    except OSError:  # a test's or a notebook's
        return text


def table_text(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    right: Sequence[bool] | None = None,
    optional: Sequence[str] = (),
) -> str:
    """Draw a table of at most `width` columns of text, without cutting a word.

    right: whether a column is aligned to the right; by default those of numbers.
    optional: columns that are left out where there is no room, the first first; then the last ones are.
    """
    columns = list(zip(headings, *rows))
    if right is None:
        right = [n > 0 and all(map(_NUMBER.match, column[1:])) for n, column in enumerate(columns)]
    hanging = [2] + [0] * (len(columns) - 1)
    least = [
        max(_least(column[0], hang, 0), *(_least(cell, hang) for cell in column[1:]))
        for column, hang in zip(columns, hanging)
    ]
    order = [headings.index(name) for name in optional]
    order += [n for n in range(len(columns) - 1, 0, -1) if n not in order]
    kept = list(range(len(columns)))
    while len(kept) > 1 and _total(least[n] for n in kept) > width:
        kept.remove(order.pop(0))
    widths, room = dict.fromkeys(kept, 0), width - _total(least[n] for n in kept)
    wanted = {n: max([least[n], *(len(line) for cell in columns[n][1:] for line in cell.split("\n"))]) for n in kept}
    for n in sorted(kept, key=lambda n: (n == 0, wanted[n] - least[n])):
        widths[n] = min(wanted[n], least[n] + max(0, room))
        room -= widths[n] - least[n]
    lines = []
    for row in (headings, *rows):
        cells = [_folded(row[n], widths[n], hanging[n]) for n in kept]
        for part in range(max(map(len, cells))):
            texts = [cell[part] if part < len(cell) else "" for cell in cells]
            aligned = (t.rjust(widths[n]) if right[n] else t.ljust(widths[n]) for t, n in zip(texts, kept))
            lines.append((" " * _GAP).join(aligned).rstrip())
        if row is headings:
            lines.append("─" * _total(widths.values()))
    if left_out := [name for n, name in enumerate(headings) if n not in kept]:
        lines.append(fill(f"(No room for: {', '.join(left_out)}.)", width))
    return "\n".join(lines)


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _least(cell: str, hanging: int, unbroken: int = _UNBROKEN) -> int:
    """Return the width in which a cell's words are whole, and lines of up to `unbroken`."""
    return max(
        min(len(line), max(unbroken, *(len(word.rstrip()) + hanging for word in _words(line))))
        for line in cell.split("\n")
    )


def _words(line: str) -> list[str]:
    return (_IN_SENTENCE if " " in line.strip() or line.startswith("/") else _IN_NAME).split(line)


def _folded(cell: str, width: int, hanging: int) -> list[str]:
    """Return a cell's lines of at most `width`; further lines of one are set in."""
    lines = []
    for line in cell.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + hanging)
        text = ""
        for word in _words(line):
            if text.strip() and len(text + word.rstrip()) > width:
                lines.append(text.rstrip())
                text = indent
            text += word
        lines.append(text.rstrip())
    return lines
