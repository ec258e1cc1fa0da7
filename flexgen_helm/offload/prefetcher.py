"""Weights that rest on slower tiers and are brought beside the computing, stage by stage, ahead of it.

A pass visits stages in a known order. For each visit the matrices that rest elsewhere are cut into units (a matrix,
or row tiles of a large one), and a thread loads the units in order into a ring of staging memory, as far ahead as the
ring has room. A stage that fits into the ring is loaded once and used by all its batches; of one that does not, each
unit is given back as soon as it is used, and loaded again for the next batch.

    loader     | layer 3: q k v o up down | layer 4: q k v …        (waits for room)
    computing                   | layer 3, batch 0 | layer 3, batch 1 |   gives units back during its last use
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from flexgen_helm.offload.staging import RingSlot, StagingRing, aligned
from flexgen_helm.offload.transfer_stats import TransferStats

# Loads in flight: while one crosses the second link of its way, the next is on the first.
_LOADERS = 2

# Fetches rows [first, first + count) of a matrix into staging memory (bytes, aligned) and returns them [count, in].
Fetch = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True)
class OffloadedMatrix:
    """A matrix that rests elsewhere. row_bytes: of one row at rest. tile_rows: rows of one unit."""

    name: str
    rows: int
    row_bytes: int
    tile_rows: int
    fetch: Fetch

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def unit_bytes(self) -> list[int]:
        """Staging bytes of each unit."""
        tiles = range(0, self.rows, self.tile_rows)
        return [staged_bytes(min(self.tile_rows, self.rows - first), self.row_bytes) for first in tiles]


def staged_bytes(rows: int, row_bytes: int) -> int:
    """Staging memory of a tile: aligned reads may begin and end beside it."""
    return aligned(rows * row_bytes) + 2 * aligned(1)


def fits(matrices: Sequence[OffloadedMatrix], capacity: int) -> bool:
    """Whether a ring holds all units at once, wherever in it the first one lies."""
    sizes = [size for matrix in matrices for size in matrix.unit_bytes()]
    # Blocks may not fit round the ring's end exactly; one unit's size covers what that wastes.
    return sum(sizes) + max(sizes, default=0) <= capacity


@dataclass(eq=False)
class _Unit:
    matrix: OffloadedMatrix
    first: int
    count: int
    ready: threading.Event = field(default_factory=threading.Event)
    block: RingSlot | None = None
    rows: Tensor | None = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Visit:
    stage: str
    uses_left: int | None
    keeps: bool  # the whole stage stays in the ring until its last use
    units: deque[_Unit]


class WeightPrefetcher:
    """Loads units ahead of their use. One consumer; errors of the loader surface at the unit's use.

    overlap False: nothing is loaded before its use (each unit on demand, in the consumer's thread). used: called
    before a unit's memory is given back, while products that read it may still be under way on a device.
    """

    def __init__(
        self, ring: StagingRing, traffic: TransferStats, overlap: bool, used: Callable[[], None] = lambda: None
    ) -> None:
        self._ring, self._traffic, self._overlap, self._used = ring, traffic, overlap, used
        self._visits: deque[_Visit] = deque()
        self._queue: deque[_Unit] = deque()
        self._wake = threading.Condition()
        self._order = threading.Lock()  # blocks are taken in the order of the queue, though loads run side by side
        self._loading = 0
        self._closed = False
        names = [f"weights loader {i}" for i in range(_LOADERS if overlap else 0)]
        self._loaders = [threading.Thread(target=self._load, name=name, daemon=True) for name in names]
        for loader in self._loaders:
            loader.start()

    def visit(self, stage: str, matrices: Sequence[OffloadedMatrix], uses: int | None) -> bool:
        """Announce the next visit: `stage` will be used `uses` times in a row and needs `matrices` in this order.

        uses None: not known yet, to be told by a later `visit` of the same stage; refused (False) for a stage that
        does not fit into the ring.
        """
        expected = next((visit for visit in self._visits if visit.uses_left is None), None)
        if expected is not None and uses is not None:
            assert expected.stage == stage, f"{expected.stage} was expected next, not {stage}"
            expected.uses_left = uses
            return True
        keeps = fits(matrices, self._ring.capacity)
        if uses is None and not keeps:
            return False
        rounds = 1 if keeps else uses
        assert rounds is not None
        units = deque(
            _Unit(matrix, first, min(matrix.tile_rows, matrix.rows - first))
            for _ in range(rounds)
            for matrix in matrices
            for first in range(0, matrix.rows, matrix.tile_rows)
        )
        self._visits.append(_Visit(stage, uses, keeps, units))
        if self._overlap:
            with self._wake:
                self._queue.extend(units)
                self._wake.notify_all()
        return True

    @property
    def expects(self) -> bool:
        """Whether visits are announced whose uses are not known yet."""
        return any(visit.uses_left is None for visit in self._visits)

    @contextmanager
    def using(self, stage: str) -> Iterator[Callable[[str], Iterator[tuple[int, Tensor]]]]:
        """One use of the stage that is next in order: rows(name) yields (first row, rows [count, in]) of a matrix."""
        assert self._visits and self._visits[0].stage == stage, f"{stage} is not the next visit"
        visit = self._visits[0]
        assert visit.uses_left is not None
        last = visit.uses_left == 1

        def rows(name: str) -> Iterator[tuple[int, Tensor]]:
            if visit.keeps:
                for unit in [unit for unit in visit.units if unit.matrix.name == name]:
                    yield unit.first, self._take(unit)
                    if last:
                        visit.units.remove(unit)
                        self._give(unit)
                return
            # In order: what lies before the wanted matrix was not needed this time (experts nobody asked for).
            while visit.units[0].matrix.name != name:
                self._skip(visit.units.popleft())
            rest = visit.units[0].matrix.rows
            while rest:
                unit = visit.units[0]  # still the visit's while it is used: an error there must not lose its block
                yield unit.first, self._take(unit)
                visit.units.popleft()
                self._give(unit)
                rest -= unit.count

        yield rows
        visit.uses_left -= 1
        if last:
            while visit.units:
                self._skip(visit.units.popleft())
            self._visits.popleft()

    def cancel(self) -> None:
        """Forget all visits that were announced; what is being loaded is waited for and dropped."""
        with self._wake:
            self._queue.clear()
        self._ring.cancel()
        with self._wake:
            self._wake.wait_for(lambda: not self._loading)
        for visit in self._visits:
            for unit in visit.units:
                self._give(unit)
        self._visits.clear()
        self._ring.resume()

    def close(self) -> None:
        self.cancel()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for loader in self._loaders:
            loader.join()

    def _take(self, unit: _Unit) -> Tensor:
        if not self._overlap and unit.block is None:
            self._reserve(unit)
            self._fill(unit)
        if not unit.ready.is_set():
            with self._traffic.timed("wait_weights"):
                unit.ready.wait()
        if unit.error is not None:
            raise unit.error
        assert unit.rows is not None
        return unit.rows

    def _skip(self, unit: _Unit) -> None:
        """A unit that nobody needs: taken from the queue, or waited for and given back."""
        with self._wake:
            queued = unit in self._queue
            if queued:
                self._queue.remove(unit)
        if queued or not self._overlap:
            self._give(unit)
            return
        unit.ready.wait()
        self._give(unit)

    def _give(self, unit: _Unit) -> None:
        if unit.block is not None and not unit.block.given_back:
            unit.rows = None
            self._used()
            self._ring.release(unit.block)

    def _load(self) -> None:
        while True:
            with self._order:
                with self._wake:
                    self._wake.wait_for(lambda: self._queue or self._closed)
                    if self._closed:
                        return
                    unit = self._queue.popleft()
                    self._loading += 1
                self._reserve(unit)
            self._fill(unit)
            with self._wake:
                self._loading -= 1
                self._wake.notify_all()

    def _reserve(self, unit: _Unit) -> None:
        try:
            unit.block = self._ring.acquire(staged_bytes(unit.count, unit.matrix.row_bytes))
        except BaseException as error:  # surfaces where the unit is used; a loader that died would hang everyone
            unit.error = error

    def _fill(self, unit: _Unit) -> None:
        try:
            if unit.block is not None:
                with self._traffic.timed("load_weights"):
                    unit.rows = unit.matrix.fetch(unit.first, unit.count, self._ring.bytes_of(unit.block))
        except BaseException as error:  # surfaces where the unit is used
            unit.error = error
        finally:
            unit.ready.set()
