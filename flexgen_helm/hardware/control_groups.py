"""What host memory this process may use: the machine's, or less where a control group (Linux cgroup) allows less.

A container, a batch system, and `systemd-run -p MemoryMax=` limit a group of processes. The system's own figures are
still those of the whole machine, and a process that believes them is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MOUNTS, OWN_GROUPS = Path("/proc/mounts"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Files:
    """Names of a group's files in one version of control groups.

    inactive_file: key of `stat` for the page cache that is freed first.
    """

    limit: str
    usage: str
    inactive_file: str


FILES = {
    1: Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: Files("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that may be used.

    available: without making another process swap, or the group exceed its limit.
    total: of the machine or the group.
    group: folder of the control group that limits `available`; None if the machine does.
    """

    available: int
    total: int
    group: Path | None = None


def host_memory(mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> HostMemory:
    """Return the memory that this process may use now."""
    memory = psutil.virtual_memory()
    least = HostMemory(memory.available, memory.total)
    for version, folders in hierarchies(mounts, own):
        for folder in folders:
            allowed = _allowed(folder, FILES[version])
            if allowed is not None and allowed.total < memory.total:
                is_least = allowed.available < least.available
                least = HostMemory(
                    min(allowed.available, least.available),
                    min(allowed.total, least.total),
                    allowed.group if is_least else least.group,
                )
    return least


def hierarchies(mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> Iterator[tuple[int, list[Path]]]:
    """Yield the version of each hierarchy that can have memory limits, and its folders from this process's group up.

    The last folder is where the hierarchy is mounted. It is the only one where a container cannot see its own group.
    """
    mounted = [line.split() for line in mounts.read_text().splitlines()] if mounts.is_file() else []
    groups = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    for _, mount, kind, options, *_ in mounted:
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((path for _, names, path in groups if "memory" in names.split(",")), "/")
            yield 1, _chain(Path(mount), path)
    for _, mount, kind, *_ in mounted:
        if kind == "cgroup2":
            yield 2, _chain(Path(mount), next((path for number, _, path in groups if number == "0"), "/"))


def _chain(mount: Path, path: str) -> list[Path]:
    folder = mount / path.lstrip("/")
    if not folder.is_dir():
        return [mount]
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _allowed(folder: Path, files: Files) -> HostMemory | None:
    """Return what a group allows; None if it has no limit."""
    try:
        limit = int((folder / files.limit).read_text())  # 'max' is no number
        used = int((folder / files.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    needed = used - int(stat.get(files.inactive_file, 0))
    return HostMemory(max(0, limit - max(0, needed)), limit, folder)
