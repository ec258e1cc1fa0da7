"""Page-aligned host memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.shared_sizes import ALIGNMENT, aligned

# Allocations from this size on ask for huge pages (2 MiB on most machines).
_HUGE_PAGES_FROM = 4 << 20
# Bytes of an allocation that tensors share: what no tensor uses was never written, and takes no
# memory.
_PAGES_BYTES, _LINE_BYTES = 64 << 20, 64


def pages(num_bytes: int) -> Tensor:
    """Allocate page-aligned, zeroed host memory [num_bytes rounded up to whole pages].

    The system provides a page when it is first written. Large allocations use huge pages where the
    system has them, because direct I/O looks up every page.
    """
    memory = mmap.mmap(
        -1, max(ALIGNMENT, aligned(num_bytes)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if num_bytes >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


class Pages:
    """Hands out parts of large allocations, whose huge pages tensors share that are smaller than
    one.

    A processor looks up every page that it reads: a plain sum of 300 MB takes 0.75 of the time in
    huge pages. An allocation is freed with its last tensor.
    """

    def __init__(self) -> None:
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that begins at a line of the cache."""
        num_bytes = prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._memory):
            self._memory, self._used = pages(max(_PAGES_BYTES, num_bytes)), 0
        part = self._memory[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return part.view(dtype).view(*shape)
