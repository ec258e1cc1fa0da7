"""A ring of staging memory: blocks are taken in order by one thread and given back by another."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.planner.constants import ALIGNMENT

# Memory from here on comes in large pages (2 MiB on most machines).
_LARGE = 4 << 20


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pages(num_bytes: int) -> Tensor:
    """Page-aligned host memory [num_bytes rounded up to whole pages], zero, and not resident until it is written.

    In large pages where it is large and the system has them: direct I/O looks every page up.
    """
    memory = mmap.mmap(-1, max(ALIGNMENT, aligned(num_bytes)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


class RingCancelled(Exception):
    """The waiting for room was called off."""


@dataclass(eq=False)
class RingSlot:
    """`size` bytes of the ring from `offset` on, both aligned."""

    offset: int
    size: int
    given_back: bool = False


class StagingRing:
    """`capacity` bytes of page-aligned memory, of which blocks are reused first in, first out.

    A block that is given back early is reused only when all older ones are back too: the users here (weights in the
    order of a pass) give back in that order anyway. One thread takes, any may give.

        | free |  oldest … newest  | free |        take behind the newest, or from the start again
    """

    def __init__(self, capacity: int, memory: Tensor | None = None) -> None:
        """memory: of `capacity` bytes on any device; None for pages of this process, not resident until written."""
        self.capacity = aligned(capacity)
        memory = pages(self.capacity) if memory is None else memory
        assert memory.numel() == self.capacity
        self._memory = memory
        self._blocks: deque[RingSlot] = deque()
        self._changed = threading.Condition()
        self._cancelled = False

    def acquire(self, num_bytes: int) -> RingSlot:
        """Wait until a block has room; raises `RingCancelled` once `cancel` was called."""
        size = aligned(num_bytes)
        assert 0 < size <= self.capacity, f"a block of {size} bytes in a ring of {self.capacity}"
        with self._changed:
            while True:
                if self._cancelled:
                    raise RingCancelled
                offset = self._room(size)
                if offset is not None:
                    block = RingSlot(offset, size)
                    self._blocks.append(block)
                    return block
                self._changed.wait()

    def release(self, block: RingSlot) -> None:
        with self._changed:
            assert not block.given_back
            block.given_back = True
            while self._blocks and self._blocks[0].given_back:
                self._blocks.popleft()
            self._changed.notify_all()

    def bytes_of(self, block: RingSlot) -> Tensor:
        """The block's memory [size] as bytes."""
        return self._memory[block.offset : block.offset + block.size]

    @property
    def in_use(self) -> int:
        with self._changed:
            return sum(block.size for block in self._blocks)

    def cancel(self) -> None:
        """Call off the wait for room, now and until `resume`."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._cancelled = False

    def _room(self, size: int) -> int | None:
        if not self._blocks:
            return 0
        first, last = self._blocks[0].offset, self._blocks[-1].offset + self._blocks[-1].size
        if self._blocks[-1].offset >= first:  # not wrapped: free behind the newest and before the oldest
            if last + size <= self.capacity:
                return last
            return 0 if size <= first else None
        return last if last + size <= first else None
