"""Locks among processes, on whatever file system their files lie."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from filelock import SoftFileLock, Timeout

from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import naming
from flexgen_helm.progress import Message, report

# Seconds between two tries, and after which a wait is reported.
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
    began, tell_after_s = time.monotonic(), TELL_AFTER_S
    with ExitStack() as held:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            while not _try_lock(path, held):
                waited = time.monotonic() - began
                if waited >= timeout:
                    raise InUseError(
                        f"{path} is locked by {_holder(path)}; wait until that has ended"
                    )
                if waited > tell_after_s:
                    tell_after_s = math.inf
                    report(Message(f"waiting for {path}, which {_holder(path)} has locked"))
                stop_point()
                time.sleep(_POLL_S)
        yield


def _try_lock(path: Path, held: ExitStack) -> bool:
    """Try to lock a file until the stack is closed; False if another process has locked it."""
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        stack.callback(os.close, descriptor)  # unlocks it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still_at(path, descriptor):  # whoever had it has deleted or renamed it
                return False
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            try:
                stack.enter_context(SoftFileLock(_marker(path), timeout=0, thread_local=False))
            except Timeout:
                return False
        held.push(stack.pop_all())
    return True


def _is_still_at(path: Path, descriptor: int) -> bool:
    """Whether a path names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def sole_writer(path: Path, flag: str) -> Iterator[None]:
    """Let one process at a time write an output file or folder: it holds a lock beside it, which
    does not stay.

    flag: what the user gave it by.
    Raises `InUseError`, which names the process that writes, and `UsageError` if nothing can be
    written there.
    """
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, timeout=0.2))
        except InUseError:
            raise InUseError(
                f"{flag}: {path} is written by {_holder(lock)}; wait until that has ended, or give "
                "another name"
            ) from None
        except OSError as error:
            raise UsageError(f"{flag}: {path} cannot be written: {error.strerror}") from error
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


@contextmanager
def written_whole(path: Path, flag: str) -> Iterator[FileIO]:
    """Open a file that becomes `path` at the end, as its sole writer; what was written before an
    error stays beside it.

    flag: what the user gave it by.
    Raises as `sole_writer`, and OSError, which names the file.
    """
    partial = path.with_name(f"{path.name}.partial")
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder; name a file")
    with sole_writer(path, flag):
        try:
            file = partial.open("wb", buffering=0)
        except OSError as error:
            raise UsageError(f"{flag}: {path} cannot be written: {error.strerror}") from error
        try:
            with file:
                yield file  # whose errors are not all of this file
                with naming(partial):
                    os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            with suppress(OSError):
                if not partial.stat().st_size:
                    partial.unlink()


def _marker(path: Path) -> Path:
    """Return the file that exists while a lock is held on a file system without locks.

    Not `path`: that stays where there are locks, and may come from there.
    """
    return path.with_name(f".{path.name}.held")


def _holder(path: Path) -> str:
    """Return who holds a lock, as far as that can be known."""
    with suppress(OSError, ValueError):
        if (marker := _marker(path)).exists():
            process, host, *_ = marker.read_text().split()
            return f"process {process} of {host} (if that has ended, delete {marker})"
        inode = path.stat().st_ino
        # 1: FLOCK  ADVISORY  WRITE 4321 08:01:7654 0 EOF
        found = re.search(rf" FLOCK .* (\d+) \S+:{inode} ", Path("/proc/locks").read_text())
        return f"process {found[1]}" if found else "another process"
    return "another process"
