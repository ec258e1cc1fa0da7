"""Identity of files: hashes that are remembered while a file is unchanged, or compared with the
hub's. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import CheckpointError
from flexgen_helm.files import naming, refuse_lfs_pointer
from flexgen_helm.paths import read_state, update_state
from flexgen_helm.progress import ProgressPhase, report

_HASHES = "hashes.json"
# A file that changes twice within one tick of the clock keeps its date: the hash of one this young
# is not remembered.
_SETTLED_NS = 2_000_000_000
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")

# A file of at most so many bytes is hashed as fast as its hash is looked up, so nothing is
# remembered of it.
_SMALL = 1 << 20
# Bytes between two reports of progress.
_REPORT_EVERY = 64 << 20

# Size in bytes, modification time in nanoseconds, inode, and time of the last change of content or
# inode: they change with a file's content. Only the last one, which no program can set, tells of an
# edit whose date was put back.
Stamp = tuple[int, int, int, int]


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


@contextmanager
def _explain_os_errors(path: Path, what: str = "") -> Iterator[None]:
    try:
        with naming(path):
            yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read{what}: {error.strerror}") from error


@dataclass(frozen=True)
class SourceFile:
    """A file of a checkpoint as it was when the checkpoint was opened; `read` refuses one that has
    changed since.
    """

    path: Path
    stamp: Stamp

    @classmethod
    def open(cls, path: Path) -> SourceFile:
        """Raise `CheckpointError` if it cannot be read, or is a Git LFS pointer."""
        refuse_lfs_pointer(path)
        with _explain_os_errors(path):
            return cls(path, _stamp(path.stat()))

    @property
    def size(self) -> int:
        return self.stamp[0]

    def read(self, offset: int, size: int, what: str) -> bytearray:
        """Read `size` bytes from `offset` on; what: the part of the file, for messages.

        Without mapping: a mapped page would count as our memory.
        """
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), offset, what)
        return buffer

    def read_into(self, view: memoryview, offset: int, what: str) -> None:
        """Fill memory with the bytes from `offset` on."""
        size, done = len(view), 0
        with _explain_os_errors(self.path, f" ({what})"), self.path.open("rb", buffering=0) as file:
            self.require_unchanged(file.fileno(), what)
            file.seek(offset)
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{self.path} ends {size - done} bytes early in {what}")
                done += count

    def require_unchanged(self, descriptor: int, what: str) -> None:
        """Raise `CheckpointError` if the open file is not as it was when the checkpoint was
        opened.
        """
        # Without the last time of a stamp: a new link or other rights change no content.
        if _stamp(os.fstat(descriptor))[:3] != self.stamp[:3]:
            raise CheckpointError(
                f"{self.path} has changed since it was opened, while reading {what}"
            )


# ---- fingerprints ----


def content_fingerprint(files: Iterable[Path]) -> str:
    """Return the SHA-256 over the files' names (without folder) and contents, in order of name."""
    lines = sorted(f"{file.name} {file_sha256(file)}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def snapshot_fingerprint(repo: str, commit: str, sizes: Mapping[str, int]) -> str:
    """Return the identity of a hub snapshot, whose files are not read.

    sizes: name -> bytes of its files.
    """
    text = json.dumps([repo, commit, sorted(sizes.items())])
    return hashlib.sha256(text.encode()).hexdigest()


# ---- hashes ----


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content.

    That of a large file is remembered in `hashes.json` by path and stamp.
    Raises `CheckpointError` if the file cannot be read or changes meanwhile.
    """
    with _explain_os_errors(path):
        stamp = _stamp(path.stat())
        is_small = stamp[0] <= _SMALL
        if not is_small and (known := _recall(path, stamp)) is not None:
            return known
        digest = hash_file(path)
        if _stamp(path.stat()) != stamp:
            raise CheckpointError(
                f"{path} changed while it was being hashed; wait until it is complete"
            )
    if not is_small:
        _remember(path, digest, stamp)
    return digest


def is_quick_to_hash(path: Path) -> bool:
    """Whether `file_sha256` reads at most a megabyte."""
    with _explain_os_errors(path):
        stamp = _stamp(path.stat())
    return stamp[0] <= _SMALL or _recall(path, stamp) is not None


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file's content."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(1 << 20))
        while count := file.readinto(buffer):
            stop_point()
            digest.update(buffer[:count])
            done += count
            if not done % _REPORT_EVERY or done == total >= _REPORT_EVERY:
                report(ProgressPhase("verify", path.name, done, total))
    return digest.hexdigest()


def _recall(path: Path, stamp: Stamp) -> str | None:
    """Return the hash that a file had when it had this stamp, if it is remembered."""
    entry = read_state(_HASHES).get(str(path.resolve()))
    if not isinstance(entry, dict) or entry.get("stamp") != list(stamp):
        return None
    digest = entry.get("sha256")
    return digest if isinstance(digest, str) else None


def _remember(path: Path, digest: str, stamp: Stamp) -> None:
    """Remember a file's hash for as long as it has this stamp."""
    if time.time_ns() - stamp[1] > _SETTLED_NS:
        entry = {str(path.resolve()): {"stamp": stamp, "sha256": digest}}
        update_state(_HASHES, lambda hashes: hashes.update(entry))


def forget_hash(path: Path) -> None:
    """Forget the remembered hash of a file, so that it is hashed again."""
    update_state(_HASHES, lambda hashes: hashes.pop(str(path.resolve()), None))


# ---- the hub's hashes ----


def check_blobs(files: Iterable[Path], *, hash_again: bool = False) -> None:
    """Compare files of a hub snapshot with the names of their blobs, which are hashes of the
    content.

    Weights are named by their SHA-256, which is remembered unless `hash_again`; small files by
    git's SHA-1. A file that is not a link to a blob is skipped. Raises `CheckpointError` naming
    file and blob.
    """
    for file in files:
        blob = blob_of(file)
        if blob is None:
            continue
        if _SHA256.fullmatch(blob.name):
            if hash_again:
                forget_hash(blob)
            digest = file_sha256(blob)
        else:
            with _explain_os_errors(blob):
                content = blob.read_bytes()
            digest = hashlib.sha1(
                b"blob %d\0" % len(content) + content, usedforsecurity=False
            ).hexdigest()
        if digest != blob.name:
            raise CheckpointError(
                f"{file} is damaged: its hash is {digest[:16]}…, but the hub gave "
                f"{blob.name[:16]}…; delete {blob} and run the same command again"
            )


def blob_of(file: Path) -> Path | None:
    """Return the hub's blob that a snapshot's link leads to, named by its hash; None for any file
    besides.
    """
    if not file.is_symlink():
        return None
    target = file.parent / os.readlink(file)
    return target if _SHA256.fullmatch(target.name) or _GIT_SHA1.fullmatch(target.name) else None
