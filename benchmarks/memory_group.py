"""A memory control group (Linux cgroup): limits a process's memory, the page cache of its files included."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flexgen_helm.errors import FlexgenError
from flexgen_helm.hardware.host_memory import CGROUP, MOUNTS, memory_groups

_serials = itertools.count()


class GroupUnavailable(FlexgenError):
    """This machine or user cannot create a memory control group; the message says why."""


class MemoryGroup:
    """A control group of at most `limit` bytes, page cache included; version 1 or 2, whichever is mounted.

    It is a child of the caller's own group in version 1 and a sibling in version 2, which allows processes in leaf
    groups only. So a limit on the caller's parent holds here too.
    """

    def __init__(self, limit: int, mounts: Path = MOUNTS, own: Path = CGROUP) -> None:
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
        # Fails without swap accounting, and then there is no swap to forbid.
        with suppress(OSError):
            swap = ("memory.memsw.limit_in_bytes", limit) if self._version == 1 else ("memory.swap.max", 0)
            (self._folder / swap[0]).write_text(str(swap[1]))

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"), *command]

    @property
    def peak(self) -> int | None:
        """Peak bytes, page cache included; None if the kernel does not report it."""
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
    """Drop the page cache of all files below `folder`, so that the next reader reads from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _parent(mounts: Path, own: Path) -> tuple[Path, int]:
    """Return the folder in which to create a group, and the version of control groups."""
    groups = memory_groups(mounts, own)
    if groups is not None and groups.version == 1:
        return groups.folder, 1
    if groups is not None:
        folder = groups.folder if groups.folder == groups.mount else groups.folder.parent
        control = folder / "cgroup.subtree_control"
        if control.is_file() and "memory" in control.read_text().split():
            return folder, 2
    raise GroupUnavailable("no memory controller of control groups is mounted here (version 1, or delegated version 2)")
