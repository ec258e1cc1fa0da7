"""What is stored below the state folder and can be made again: listed with size and last use, removed when named.

Nothing calls `remove` by itself. What a process uses stays: a run that holds its lock, a conversion being written, a
file that is open. Locks are also seen by other machines that share the folder; open files are seen on this one only.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import psutil

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.locks import InUseError, locked, path_key

Kind = Literal[
    "answers", "conversion", "model", "offloaded weights",
    "rest of a dead run", "rest of a dead conversion", "rest of a removal",
]  # fmt: skip


@dataclass(frozen=True)
class StoredItem:
    """A folder or file that can be removed as a whole.

    name: path below the state folder, or the whole path in another offload directory.
    num_bytes: on the disk, of all its files.
    last_used: seconds since 1970: the latest change or reading of a file, as far as the file system notes it.
    model: whose answers it has; '' where that is not known, or the name says it.
    """

    name: str
    path: Path
    kind: Kind
    num_bytes: int
    last_used: float
    is_in_use: bool
    model: str = ""


def stored_items(home: Path, offload_dir: Path | None = None) -> list[StoredItem]:
    """Return what can be removed, the largest first; offload_dir: another than the one in `home`."""
    open_files = _open_files()
    items = []
    for path, kind in _candidates(home, offload_dir or home / "offload"):
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        used, num_bytes = 0.0, 0
        for file in files:
            with suppress(OSError):  # it goes away meanwhile
                status = file.stat()
                accessed, num_bytes = status.st_atime, num_bytes + status.st_blocks * 512
                used = max(used, accessed, status.st_mtime)
        name = str(path.relative_to(home)) if path.is_relative_to(home) else str(path)
        in_use = any(_is_inside(file, path) for file in open_files) or not _can_be_locked(path, kind, home)
        model = _model(path) if kind == "answers" else ""
        if path.is_file() and used:  # opening it for its lock is no use of it
            with suppress(OSError):
                os.utime(path, (accessed, path.stat().st_mtime))
        items.append(StoredItem(name, path, kind, num_bytes, used, in_use, model))
    return sorted(items, key=lambda item: (-item.num_bytes, item.name))


def _model(path: Path) -> str:
    """Return the model that a response cache names; '' for one that does not, or cannot be read now."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=0)) as connection:
        found = connection.execute("SELECT value FROM meta WHERE name = 'model'").fetchone()
        return str(found[0]) if found else ""
    return ""


def select(items: Sequence[StoredItem], patterns: Sequence[str]) -> list[StoredItem]:
    """Return the items that are named, by name or shell pattern. Raises `UsageError` for a name that fits none."""
    for pattern in patterns:
        if not any(fnmatchcase(item.name, pattern) for item in items):
            raise UsageError(f"nothing is stored under the name {pattern}; flexgen-helm clean lists what there is")
    return [item for item in items if any(fnmatchcase(item.name, pattern) for pattern in patterns)]


def remove(item: StoredItem, home: Path) -> None:
    """Remove an item. Raises `InUseError` if a process uses it, `FlexgenError` if it cannot be removed."""
    with ExitStack() as stack:
        if not _lock(stack, item.path, item.kind, home, creates=True):
            raise InUseError(f"{item.path} is used by a process and stays")
        if any(_is_inside(file, item.path) for file in _open_files(but=os.getpid())):
            raise InUseError(f"{item.path} is open in a process and stays")
        try:
            if item.path.is_dir():
                # Renamed first: what is half removed is never taken for whole.
                doomed = item.path.with_name(f".{item.path.name}.removed")
                shutil.rmtree(doomed, ignore_errors=True)
                os.rename(item.path, doomed)
                shutil.rmtree(doomed)
            else:
                item.path.unlink()
        except OSError as error:
            raise FlexgenError(f"{item.path} cannot be removed: {error.strerror}") from error


def _candidates(home: Path, offload: Path) -> Iterator[tuple[Path, Kind]]:
    patterns: list[tuple[Path, str, Kind]] = [
        (home / "journal", "*.sqlite", "answers"),
        (home / "converted", "*/*", "conversion"),
        (home / "models", "*", "model"),
        (offload, "weights-*", "offloaded weights"),
    ]
    for folder, pattern, kind in patterns:
        for path in folder.glob(pattern):
            is_rest = path.name.startswith(".")
            if path.is_symlink() or path.suffix == ".lock":
                continue
            if kind == "conversion" or not is_rest:
                yield path, "rest of a dead conversion" if is_rest else kind
    for folder in (home / "models", offload):
        for path in folder.glob(".*.removed"):
            yield path, "rest of a removal"
    for path in offload.glob("run-*"):
        if path.is_dir() and _can_be_locked(path, "rest of a dead run", home):
            yield path, "rest of a dead run"


def _can_be_locked(path: Path, kind: Kind, home: Path) -> bool:
    with ExitStack() as stack:
        return _lock(stack, path, kind, home)


def _lock(stack: ExitStack, path: Path, kind: Kind, home: Path, creates: bool = False) -> bool:
    """Keep other processes from an item until the stack is closed; False if one uses it.

    creates: make the lock's file if there is none, so that a process that begins meanwhile waits.
    """
    locks: dict[Kind, list[Path]] = {
        # The lock of `convert`, and those of engines that open an offload directory.
        "conversion": [home / "locks" / f"convert-{path_key(path)}.lock"],
        "rest of a dead conversion": [home / "locks" / f"convert-{path_key(_target(path))}.lock"],
        "offloaded weights": [path.parent / ".lock", *path.parent.glob("run-*.lock")],
        "rest of a dead run": [path.with_suffix(".lock")],
    }
    try:
        for lock in locks.get(kind, ()):
            if creates or lock.exists():
                stack.enter_context(locked(lock, timeout=0))
        if kind == "answers":
            connection = stack.enter_context(closing(sqlite3.connect(path, timeout=0, isolation_level=None)))
            connection.execute("BEGIN EXCLUSIVE")
    except (OSError, InUseError):
        return False
    except sqlite3.DatabaseError as error:  # a file that is no database is nobody's
        return "locked" not in str(error)
    return True


def _target(rest: Path) -> Path:
    """Return the folder that `.NAME.partial` was to become."""
    return rest.with_name(rest.stem.removeprefix("."))


def _is_inside(file: str, path: Path) -> bool:
    return file == str(path) or file.startswith(f"{path}{os.sep}")


def _open_files(but: int | None = None) -> set[str]:
    """Return the paths of all files that processes of this machine have open, as far as they may be seen."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found |= {file.path for file in process.open_files() if process.pid != but}
    return found
