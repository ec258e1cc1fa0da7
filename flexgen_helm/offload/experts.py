"""Experts on slower tiers, brought to the compute device once tokens are routed to them.

The router decides in the middle of a layer. Then exactly the chosen experts that no slot holds are
loaded, in the order of their use, and behind them those that the next layer is expected to use.
What a slot holds stays until its memory is needed, so hot experts are not read again.

    computing  | layer 3: attention, router | expert 4 | expert 9 | layer 4: attention, router | …
    loaders                    use([4, 9])  | 4 | 9 |  4.0 | 4.1 | …  (as far as slots are free)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexgen_helm.offload.matrices import OffloadedMatrix
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.shared_sizes import ALIGNMENT, NUM_LOADERS, aligned

# Uses for each known expert after which all counts are halved, so that what was hot once does not
# stay for ever.
_USES_PER_HALVING = 8


@dataclass(eq=False)
class _Load:
    """An expert in a slot, or on its way there.

    matrices: by name, in the slot.
    is_expected: it was loaded ahead, and no use has asked for it yet.
    """

    slot: int
    matrices: Future[dict[str, Tensor]]
    is_expected: bool


class Expert:
    """The matrices of an expert on another tier, which are fetched together.

    num_bytes: of the memory that a fetch needs. Each matrix begins at a page there, and has one
        more, because a read may begin in the middle of a page.
    """

    def __init__(self, matrices: Mapping[str, OffloadedMatrix]) -> None:
        """matrices: by name."""
        self._matrices: dict[str, tuple[OffloadedMatrix, int]] = {}  # with its offset
        self.num_bytes = 0
        for name, matrix in matrices.items():
            self._matrices[name] = matrix, self.num_bytes
            self.num_bytes += aligned(matrix.num_bytes) + ALIGNMENT

    def fetch(self, slot: Tensor) -> dict[str, Tensor]:
        """Fetch all matrices to memory [num_bytes] on the compute device, in their storage
        format.
        """
        return {
            name: matrix.fetch(0, matrix.shape[0], slot[offset:])
            for name, (matrix, offset) in self._matrices.items()
        }


class ExpertStreamer:
    """Loads experts into slots, in background threads; for the computing thread. Errors surface at
    the use.
    """

    def __init__(
        self, experts: Mapping[str, Expert], slots: Tensor, tiers: TransferManager
    ) -> None:
        """slots: memory [slots, bytes] on the compute device; a slot holds the largest expert."""
        self._experts, self._slots, self._tiers = experts, slots, tiers
        self._free = list(range(len(slots)))
        # work that reads a slot, of the expert that was released last
        self._readers: dict[int, torch.cuda.Event | None] = {}
        self._loads: dict[str, _Load] = {}  # what slots hold, from the oldest to the newest
        self._uses: dict[str, float] = {}  # by expert; old uses count less
        self._uses_until_halved = 0
        self._wanted: deque[str] = deque()  # in the order of use
        self._expected: Sequence[str] = ()

    def use(self, experts: Sequence[str], expected: Sequence[str] = ()) -> None:
        """Load experts in the order of their use, and then those that are expected to be used
        next.
        """
        self._release_until(None)
        self._wanted, self._expected = deque(experts), expected
        for expert in experts:
            if not self._uses_until_halved:
                self._uses = {known: count / 2 for known, count in self._uses.items()}
                self._uses_until_halved = _USES_PER_HALVING * max(1, len(self._uses))
            self._uses_until_halved -= 1
            self._uses[expert] = self._uses.get(expert, 0.0) + 1
            if expert in self._loads:
                self._loads[expert].is_expected = False
        self._load_ahead()

    def matrix(self, expert: str, name: str) -> Tensor:
        """Return a matrix of an expert that is wanted, in its storage format; wait until it is
        loaded.

        The wanted experts before it are released.
        """
        assert expert in self._wanted, f"{expert} was not asked for, or is used in another order"
        if self._wanted[0] != expert or expert not in self._loads:
            self._release_until(expert)
            self._load_ahead()
        return self._tiers.wait(self._loads[expert].matrices, "weights")[name]

    def finish(self) -> None:
        """End the use of the experts that were asked for."""
        self._release_until(None)
        self._load_ahead()

    def cancel(self) -> None:
        """Forget what was asked for and expected; wait for loads under way. What slots hold
        stays.
        """
        self._expected = ()
        self.finish()
        for expert in [
            name for name, load in self._loads.items() if load.matrices.exception() is not None
        ]:
            self._evict(expert)

    def _load_ahead(self) -> None:
        """Begin to load what no slot holds of the wanted and the expected experts, as far as there
        is room.
        """
        needed = [*self._wanted, *(self._expected if self._tiers.overlap else ())]
        for position, expert in enumerate(needed):
            if expert in self._loads:
                continue
            if not self._free:
                evicted = self._choose_evicted(needed, position)
                if evicted is None:
                    return
                self._evict(evicted)
            slot = self._free.pop()
            load = self._tiers.submit(
                "experts loader", partial(self._load, expert, slot), NUM_LOADERS
            )
            self._loads[expert] = _Load(slot, load, position >= len(self._wanted))

    def _release_until(self, next_used: str | None) -> None:
        """End the use of the wanted experts before `next_used` (None: of all), so that their slots
        may be reused.
        """
        while self._wanted and self._wanted[0] != next_used:
            expert = self._wanted.popleft()
            if (load := self._loads.get(expert)) is None:
                continue
            self._readers[load.slot] = self._tiers.launched()
            if load.matrices.done() and load.matrices.exception() is not None:
                self._evict(expert)

    def _choose_evicted(self, needed: Sequence[str], position: int) -> str | None:
        """Return the expert whose slot `needed[position]` takes; None where that one must wait.

        needed: the wanted experts, then the expected ones.

        First goes an expert that nobody needs: the least used, of equals the newest. If there is
        none, an expected expert waits; a wanted one takes the slot of the last expected one; and
        the wanted one that is used next takes even that of the last wanted one.
        """
        unneeded = self._loads.keys() - needed
        if unneeded:
            newest_first = [name for name in reversed(self._loads) if name in unneeded]
            return min(newest_first, key=lambda name: self._uses.get(name, 0.0))
        if position >= len(self._wanted):
            return None
        last = next(name for name in reversed(needed) if name in self._loads)
        return last if position == 0 or last not in self._wanted else None

    def _evict(self, expert: str) -> None:
        """Free the slot of an expert, once it is loaded."""
        load = self._loads.pop(expert)
        if load.matrices.exception() is None and load.is_expected:
            self._tiers.stats.count_expert_reads(0, wasted_bytes=self._experts[expert].num_bytes)
        self._free.append(load.slot)

    def _load(self, expert: str, slot: int) -> dict[str, Tensor]:
        """Runs in a background thread."""
        with self._tiers.stats.timed("load_weights"):
            if (readers := self._readers.get(slot)) is not None:
                readers.synchronize()
            matrices = self._experts[expert].fetch(self._slots[slot])
        self._tiers.stats.count_expert_reads(self._experts[expert].num_bytes)
        return matrices
