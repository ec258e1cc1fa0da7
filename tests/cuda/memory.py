"""Memory of the device, as PyTorch's caching allocator hands it out: of a pool for each stream.

A block that is freed goes back to its stream's pool, whatever still reads it. So another stream
that uses it must be waited for before, by that stream or by the host, or be named by
`record_stream`; and it must wait for what its own stream did before the block was handed out.
"""

from __future__ import annotations

import torch

from tests.cuda.ordering import Access

_UNIT = 512  # bytes; sizes are rounded up


class Block:
    """Allocated bytes, which its tensors share: when the last one is gone, they are free.

    users: streams that `record_stream` named.
    """

    def __init__(self, allocator, stream, start, size):
        self.allocator, self.stream, self.start, self.size = allocator, stream, start, size
        self.accesses: list[Access] = allocator.ordering.begins(stream, start, start + size)
        self.users: set[int] = {stream}

    def __del__(self):
        self.allocator.in_use -= self.size
        self.allocator.ordering.reuse(self.accesses, self.stream, self.users)


class Allocator:
    """One device's memory.

    total: bytes of the device; allowed: of them, to this process.
    failing: numbers of coming allocations, from 0 on, that find no memory.
    """

    def __init__(self, ordering, total, first):
        self.ordering, self.total, self.allowed = ordering, total, total
        self.in_use, self.peak, self.num_allocations = 0, 0, 0
        self.failing: set[int] = set()
        self._next = first

    def allocate(self, num_bytes, stream):
        size = max(_UNIT, -(-num_bytes // _UNIT) * _UNIT)
        with self.ordering.lock:
            self.num_allocations += 1
            if self.num_allocations - 1 in self.failing or self.in_use + size > self.allowed:
                raise torch.OutOfMemoryError(f"CUDA out of memory. {size} bytes of {self.allowed}")
            self._next += size
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
            return Block(self, stream, self._next - size, size)
