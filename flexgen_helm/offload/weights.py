"""Weights at rest on their tiers, and the operators that the decoder sees.

At rest a matrix keeps its 16-bit type, or is packed as the precision says: once, into a file that every tier is
filled from. A product brings it to the compute type by row tile (`products`). Beside the computing device it may rest
in the compute type instead, where there is room, and laid out as products like it best. Matrices of other tiers are
streamed in (`stream`); rows of tables are gathered where they lie. Vectors are few and always rest beside the
computing, in the compute type.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.hardware.rates import column_major
from flexgen_helm.models.config import EMBED, EMBED_TABLE, HEAD, stage_names, stage_tensor_shapes
from flexgen_helm.models.decoder import StageWeights
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.linear import TILE_ELEMENTS, dequantized, tiled_linear
from flexgen_helm.offload.prefetcher import OffloadedMatrix, WeightPrefetcher, fits, staged_bytes
from flexgen_helm.offload.staging import StagingRing, aligned, pages
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.planner.placement import Tier
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import FP16, Precision
from flexgen_helm.scheduling.schedule import StageVisit

# Bytes that a disk delivers in the time of one short read: many rows of a table are better read with all between them.
_ROW_READ_BYTES = 256 << 10
# Bytes that are loaded at once: long enough for the full rate of disk and link.
UNIT_BYTES = 32 << 20
# And no shorter than this, if a stage shall fit into the ring.
LEAST_UNIT_BYTES = 1 << 20
# Rows of a table that lies on the disk are read side by side; a table of which most pages are wanted is read through.
_GATHER_THREADS = 8

HEAD_MATRIX = "head.lm.weight"


class TieredWeights:
    """All weights of a model, each matrix on the tier that `placement` names.

    Loading holds one tensor beside what is kept; what goes to the disk is written piece by piece. `compute_copies`:
    matrices beside the computing rest in the compute type (exact: 16-bit values are representable in it).
    staging_bytes: the ring for matrices of other tiers, claimed from the home tier; not claimed where nothing is
    elsewhere.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tiers: Tiers,
        placement: Mapping[str, Tier],
        dtype: torch.dtype,
        *,
        compute_copies: bool = False,
        staging_bytes: int = 0,
        overlap: bool = True,
        precision: Precision = FP16,
    ) -> None:
        self._config, self._tiers, self._dtype = checkpoint.config, tiers, dtype
        self.shapes = dict(checkpoint.shapes)
        self._rest, self._precision = checkpoint.storage_dtype, precision
        self._forms: dict[str, GroupFormat] = {}  # of the matrices that are packed where they lie
        self._claims: list[tuple[Tier, Allocation]] = []
        self._home: dict[str, Tensor] = {}
        self._far: dict[str, _Far] = {}
        self._prefetcher: WeightPrefetcher | None = None
        self._stages = stage_names(checkpoint.config)
        self._gatherers: ThreadPoolExecutor | None = None
        try:
            for name, shape in checkpoint.shapes.items():
                self._load(checkpoint, name, shape, placement.get(name, tiers.compute_tier), compute_copies)
            if self._config.tied_head:
                self.shapes[HEAD_MATRIX] = self.shapes[EMBED_TABLE]
                self._alias(EMBED_TABLE, HEAD_MATRIX)
            if self._far:
                self._claim(tiers.compute_tier, "staging", staging_bytes)
                memory = None if tiers.copy_engine is None else tiers.copy_engine.device_memory(aligned(staging_bytes))
                ring = StagingRing(staging_bytes, memory)
                self._prefetcher = WeightPrefetcher(ring, tiers.stats, overlap, self._used)
            self._offloaded = {stage: self._stage_units(stage, staging_bytes) for stage in self._stages}
        except BaseException:
            self.close()
            raise

    def prefetch(self, visits: Generator[StageVisit, None, None]) -> None:
        """Begin to load what the next visits need, as far ahead as the staging ring has room."""
        prefetcher = self._prefetcher
        while prefetcher is not None and (prefetcher.wants_more or prefetcher.has_expected):
            visit = next(visits, None)
            if visit is None:
                return
            matrices = self._offloaded[self._stages[visit.stage]]
            if not matrices:
                continue
            has_room = visit.uses is not None or prefetcher.wants_more
            if not has_room or not prefetcher.start(self._stages[visit.stage], matrices, visit.uses):
                visits.close()  # of the next pass no more is loaded
                return

    @contextmanager
    def stage(self, name: str) -> Iterator[StageWeights]:
        if self._prefetcher is None or not self._offloaded[name]:
            yield _Stage(self, name, None)
            return
        with self._prefetcher.using(name) as rows:
            yield _Stage(self, name, rows)

    def cancel(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.cancel()

    def streamed_bytes(self) -> dict[str, int]:
        """Stage -> bytes of its matrices that rest on other tiers."""
        return {stage: sum(matrix.num_bytes for matrix in found) for stage, found in self._offloaded.items()}

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        if self._gatherers is not None:
            self._gatherers.shutdown()
        self._home.clear()
        for far in {id(far): far for far in self._far.values()}.values():
            far.close()
        self._far.clear()
        for tier, claim in self._claims:
            self._tiers.ledgers[tier].release(claim)
        self._claims = []

    def _claim(self, tier: Tier, kind: str, num_bytes: int) -> None:
        self._claims.append((tier, self._tiers.ledgers[tier].claim(kind, num_bytes)))

    def _load(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], tier: Tier, copies: bool) -> None:
        home, fmt = self._tiers.compute_tier, self._form(name, shape)
        if fmt is None and (len(shape) == 1 or tier == home):
            wanted = self._dtype if copies or len(shape) == 1 else self._rest
            self._claim(home, "weights", prod(shape) * wanted.itemsize)
            held = checkpoint.tensor(name).to(device=self._tiers.device, dtype=wanted)
            self._home[name] = _for_products(name, held) if copies else held
            return
        rests, dtype = shape, self._rest
        if fmt is not None:
            rests, dtype = (fmt.num_stripes(shape[0]), fmt.stripe_bytes(shape[1])), torch.uint8
        size = prod(rests) * dtype.itemsize
        self._claim(tier, "weights", prod(shape) * self._dtype.itemsize if copies and tier == home else size)
        if tier == "disk":
            self._far[name] = _OnDisk(self._tiers, self._file(checkpoint, name, shape, size), rests, dtype)
        elif tier == home:
            assert fmt is not None
            packed = self._read(checkpoint, name, shape, size).view(rests).to(self._tiers.device)
            if copies:
                self._home[name] = _for_products(name, dequantized(packed, fmt, shape[0], shape[1], self._dtype))
            else:
                self._home[name], self._forms[name] = packed, fmt
        else:
            assert self._tiers.copy_engine is not None
            held = self._tiers.copy_engine.host_memory(size).view(dtype)
            pieces = checkpoint.tiles(name) if fmt is None else [self._read(checkpoint, name, shape, size)]
            done = 0
            for piece in pieces:
                held[done : done + piece.numel()] = piece
                done += piece.numel()
            self._far[name] = _OnHost(self._tiers, held.view(rests))
        if fmt is not None and tier != home:
            self._forms[name] = fmt

    def _form(self, name: str, shape: tuple[int, ...]) -> GroupFormat | None:
        return self._precision.format_of(name) if len(shape) == 2 else None

    def _file(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], size: int) -> DirectFile:
        """The matrix as it rests, `size` bytes, in a file that is kept: it is converted once."""
        fmt = self._form(name, shape)
        if fmt is None:
            label, pieces = str(self._rest).removeprefix("torch."), checkpoint.tiles(name)
        else:
            label, pieces = self._precision.weights_label, _packed_pieces(checkpoint.tiles(name), fmt, shape[1])
        return self._tiers.directory().weights(checkpoint.fingerprint, label).ensure(name, size, pieces)

    def _read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], size: int) -> Tensor:
        """The bytes of the matrix's file [size], in new host memory."""
        file = self._file(checkpoint, name, shape, size)
        try:
            return file.read_tensor(0, (size,), torch.uint8)
        finally:
            file.close()

    def _alias(self, source: str, name: str) -> None:
        if source in self._home:
            self._home[name] = self._home[source]
        else:
            self._far[name] = self._far[source]
        if source in self._forms:
            self._forms[name] = self._forms[source]

    def _used(self) -> None:
        if self._tiers.copy_engine is not None:
            self._tiers.copy_engine.mark_used()

    def _stage_units(self, stage: str, staging_bytes: int) -> list[OffloadedMatrix]:
        """A stage's matrices in units of which three fit into the ring, so that loading and using go on side by side.

        Smaller units where those let the whole stage fit: else it is loaded anew for every batch.
        """
        unit = widest = max(1, min(UNIT_BYTES, staging_bytes // 3 - 2 * aligned(1)))
        found = self._stage_matrices(stage, widest)
        while not fits(found, staging_bytes):
            unit //= 2
            if unit < LEAST_UNIT_BYTES:
                return self._stage_matrices(stage, widest)
            found = self._stage_matrices(stage, unit)
        return found

    def _stage_matrices(self, stage: str, unit: int) -> list[OffloadedMatrix]:
        """The matrices of a stage that are streamed, in the order in which the decoder asks for them."""
        names = [name for name, shape in stage_tensor_shapes(self._config, stage).items() if len(shape) == 2]
        if stage == EMBED:
            names = [name for name in names if not _is_table(name)]
        if stage == HEAD and self._config.tied_head:
            names.append(HEAD_MATRIX)
        found = []
        for name in names:
            if (far := self._far.get(name)) is not None:
                rows, row_bytes = far.shape[0], far.row_bytes  # a packed matrix has stripes for rows
                owner = name.removeprefix(f"{stage}.").removesuffix(".weight")
                found.append(OffloadedMatrix(owner, rows, row_bytes, max(1, min(rows, unit // row_bytes)), far.fetch))
        return found

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """Rows [T] of a table -> [T, width] in the compute type."""
        if (table := self._home.get(name)) is not None:
            return table.index_select(0, rows).to(self._dtype)
        if self._gatherers is None:
            self._gatherers = ThreadPoolExecutor(_GATHER_THREADS, thread_name_prefix="table rows")
        return self._far[name].gather(rows, self._gatherers).to(device=self._tiers.device, dtype=self._dtype)


class _Stage:
    """One batch's use of one stage (`StageWeights`)."""

    def __init__(
        self, weights: TieredWeights, stage: str, rows: Callable[[str], Iterator[tuple[int, Tensor]]] | None
    ) -> None:
        self._weights, self._stage, self._rows = weights, stage, rows
        self.repeatable = rows is None

    def linear(self, name: str, x: Tensor) -> Tensor:
        full, bias = f"{self._stage}.{name}.weight", self.vector(f"{name}.bias")
        fmt, out_size = self._weights._forms.get(full), self._weights.shapes[full][0]
        if (weight := self._weights._home.get(full)) is not None:
            return tiled_linear(x, weight, bias, fmt, out_size)
        assert self._rows is not None
        stripe = 1 if fmt is None else fmt.stripe_rows
        y = x.new_empty((x.shape[0], 0))
        for begin, weight in self._rows(name):
            first, count = begin * stripe, min(weight.shape[0] * stripe, out_size - begin * stripe)
            part = tiled_linear(x, weight, None if bias is None else bias[first : first + count], fmt, count)
            if count == out_size:
                y = part
                continue
            if not first:
                y = x.new_empty((x.shape[0], out_size))
            y[:, first : first + count] = part
        return y

    def vector(self, name: str) -> Tensor | None:
        return self._weights._home.get(f"{self._stage}.{name}")

    def lookup(self, name: str, rows: Tensor) -> Tensor:
        return self._weights.gather(f"{self._stage}.{name}.weight", rows)


def _is_table(name: str) -> bool:
    """Whether rows are gathered from it."""
    return name.startswith(f"{EMBED}.") and "project" not in name


def _for_products(name: str, held: Tensor) -> Tensor:
    return column_major(held) if held.dim() == 2 and not _is_table(name) else held


class _Far(ABC):
    """A matrix on another tier than the computing, as it rests there: packed, it has stripes of bytes for rows."""

    shape: tuple[int, int]
    row_bytes: int

    @abstractmethod
    def fetch(self, first: int, count: int, staging: Tensor) -> Tensor:
        """As `stream.Fetch`."""

    @abstractmethod
    def gather(self, rows: Tensor, threads: ThreadPoolExecutor) -> Tensor:
        """Rows [T] -> [T, width] in the type at rest, on the host or the device."""

    @abstractmethod
    def close(self) -> None: ...


class _OnHost(_Far):
    """In host memory, behind the link."""

    def __init__(self, tiers: Tiers, held: Tensor) -> None:
        self.shape, self.row_bytes = (held.shape[0], held.shape[1]), held.shape[1] * held.element_size()
        self._tiers, self._held = tiers, held

    def fetch(self, first: int, count: int, staging: Tensor) -> Tensor:
        rows = self._held[first : first + count]
        return _to_device(self._tiers, rows.reshape(-1).view(torch.uint8), staging).view(rows.dtype).view(rows.shape)

    def gather(self, rows: Tensor, threads: ThreadPoolExecutor) -> Tensor:
        found = self._held.index_select(0, rows.cpu())
        return _to_device(self._tiers, found, None)

    def close(self) -> None:
        del self._held


class _OnDisk(_Far):
    """In a file of the disk tier; behind the link too where a device computes."""

    def __init__(self, tiers: Tiers, file: DirectFile, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.row_bytes = (shape[0], shape[1]), shape[1] * dtype.itemsize
        self._tiers, self._file, self._dtype = tiers, file, dtype
        self._local = threading.local()

    def fetch(self, first: int, count: int, staging: Tensor) -> Tensor:
        size = count * self.row_bytes
        if self._tiers.copy_engine is None:
            data = self._read(first, count, staging)
        else:
            data = _to_device(self._tiers, self._read(first, count, self._buffer(staging.numel())), staging)
        assert data.numel() == size
        return data.view(self._dtype).view(count, -1)

    def gather(self, rows: Tensor, threads: ThreadPoolExecutor) -> Tensor:
        wanted, places = rows.cpu().unique(return_inverse=True)
        separately = wanted.numel() * max(_ROW_READ_BYTES, staged_bytes(1, self.row_bytes))
        out = torch.empty((wanted.numel(), self.shape[1]), dtype=self._dtype)
        if separately > self.shape[0] * self.row_bytes:
            step = max(1, UNIT_BYTES // 4 // self.row_bytes)
            for first in range(0, self.shape[0], step):
                count = min(step, self.shape[0] - first)
                inside = (wanted >= first) & (wanted < first + count)
                if inside.any():
                    tile = self._read(first, count, pages(staged_bytes(count, self.row_bytes)))
                    out[inside] = tile.view(self._dtype).view(count, -1)[wanted[inside] - first]
        else:

            def one(place: int, row: int) -> None:
                out[place] = self._read(row, 1, pages(staged_bytes(1, self.row_bytes))).view(self._dtype)

            list(threads.map(one, range(wanted.numel()), wanted.tolist()))
        return out[places] if self._tiers.copy_engine is None else _to_device(self._tiers, out[places], None)

    def close(self) -> None:
        self._file.close()

    def _read(self, first: int, count: int, staging: Tensor) -> Tensor:
        """Bytes of rows, read into the beginning of `staging`."""
        begin, size = first * self.row_bytes, count * self.row_bytes
        beside = begin % aligned(1)
        span = staging[: aligned(beside + size)]
        self._file.read(begin - beside, span)
        self._tiers.stats.count_bytes("disk_to_cpu", "weights", size)
        return span[beside : beside + size]

    def _buffer(self, size: int) -> Tensor:
        """Host memory of the calling loader, kept for its next load."""
        held: Tensor | None = getattr(self._local, "memory", None)
        if held is None or held.numel() < size:
            assert self._tiers.copy_engine is not None
            held = self._local.memory = self._tiers.copy_engine.host_memory(size)
        return held


def _packed_pieces(pieces: Iterable[Tensor], fmt: GroupFormat, width: int) -> Iterator[Tensor]:
    """Bytes of a matrix's stripes, from its flat pieces in order; about a tile of it is in memory at a time."""
    whole = fmt.stripe_rows * width
    waiting: list[Tensor] = []
    held = 0
    for piece in pieces:
        waiting.append(piece)
        held += piece.numel()
        if held >= max(whole, TILE_ELEMENTS):
            joined = torch.cat(waiting)
            ready = held // whole * whole
            yield quantize(joined[:ready].view(-1, width), fmt)
            waiting, held = [joined[ready:]], held - ready
    if held:
        yield quantize(torch.cat(waiting).view(-1, width), fmt)


def _to_device(tiers: Tiers, source: Tensor, staging: Tensor | None) -> Tensor:
    assert tiers.copy_engine is not None
    target = None if staging is None else staging[: source.numel()]
    arrived = tiers.copy_engine.to_device(source, target)
    tiers.stats.count_bytes("cpu_to_gpu", "weights", source.numel() * source.element_size())
    return arrived
