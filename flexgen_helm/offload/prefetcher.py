"""Weights that are stored on slower tiers, brought to the compute device stage by stage, ahead of
their use.

A pass visits stages in a known order. For each visit the offloaded matrices are cut into units (a
matrix, or row tiles of a large one). Units are loaded in order into a staging ring, as far ahead as
the ring has room. A stage that fits into the ring is loaded once and used by all its batches. Of a
larger one each unit is released as soon as it is used, and loaded again for the next batch.

    loaders     | layer 3: q k v o up down | layer 4: q k v …        (until the ring is full)
    computing                    | layer 3, batch 0 | layer 3, batch 1 |    (releases at last use)

Experts are not loaded here: which ones a batch needs is known in the middle of their layer
(`offload.experts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, takewhile

import torch
from torch import Tensor

from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.shared_sizes import NUM_LOADERS, aligned, aligned_read_bytes

# Fetches rows [first, first + count) of a matrix into staging memory (bytes, aligned) and returns
# them [count, in].
Fetch = Callable[[int, int, Tensor], Tensor]
# The rows for one use of a stage: name of a matrix -> (first row, rows [count, in]) of all its
# units, in order.
StreamedRows = Callable[[str], Iterator[tuple[int, Tensor]]]


@dataclass(eq=False)
class RingSlot:
    """`size` bytes of the ring from `offset`, both aligned.

    after: work that reads what was there before, and must be over when the slot is written.
    readers: work that reads the slot.
    """

    offset: int
    size: int
    after: torch.cuda.Event | None = None
    readers: torch.cuda.Event | None = None
    released: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.size


class StagingRing:
    """A ring buffer whose slots are reused first in, first out; for one thread.

    A slot that is released early is reused only after all older slots are released. Weights are
    released in order anyway, because a pass uses them in order.

        | free |  oldest … newest  | free |    acquire behind the newest, or from the start
    """

    def __init__(self, capacity: int, memory: Tensor) -> None:
        """memory: of `capacity` bytes, rounded up to whole pages, on any device."""
        self.capacity, self._memory = aligned(capacity), memory
        assert memory.numel() == self.capacity
        self._slots: deque[RingSlot] = deque()  # from the oldest to the newest
        self._readers: torch.cuda.Event | None = None  # of the slot that was taken out last

    def acquire(self, num_bytes: int) -> RingSlot | None:
        """Take a slot of at least `num_bytes`; None while there is no room."""
        size = aligned(num_bytes)
        assert 0 < size <= self.capacity, f"a slot of {size} bytes in a ring of {self.capacity}"
        while (offset := self._free_offset(size)) is None:
            if not self._slots[0].released:
                return None
            # Only as many as are needed: the readers of later slots end later.
            self._readers = self._slots.popleft().readers
        slot = RingSlot(offset, size, self._readers)
        self._slots.append(slot)
        return slot

    def release(self, slot: RingSlot, readers: torch.cuda.Event | None) -> None:
        """Let a slot be reused once all older ones are released; readers: work that was launched
        until now.
        """
        assert not slot.released
        slot.released = True
        for free in takewhile(lambda slot: slot.released, self._slots):
            free.readers = free.readers or readers

    def memory(self, slot: RingSlot) -> Tensor:
        """Return the slot's bytes [size]."""
        return self._memory[slot.offset : slot.end]

    @property
    def in_use(self) -> int:
        """Bytes that cannot be acquired yet."""
        return sum(slot.size for slot in dropwhile(lambda slot: slot.released, self._slots))

    def _free_offset(self, size: int) -> int | None:
        """Return where `size` bytes are free behind the newest slot; None if there is no room."""
        if not self._slots:
            return 0
        oldest, newest = self._slots[0], self._slots[-1]
        if newest.offset < oldest.offset:  # wrapped: free between the newest and the oldest
            return newest.end if newest.end + size <= oldest.offset else None
        if newest.end + size <= self.capacity:
            return newest.end
        return 0 if size <= oldest.offset else None


@dataclass(frozen=True)
class StreamedMatrix:
    """A matrix on another tier, and the units that it is loaded in.

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

    def units(self) -> list[Unit]:
        """Cut the matrix into units."""
        tiles = range(0, self.rows, self.tile_rows)
        return [Unit(self, first, min(self.tile_rows, self.rows - first)) for first in tiles]


@dataclass(eq=False)
class Unit:
    """Rows [first, first + num_rows) of a matrix.

    slot: that its rows are loaded into.
    loading: the load, whose result are the rows. Both are set from its begin until the unit is
        released.
    """

    matrix: StreamedMatrix
    first: int
    num_rows: int
    slot: RingSlot | None = None
    loading: Future[Tensor] | None = None

    @property
    def ring_bytes(self) -> int:
        return ring_bytes(self.num_rows, self.matrix.row_bytes)


def ring_bytes(rows: int, row_bytes: int) -> int:
    """Return the memory that a tile is read into."""
    return aligned_read_bytes(rows * row_bytes)


def fits(matrices: Sequence[StreamedMatrix], capacity: int) -> bool:
    """Return whether a ring holds all units at once, wherever in it the first one is."""
    sizes = [unit.ring_bytes for matrix in matrices for unit in matrix.units()]
    # Slots may not fit round the ring's end exactly; one unit's size covers what that wastes.
    return sum(sizes) + max(sizes, default=0) <= capacity


@dataclass(eq=False)
class _Visit:
    """A visit that was announced, with the units of it that are not released yet.

    uses_left: None while the visit's pass has not begun.
    keeps: the stage stays in the ring until its last use. Otherwise its units follow each other
        once for every use.
    """

    stage: str
    uses_left: int | None
    keeps: bool
    units: deque[Unit]


class WeightPrefetcher:
    """Loads units ahead of their use, in background threads; for the computing thread. Errors
    surface at the use.
    """

    def __init__(self, ring: StagingRing, transfers: TransferManager) -> None:
        self._ring, self._transfers = ring, transfers
        self._visits: deque[_Visit] = deque()
        self._queue: deque[Unit] = deque()  # units that the ring has no room for yet

    @property
    def wants_more(self) -> bool:
        """Whether more visits should be announced: the units that wait would not fill the ring."""
        return sum(unit.ring_bytes for unit in self._queue) < self._ring.capacity

    @property
    def has_expected(self) -> bool:
        """Whether a visit is announced whose number of uses is not known yet."""
        return any(visit.uses_left is None for visit in self._visits)

    def start(self, stage: str, matrices: Sequence[StreamedMatrix], uses: int | None) -> bool:
        """Announce the next visit and begin to load it; return whether it was announced.

        matrices: what the stage needs, in the order of use.
        uses: how often in a row the stage will be used. None for a visit of the next pass, whose
            batches are not known yet: the visit is announced again when that pass begins. Without
            uses only a stage that fits into the ring can be announced.
        """
        expected = next((visit for visit in self._visits if visit.uses_left is None), None)
        if expected is not None and uses is not None:
            assert expected.stage == stage, f"{expected.stage} was expected next, not {stage}"
            expected.uses_left = uses
            return True
        keeps = fits(matrices, self._ring.capacity)
        if uses is None and not keeps:
            return False
        loads = 1 if keeps else uses
        assert loads is not None
        units = deque(unit for _ in range(loads) for matrix in matrices for unit in matrix.units())
        self._visits.append(_Visit(stage, uses, keeps, units))
        self._queue.extend(units)
        self._load_ahead()
        return True

    @contextmanager
    def using(self, stage: str, is_repeated: bool = False) -> Iterator[StreamedRows]:
        """Use the stage that is next in order, once; waits for each unit when it is asked for.

        is_repeated: a matrix may be asked for more than once; the ring keeps all of the stage.
        """
        assert self._visits and self._visits[0].stage == stage, f"{stage} is not the next visit"
        visit = self._visits[0]
        assert visit.uses_left is not None and (visit.keeps or not is_repeated)
        is_last = visit.uses_left == 1

        if visit.keeps:
            yield partial(self._kept_rows, visit, is_last and not is_repeated)
        else:
            yield partial(self._passing_rows, visit)
        visit.uses_left -= 1
        if is_last:
            while visit.units:
                self._release(visit.units.popleft())
            self._visits.popleft()

    def _kept_rows(self, visit: _Visit, releases: bool, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a matrix whose stage the ring keeps.

        releases: they are used for the last time, so each unit is released behind its use.
        """
        for unit in [unit for unit in visit.units if unit.matrix.name == name]:
            yield unit.first, self._loaded(unit)
            if releases:
                visit.units.remove(unit)
                self._release(unit)

    def _passing_rows(self, visit: _Visit, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a matrix whose stage passes through the ring."""
        # In order: units before the wanted matrix are not needed this time.
        while visit.units[0].matrix.name != name:
            self._release(visit.units.popleft())
        rows_left = visit.units[0].matrix.rows
        while rows_left:
            # still the visit's while it is used: an error there must not lose its slot
            unit = visit.units[0]
            yield unit.first, self._loaded(unit)
            visit.units.popleft()
            self._release(unit)
            rows_left -= unit.num_rows

    def cancel(self) -> None:
        """Forget all announced visits; loads under way are waited for and dropped."""
        self._queue.clear()
        for unit in [
            unit for visit in self._visits for unit in visit.units if unit.slot is not None
        ]:
            self._release(unit)
        self._visits.clear()

    def _load_ahead(self) -> None:
        """Begin to load what the ring has room for."""
        while self._queue and (slot := self._ring.acquire(self._queue[0].ring_bytes)) is not None:
            unit = self._queue.popleft()
            unit.slot = slot
            load = partial(self._load, unit, slot)
            unit.loading = self._transfers.submit("weights loader", load, NUM_LOADERS)

    def _load(self, unit: Unit, slot: RingSlot) -> Tensor:
        """Runs in a background thread."""
        with self._transfers.stats.timed("load_weights"):
            if slot.after is not None:
                slot.after.synchronize()
            return unit.matrix.fetch(unit.first, unit.num_rows, self._ring.memory(slot))

    def _loaded(self, unit: Unit) -> Tensor:
        """Return the rows of a unit; wait until they are loaded."""
        assert unit.loading is not None, "all units before it are released, so the ring has room"
        if not unit.loading.done():
            with self._transfers.stats.timed("wait_weights"):
                unit.loading.exception()  # waits
        return unit.loading.result()

    def _release(self, unit: Unit) -> None:
        """Give a unit's memory back, after its load; or take one that nobody needs from the
        queue.
        """
        if unit.slot is None:
            self._queue.remove(unit)
            return
        assert unit.loading is not None
        unit.loading.exception()  # waits
        self._ring.release(unit.slot, self._transfers.launched())
        unit.slot = unit.loading = None
        self._load_ahead()
