"""Which files of a folder are opened, by whatever library: the kernel tells (inotify)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPENED, _IS_FOLDER = 0x20, 0x40000000  # IN_OPEN, IN_ISDIR
_EVENT = struct.Struct("iIII")


@contextmanager
def opened_files(folder: Path) -> Iterator[set[str]]:
    """Fill the set, at the end, with the paths below `folder` of the files that were opened
    meanwhile.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    try:
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        watched = {
            libc.inotify_add_watch(descriptor, os.fsencode(path), _OPENED): path for path in folders
        }
        assert min(watched) >= 0, os.strerror(ctypes.get_errno())
        found: set[str] = set()
        yield found
        events = os.read(descriptor, 1 << 20)
        while events:
            watch, kind, _, length = _EVENT.unpack_from(events)
            name = events[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            events = events[_EVENT.size + length :]
            if not kind & _IS_FOLDER:
                found.add(str((watched[watch] / os.fsdecode(name)).relative_to(folder)))
    finally:
        os.close(descriptor)
