"""Files: read forgivingly, and written whole or not at all, on the disk when the call returns."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
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


# Bytes and seconds in units for people. Everything inside the package counts bytes and seconds.


def size(num_bytes: float) -> str:
    """Return '12.3 GiB', '345 MiB' or '17 B': three significant digits or more."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:,.0f} B"


def exact_size(num_bytes: int) -> str:
    """Return '12.3 GiB (13,207,024,435 bytes)', for messages that ask the user to change a size."""
    return (
        f"{size(num_bytes)} ({num_bytes:,} bytes)"
        if num_bytes >= 1 << 10
        else f"{num_bytes:,} bytes"
    )


def size_argument(num_bytes: int) -> str:
    """Return the size as flags take it, exactly: '8GiB', or '1000B'."""
    for unit, factor in (("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def duration(seconds: float) -> str:
    """Return 'h:mm:ss', or 'm:ss' below one hour."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


def spelled_duration(seconds: float) -> str:
    """Return '3 d 4 h', '3 h 12 min', '9 min 19 s' or '4.2 s', for sentences."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    large, small, units = (*divmod(round(seconds), 60), ("min", "s"))
    if large >= 60:
        large, small, units = (*divmod(round(seconds / 60), 60), ("h", "min"))
    if large >= 48 and units[0] == "h":
        large, small, units = (*divmod(round(seconds / 3600), 24), ("d", "h"))
    return f"{large:,} {units[0]} {small} {units[1]}"


def rough_duration(seconds: float) -> str:
    """Return '2 days', '38 h', '2.5 h', '9 min' or '4.2 s', for plans: they are no more exact."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if (number := seconds / length) > 1.9:
            return f"{round(2 * number) / 2 if number < 10 else round(number):,} {unit}".replace(
                ".0 ", " "
            )
    return f"{seconds:.3g} s"


def count(number: int, noun: str) -> str:
    """Return '1 run' or '1,234 runs'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rate_text(value: float) -> str:
    """Return '1,234' or '7.53': three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# The known names that a misspelt one may mean. No torch.

# Least similarity of two names, of 1: below it a suggestion is noise.
_SIMILAR = 0.7


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that `name` may mean, best first.

    Names that differ only in case and punctuation: 'llama3-8B' is 'llama-3-8b'.
    Else names that `name` shortens, as a whole or word by word: 'smollm2', '8b-instruct',
    'qwen-8b'.
    Else similar ones, first those with the same words: 'llama-3-7b' may be 'llama-3-70b' or
    'llama-2-7b'.
    """
    wanted, words = _letters(name), _words(name)
    if not wanted:
        return []
    equal, longer, similar = [], [], []
    for candidate in dict.fromkeys(known):
        letters, found = _letters(candidate), _words(candidate)
        likeness = difflib.SequenceMatcher(None, letters, wanted).ratio()
        rank = (-likeness - len(words & found) / len(words), candidate)
        if letters == wanted:
            equal.append(rank)
        elif letters.startswith(wanted) or all(
            any(one.startswith(word) for one in found) for word in words
        ):
            longer.append(rank)
        elif likeness >= _SIMILAR:
            similar.append(rank)
    return [candidate for _, candidate in sorted(equal or longer or similar)[:count]]


def question(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return 'did you mean a or b? '; `otherwise` where no known name is close."""
    close = closest(name, known)
    return f"did you mean {listed(close)}? " if close else otherwise


def listed(names: Iterable[str]) -> str:
    """Return 'a', 'a or b', or 'a, b or c'."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))
