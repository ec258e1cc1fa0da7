"""Durable files: written whole or not at all, and on the disk when the call returns."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text in one step: nobody, not even after a crash, sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        write_synced(temporary, text.encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
