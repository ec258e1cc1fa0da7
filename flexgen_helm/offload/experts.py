"""Experts on slower tiers, brought to the compute device once tokens are routed to them.

The router decides in the middle of a layer. Then exactly the chosen experts that no slot holds are loaded, in the
order of their use. What a slot holds stays until its memory is needed (`offload.expert_cache`), so hot experts are not
read again. While nothing else is loaded, experts that the next layer will probably choose are.

    computing  | layer 3: attention, router | expert 4 | expert 9 | layer 4: attention, router | …
    loaders             use_experts([4, 9]) | 4 | 9 |  4.7? 4.12?  (guesses)     | …
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flexgen_helm.offload.matrices import ExpertMatrix, OffloadedMatrix
from flexgen_helm.offload.prefetcher import num_loaders
from flexgen_helm.offload.transfer_stats import TransferStats
from flexgen_helm.planner.placement import GUESSED_SLOTS_SHARE, GUESSED_WASTE_SHARE

# Which experts staging memory holds, and which one gives its slot to the next. No threads, no tensors.

Key = TypeVar("Key", bound=Hashable)

# Uses for each known expert after which all counts are halved, so that what was hot once does not stay for ever.
_HALF_LIFE = 8


class ExpertCache(Generic[Key]):
    """Slots, and how often each expert was used."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[Key, int] = {}  # from the oldest to the newest
        self._free = [*range(num_slots - 1, -1, -1)]
        self._uses: dict[Key, float] = {}
        self._uses_left = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def slot(self, key: Key) -> int:
        return self._slots[key]

    def uses(self, key: Key) -> float:
        """Return how often an expert was used, old uses counted less."""
        return self._uses.get(key, 0.0)

    def note_use(self, key: Key) -> None:
        if not self._uses_left:
            self._uses = {known: count / 2 for known, count in self._uses.items()}
            self._uses_left = _HALF_LIFE * max(1, len(self._uses))
        self._uses_left -= 1
        self._uses[key] = self.uses(key) + 1

    def victim(self, keep: Container[Key], prefers: Callable[[Key], bool] = lambda key: False) -> Key | None:
        """Return the expert whose slot is worth least; None if all are in `keep`.

        prefers: those that are dropped last.
        """
        newest_first = [key for key in reversed(self._slots) if key not in keep]
        return min(newest_first, key=lambda key: (prefers(key), self.uses(key)), default=None)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def put(self, key: Key) -> int:
        """Give an expert a free slot."""
        assert key not in self._slots
        self._slots[key] = self._free.pop()
        return self._slots[key]

    def drop(self, key: Key) -> None:
        self._free.append(self._slots.pop(key))


@dataclass(eq=False)
class _Load:
    """An expert in a slot, or on its way there.

    is_guess: nobody has used it yet.
    """

    expert: str
    is_guess: bool
    is_done: bool = False
    error: BaseException | None = None


class ExpertStreamer:
    """Loads experts into slots. One thread uses them; errors of a loader surface where the expert is used."""

    def __init__(
        self,
        stored: Mapping[str, OffloadedMatrix],
        slots: Tensor,
        stats: TransferStats,
        overlap: bool,
        *,
        launched: Callable[[], torch.cuda.Event | None] = lambda: None,
        is_idle: Callable[[], bool] = lambda: True,
        wake: threading.Condition | None = None,
    ) -> None:
        """stored: expert -> its bytes, in pages.

        slots: memory [slots, bytes] on the compute device; a slot holds the largest expert.
        overlap: False loads each expert when it is used, in the thread that uses it, and guesses nothing.
        launched: of the device's copies; a slot is loaded once the last reader of its memory is done.
        is_idle: whether nothing else is loaded, so that guesses may be.
        wake: notified when `is_idle` may have changed.
        """
        self._stored, self._slots, self._stats, self._overlap = stored, slots, stats, overlap
        self._launched, self._is_idle = launched, is_idle
        self._readers: dict[int, torch.cuda.Event | None] = {}  # work that reads a slot
        self._cache: ExpertCache[str] = ExpertCache(len(slots))
        self._loads: dict[str, _Load] = {}  # what each slot holds
        self._wanted: deque[str] = deque()  # by the batch under way, in the order of use
        self._stage_used_again: str | None = None
        self._guess: tuple[Sequence[str], Tensor] | None = None  # experts of a stage and their scores
        self._guesses: deque[str] = deque()
        self._num_busy = 0
        self._closed = False
        self._wake = wake or threading.Condition()
        names = [f"experts loader {i}" for i in range(num_loaders(overlap) if overlap else 0)]
        self._loaders = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for loader in self._loaders:
            loader.start()

    def use(self, experts: Sequence[str], stage: str, used_again: bool) -> None:
        """Load the experts of a batch, in the order of their use.

        used_again: another batch uses the same stage next, so what is loaded now is dropped last.
        """
        with self._wake:
            self._wanted = deque(experts)
            self._stage_used_again = f"{stage}." if used_again else None
            if self._guesses and self._guesses[0].startswith(f"{stage}."):
                self._guesses.clear()
            for expert in experts:
                self._cache.note_use(expert)
                if expert in self._loads:
                    self._loads[expert].is_guess = False
            self._wake.notify_all()

    def matrix(self, matrix: ExpertMatrix) -> Tensor:
        """Return a matrix of an expert that the batch uses, in its storage format; wait until it is loaded.

        The experts before it are given up.
        """
        expert = matrix.expert
        with self._wake:
            assert expert in self._wanted, f"{expert} was not asked for, or is used in another order"
            while self._wanted[0] != expert:
                self._give_up()
        if not self._overlap and expert not in self._loads:
            with self._wake:
                load = self._next_wanted()
                assert load is not None and load.expert == expert
            self._fill(load)
        load = self._wait(expert)
        if load.error is not None:
            raise load.error
        return matrix.view(self._slots[self._cache.slot(expert)])

    def finish(self) -> None:
        """End the use of a stage by a batch."""
        with self._wake:
            while self._wanted:
                self._give_up()

    def guess(self, experts: Sequence[str], scores: Tensor) -> None:
        """Load likely experts of the next stage while nothing else is loaded, within a small share of all bytes.

        experts: of the stage, those that are offloaded or not, by number.
        scores: how likely each is [E], on any device; 0 for one that is not expected.
        """
        if self._overlap:
            with self._wake:
                self._guess = experts, scores
                self._wake.notify_all()

    def cancel(self) -> None:
        """Forget what was asked for; wait for loads under way. What slots hold stays."""
        with self._wake:
            while self._wanted:
                self._give_up()
            self._guesses.clear()
            self._guess = self._stage_used_again = None
            self._wake.wait_for(lambda: not self._num_busy)
            for load in [load for load in self._loads.values() if not load.is_done or load.error is not None]:
                self._drop(load.expert)

    def close(self) -> None:
        self.cancel()
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for loader in self._loaders:
            loader.join()

    def _give_up(self) -> None:
        """Let the slot of the first wanted expert be reused; holds the lock."""
        expert = self._wanted.popleft()
        load = self._loads.get(expert)
        if load is not None and load.error is not None:
            self._drop(expert)
        elif load is not None:
            self._readers[self._cache.slot(expert)] = self._launched()
        self._wake.notify_all()

    def _wait(self, expert: str) -> _Load:
        def is_loaded() -> bool:
            return expert in self._loads and self._loads[expert].is_done

        with self._wake:
            if not is_loaded():
                with self._stats.timed("wait_weights", expert):
                    self._wake.wait_for(is_loaded)
            return self._loads[expert]

    # --- Loaders ---
    def _work(self) -> None:
        """Load until the streamer is closed; runs in each loader thread."""
        while True:
            with self._wake:
                while (job := self._next_job()) is None:
                    if self._closed:
                        return
                    self._wake.wait()
                self._num_busy += 1
            try:
                with suppress(Exception):  # of a guess, which costs nothing; a load keeps its error for its use
                    job()
            finally:
                with self._wake:
                    self._num_busy -= 1
                    self._wake.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """Return what is most urgent; None if there is nothing to do, or no room."""
        if (load := self._next_wanted() or self._next_guess()) is not None:
            return partial(self._fill, load)
        if self._guess is not None:
            guess, self._guess = self._guess, None
            return partial(self._rank, *guess)
        return None

    def _next_wanted(self) -> _Load | None:
        """Begin the first wanted load that no slot holds; None if there is none, or no room."""
        for place, expert in enumerate(self._wanted):
            if expert not in self._loads:
                has_room = self._cache.has_free_slot or self._make_room(place)
                return self._begin(expert, is_guess=False) if has_room else None
        return None

    def _make_room(self, place: int) -> bool:
        """Free a slot for the wanted expert at `place` in the order of use; return False if it must wait."""
        victim = self._cache.victim(self._kept(), self._is_used_again)
        if victim is None and not any(earlier in self._loads for earlier in list(self._wanted)[:place]):
            # Every slot holds an expert that is wanted later, and none will be given up before this one is used.
            done = (later for later in reversed(self._wanted) if later in self._loads and self._loads[later].is_done)
            victim = next(done, None)
        if victim is None:
            return False
        self._drop(victim)
        return True

    def _next_guess(self) -> _Load | None:
        """Begin the likeliest guess that may be read now; None if there is none."""
        while self._guesses and self._is_idle() and not self._num_loading():
            unused = [load.expert for load in self._loads.values() if load.is_guess]
            if len(unused) >= max(1, int(GUESSED_SLOTS_SHARE * len(self._slots))):
                self._guesses.clear()
                break
            expert = self._guesses.popleft()
            is_allowed = expert not in self._loads and self._may_read(expert, unused)
            if is_allowed and self._make_room_for_guess(expert, unused):
                return self._begin(expert, is_guess=True)
        return None

    def _may_read(self, expert: str, unused: Sequence[str]) -> bool:
        """Return whether wrong guesses stay within their share, even if this and all unused ones are wrong."""
        counts = self._stats.experts
        risk = counts.wasted_bytes + sum(map(self._size, unused)) + self._size(expert)
        return risk <= GUESSED_WASTE_SHARE * counts.routed_bytes

    def _make_room_for_guess(self, expert: str, unused: Sequence[str]) -> bool:
        """Free a slot whose expert is worth no more than the guess: used no more often, and not by the next batch."""
        if self._cache.has_free_slot:
            return True
        victim = self._cache.victim({*self._kept(), *unused}, self._is_used_again)
        if victim is None or self._is_used_again(victim) or self._cache.uses(victim) > self._cache.uses(expert):
            return False
        self._drop(victim)
        return True

    def _kept(self) -> set[str]:
        """Return the experts that must keep their slots."""
        return {*self._wanted, *(load.expert for load in self._loads.values() if not load.is_done)}

    def _is_used_again(self, expert: str) -> bool:
        return self._stage_used_again is not None and expert.startswith(self._stage_used_again)

    def _num_loading(self) -> int:
        return sum(not load.is_done for load in self._loads.values())

    def _size(self, expert: str) -> int:
        return self._stored[expert].num_bytes

    def _begin(self, expert: str, is_guess: bool) -> _Load:
        self._cache.put(expert)
        load = self._loads[expert] = _Load(expert, is_guess)
        return load

    def _drop(self, expert: str) -> None:
        load = self._loads.pop(expert)
        self._cache.drop(expert)
        if load.is_guess and load.error is None:
            self._stats.count_expert_reads(0, wasted_bytes=self._size(expert))

    def _fill(self, load: _Load) -> None:
        try:
            stored, slot = self._stored[load.expert], self._cache.slot(load.expert)
            with self._stats.timed("load_weights", load.expert):
                if (readers := self._readers.get(slot)) is not None:
                    readers.synchronize()
                stored.fetch(0, stored.shape[0], self._slots[slot])
            self._stats.count_expert_reads(self._size(load.expert))
        except BaseException as error:  # surfaces where the expert is used; a loader that died would hang everyone
            load.error = error
        with self._wake:
            load.is_done = True
            if load.error is not None and load.is_guess:
                self._drop(load.expert)  # read again, and reported, if it is used
            self._wake.notify_all()

    def _rank(self, experts: Sequence[str], scores: Tensor) -> None:
        """Turn scores into guesses, the likeliest first; here a device is waited for without holding others up."""
        likely = sorted(enumerate(scores.tolist()), key=lambda pair: -pair[1])
        with self._wake:
            if not self._wanted or self._wanted[0] not in experts:  # else the stage has begun
                names = (experts[number] for number, score in likely if score > 0)
                self._guesses = deque(name for name in names if name in self._stored)
