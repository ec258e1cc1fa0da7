"""A block of code that handles a stranger's files: what it must not do, whatever they contain."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError

MIB = 1 << 20
# Where libraries may write though nothing told them to.
_IGNORED = ("/dev/", "/proc/")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Names of what ends in a file or another process; `open` is judged by its flags.
_PROCESSES = ("os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen")
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
)
# A hook cannot be removed; this one looks only while a block is active.
_watched: dict[str, Any] = {}


class Violation(AssertionError):
    """The block did what it must not; no error of its own, so that the code under test does not
    hide it.
    """


@contextmanager
def contained(
    *writable: Path, errors: type[Exception] = FlexgenError, memory: int = 768 * MIB
) -> Iterator[list[Any]]:
    """Let a block end, or raise one of our errors, which is yielded in a list; anything else is a
    failure.

    writable: folders in which the block may change files. Python's own caches, whose names have
        `__pycache__`, count as nobody's.
    memory: bytes that the process may grow by.

    Raises `Violation` for a file changed elsewhere, a process started, or 30 s of processor time.
    """
    _install_hook()
    caught: list[Any] = []
    violations: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def too_long(*_: Any) -> None:
        raise Violation("30 s of processor time")

    before = signal.signal(signal.SIGPROF, too_long)
    _watched.update(
        folders=tuple(str(folder.resolve()) for folder in writable), violations=violations
    )
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, 30.0)
    try:
        yield caught
    except errors as error:
        caught.append(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        _watched.clear()
        signal.signal(signal.SIGPROF, before)
    if violations:
        raise Violation("; ".join(violations))
    for error in caught:
        said = str(error)
        assert said and "\n" not in said.strip()[:200], said


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _install_hook() -> None:
    if not _watched.get("installed") and not getattr(sys, "_flexgen_hostile_hook", False):
        sys._flexgen_hostile_hook = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITES:
            _judge(event, path)
    elif event in _PROCESSES:
        _watched["violations"].append(f"{event} {str(arguments)[:100]}")
    elif event in _CHANGES:
        _judge(event, arguments[0], arguments[-1])


def _judge(event: str, path: Any, folder: Any = None) -> None:
    """folder: descriptor of the folder that the path begins in, if it is one."""
    if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor that is open already
        return
    begins_in = f"/proc/self/fd/{folder}" if isinstance(folder, int) and folder >= 0 else ""
    name = os.path.realpath(os.path.join(begins_in, os.fsdecode(path)))
    if "__pycache__" in name or name.startswith((*_IGNORED, *_watched["folders"])):
        return
    _watched["violations"].append(f"{event} {name}")
