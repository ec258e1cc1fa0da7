"""Return freed memory to the system, or keep it for reuse (glibc's `mallopt` and `malloc_trim`)."""

from __future__ import annotations

import ctypes
import resource
import sys

# Bytes beside all that is counted: gaps between blocks, buffers of libraries.
UNCOUNTED_BYTES = 64 << 20
# Parameters of malloc.h, the same numbers in every version of glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of returning them to the system; nothing without glibc.

    Every product allocates and frees the same tens of megabytes. If the system takes them back in
    between, it zeroes and maps each page anew: a third of the prefill time of a small model. The
    setting holds for the whole process: the largest batch's memory stays until
    `return_freed_memory`.
    """
    if (libc := _glibc()) is not None:
        # One arena: large blocks of another thread's arena would go back to the system all the
        # same.
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)):
            libc.mallopt(parameter, value)


def return_freed_memory() -> None:
    """Return freed memory to the system now; nothing without glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


class ResidentMemory:
    """Keeps the process within what its engine may use, by returning freed memory to the system.

    Freed blocks are kept (`keep_freed_memory`), and blocks of many sizes leave gaps between them.
    The process had memory before the engine was made, and its other parts may take more meanwhile:
    both are not the engine's.
    """

    def __init__(self, limit: int) -> None:
        """limit: bytes of the host's tier."""
        self._limit, self._other_bytes = limit, resident_bytes()

    def hold(self, workspace_bytes: int) -> None:
        """Return freed memory to the system if the process has more than its engine may use.

        workspace_bytes: what the engine may use beside the limit now.
        """
        allowed = self._limit + self._other_bytes + workspace_bytes + UNCOUNTED_BYTES
        if resident_bytes() > allowed:
            return_freed_memory()
            # What is resident now is in use by other parts. Half of the uncounted bytes are left
            # free, so that the next call does not return memory again.
            self._other_bytes += max(0, resident_bytes() - allowed + UNCOUNTED_BYTES // 2)


def resident_bytes() -> int:
    """Read the bytes of this process that are in memory; quickly, because every expert of a pass
    asks.
    """
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
