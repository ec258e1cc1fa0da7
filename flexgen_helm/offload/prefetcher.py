"""Weights that are stored on slower tiers, brought to the compute device stage by stage, ahead of their use.

A pass visits stages in a known order. For each visit the offloaded matrices are cut into units (a matrix, or row
tiles of a large one). Loader threads load units in order into a staging ring, as far ahead as the ring has room. A
stage that fits into the ring is loaded once and used by all its batches. Of a larger one each unit is released as
soon as it is used, and loaded again for the next batch.

    loaders     | layer 3: q k v o up down | layer 4: q k v …        (wait for room)
    computing                    | layer 3, batch 0 | layer 3, batch 1 |   releases units during its last use

Experts are not loaded here: which ones a batch needs is known in the middle of their layer (`offload.experts`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen_helm.offload.staging import RingSlot, StagingRing, aligned
from flexgen_helm.offload.transfer_stats import TransferStats
from flexgen_helm.planner.placement import NUM_LOADERS

# Fetches rows [first, first + count) of a matrix into staging memory (bytes, aligned) and returns them [count, in].
Fetch = Callable[[int, int, Tensor], Tensor]
# One use of a stage: name of a matrix -> (first row, rows [count, in]) of all its units, in order.
StageRows = Callable[[str], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True)
class StagedMatrix:
    """A matrix on another tier, and the units that it is staged in.

    rows, row_bytes: in its storage format.
    tile_rows: rows of one unit.
    fetch: see `Fetch`.
    """

    name: str
    rows: int
    row_bytes: int
    tile_rows: int
    fetch: Fetch

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def unit_bytes(self) -> list[int]:
        """Return the staging bytes of each unit."""
        tiles = range(0, self.rows, self.tile_rows)
        return [staged_bytes(min(self.tile_rows, self.rows - first), self.row_bytes) for first in tiles]


def staged_bytes(rows: int, row_bytes: int) -> int:
    """Return the staging memory of a tile: aligned reads may begin before it and end behind it."""
    return aligned(rows * row_bytes) + 2 * aligned(1)


def num_loaders(overlap: bool) -> int:
    """Return how many threads fetch at once: the one that computes without overlap."""
    return NUM_LOADERS if overlap else 1


def fits(matrices: Sequence[StagedMatrix], capacity: int) -> bool:
    """Return whether a ring holds all units at once, wherever in it the first one is."""
    sizes = [size for matrix in matrices for size in matrix.unit_bytes()]
    # Slots may not fit round the ring's end exactly; one unit's size covers what that wastes.
    return sum(sizes) + max(sizes, default=0) <= capacity


@dataclass(eq=False)
class _Unit:
    matrix: StagedMatrix
    first: int
    count: int
    ready: threading.Event = field(default_factory=threading.Event)
    slot: RingSlot | None = None
    rows: Tensor | None = None
    error: BaseException | None = None

    @property
    def staged_bytes(self) -> int:
        return staged_bytes(self.count, self.matrix.row_bytes)


@dataclass(eq=False)
class _Visit:
    """uses_left: None while it is not known. keeps: the whole stage stays in the ring until its last use."""

    stage: str
    uses_left: int | None
    keeps: bool
    units: deque[_Unit]


class WeightPrefetcher:
    """Loads units ahead of their use. One thread uses them; errors of a loader surface at the unit's use."""

    def __init__(
        self,
        ring: StagingRing,
        stats: TransferStats,
        overlap: bool,
        launched: Callable[[], torch.cuda.Event | None] = lambda: None,
    ) -> None:
        """overlap: False loads each unit when it is used, in the thread that uses it.

        launched: of the device's copies; a unit is loaded once the last reader of its memory is done.
        """
        self._ring, self._stats, self._overlap, self._launched = ring, stats, overlap, launched
        self._visits: deque[_Visit] = deque()
        self._queue: deque[_Unit] = deque()
        self.wake = self._wake = threading.Condition()
        self._order = threading.Lock()  # slots are taken in the order of the queue, though loads run side by side
        self._num_loading = self._num_filling = 0
        self._closed = False
        names = [f"weights loader {i}" for i in range(NUM_LOADERS if overlap else 0)]
        self._loaders = [threading.Thread(target=self._load, name=name, daemon=True) for name in names]
        for loader in self._loaders:
            loader.start()

    @property
    def wants_more(self) -> bool:
        """Whether loaders may run out of announced units before the next item begins."""
        if not self._overlap:
            return not self._visits
        with self._wake:
            return sum(unit.staged_bytes for unit in self._queue) < self._ring.capacity

    @property
    def has_expected(self) -> bool:
        """Whether visits are announced whose uses are not known yet."""
        return any(visit.uses_left is None for visit in self._visits)

    @property
    def is_idle(self) -> bool:
        """Whether no unit is on its way; `wake` is notified when that changes."""
        return not self._num_filling

    def start(self, stage: str, matrices: Sequence[StagedMatrix], uses: int | None) -> bool:
        """Announce the next visit and begin to load it: `stage` will be used `uses` times in a row.

        matrices: what it needs, in the order of use.
        uses: None where it is not known yet; a later call for the same stage says it. Returns False, and announces
            nothing, for such a stage that does not fit into the ring.
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

    @contextmanager
    def using(self, stage: str) -> Iterator[StageRows]:
        """Use the stage that is next in order, once; waits for each unit when it is asked for."""
        assert self._visits and self._visits[0].stage == stage, f"{stage} is not the next visit"
        visit = self._visits[0]
        assert visit.uses_left is not None
        is_last = visit.uses_left == 1

        def rows(name: str) -> Iterator[tuple[int, Tensor]]:
            if visit.keeps:
                for unit in [unit for unit in visit.units if unit.matrix.name == name]:
                    yield unit.first, self._wait(unit)
                    if is_last:
                        visit.units.remove(unit)
                        self._release(unit)
                return
            # In order: units before the wanted matrix are not needed this time.
            while visit.units[0].matrix.name != name:
                self._skip(visit.units.popleft())
            rows_left = visit.units[0].matrix.rows
            while rows_left:
                unit = visit.units[0]  # still the visit's while it is used: an error there must not lose its slot
                yield unit.first, self._wait(unit)
                visit.units.popleft()
                self._release(unit)
                rows_left -= unit.count

        yield rows
        visit.uses_left -= 1
        if is_last:
            while visit.units:
                self._skip(visit.units.popleft())
            self._visits.popleft()

    def cancel(self) -> None:
        """Forget all announced visits; loads under way are waited for and dropped."""
        with self._wake:
            self._queue.clear()
        self._ring.cancel()
        with self._wake:
            self._wake.wait_for(lambda: not self._num_loading)
        for visit in self._visits:
            for unit in visit.units:
                self._release(unit)
        self._visits.clear()
        self._ring.resume()

    def close(self) -> None:
        self.cancel()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for loader in self._loaders:
            loader.join()

    def _wait(self, unit: _Unit) -> Tensor:
        if not self._overlap and unit.slot is None:
            self._reserve(unit)
            self._fill(unit)
        if not unit.ready.is_set():
            with self._stats.timed("wait_weights", unit.matrix.name):
                unit.ready.wait()
        if unit.error is not None:
            raise unit.error
        assert unit.rows is not None
        return unit.rows

    def _skip(self, unit: _Unit) -> None:
        """Take a unit that nobody needs from the queue, or wait for it and release it."""
        with self._wake:
            queued = unit in self._queue
            if queued:
                self._queue.remove(unit)
        if not queued and self._overlap:
            unit.ready.wait()
        self._release(unit)

    def _release(self, unit: _Unit) -> None:
        if unit.slot is not None and not unit.slot.released:
            unit.rows = None
            self._ring.release(unit.slot, self._launched())

    def _load(self) -> None:
        """Load units from the queue until the prefetcher is closed; runs in each loader thread."""
        while True:
            with self._order:
                with self._wake:
                    self._wake.wait_for(lambda: self._queue or self._closed)
                    if self._closed:
                        return
                    unit = self._queue.popleft()
                    self._num_loading += 1
                self._reserve(unit)
            with self._wake:
                self._num_filling += 1
            self._fill(unit)
            with self._wake:
                self._num_filling -= 1
                self._num_loading -= 1
                self._wake.notify_all()

    def _reserve(self, unit: _Unit) -> None:
        try:
            unit.slot = self._ring.acquire(unit.staged_bytes)
        except BaseException as error:  # surfaces where the unit is used; a loader that died would hang everyone
            unit.error = error

    def _fill(self, unit: _Unit) -> None:
        try:
            if unit.slot is not None:
                with self._stats.timed("load_weights", unit.matrix.name):
                    if unit.slot.after is not None:
                        unit.slot.after.synchronize()
                    unit.rows = unit.matrix.fetch(unit.first, unit.count, self._ring.memory(unit.slot))
        except BaseException as error:  # surfaces where the unit is used
            unit.error = error
        finally:
            unit.ready.set()
