"""A memory control group: a limit for a process that counts the page cache of the files it reads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flexgen_helm.errors import FlexgenError

_serials = itertools.count()


class GroupUnavailable(FlexgenError):
    """This machine or this user cannot have one; the message says why."""


class MemoryGroup:
    """At most `limit` bytes for what runs in it, page cache included; version 1 or 2, whichever is mounted.

    Made below the caller's own group (version 1) or beside it (version 2, which keeps processes out of inner groups),
    so that a limit that holds for the caller holds here too.
    """

    def __init__(self, limit: int, mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")) -> None:
        parent, self._version = _parent(mounts, own)
        self._folder = parent / f"flexgen-bench-{os.getpid()}-{next(_serials)}"
        try:
            self._folder.mkdir()
            name = "memory.limit_in_bytes" if self._version == 1 else "memory.max"
            (self._folder / name).write_text(str(limit))
        except OSError as error:
            with suppress(OSError):
                self._folder.rmdir()
            raise GroupUnavailable(f"no memory control group below {parent}: {error.strerror}") from error
        # Without swap accounting there is nothing to forbid.
        with suppress(OSError):
            swap = ("memory.memsw.limit_in_bytes", limit) if self._version == 1 else ("memory.swap.max", 0)
            (self._folder / swap[0]).write_text(str(swap[1]))

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"), *command]

    @property
    def peak(self) -> int | None:
        """The most that was in use, page cache included; None where the kernel does not say."""
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        try:
            return int((self._folder / name).read_text())
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with suppress(OSError):
            self._folder.rmdir()

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def forget_files(folder: Path) -> None:
    """Drop the page cache of all files below `folder`, so that whoever reads them next pays for their pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _parent(mounts: Path, own: Path) -> tuple[Path, int]:
    """Where to make a group, and the version."""
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.is_file() else []
    groups = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    first = next((line[1] for line in lines if line[2] == "cgroup" and "memory" in line[3].split(",")), None)
    if first is not None:
        mine = next((path for _, names, path in groups if "memory" in names.split(",")), "/")
        folder = Path(first) / mine.lstrip("/")
        return (folder if folder.is_dir() else Path(first)), 1
    second = next((line[1] for line in lines if line[2] == "cgroup2"), None)
    if second is not None:
        mine = next((path for number, _, path in groups if number == "0"), "/")
        folder = (Path(second) / mine.lstrip("/")).parent if mine != "/" else Path(second)
        control = folder / "cgroup.subtree_control"
        if control.is_file() and "memory" in control.read_text().split():
            return folder, 2
    raise GroupUnavailable("no memory controller of control groups is mounted here (version 1, or delegated version 2)")
