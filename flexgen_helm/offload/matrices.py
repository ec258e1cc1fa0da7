"""Matrices of a checkpoint: loaded to a tier in their storage format, and those on a slower tier
than the compute device's fetched from there.

The storage format is the checkpoint's 16-bit dtype, or a packed format of the precision. Packed
matrices have stripes of bytes for rows (`quant.formats`). A matrix is packed once, into a weight
file from which every tier is loaded.

The matrices of an expert are loaded together, and share a weight file.

A matrix that a file of the checkpoint has in its storage format, in 16 bits or as published, is
read from there, if that file is on the disk of the offload directory. It has no weight file, and
its values are checked once (`offload.weights_at_rest`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cached_property
from itertools import accumulate, count, takewhile
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.checkpoint.published_blocks import StoredRows, read_blocks
from flexgen_helm.errors import OffloadError
from flexgen_helm.kernels.team import use_one_thread
from flexgen_helm.models.config import expert_number, expert_of
from flexgen_helm.offload.disk import CheckpointFile, DirectFile
from flexgen_helm.offload.offload_directory import WeightFiles
from flexgen_helm.offload.pages import Pages, pages
from flexgen_helm.offload.prefetcher import ring_bytes
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.offload.weights_at_rest import WeightsAtRest
from flexgen_helm.planner.staging import gather_bytes
from flexgen_helm.progress import Message, report
from flexgen_helm.quant.formats import BlockFormat, GroupFormat, StoredFormat
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.shared_sizes import (
    ALIGNMENT,
    COPY_BUFFER_BYTES,
    GATHER_BYTES,
    HOST_UPCAST_ELEMENTS,
    aligned,
)

_thread_local = threading.local()
# Threads that read rows of tables; they are kept, because starting them takes longer than the
# reads.
_READERS = ThreadPoolExecutor(8, "table rows", use_one_thread)
# Bytes that a disk reads in the time of one short read: rows nearer than this are read with what is
# between them.
_GAP_BYTES = 256 << 10
# Bytes of the longest read of several rows.
_STRETCH_BYTES = 4 << 20


class OffloadedMatrix(ABC):
    """A matrix on another tier than the compute device's.

    shape, dtype, row_bytes: of its storage format.
    """

    def __init__(self, tiers: TransferManager, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._tiers, self.dtype = tiers, dtype
        self.shape, self.row_bytes = (shape[0], shape[1]), shape[1] * dtype.itemsize
        self.num_bytes = shape[0] * self.row_bytes

    @abstractmethod
    def fetch(self, first: int, count: int, staging: Tensor) -> Tensor:
        """Fetch rows [first, first + count) to staging memory on the compute device; see
        `prefetcher.Fetch`.
        """

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """Fetch single rows of a table to the compute device -> [T, width]; rows: [T], on the
        host.
        """

    def buffer_bytes(self, rows: int) -> int:
        """Return the bytes of host memory that a fetch of so many rows needs on its way from the
        disk to a device.
        """
        return 0


class HostMatrix(OffloadedMatrix):
    """A matrix in host memory, behind the link to the compute device."""

    def __init__(self, tiers: TransferManager, stored: Tensor) -> None:
        super().__init__(tiers, tuple(stored.shape), stored.dtype)
        self._stored = stored

    def fetch(self, first: int, count: int, staging: Tensor) -> Tensor:
        rows = self._stored[first : first + count]
        fetched = self._tiers.to_device(rows.reshape(-1).view(torch.uint8), "weights", staging)
        return fetched.view(self.dtype).view(rows.shape)

    def gather(self, rows: Tensor) -> Tensor:
        return self._tiers.rows_to_device(self._stored, rows, "weights")


class DiskMatrix(OffloadedMatrix):
    """A matrix in a file. Its rows cross the link too if a gpu computes.

    offset: where it begins in the file.
    """

    def __init__(
        self,
        tiers: TransferManager,
        file: DirectFile,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        offset: int = 0,
    ) -> None:
        super().__init__(tiers, shape, dtype)
        self._file, self._offset = file, offset

    def fetch(self, first: int, count: int, staging: Tensor) -> Tensor:
        copy_engine, row_bytes = self._tiers.copy_engine, self.row_bytes
        if copy_engine is None:
            fetched = self._read(first, count, staging)
        else:
            fetched, step = staging[: count * row_bytes], buffered_rows(row_bytes)
            for done in range(0, count, step):
                rows = min(step, count - done)
                on_host = self._read(
                    first + done, rows, copy_engine.thread_buffer(ring_bytes(rows, row_bytes))
                )
                self._tiers.to_device(on_host, "weights", fetched[done * row_bytes :])
        return fetched.view(self.dtype).view(count, -1)

    def gather(self, rows: Tensor) -> Tensor:
        # Each row is read once. Rows that are near each other are one stretch, which is one read.
        unique_rows, inverse = rows.unique(return_inverse=True)  # sorted
        gathered = torch.empty((unique_rows.numel(), self.row_bytes), dtype=torch.uint8)
        indices = unique_rows.numpy()
        is_far = np.diff(indices) * self.row_bytes > _GAP_BYTES
        # stretches end at multiples of their most bytes
        ends_stretch = np.diff(indices * self.row_bytes // _STRETCH_BYTES) > 0
        splits = np.flatnonzero(is_far | ends_stretch) + 1

        def read(stretch: np.ndarray, out: np.ndarray) -> None:
            first, count = int(stretch[0]), int(stretch[-1] - stretch[0]) + 1
            tile = self._read(first, count, pages(ring_bytes(count, self.row_bytes)))
            out[:] = tile.numpy().reshape(count, -1)[stretch - first]

        list(_READERS.map(read, np.split(indices, splits), np.split(gathered.numpy(), splits)))
        return self._tiers.rows_to_device(gathered.view(self.dtype), inverse, "weights")

    def buffer_bytes(self, rows: int) -> int:
        return ring_bytes(min(rows, buffered_rows(self.row_bytes)), self.row_bytes)

    def _read(self, first: int, count: int, staging: Tensor) -> Tensor:
        """Read rows into staging memory; return their bytes.

        file   | page | page | page |        whole pages are read
        rows       | first … |
        """
        offset, size = self._offset + first * self.row_bytes, count * self.row_bytes
        skipped = offset % ALIGNMENT
        span = staging[: aligned(skipped + size)]
        self._file.read(offset - skipped, span)
        self._tiers.stats.count_bytes("disk_to_cpu", "weights", size)
        return span[skipped : skipped + size]


class GatheredMatrix(DiskMatrix):
    """A matrix whose rows are gathered from several places of files, through memory of the reading
    thread.

    files: open files of the checkpoint.
    parts: the matrix's rows in order, each part with its places in the files.
    """

    def __init__(
        self,
        tiers: TransferManager,
        files: Mapping[SourceFile, DirectFile],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Sequence[StoredRows],
    ) -> None:
        # `_read` chooses the file
        super().__init__(tiers, next(iter(files.values())), shape, dtype)
        self._files, self._parts = files, parts
        self._block_bytes = sum(plane.block_bytes for plane in parts[0].planes)

    def _read(self, first: int, count: int, staging: Tensor) -> Tensor:
        rows = staging[: count * self.row_bytes].view(count, -1, self._block_bytes)
        step = max(1, GATHER_BYTES // self.row_bytes)
        for done in range(0, count, step):
            read_blocks(self._parts, first + done, rows[done : done + step], self._read_bytes)
        self._tiers.stats.count_bytes("disk_to_cpu", "weights", count * self.row_bytes)
        return rows.view(-1)

    def _read_bytes(self, file: SourceFile, offset: int, size: int) -> Tensor:
        """Read bytes of a file into memory of this thread, until its next call."""
        skipped = offset % ALIGNMENT
        needed = max(aligned(skipped + size), gather_bytes(self.num_bytes))
        buffer: Tensor | None = getattr(_thread_local, "gathered", None)
        if buffer is None or buffer.numel() < needed:
            buffer = _thread_local.gathered = pages(needed)
        span = buffer[: aligned(skipped + size)]
        self._files[file].read(offset - skipped, span)
        return span[skipped : skipped + size]


def buffered_rows(row_bytes: int) -> int:
    """Return the rows that a loader reads from the disk at once, on their way to a device."""
    return max(1, COPY_BUFFER_BYTES // row_bytes)


class MatrixLoader:
    """Loads the tensors of one checkpoint. The caller claims their memory first.

    Files of which matrices are read stay open until it is closed.
    stacks: resident matrices [E, out, in] of all experts of a layer that one product takes, by
        their name with {} for an expert's number.
    phase: 'load', until unchecked values had to be read ('verify') or a weight file to be written
        ('convert').
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tiers: TransferManager,
        precision: Precision,
        dtype: torch.dtype,
        is_offloaded: bool,
    ) -> None:
        """dtype: of computing.

        is_offloaded: some matrices do not rest on the compute device.
        """
        self._checkpoint, self._tiers, self._precision = checkpoint, tiers, precision
        self._dtype, self._is_offloaded = dtype, is_offloaded
        self._at_rest = WeightsAtRest(checkpoint, precision, tiers.folder)
        self.stacks: dict[str, Tensor] = {}
        self.phase: Literal["load", "verify", "convert"] = "load"
        self._files: dict[str, WeightFiles] = {}  # by label
        self._pages = Pages()
        self._resources = ExitStack()
        # weight files by name, those of the checkpoint by path
        self._open_files: dict[str, DirectFile] = {}
        self._experts: dict[str, list[str]] = {}  # expert -> its matrices that share a weight file
        for name, shape in checkpoint.shapes.items():
            expert = expert_of(name)
            if expert is not None and len(shape) == 2 and not self._at_rest.rows_of(name):
                self._experts.setdefault(expert, []).append(name)

    def format_of(self, name: str) -> StoredFormat | None:
        """Return how a tensor is packed; None if it has the checkpoint's 16-bit dtype."""
        return self._precision.format_of(name) if len(self._checkpoint.shapes[name]) == 2 else None

    def order(self, name: str) -> Tensor | None:
        """Return for each row of a matrix its index among the rows as they are stored [rows]; None
        if they are stored in order.
        """
        is_published = isinstance(self.format_of(name), BlockFormat)
        order = self._checkpoint.row_order(name) if is_published else None
        return None if order is None else order.to(self._tiers.device)

    def num_bytes(self, name: str) -> int:
        """Return the size of a tensor in its storage format."""
        shape, dtype = self._storage(name)
        return prod(shape) * dtype.itemsize

    def to_device(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Load a tensor to the compute device; dtype: of one that is not packed, None for the
        checkpoint's.
        """
        (shape, storage_dtype), copy_engine = self._storage(name), self._tiers.copy_engine
        if copy_engine is not None and self._tiers.device.type != "cpu":
            target = self._device_memory(name, shape, dtype or storage_dtype)
            _copy_tiles(
                self._loaded_tiles(name),
                target,
                lambda part, tile: copy_engine.to_device(tile.to(dtype), part),
            )
            return target
        fmt = self.format_of(name)
        if isinstance(fmt, GroupFormat):
            return self._read_packed(name)
        if fmt is not None:
            packed = self._pages.empty(shape, dtype=storage_dtype)
            self._checkpoint.read_packed(name, packed)
            return packed
        # what is converted lives for a moment, and would waste room of the shared pages
        empty = self._pages.empty if dtype in (None, storage_dtype) else torch.empty
        return self._checkpoint.tensor(name, empty).to(dtype)

    def _device_memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a resident tensor: of an expert as a part of a stack, where a kernel multiplies
        with one. Beside offloaded weights it saves nothing.
        """
        engine, expert = self._tiers.copy_engine, expert_of(name)
        assert engine is not None
        # Rules of `torch.nn.functional.grouped_mm` from 2.10 to 2.14, for rows of whole 16 bytes;
        # elsewhere it is a loop that waits for the device.
        if (
            expert
            and not self._is_offloaded
            and dtype == self._dtype == torch.bfloat16
            and torch.cuda.get_device_capability(engine.device)[0] in (9, 10)
            and shape[-1] % 8 == 0
        ):
            stack = f"{expert.rpartition('.')[0]}.{{}}{name.removeprefix(expert)}"
            if stack not in self.stacks:
                members = takewhile(
                    self._checkpoint.shapes.__contains__, map(stack.format, count())
                )
                self.stacks[stack] = engine.device_memory((len([*members]), *shape), dtype)
            return self.stacks[stack][expert_number(expert)]
        return engine.device_memory(shape, dtype)

    def to_host(self, name: str) -> HostMatrix:
        """Load a matrix to host memory, behind the link."""
        assert self._tiers.copy_engine is not None
        shape, dtype = self._storage(name)
        stored = self._tiers.copy_engine.host_memory(self.num_bytes(name)).view(dtype)
        _copy_tiles(self._loaded_tiles(name), stored)
        return HostMatrix(self._tiers, stored.view(shape))

    def to_disk(self, name: str) -> DiskMatrix:
        """Open a matrix where the checkpoint has it, or its weight file, which is written first if
        there is none.
        """
        if not (parts := self._at_rest.rows_of(name)):
            file, offset = self._weight_file(name)
            return DiskMatrix(self._tiers, self._keep_open(file), *self._storage(name), offset)
        tiles = self._in_phase("verify", self._tiles(name))
        # published values that fit one dtype may be too large for another
        fmt = self.format_of(name)
        self._weight_files(fmt).ensure_checked(
            name if fmt is None else f"{name} {self._dtype}", tiles
        )
        files = {
            plane.file: self._keep_open(CheckpointFile(plane.file, self._tiers.disk_rates))
            for part in parts
            for plane in part.planes
        }
        if len(parts) > 1 or len(parts[0].planes) > 1:
            return GatheredMatrix(self._tiers, files, *self._storage(name), parts)
        (plane,) = parts[0].planes
        offset = plane.offset + parts[0].rows.start * plane.row_bytes
        return DiskMatrix(self._tiers, files[plane.file], *self._storage(name), offset)

    def close(self) -> None:
        """Close all files; the matrices must not be read any more."""
        self._resources.close()

    def _storage(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype in the storage format."""
        shape, fmt = self._checkpoint.shapes[name], self.format_of(name)
        if fmt is None:
            return shape, self._checkpoint.storage_dtype
        return (fmt.num_stripes(shape[0]), fmt.stripe_bytes(shape[1])), torch.uint8

    def _keep_open(self, file: DirectFile) -> DirectFile:
        """Keep a file open until the loader is closed; return the one that is open already if it
        was opened before.
        """
        if (already_open := self._open_files.get(str(file.path))) is not None:
            file.close()
            return already_open
        self._open_files[str(file.path)] = file
        self._resources.callback(file.close)
        return file

    def _weight_file(self, name: str) -> tuple[DirectFile, int]:
        """Open the weight file of a matrix, which is written first if there is none; return it, and
        the offset at which the matrix begins.
        """
        expert = expert_of(name)
        names = [name] if expert is None else self._experts[expert]
        offsets = [0, *accumulate(aligned(self.num_bytes(member)) for member in names)]
        files = self._weight_files(
            next((fmt for member in names if (fmt := self.format_of(member))), None)
        )

        def padded_tiles() -> Iterator[Tensor]:
            for member in names:
                yield from self._tiles(member)
                yield torch.zeros(-self.num_bytes(member) % ALIGNMENT, dtype=torch.uint8)

        tiles = self._in_phase("convert", padded_tiles())
        return files.ensure(expert or name, offsets[-1], tiles), offsets[names.index(name)]

    def _tiles(self, name: str) -> Iterable[Tensor]:
        """Return flat tiles of a matrix in its storage format, from the checkpoint."""
        fmt = self.format_of(name)
        if isinstance(fmt, GroupFormat):
            return _packed_tiles(
                self._checkpoint.tiles(name), fmt, self._checkpoint.shapes[name][1]
            )
        return (
            self._checkpoint.tiles(name)
            if fmt is None
            else self._checkpoint.packed_tiles(name, self._dtype)
        )

    def _loaded_tiles(self, name: str) -> Iterable[Tensor]:
        """Return flat tiles of a matrix in its storage format, from its weight file if it is packed
        here, else from the checkpoint.
        """
        is_packed_here = isinstance(self.format_of(name), GroupFormat)
        return [self._read_packed(name).view(-1)] if is_packed_here else self._tiles(name)

    def _weight_files(self, fmt: StoredFormat | None) -> WeightFiles:
        label = self._at_rest.label(fmt)
        if label not in self._files:
            self._files[label] = self._tiers.directory().weights(
                self._checkpoint.fingerprint, label
            )
        return self._files[label]

    def _in_phase(
        self, phase: Literal["verify", "convert"], tiles: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """Pass tiles on, and set the loader's phase once one is asked for: where a weight file is
        missing, or values are unchecked.
        """
        self.phase = phase
        yield from tiles

    def _read_packed(self, name: str) -> Tensor:
        """Read a packed matrix [stripes, bytes] from its weight file into new host memory, or pack
        it there.
        """
        if self._has_directory:
            file, offset = self._weight_file(name)
            with closing(file):
                return file.read_tensor(offset, *self._storage(name))
        packed = torch.empty(self._storage(name)[0], dtype=torch.uint8)
        tiles = self._in_phase("convert", self._tiles(name))
        _copy_tiles(map(Tensor.flatten, tiles), packed)
        return packed

    @cached_property
    def _has_directory(self) -> bool:
        """Whether weight files can be kept, which a read-only file system forbids."""
        try:
            self._tiers.directory()
        except OffloadError as error:
            report(
                Message(f"packed weights are not kept, and packed again by the next run: {error}")
            )
            return False
        return True


def _copy_tiles(
    tiles: Iterable[Tensor], memory: Tensor, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """Fill memory with flat tiles, one behind another; copy: is given a part of the memory, and its
    tile.
    """
    done = 0
    for tile in tiles:
        copy(memory.view(-1)[done : done + tile.numel()], tile)
        done += tile.numel()


def _packed_tiles(tiles: Iterable[Tensor], fmt: GroupFormat, width: int) -> Iterator[Tensor]:
    """Pack flat tiles of a matrix, in order, as whole stripes; about a tile is in memory at a
    time.
    """
    stripe_elements = fmt.stripe_rows * width
    waiting: list[Tensor] = []
    num_waiting = 0
    for tile in tiles:
        waiting.append(tile)
        num_waiting += tile.numel()
        if num_waiting >= max(stripe_elements, HOST_UPCAST_ELEMENTS):
            joined = torch.cat(waiting)
            whole = num_waiting // stripe_elements * stripe_elements
            yield quantize(joined[:whole].view(-1, width), fmt)
            waiting, num_waiting = [joined[whole:]], num_waiting - whole
    if num_waiting:
        yield quantize(torch.cat(waiting).view(-1, width), fmt)
