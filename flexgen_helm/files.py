"""Files: read forgivingly, and written whole or not at all, on the disk when the call returns."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from flexgen_helm.errors import CheckpointError, UsageError


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing or damaged. Raises OSError where the system is
    at its end.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (
            errno.EIO,
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOMEM,
        ):
            raise
        return {}
    return content if isinstance(content, dict) else {}


_LFS_POINTER = b"version https://git-lfs"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise `CheckpointError` for the short text that a clone without Git LFS has in place of a
    file.
    """
    with suppress(OSError), path.open("rb") as file:  # whoever reads it says why it cannot be read
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer in place of the file; run `git lfs pull` in its "
                "folder"
            )


def existing_folder(path: Path) -> Path:
    """Return the path itself if it is a folder, otherwise its nearest parent that is one."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def require_writable(path: Path, name: str, remedy: str = "") -> None:
    """Refuse a folder in which no file can be made; nothing is left there. name: of what the user
    gave.
    """
    blocked = next(
        (part for part in (path, *path.absolute().parents) if part.exists() and not part.is_dir()),
        None,
    )
    if blocked is not None:
        raise UsageError(f"{name} {path} cannot be written: {blocked} is a file")
    folder = existing_folder(path)
    for part in path.absolute().relative_to(folder.absolute()).parts:
        # a name that is too long is told only in a folder that is there
        with suppress(FileNotFoundError):
            os.stat(folder / part)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{name} {path} cannot be written: {error.strerror}{remedy and f'; {remedy}'}"
        ) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name a file: those of open files name none, temporary ones have its
    name in theirs.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or path.name in str(error.filename):
            error.filename, error.filename2 = str(path), None
        raise


def append(file: FileIO, content: bytes) -> None:
    """Append to an open file and hand it to the system. Raises OSError, which names the file."""
    left = memoryview(content)
    with naming(Path(str(file.name))):
        while left:  # a disk that gets full takes a part
            left = left[file.write(left) :]


def replace_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text in one step: nobody, not even after a crash, sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with naming(path):
            write_synced(temporary, text.encode())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_json(path: Path, content: Any) -> None:
    """Replace a file by JSON; see `replace_text`."""
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with naming(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
