"""Files of the disk tier: read and written by direct I/O, past the page cache."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.errors import CheckpointError, DiskFullError, OffloadError
from flexgen_helm.files import naming
from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.rate_limit import DiskRates
from flexgen_helm.shared_sizes import ALIGNMENT, aligned
from flexgen_helm.units import exact_size

# Bytes of one read or write: enough for the disk's full rate, few enough to be cancelled soon.
CHUNK_BYTES = 8 << 20


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
            raise offload_error(error, path, self.size) from error
        if create:
            try:
                # Allocate all blocks now, so that a full disk is an error here and not in the
                # middle of a run.
                os.posix_fallocate(self._descriptor, 0, max(self.size, ALIGNMENT))
            except OSError as error:
                self.close(delete=True)  # an open descriptor would keep the blocks
                raise offload_error(error, path, self.size) from error
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
        buffer[: tensor.nbytes] = flat_bytes(tensor)
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
        """Read or write a buffer in pieces of `CHUNK_BYTES` bytes; the file's last page is read as
        far as the file goes.
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
                    count = call(self._descriptor, [view[done : done + CHUNK_BYTES]], offset + done)
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
                raise offload_error(error, self.path, len(view)) from error


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
            raise offload_error(error, source.path, source.size) from error
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


def flat_bytes(tensor: Tensor) -> Tensor:
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


def offload_error(error: OSError, path: Path, num_bytes: int) -> OffloadError:
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
