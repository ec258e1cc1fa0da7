"""The disk tier: an offload directory, and its files, read and written past the page cache.

Layout of an offload directory:

    weights-<fingerprint>-<format>/<tensor>       one file a matrix, written once, shared by all
                                                  runs of these weights
    weights-<fingerprint>-<format>/checked.txt    matrices that were checked once, and are read from
                                                  the checkpoint
    run-<pid>-<n>/                                cache and activations of one engine, deleted when
                                                  it closes
    run-<pid>-<n>.lock                            locked by that process; a run whose lock is free
                                                  is dead and deleted
    .lock                                         locked while runs are created or deleted, so that
                                                  none looks dead
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext, suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.errors import CheckpointError, DiskFullError, OffloadError
from flexgen_helm.files import exact_size, naming
from flexgen_helm.locks import InUseError, locked
from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.rate_limit import DiskRates
from flexgen_helm.tiers import ALIGNMENT, aligned

# Bytes of one read or write: enough for the disk's full rate, few enough to be cancelled soon.
_CHUNK = 8 << 20
_serials = itertools.count()


class DirectFile:
    """A file of fixed size with direct I/O. Any thread may read and write; calls block.

    Buffers are bytes in host memory whose address and length are multiples of `ALIGNMENT`, as are
    offsets. On a file system without direct I/O, each transfer drops its pages from the page cache
    instead.

    All methods raise `OffloadError`; creating and writing a file raise `DiskFullError` if there is
    no room.
    """

    def __init__(self, path: Path, size: int, create: bool, rates: DiskRates | None = None) -> None:
        """Open or create a file.

        size: bytes, rounded up to a multiple of `ALIGNMENT`; an existing file must have at least as
            many.
        rates: of a simulated disk.
        """
        self._rates = rates
        self.path, self.size = path, aligned(size)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            self._descriptor, self.direct = _open(path, flags)
        except OSError as error:
            raise _offload_error(error, path, self.size) from error
        if create:
            try:
                # Allocate all blocks now, so that a full disk is an error here and not in the
                # middle of a run.
                os.posix_fallocate(self._descriptor, 0, max(self.size, ALIGNMENT))
            except OSError as error:
                self.close(delete=True)  # an open descriptor would keep the blocks
                raise _offload_error(error, path, self.size) from error
        self._file_bytes = os.fstat(self._descriptor).st_size
        if self._file_bytes < self.size:
            os.close(self._descriptor)
            raise OffloadError(
                f"{path} is shorter than its {exact_size(self.size)}; delete it, and it is written "
                "again"
            )

    def read(self, offset: int, buffer: Tensor) -> None:
        """Fill the buffer from `offset` on."""
        self._transfer(False, offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> None:
        """Write the buffer at `offset`."""
        self._transfer(True, offset, buffer)

    def read_tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read what `write_tensor` stored at `offset`, into new host memory."""
        size = prod(shape) * dtype.itemsize
        buffer = pages(size)
        self.read(offset, buffer)
        return buffer[:size].view(dtype).view(shape)

    def write_tensor(self, offset: int, tensor: Tensor) -> None:
        """Write a tensor in host memory at `offset`, padded to whole pages."""
        buffer = pages(tensor.nbytes)
        buffer[: tensor.nbytes] = _flat_bytes(tensor)
        self.write(offset, buffer)

    def sync(self) -> None:
        """Block until everything that was written is on the disk."""
        with naming(self.path):
            os.fsync(self._descriptor)

    def close(self, delete: bool = False) -> None:
        os.close(self._descriptor)
        if delete:
            with suppress(OSError):  # with its run's folder, or by the next run
                self.path.unlink()

    def _transfer(self, is_write: bool, offset: int, buffer: Tensor) -> None:
        """Read or write a buffer in pieces of `_CHUNK` bytes; one that reaches behind the end of a
        checkpoint's file is filled as far as that.
        """
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        call: Callable[[int, list[memoryview], int], int] = os.pwritev if is_write else os.preadv
        assert (
            offset % ALIGNMENT == 0
            and len(view) % ALIGNMENT == 0
            and offset + len(view) <= self.size
        )
        done, size = 0, min(len(view), self._file_bytes - offset)
        with nullcontext() if self._rates is None else self._rates.of(is_write).transfer(size):
            try:
                while done < size:
                    count = call(self._descriptor, [view[done : done + _CHUNK]], offset + done)
                    # Direct I/O is cut short only at the file's end.
                    if count <= 0 or (self.direct and count % ALIGNMENT and done + count < size):
                        raise OffloadError(
                            f"{self.path} ends {size - done} bytes early; delete it and run again"
                        )
                    if not self.direct:
                        if is_write:
                            os.fdatasync(self._descriptor)
                        os.posix_fadvise(
                            self._descriptor, offset + done, count, os.POSIX_FADV_DONTNEED
                        )
                    done += count
            except OSError as error:
                raise _offload_error(error, self.path, len(view)) from error


class CheckpointFile(DirectFile):
    """A file of a checkpoint, read where it is, as far as its last page; it cannot be written."""

    def __init__(self, source: SourceFile, rates: DiskRates | None = None) -> None:
        """Open for reading alone, whatever the file's size; instead of `DirectFile.__init__`, which
        opens for writing, too.

        Raises `CheckpointError` if the file is another than the checkpoint's.
        """
        self._source, self._rates = source, rates
        self.path, self.size, self._file_bytes = source.path, aligned(source.size), source.size
        try:
            self._descriptor, self.direct = _open(source.path, os.O_RDONLY)
        except OSError as error:
            raise _offload_error(error, source.path, source.size) from error
        try:
            source.require_unchanged(self._descriptor, "weights")
        except CheckpointError:
            self.close()
            raise

    def read(self, offset: int, buffer: Tensor) -> None:
        """Fill the buffer from `offset` on; raises `CheckpointError` if the file has changed since
        it was opened.
        """
        try:
            super().read(offset, buffer)
        finally:
            self._source.require_unchanged(self._descriptor, "weights")


class OffloadDirectory:
    """The offload directory, opened by one engine. Opening it deletes the runs of dead processes.

    Raises `OffloadError` if the folder cannot be used.
    """

    def __init__(self, folder: Path, rates: DiskRates | None = None) -> None:
        """rates: of a simulated disk."""
        self.folder, self._rates = folder, rates
        _raise_file_limit()
        try:
            with locked(folder / ".lock", timeout=600):
                self._delete_dead_runs()
                self.run, self._run_lock = self._lock_new_run()
                self.run.mkdir()
        except OSError as error:
            raise OffloadError(
                f"the offload directory {folder} cannot be used: {error.strerror}"
            ) from error

    def scratch(self, name: str, size: int) -> DirectFile:
        """Create a file of this run."""
        return DirectFile(self.run / name, size, create=True, rates=self._rates)

    def weights(self, fingerprint: str, fmt: str) -> WeightFiles:
        """Return the files of a model's weights.

        fingerprint: of the checkpoint.
        fmt: label of the format that the matrices are stored in, a 16-bit dtype or
            `Precision.weights_label`.
        """
        return WeightFiles(_weights_folder(self.folder, fingerprint, fmt), self._rates)

    def close(self) -> None:
        """Delete the files of this run."""
        shutil.rmtree(self.run, ignore_errors=True)
        self._run_lock.close()
        with suppress(OSError):  # the next run deletes it
            self.run.with_suffix(".lock").unlink()

    def _lock_new_run(self) -> tuple[Path, ExitStack]:
        """Return the folder of a new run, and its lock; processes of two containers can have the
        same pid, so that a name may be taken.
        """
        while True:
            run, held = self.folder / f"run-{os.getpid()}-{next(_serials)}", ExitStack()
            with suppress(InUseError):
                held.enter_context(locked(run.with_suffix(".lock"), timeout=0))
                return run, held

    def _delete_dead_runs(self) -> None:
        for run in {path.with_suffix("") for path in self.folder.glob("run-*")}:
            lock = run.with_suffix(".lock")
            with suppress(InUseError, OSError), locked(lock, timeout=0):
                shutil.rmtree(run, ignore_errors=True)
                lock.unlink(missing_ok=True)


class WeightFiles:
    """The matrices of one model in one format, a file each. Whoever needs a file first writes it.

    A file gets its name once it is whole and on the disk. The folder's name has the weights'
    fingerprint, so that no file of another model is used.
    """

    def __init__(self, folder: Path, rates: DiskRates | None = None) -> None:
        """rates: of a simulated disk; files are written as fast as the real one is."""
        self._folder, self._rates = folder, rates
        self._checked: set[str] | None = None  # lines of `checked.txt`, once it is read
        self._lock = folder / ".lock"

    def ensure(self, name: str, size: int, tiles: Iterable[Tensor]) -> DirectFile:
        """Open the file of a matrix; write it first if there is none of its size. Other processes
        that need it wait.

        size: bytes of the matrix.
        tiles: its content in order, read only to write it.
        """
        path = self._folder / name
        try:
            with locked(self._lock):
                if not path.is_file() or path.stat().st_size != aligned(size):
                    self._write(path, size, tiles)
        except OSError as error:
            raise _offload_error(error, path, size) from error
        return DirectFile(path, size, create=False, rates=self._rates)

    def ensure_checked(self, name: str, tiles: Iterable[Tensor]) -> None:
        """Check a matrix that stays in the checkpoint's file, by reading its tiles; once for all
        runs.
        """
        path = self._folder / "checked.txt"
        try:
            if self._checked is None:
                self._checked = (
                    set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
                )
            if name not in self._checked:
                for _ in tiles:
                    pass
                with locked(self._lock), path.open("a", encoding="utf-8") as file:
                    # on a line of its own, whatever a killed process has begun to write
                    file.write(f"\n{name}\n")
                self._checked.add(name)
        except OSError as error:
            raise _offload_error(error, path, ALIGNMENT) from error

    def _write(self, path: Path, size: int, tiles: Iterable[Tensor]) -> None:
        """Write a matrix under another name, then rename it."""
        unfinished = path.with_name(path.name + ".part")
        for abandoned in self._folder.glob("*.part"):
            # left by a killed process: no other can write now, as this one has the lock
            abandoned.unlink(missing_ok=True)
        file = DirectFile(unfinished, size, create=True)
        try:
            buffer = pages(_CHUNK)
            filled = offset = 0
            for tile in tiles:
                data = _flat_bytes(tile)
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
            file.sync()
        except BaseException:
            file.close(delete=True)
            raise
        file.close()
        os.replace(unfinished, path)


def written_bytes(folder: Path, fingerprint: str, fmt: str) -> int:
    """Return the bytes of the weight files that an offload directory has; see
    `OffloadDirectory.weights`.
    """
    paths = _weights_folder(folder, fingerprint, fmt).glob("[!.]*")  # none where it is absent
    return sum(path.stat().st_size for path in paths if path.suffix not in (".part", ".txt"))


def _weights_folder(folder: Path, fingerprint: str, fmt: str) -> Path:
    return folder / f"weights-{fingerprint[:32]}-{fmt}"


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).view(-1)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file for direct I/O if the file system has it; return the descriptor and whether it
    has.
    """
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # The refused call may have created the file already.
        return os.open(path, flags & ~os.O_EXCL, 0o600), False


def _raise_file_limit() -> None:
    """Allow as many open files as the system permits: every cache block on the disk is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _offload_error(error: OSError, path: Path, num_bytes: int) -> OffloadError:
    """Say what a system call's error means and what helps; num_bytes: that the file needs."""
    if error.errno == errno.EFBIG:
        return DiskFullError(
            f"files in {path.parent} may not have the {exact_size(num_bytes)} that {path.name} "
            "needs; raise the limit (ulimit -f), or name another directory with --offload-dir"
        )
    # A quota, and a disk without inodes, leave bytes free.
    if error.errno == errno.ENOSPC and (free := shutil.disk_usage(path.parent).free) < num_bytes:
        return DiskFullError(
            f"{path.parent} has {exact_size(free)} free, and {exact_size(num_bytes)} are needed "
            f"for {path.name}; free some, or name another directory with --offload-dir"
        )
    error.filename = str(path)
    kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else OffloadError
    return kind(f"{path} cannot be used: {error.strerror}")
