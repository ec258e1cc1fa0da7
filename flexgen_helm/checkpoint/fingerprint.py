"""Identity of content: what may be reused together, whatever the folder is called. No torch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.errors import CheckpointError
from flexgen_helm.files import replace_text

# A file changed twice within one tick of the clock keeps its date; one this young is hashed but not remembered.
_SETTLED_NS = 2_000_000_000


def content_fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the files' names (without folder) and contents, in order of name: 64 hexadecimal digits."""
    lines = sorted(f"{file.name} {file_sha256(file)}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def snapshot_fingerprint(repo: str, commit: str, sizes: Mapping[str, int]) -> str:
    """Identity of a hub snapshot: repository, commit and the sizes in bytes of its files; nothing is hashed."""
    text = json.dumps([repo, commit, sorted(sizes.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, remembered in `hashes.json` by real path, size, date and inode.

    Raises `CheckpointError` where the file cannot be read or changes meanwhile.
    """
    try:
        before = stamp(path)
        if (known := recall(path, "sha256", before)) is not None:
            return known
        digest = _hash(path)
        after = stamp(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if before != after:
        raise CheckpointError(f"{path} changed while it was being hashed; wait until it is complete")
    remember(path, "sha256", digest, before)
    return digest


def stamp(path: Path) -> list[int]:
    """Size in bytes, date in nanoseconds and inode of a file: what changes when its content does."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def recall(path: Path, what: str, at: list[int]) -> str | None:
    """What was remembered of a file under `what` when its stamp was `at`."""
    entry = _load().get(str(path.resolve()))
    if isinstance(entry, dict) and entry.get("stamp") == at and isinstance(entry.get(what), str):
        return str(entry[what])
    return None


def remember(path: Path, what: str, value: str, at: list[int]) -> None:
    """Keep a fact about a file for as long as its stamp is `at`; one that is too young is not believed."""
    if time.time_ns() - at[1] <= _SETTLED_NS:
        return
    key = str(path.resolve())

    def change(known: dict[str, Any]) -> None:
        entry = known.get(key)
        kept = entry if isinstance(entry, dict) and entry.get("stamp") == at else {}
        known[key] = {**kept, "stamp": at, what: value}

    _change(change)


def forget(path: Path) -> None:
    """Forget what is known of a file, so that it is hashed anew."""
    _change(lambda known: known.pop(str(path.resolve()), None))


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(1 << 20))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _load() -> dict[str, Any]:
    try:
        content = json.loads((state_dir() / "hashes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # Nothing is lost but the time to hash again.
    return content if isinstance(content, dict) else {}


def _change(change: Callable[[dict[str, Any]], object]) -> None:
    folder = state_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "hashes.json.lock"):
            known = _load()
            change(known)
            replace_text(folder / "hashes.json", json.dumps(known, indent=1, sort_keys=True))
    except OSError:
        pass  # A home that cannot be written costs time, not correctness.
