"""File systems that are soon full, and folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes at a new folder; skip the test where that is not
    allowed.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # also where it is a working folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write into a folder meanwhile; skip the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a folder read-only needs root")
    bound = subprocess.run(
        ["mount", "--bind", str(folder), str(folder)], capture_output=True, text=True
    )
    if bound.returncode:
        pytest.skip(f"nothing can be mounted here: {bound.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder), str(folder)], check=True)
        yield
    finally:
        # also where it is a working folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
