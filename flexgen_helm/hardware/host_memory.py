"""Whether this process returns freed memory to the system (glibc's `mallopt`)."""

from __future__ import annotations

import ctypes
import sys

# Parameters of malloc.h, the same numbers in every version of glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of returning them to the system; nothing without glibc.

    Every product allocates and frees the same tens of megabytes. If the system takes them back in between, it zeroes
    and maps each page anew: a third of the prefill time of a small model. The setting holds for the whole process;
    the largest batch's memory stays until `return_freed_memory`.
    """
    if (libc := _glibc()) is not None:
        # One arena: large blocks of another thread's arena would go back to the system all the same.
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)):
            libc.mallopt(parameter, value)


def return_freed_memory() -> None:
    """Return freed memory to the system now; nothing without glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
