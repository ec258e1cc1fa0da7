"""Text for terminals: sentences and tables that break at words. Needs neither rich nor pandas."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import TextWrapper
from typing import TextIO

_GAP = "  "
# A cell of at most so many characters stays on one line.
_UNBROKEN = 16
_NUMBER = re.compile(r"[-+×<]? ?\d[\d.,]*(?![a-z\d])|$")
# Names break after commas and colons. In sentences a number stays with its unit, and paths break
# after slashes.
_NAME = re.compile(r"(?<=[,:])(?=[^\W\d])")
_SENTENCE = re.compile(r"(?<=[^\d\s])(\s+)|(?<=/)(?=\w)")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose lines can be redrawn; with TERM=dumb they cannot."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def fill(text: str, width: int) -> str:
    """Break lines at words, never within one; a line that begins with a blank is a command, and
    stays.
    """
    wrapper = TextWrapper(
        width, subsequent_indent=_GAP, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(
        line if line.startswith(" ") else wrapper.fill(line) for line in text.split("\n")
    )


def fill_for(stream: TextIO, text: str) -> str:
    """Break lines at words if a stream is a terminal."""
    return (
        fill(text, os.get_terminal_size(stream.fileno()).columns or 80)
        if is_terminal(stream)
        else text
    )


def table_text(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    optional: Sequence[str] = (),
) -> str:
    """Draw a table of at most `width` columns of text, without cutting a word.

    Columns of numbers are aligned to the right.

    optional: columns that are left out where there is no room, the first first; then the last ones
        are.
    """
    # Columns get their least widths at first, and what is left of `width` at the end.
    is_number, widths, full_widths = list[bool](), list[int](), list[int]()
    for heading, *cells in zip(headings, *rows):
        hanging = "" if is_number else _GAP  # the first column has names
        is_number.append(bool(is_number) and all(map(_NUMBER.match, cells)))
        text = "\n".join(cells)
        full_widths.append(max(map(len, text.split("\n"))))
        words = max(map(len, _folded(text, 1, hanging)))  # of the longest word: no line is shorter
        widths.append(
            max(
                min(full_widths[-1], max(_UNBROKEN, words)),
                *map(len, _folded(heading, 1, hanging)),
            )
        )
    kept = list(range(len(headings)))
    drop_order = [*map(headings.index, optional), *kept[:0:-1]]
    while (room := width - sum(widths[n] + len(_GAP) for n in kept) + len(_GAP)) < 0 and len(
        kept
    ) > 1:
        kept.remove(next(n for n in drop_order if n in kept))
    # the first column gets what is left
    for n in sorted(kept, key=lambda n: (n == 0, full_widths[n] - widths[n])):
        more = max(0, min(room, full_widths[n] - widths[n]))
        widths[n], room = widths[n] + more, room - more
    lines = []
    for row in (headings, *rows):
        for parts in zip_longest(
            *(_folded(row[n], widths[n], "" if n else _GAP) for n in kept), fillvalue=""
        ):
            aligned = (
                f"{part:{'>' if is_number[n] else '<'}{widths[n]}}" for part, n in zip(parts, kept)
            )
            lines.append(_GAP.join(aligned).rstrip())
        if row is headings:
            lines.append("─" * (sum(widths[n] + len(_GAP) for n in kept) - len(_GAP)))
    if len(kept) < len(headings):
        left_out = ", ".join(name for n, name in enumerate(headings) if n not in kept)
        lines.append(fill(f"(No room for: {left_out}.)", width))
    return "\n".join(lines)


def _folded(cell: str, width: int, hanging: str) -> list[str]:
    """Return a cell's lines of at most `width` columns, or as wide as its longest word.

    hanging: what a line begins with that continues another one.
    """
    wrapper, lines = TextWrapper(width, break_long_words=False, break_on_hyphens=False), []
    for line in cell.split("\n"):
        text = line.lstrip()
        wrapper.wordsep_simple_re = _SENTENCE if " " in text or text.startswith("/") else _NAME
        wrapper.initial_indent = line[: len(line) - len(text)]
        wrapper.subsequent_indent = wrapper.initial_indent + hanging
        lines += wrapper.wrap(text) or [""]
    return lines
