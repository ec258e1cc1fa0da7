"""Memory that this process may use: the machine's, or less in a container or a job of a cluster."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flexgen_helm.units import size

MOUNTS, CGROUP = Path("/proc/mounts"), Path("/proc/self/cgroup")
# By version: the limit, the bytes in use, and of these in memory.stat the files that the kernel
# drops first.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}

# Address space, measured: a run of HELM with a model of 0.1 GB maps 6.6 GiB with 2 cores, 3.1 of
# them torch.
_LIBRARY_BYTES = 7 << 30
# Of the stack and the heap of a core's threads.
_CORE_BYTES = 128 << 20


@dataclass(frozen=True)
class HostMemory:
    """Bytes that this process may have, and of these what is free.

    group_limit: of the control group with the least room; None if none has a limit below the
        machine's memory.
    """

    total: int
    available: int
    group_limit: int | None = None


@dataclass(frozen=True)
class MemoryGroups:
    """Where control groups of memory are mounted, and this process's own folder among them."""

    version: int
    mount: Path
    folder: Path


def host_memory(mounts: Path = MOUNTS, cgroup: Path = CGROUP) -> HostMemory:
    """Return the machine's memory, or what the control groups of this process leave of it."""
    machine = psutil.virtual_memory()
    groups = memory_groups(mounts, cgroup)
    limits = [] if groups is None else _limits(groups)
    limited = sorted((room, limit) for room, limit in limits if limit < machine.total)
    if not limited:
        return HostMemory(machine.total, machine.available)
    room, group_limit = limited[0]
    return HostMemory(min(limit for _, limit in limited), min(room, machine.available), group_limit)


def lacking_address_space() -> str | None:
    """Say that the limit of this process (`ulimit -v`) is below what is taken before any weight;
    None if it is not.

    Beyond it a thread may die as it begins, for which Python waits for ever, or a library ends the
    process.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    least = _LIBRARY_BYTES + len(os.sched_getaffinity(0)) * _CORE_BYTES
    if limit == resource.RLIM_INFINITY or limit >= least:
        return None
    return (
        f"ulimit -v is {size(limit)} of address space, and libraries and threads take "
        f"{size(least)} before any model"
    )


def memory_groups(mounts: Path = MOUNTS, cgroup: Path = CGROUP) -> MemoryGroups | None:
    """Find the memory controller; version 1 if both are mounted with one. None where there is
    none.
    """
    mounted = [line.split() for line in mounts.read_text().splitlines()] if mounts.is_file() else []
    memberships = (
        [line.split(":", 2) for line in cgroup.read_text().splitlines()] if cgroup.is_file() else []
    )
    for _, mount, kind, options, *_ in mounted:
        if kind == "cgroup" and "memory" in options.split(","):
            path = next(
                (path for _, names, path in memberships if "memory" in names.split(",")), "/"
            )
            return _groups(1, Path(mount), path)
    for _, mount, kind, *_ in mounted:
        if kind == "cgroup2":
            return _groups(
                2,
                Path(mount),
                next((path for number, _, path in memberships if number == "0"), "/"),
            )
    return None


def _groups(version: int, mount: Path, path: str) -> MemoryGroups:
    folder = mount / path.lstrip("/")
    # a container sees its own as the root
    return MemoryGroups(version, mount, folder if folder.is_dir() else mount)


def _limits(groups: MemoryGroups) -> Iterator[tuple[int, int]]:
    """Yield room and limit of the process's group and of those around it, in bytes.

    Room: what the limit leaves, with the files in memory that the kernel would drop first.
    """
    limit_file, usage_file, inactive = _FILES[groups.version]
    folder = groups.folder
    while folder.is_relative_to(groups.mount):
        with suppress(OSError, ValueError):  # no such file in the root; 'max' is no number
            limit, usage = (int((folder / file).read_text()) for file in (limit_file, usage_file))
            lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            droppable = next((int(line[1]) for line in lines if line[0] == inactive), 0)
            yield max(0, limit - usage + droppable), limit
        folder = folder.parent
