"""Experts on slower tiers, brought to the compute device once tokens are routed to them.

The router decides in the middle of a layer. Then exactly the chosen experts that no slot holds are loaded, in the
order of their use. What a slot holds stays until its memory is needed, so hot experts are not read again. While
nothing else is loaded, experts that the next layer will probably choose are.

    computing  | layer 3: attention, router | expert 4 | expert 9 | layer 4: attention, router | …
    loaders                    use([4, 9])  | 4 | 9 |  4.7? 4.12?  (guesses)     | …
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexgen_helm.offload.matrices import Expert
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.placement import GUESSED_SLOTS_SHARE, GUESSED_WASTE_SHARE, NUM_LOADERS

# Uses for each known expert after which all counts are halved, so that what was hot once does not stay for ever.
_HALF_LIFE = 8
# Seconds after which a guess looks again whether other weights are on their way.
_POLL_S = 0.001


@dataclass(eq=False)
class _Load:
    """An expert in a slot, or on its way there.

    matrices: by name, in the slot.
    is_guess: nobody has used it yet.
    """

    slot: int
    matrices: Future[dict[str, Tensor]]
    is_guess: bool = False


class ExpertStreamer:
    """Loads experts into slots, in background threads; for the computing thread. Errors surface at the use.

    Guesses are made by a background thread, which nothing else runs beside: the next call ends them first.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        slots: Tensor,
        tiers: TransferManager,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        """slots: memory [slots, bytes] on the compute device; a slot holds the largest expert.

        is_idle: whether no other weights are on their way, so that guesses may be.
        """
        self._experts, self._slots, self._tiers, self._is_idle = experts, slots, tiers, is_idle
        self._free = list(range(len(slots)))
        self._readers: dict[int, torch.cuda.Event | None] = {}  # work that reads a slot
        self._loads: dict[str, _Load] = {}  # what slots hold, from the oldest to the newest
        self._uses: dict[str, float] = {}  # old ones count less
        self._uses_left = 0
        self._wanted: deque[str] = deque()  # by the batch under way, in the order of use
        self._stage_used_again: str | None = None
        self._guessing: Future[None] | None = None
        self._ends_guessing = threading.Event()

    def use(self, experts: Sequence[str], stage: str, used_again: bool) -> None:
        """Load the experts of a batch, in the order of their use.

        used_again: another batch uses the same stage next, so what is loaded now is dropped last.
        """
        self._end_guessing()
        self._wanted = deque(experts)
        self._stage_used_again = f"{stage}." if used_again else None
        for expert in experts:
            if not self._uses_left:
                self._uses = {known: count / 2 for known, count in self._uses.items()}
                self._uses_left = _HALF_LIFE * max(1, len(self._uses))
            self._uses_left -= 1
            self._uses[expert] = self._uses.get(expert, 0.0) + 1
            if expert in self._loads:
                self._loads[expert].is_guess = False
        self._load_wanted()

    def matrix(self, expert: str, name: str) -> Tensor:
        """Return a matrix of an expert that the batch uses, in its storage format; wait until it is loaded.

        The experts before it are given up.
        """
        assert expert in self._wanted, f"{expert} was not asked for, or is used in another order"
        while self._wanted[0] != expert:
            self._give_up()
        self._load_wanted()
        return self._tiers.wait(self._loads[expert].matrices, "weights")[name]

    def finish(self) -> None:
        """End the use of a stage by a batch."""
        while self._wanted:
            self._give_up()

    def guess(self, experts: Sequence[str], scores: Tensor) -> None:
        """Load likely experts of the next stage while nothing else is loaded, within a small share of all bytes.

        experts: of the stage, those that are offloaded or not, by number.
        scores: how likely each is [E], on any device; 0 for one that is not expected.
        """
        if self._tiers.overlap and self._guessing is None and not self._wanted:
            guess = partial(self._guess, experts, scores)
            self._guessing = self._tiers.submit("experts loader", guess, NUM_LOADERS)

    def cancel(self) -> None:
        """Forget what was asked for; wait for loads under way. What slots hold stays."""
        self._end_guessing()
        self.finish()
        self._stage_used_again = None
        for expert in [name for name, load in self._loads.items() if load.matrices.exception() is not None]:
            self._drop(expert)

    def _load_wanted(self) -> None:
        """Begin to load wanted experts that no slot holds, as far as there is room."""
        for position, expert in enumerate(self._wanted):
            if expert in self._loads:
                continue
            if not self._free:
                victim = self._victim()
                if victim is None and not any(self._wanted[earlier] in self._loads for earlier in range(position)):
                    # Every slot holds an expert that is wanted later, and none is given up before this one is used.
                    victim = next(later for later in reversed(self._wanted) if later in self._loads)
                if victim is None:
                    return
                self._drop(victim)
            slot = self._free.pop()
            load = self._tiers.submit("experts loader", partial(self._load, expert, slot), NUM_LOADERS)
            self._loads[expert] = _Load(slot, load)

    def _give_up(self) -> None:
        """Let the slot of the first wanted expert be reused."""
        expert = self._wanted.popleft()
        if (load := self._loads.get(expert)) is None:
            return
        self._readers[load.slot] = self._tiers.launched()
        if load.matrices.done() and load.matrices.exception() is not None:
            self._drop(expert)

    def _victim(self, unused: Sequence[str] = ()) -> str | None:
        """Return the expert whose slot is worth least, of equals the newest; None if all are wanted, or in `unused`."""
        newest_first = [name for name in reversed(self._loads) if name not in self._wanted and name not in unused]
        return min(newest_first, key=self._worth, default=None)

    def _worth(self, expert: str) -> tuple[bool, float]:
        """Return whether the next batch may use it, and how often it was used."""
        is_next = self._stage_used_again is not None and expert.startswith(self._stage_used_again)
        return is_next, self._uses.get(expert, 0.0)

    def _drop(self, expert: str) -> None:
        """Free the slot of an expert, once it is loaded."""
        load = self._loads.pop(expert)
        if load.matrices.exception() is None and load.is_guess:
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

    # Guesses

    def _end_guessing(self) -> None:
        if self._guessing is not None:
            self._ends_guessing.set()
            self._guessing.exception()  # waits; a guess that fails costs nothing
            self._guessing = None
            self._ends_guessing.clear()

    def _guess(self, experts: Sequence[str], scores: Tensor) -> None:
        """Load the likeliest experts, one by one, until the next call; here a device is waited for."""
        likely = sorted(enumerate(scores.tolist()), key=lambda pair: -pair[1])
        for expert in [experts[number] for number, score in likely if score > 0]:
            while not self._is_idle() and not self._ends_guessing.wait(_POLL_S):
                pass
            unused = [name for name, load in self._loads.items() if load.is_guess]
            if self._ends_guessing.is_set() or len(unused) >= max(1, int(GUESSED_SLOTS_SHARE * len(self._slots))):
                return
            if expert in self._loads or expert not in self._experts:
                continue
            # Wrong guesses stay within their share, even if this and all unused ones are wrong.
            counts, guesses = self._tiers.stats.experts, [*unused, expert]
            risk = counts.wasted_bytes + sum(self._experts[guess].num_bytes for guess in guesses)
            if risk > GUESSED_WASTE_SHARE * counts.routed_bytes:
                continue
            if not self._free:
                victim = self._victim(unused)
                # With the use that is guessed, whose load would take that slot anyway.
                if victim is None or self._worth(victim) > (False, self._uses.get(expert, 0.0) + 1):
                    continue
                self._drop(victim)
            slot, loaded = self._free.pop(), Future[dict[str, Tensor]]()
            try:
                loaded.set_result(self._load(expert, slot))
            except BaseException:
                self._free.append(slot)  # read again, and reported, if it is used
                raise
            self._loads[expert] = _Load(slot, loaded, is_guess=True)
