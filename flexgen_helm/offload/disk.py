"""The disk tier: preallocated files read and written past the page cache, in a directory with an owner.

Layout of an offload directory:

    weights-<fingerprint>-<form>/<tensor>       one file a matrix, written once, shared by all runs of these weights
    weights-<fingerprint>-<form>/manifest.json  form, and size and SHA-256 of each file
    run-<pid>-<n>/                       cache and activations of one engine, deleted when it closes
    run-<pid>-<n>.lock                   held by that process; one that nobody holds marks a dead run, swept away
    .lock                                held while runs are swept away or begun, so that none is taken for dead
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import resource
import shutil
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock, FileLock, Timeout
from torch import Tensor

from flexgen_helm.errors import DiskFullError, OffloadError
from flexgen_helm.files import replace_text
from flexgen_helm.offload.staging import ALIGNMENT, aligned, pages

# Bytes of one read or write: long enough for the disk's full rate, short enough to be cancelled soon.
_CHUNK = 8 << 20
_serials = itertools.count()


class DirectFile:
    """A file of fixed size. Reads and writes are aligned, go past the page cache, and may come from any thread.

    Where the file system refuses direct I/O, the pages are dropped from the cache behind each transfer instead.
    """

    def __init__(self, path: Path, size: int, create: bool) -> None:
        self.path, self.size = path, aligned(size)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            self._descriptor, self.direct = _open(path, flags)
        except OSError as error:
            raise _explained(error, path, self.size) from error
        if create:
            try:
                # All blocks now: a full disk is found here, not in the middle of a run.
                os.posix_fallocate(self._descriptor, 0, max(self.size, ALIGNMENT))
            except OSError as error:
                self.close(delete=True)  # both, or the blocks that were found stay taken
                raise _explained(error, path, self.size) from error
        if os.fstat(self._descriptor).st_size < self.size:
            os.close(self._descriptor)
            raise OffloadError(f"{path} is shorter than its {self.size:,} bytes; delete it, and it is written again")

    def read(self, offset: int, into: Tensor) -> None:
        """Fill `into` (bytes, aligned in address and length) from `offset` (aligned) on."""
        self._transfer(os.preadv, offset, into)

    def write(self, offset: int, data: Tensor) -> None:
        """Write `data` (bytes, aligned in address and length) at `offset` (aligned)."""
        self._transfer(os.pwritev, offset, data)

    def read_tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What `write_tensor` stored at `offset`, in new host memory."""
        size = prod(shape) * dtype.itemsize
        buffer = pages(size)
        self.read(offset, buffer)
        return buffer[:size].view(dtype).view(shape)

    def write_tensor(self, offset: int, tensor: Tensor) -> None:
        """Write a tensor of the host at `offset` (aligned), with a padded tail."""
        size = tensor.numel() * tensor.element_size()
        buffer = pages(size)
        buffer[:size] = tensor.contiguous().view(torch.uint8).view(-1)
        self.write(offset, buffer)

    def close(self, delete: bool = False) -> None:
        os.close(self._descriptor)
        if delete:
            self.path.unlink(missing_ok=True)

    def _transfer(self, call: Any, offset: int, buffer: Tensor) -> None:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        assert offset % ALIGNMENT == 0 and len(view) % ALIGNMENT == 0 and offset + len(view) <= self.size
        done = 0
        try:
            while done < len(view):
                count = call(self._descriptor, [view[done : done + _CHUNK]], offset + done)
                if count <= 0 or (self.direct and count % ALIGNMENT):  # direct transfers break off only at the end
                    raise OffloadError(f"{self.path} ends {len(view) - done} bytes early; delete it and run again")
                if not self.direct:
                    if call is os.pwritev:
                        os.fdatasync(self._descriptor)
                    os.posix_fadvise(self._descriptor, offset + done, count, os.POSIX_FADV_DONTNEED)
                done += count
        except OSError as error:
            raise _explained(error, self.path, len(view)) from error


def _allow_files() -> None:
    """As many open files as the system lets a process have: every slot group's cache is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class OffloadDirectory:
    """Where the disk tier of one engine lies. Opening it sweeps away what dead processes have left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _allow_files()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                self._sweep()
                self._lock = self._own_lock()
                self.run = Path(self._lock.lock_file).with_suffix("")
                self.run.mkdir()
        except OSError as error:
            raise OffloadError(
                f"the offload directory {folder} cannot be used ({error.strerror}); name another with --offload-dir"
            ) from error

    def scratch(self, name: str, size: int) -> DirectFile:
        """A file of this run alone."""
        return DirectFile(self.run / name, size, create=True)

    def weights(self, fingerprint: str, fmt: str) -> "WeightFiles":
        """form: how the matrices are stored, a 16-bit type or a precision's label."""
        return WeightFiles(self.folder / f"weights-{fingerprint[:32]}-{fmt}", fingerprint, fmt)

    def close(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self._lock.release()
        self.run.with_suffix(".lock").unlink(missing_ok=True)

    def _own_lock(self) -> BaseFileLock:
        """Held, under a name that nobody has: processes of two containers can have the same number."""
        while True:
            # Released by whichever thread closes the engine.
            lock = FileLock(self.folder / f"run-{os.getpid()}-{next(_serials)}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return lock

    def _sweep(self) -> None:
        runs = {path.with_suffix("") for path in self.folder.glob("run-*")}
        for run in runs:
            lock = FileLock(run.with_suffix(".lock"))
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue  # its process lives
            shutil.rmtree(run, ignore_errors=True)
            lock.release()
            run.with_suffix(".lock").unlink(missing_ok=True)


class WeightFiles:
    """Matrices of one model in one form, a file each; written by whoever needs one first, then only read.

    A file counts once its hash stands in the manifest, which is written after it; so one that was cut short is
    written again, and one of another model cannot be taken: the folder is named by the weights' fingerprint.
    """

    def __init__(self, folder: Path, fingerprint: str, fmt: str) -> None:
        self._folder, self._fingerprint, self._form = folder, fingerprint, fmt
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OffloadError(f"{folder} cannot be created: {error.strerror}") from error
        self._lock = FileLock(folder / "manifest.lock")

    def ensure(self, name: str, size: int, pieces: Iterable[Tensor]) -> DirectFile:
        """The file of tensor `name`, `size` bytes; written from `pieces` if it is not there yet."""
        path = self._folder / name
        try:
            with self._lock:
                files = self._manifest()["files"]
                known = isinstance(files.get(name), dict) and files[name].get("size") == size
                if not known or not path.is_file() or path.stat().st_size != aligned(size):
                    digest = self._write(path, size, pieces)
                    files[name] = {"size": size, "sha256": digest}
                    manifest = {"fingerprint": self._fingerprint, "form": self._form, "files": files}
                    replace_text(self._folder / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True))
        except OSError as error:
            raise _explained(error, path, size) from error
        return DirectFile(path, size, create=False)

    def verify(self, name: str) -> None:
        """Raise `OffloadError` where the file's content is not what was written."""
        known = self._manifest()["files"][name]
        with (self._folder / name).open("rb") as file:
            data = file.read(known["size"])
        if hashlib.sha256(data).hexdigest() != known["sha256"]:
            raise OffloadError(f"{self._folder / name} was changed or damaged; delete it, and it is written again")

    def _manifest(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"fingerprint": self._fingerprint, "form": self._form, "files": {}}
        try:
            found = json.loads((self._folder / "manifest.json").read_text(encoding="utf-8"))
            known = found["fingerprint"] == self._fingerprint and found["form"] == self._form
            return found if known and isinstance(found["files"], dict) else fresh
        except (OSError, ValueError, KeyError, TypeError):
            return fresh  # everything is written again, nothing wrong is used

    def _write(self, path: Path, size: int, pieces: Iterable[Tensor]) -> str:
        part, digest = path.with_name(path.name + ".part"), hashlib.sha256()
        for left in (*self._folder.glob("*.part"), *self._folder.glob(".*.tmp")):
            left.unlink(missing_ok=True)  # of writers that were killed: the lock is ours
        file = DirectFile(part, size, create=True)
        try:
            buffer = pages(_CHUNK)
            filled = offset = 0
            for piece in pieces:
                data = piece.contiguous().view(torch.uint8).view(-1)
                digest.update(memoryview(data.numpy()))  # type: ignore[arg-type]
                while data.numel():
                    count = min(data.numel(), _CHUNK - filled)
                    buffer[filled : filled + count] = data[:count]
                    filled, data = filled + count, data[count:]
                    if filled == _CHUNK:
                        file.write(offset, buffer)
                        offset, filled = offset + _CHUNK, 0
            if filled:
                buffer[filled : aligned(filled)] = 0
                file.write(offset, buffer[: aligned(filled)])
            assert offset + filled == size, f"{path.name}: {offset + filled} of {size} bytes"
            os.fsync(file._descriptor)
        except BaseException:
            file.close(delete=True)
            raise
        file.close()
        os.replace(part, path)
        return digest.hexdigest()


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Descriptor, and whether it is direct."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # The refused call may have created the file already.
        return os.open(path, flags & ~os.O_EXCL, 0o600), False


def _explained(error: OSError, path: Path, size: int) -> OffloadError:
    """What a system call's refusal means for the user; size: bytes that the file needs."""
    if error.errno == errno.EFBIG:
        return DiskFullError(
            f"files in {path.parent} may not have the {size:,} bytes that {path.name} needs; raise the limit "
            "(ulimit -f), or name another directory with --offload-dir"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free
        return DiskFullError(
            f"{path.parent} has {free:,} bytes free, and {size:,} are needed for {path.name}; free some, or name "
            "another directory with --offload-dir"
        )
    return OffloadError(f"{path} cannot be used: {error.strerror}")
