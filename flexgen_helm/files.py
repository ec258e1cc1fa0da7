"""Files: read forgivingly, and written whole or not at all, on the disk when the call returns."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flexgen_helm.errors import UsageError


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def existing_folder(path: Path) -> Path:
    """Return the path itself if it is a folder, otherwise its nearest parent that is one."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def require_writable(path: Path, name: str, remedy: str = "") -> None:
    """Refuse a folder in which no file can be made; nothing is left there. name: of what the user gave."""
    blocked = next((part for part in (path, *path.absolute().parents) if part.exists() and not part.is_dir()), None)
    if blocked is not None:
        raise UsageError(f"{name} {path} cannot be written: {blocked} is a file")
    folder = existing_folder(path)
    for part in path.absolute().relative_to(folder.absolute()).parts:
        with suppress(FileNotFoundError):  # a name that is too long is told only in a folder that is there
            os.stat(folder / part)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{name} {path} cannot be written: {error.strerror}{remedy and f'; {remedy}'}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name a file: those of open files name none, and those of temporary ones another."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


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
