"""Locks among processes, on whatever file system their files lie."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import SoftFileLock, Timeout

from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import naming
from flexgen_helm.progress import Message, report

# Seconds between two tries, and after which a wait is told.
_POLL_S, TELL_AFTER_S = 0.05, 5.0


class InUseError(FlexgenError):
    """A folder or file is used by another process; the message names it.

    Next: Start the same command again when that process has ended.
    """


@contextmanager
def locked(path: Path, timeout: float = math.inf) -> Iterator[None]:
    """Hold the lock that a file stands for; the file is made, and stays.

    timeout: seconds after which `InUseError` is raised.
    Raises OSError, which names the file, if it cannot be locked.
    """
    began, is_told = time.monotonic(), False
    with ExitStack() as held:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            while not _take(path, held):
                waited = time.monotonic() - began
                if waited >= timeout:
                    raise InUseError(f"{path} is locked by {_holder(path)}; wait until that has ended")
                if waited > TELL_AFTER_S and not is_told:
                    is_told = True
                    report(Message(f"waiting for {path}, which {_holder(path)} has locked"))
                stop_point()
                time.sleep(_POLL_S)
        yield


def _take(path: Path, held: ExitStack) -> bool:
    """Lock a file until the stack is closed; False if it is locked."""
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        stack.callback(os.close, descriptor)  # which unlocks it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = os.fstat(descriptor).st_nlink > 0  # else whoever had it has deleted it
        except BlockingIOError:
            is_taken = False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            is_taken = False
            with suppress(Timeout):
                stack.enter_context(SoftFileLock(_marker(path), timeout=0))
                is_taken = True
        if is_taken:
            held.push(stack.pop_all())
        return is_taken


def _marker(path: Path) -> Path:
    """Return the file that exists while a lock is held on a file system without locks.

    Not `path`: that stays where there are locks, and may come from there.
    """
    return path.with_name(f".{path.name}.held")


def _holder(path: Path) -> str:
    """Return who holds a lock, as far as that can be known."""
    with suppress(OSError, ValueError):
        if (marker := _marker(path)).exists():
            process, host = marker.read_text(encoding="utf-8").split()[:2]
            return f"process {process} of {host} (if that has ended, delete {marker})"
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: FLOCK  ADVISORY  WRITE 4321 08:01:7654 0 EOF
            *_, process, file, _, _ = line.split()
            if " FLOCK " in line and file.endswith(f":{inode}"):
                return f"process {process}"
    return "another process"
