"""A program on a pseudo-terminal, and what its screen showed when."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyte


@dataclass(frozen=True)
class Session:
    """frames: (seconds since the start, the screen's lines without trailing spaces), one for each
    change.
    """

    exit_code: int
    frames: list[tuple[float, str]]
    total_s: float

    @property
    def last(self) -> str:
        return self.frames[-1][1]

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a change on the screen, from the first change on."""
        times = [at for at, _ in self.frames] + [self.total_s]
        return max(later - earlier for earlier, later in zip(times, times[1:]))

    def shown(self, text: str) -> bool:
        return any(text in frame for _, frame in self.frames)


def run_in_terminal(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    columns: int = 100,
    lines: int = 50,
    timeout_s: float = 120.0,
) -> Session:
    """Run a program to its end with a terminal of its own as stdin, stdout and stderr."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    environment = {**os.environ, **(variables or {}), "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], list(command), environment)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    began = time.monotonic()
    frames: list[tuple[float, str]] = []
    while time.monotonic() - began < timeout_s:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                data = os.read(descriptor, 1 << 16)
            except OSError:  # the program has ended
                break
            stream.feed(data)
            shown = "\n".join(line.rstrip() for line in screen.display).rstrip()
            if not frames or shown != frames[-1][1]:
                frames.append((time.monotonic() - began, shown))
    else:
        os.kill(process, 9)
    status = os.waitpid(process, 0)[1]
    os.close(descriptor)
    return Session(os.waitstatus_to_exitcode(status), frames, time.monotonic() - began)
