"""The offload directory: the files of an engine's run, and weight files that runs share.

Its layout:

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

import itertools
import os
import resource
import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from torch import Tensor

from flexgen_helm.errors import OffloadError
from flexgen_helm.locks import InUseError, locked
from flexgen_helm.offload.disk import CHUNK_BYTES, DirectFile, flat_bytes, offload_error
from flexgen_helm.offload.pages import pages
from flexgen_helm.offload.rate_limit import DiskRates
from flexgen_helm.shared_sizes import ALIGNMENT, aligned

_serials = itertools.count()


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
            raise offload_error(error, path, size) from error
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
            raise offload_error(error, path, ALIGNMENT) from error

    def _write(self, path: Path, size: int, tiles: Iterable[Tensor]) -> None:
        """Write a matrix under another name, then rename it."""
        unfinished = path.with_name(path.name + ".part")
        for abandoned in self._folder.glob("*.part"):
            # left by a killed process: no other can write now, as this one has the lock
            abandoned.unlink(missing_ok=True)
        file = DirectFile(unfinished, size, create=True)
        try:
            buffer = pages(CHUNK_BYTES)
            filled = offset = 0
            for tile in tiles:
                data = flat_bytes(tile)
                while data.numel():
                    count = min(data.numel(), CHUNK_BYTES - filled)
                    buffer[filled : filled + count] = data[:count]
                    filled, data = filled + count, data[count:]
                    if filled == CHUNK_BYTES:
                        file.write(offset, buffer)
                        offset, filled = offset + CHUNK_BYTES, 0
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


def _raise_file_limit() -> None:
    """Allow as many open files as the system permits: every cache block on the disk is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
