"""Memory of the device as PyTorch's caching allocator hands it out: a pool for each stream, reused at once.

A block that is freed goes back to the pool of the stream that it was allocated on, whatever still reads it, and its
bytes keep their accesses. A block that `record_stream` names waits until those streams are done with it. The smallest
free range that is large enough is taken, and split; neighbours that are free join.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch

from tests.cuda.ordering import Access, Clock, Ordering

# As in PyTorch: sizes are rounded up to the unit; small blocks are cut from one segment, large segments are rounded.
_UNIT, _SMALL, _SEGMENT = 512, 1 << 20, 2 << 20


@dataclass(eq=False)
class Segment:
    """Bytes that the allocator has from the driver."""

    start: int
    size: int


@dataclass(eq=False)
class Range:
    """Free bytes [start, end) of a segment, and who accessed them before."""

    segment: Segment
    start: int
    end: int
    accesses: list[Access]


@dataclass(eq=False)
class Block:
    """Allocated bytes.

    users: streams that `record_stream` named.
    freed: clock of the thread that gave the block back.
    """

    stream: int
    segment: Segment
    start: int
    end: int
    accesses: list[Access]
    users: set[int] = field(default_factory=set)
    freed: Clock = field(default_factory=dict)


class Lease:
    """What the tensors of a block share: when the last one is gone, the allocator has the block back."""

    def __init__(self, allocator: Allocator, block: Block) -> None:
        self._allocator, self.block, self.ordering = allocator, block, allocator.ordering

    def __del__(self) -> None:
        ordering = self.ordering
        # A thread that copied from the block has waited, and then let go of it: so whatever anyone waited for is over.
        self.block.freed = {**ordering.snapshot(ordering.thread())}
        for actor, step in list(ordering.completed.items()):
            self.block.freed[actor] = max(step, self.block.freed.get(actor, 0))
        self._allocator.freed.append(self.block)  # only noted: the collector may run in the middle of anything


class Allocator:
    """One device's memory.

    total: bytes of the device; allowed: of them, to this process.
    reserved: bytes of segments, in use or free.
    failing: numbers of coming allocations, from 0 on, that find no memory.
    freed: blocks to be put back.
    """

    def __init__(self, ordering: Ordering, total: int, first: int) -> None:
        self.ordering, self.total, self.reserved = ordering, total, 0
        self.allowed = total
        self.in_use, self.peak, self.num_allocations = 0, 0, 0
        self.failing: set[int] = set()
        self.freed: deque[Block] = deque()
        self._waiting: list[tuple[Clock, Block]] = []
        self._free: dict[int, list[Range]] = {}
        self._next = first

    def allocate(self, num_bytes: int, stream: int) -> Lease:
        size = max(_UNIT, -(-num_bytes // _UNIT) * _UNIT)
        with self.ordering.lock:
            self._collect()
            self.num_allocations += 1
            if self.num_allocations - 1 in self.failing:
                raise torch.OutOfMemoryError("CUDA out of memory. (a test asked for it)")
            ranges = self._free.setdefault(stream, [])
            best = min((r for r in ranges if r.end - r.start >= size), key=lambda r: r.end - r.start, default=None)
            if best is None:
                best = self._new_range(size)
            else:
                ranges.remove(best)
            end = best.start + size
            if end < best.end:
                ranges.append(Range(best.segment, end, best.end, _within(best.accesses, end, best.end)))
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
            before = _within(best.accesses, best.start, end)
            return Lease(self, Block(stream, best.segment, best.start, end, before))

    def empty_cache(self) -> None:
        """Give segments back that are free as a whole."""
        with self.ordering.lock:
            self.ordering.wait_for({actor: step for actor, step in self._all_steps().items()})
            self._collect()
            for ranges in self._free.values():
                for free in list(ranges):
                    if free.end - free.start == free.segment.size:
                        ranges.remove(free)
                        self.reserved -= free.segment.size

    def _all_steps(self) -> Clock:
        """Return the steps that waiting blocks need: giving memory back waits for the device."""
        steps: Clock = {}
        for clock, _ in self._waiting:
            for actor, step in clock.items():
                steps[actor] = max(step, steps.get(actor, 0))
        return steps

    def _new_range(self, size: int) -> Range:
        size = _SEGMENT if size <= _SMALL else -(-size // _SEGMENT) * _SEGMENT
        if self.reserved + size > self.allowed:
            self.empty_cache()
        if self.reserved + size > self.allowed:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {size} bytes do not fit into {self.allowed}")
        segment = Segment(self._next, size)
        self._next += size + _SEGMENT
        self.reserved += size
        return Range(segment, segment.start, segment.start + size, [])

    def _collect(self) -> None:
        """Put freed blocks back, as far as the streams that use them are done."""
        while self.freed:
            block = self.freed.popleft()
            clock: Clock = {}
            for user in block.users:
                clock[user] = self.ordering.snapshot(user)[user]
            self._waiting.append((clock, block))
        still = []
        for clock, block in self._waiting:
            if self.ordering.is_completed(clock):
                block.freed.update(clock)
                self._put_back(block)
            else:
                still.append((clock, block))
        self._waiting = still

    def _put_back(self, block: Block) -> None:
        self.in_use -= block.end - block.start
        made = Range(block.segment, block.start, block.end, [])
        # What the freeing thread has waited for is over. Behind the rest of its own stream another may use it again.
        made.accesses = [
            access
            for access in block.accesses
            if access.actor != block.stream and block.freed.get(access.actor, 0) < access.step
        ]
        last = max((a for a in block.accesses if a.actor == block.stream), key=lambda a: a.step, default=None)
        if last is not None and block.freed.get(block.stream, 0) < last.step:
            made.accesses.append(replace(last, first=block.start, end=block.end, writes=True))
        ranges = self._free.setdefault(block.stream, [])
        for free in list(ranges):
            if free.segment is made.segment and (free.end == made.start or made.end == free.start):
                ranges.remove(free)
                bounds = min(free.start, made.start), max(free.end, made.end)
                made = Range(made.segment, *bounds, [*free.accesses, *made.accesses])
        last = max((a for a in made.accesses if a.actor == block.stream), key=lambda a: a.step, default=None)
        if last is not None:
            made.accesses = [access for access in made.accesses if access.actor != block.stream]
            made.accesses.append(replace(last, first=made.start, end=made.end))
        ranges.append(made)


def _within(accesses: list[Access], start: int, end: int) -> list[Access]:
    """Return the parts of accesses that fall into [start, end)."""
    return [
        replace(access, first=max(start, access.first), end=min(end, access.end))
        for access in accesses
        if access.first < end and start < access.end
    ]
