"""What happens before what: vector clocks of streams and host threads, and the accesses that
nothing orders.

An actor is a stream or a host thread. Each has a clock: for every actor, how many of its steps are
certainly over.
Launching, recording and waiting for events, synchronizing, and locks and futures between threads
join clocks. Two accesses of overlapping bytes, one of which writes, are a race if neither is
certainly over when the other begins.

CUDA's own order in time plays no role, so a race is found in every run, whatever the timing.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = dict[int, int]
# Places in the package, the innermost first: (file, line).
Trail = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [first, end) that an actor read or wrote in one of its steps."""

    first: int
    end: int
    actor: int
    step: int
    writes: bool
    what: str
    trail: Trail


@dataclass(slots=True)
class Recording:
    """One `record` of an event: the clock of its stream, and when a host thread asked for it."""

    clock: Clock
    thread: int
    step: int


@dataclass
class Ordering:
    """Clocks of all actors. Thread-safe.

    races: pair of accesses, as text -> how often.
    completed: steps of streams that some host thread has waited for.
    describe: an access's trail as text.
    """

    describe: Callable[[Trail], str]
    races: Counter[tuple[str, str]] = field(default_factory=Counter)
    completed: Clock = field(default_factory=dict)

    def __post_init__(self):
        self.lock = threading.RLock()
        self._clocks: dict[int, Clock] = {}
        self._names: dict[int, str] = {}
        self._threads: set[int] = set()
        self._numbers = itertools.count(1)
        self._own = threading.local()

    def new_actor(self, name):
        with self.lock:
            actor = next(self._numbers)
            self._clocks[actor], self._names[actor] = {actor: 1}, name
            return actor

    def thread(self):
        """Return the calling thread's actor."""
        actor: int | None = getattr(self._own, "actor", None)
        if actor is None:
            # Not by `current_thread`, which a thread may not ask before it has begun.
            actor = self._own.actor = self.new_actor(f"thread {threading.get_ident()}")
            self._threads.add(actor)
        return actor

    def name_thread(self, name):
        self._names[self.thread()] = f"thread {name}"

    def join(self, actor, clock):
        """Let what an actor does from now on happen after `clock`."""
        with self.lock:
            known = self._clocks[actor]
            for actor, step in clock.items():
                if known.get(actor, 0) < step:
                    known[actor] = step

    def snapshot(self, actor):
        with self.lock:
            return dict(self._clocks[actor])

    def launch(self, stream):
        """Begin a step of a stream, after all that the calling thread did."""
        self.join(stream, self._clocks[self.thread()])
        self.step(stream)

    def step(self, actor):
        with self.lock:
            self._clocks[actor][actor] += 1

    def wait_for(self, clock):
        """Let the calling thread wait until `clock` is over.

        It learns nothing of what other threads did: a stream that orders them does so by chance of
        their speed.
        """
        with self.lock:
            clock = {actor: step for actor, step in clock.items() if actor not in self._threads}
            self.join(self.thread(), clock)
            for actor, step in clock.items():
                self.completed[actor] = max(step, self.completed.get(actor, 0))

    def begins(self, stream, first, end):
        """Return what a new block begins with: its bytes may be those that the stream's last step
        used.
        """
        step = self.snapshot(stream)[stream]
        return (
            [Access(first, end, stream, step, True, "earlier use of the memory", ())]
            if step > 1
            else []
        )

    def reuse(self, accesses, stream, users):
        """Count the accesses of a freed block that its stream, the freeing thread, and all waits
        leave unordered.
        """
        with self.lock:
            for clock in (self._clocks[self.thread()], self.completed, self._clocks[stream]):
                accesses = [old for old in accesses if clock.get(old.actor, 0) < old.step]
            for old in accesses:
                if old.actor not in users:
                    self.races[self._text(old), f"memory of {self._names[stream]} is freed"] += 1

    def record(self, stream):
        with self.lock:
            thread = self.thread()
            self.join(stream, self._clocks[thread])
            self.step(thread)
            return Recording(self.snapshot(stream), thread, self._clocks[thread][thread])

    def certain(self, recordings):
        """Return the clock of the latest recording that surely came before the calling thread looks
        at the event.
        """
        with self.lock:
            known = self._clocks[self.thread()]
            for recording in reversed(recordings):
                if known.get(recording.thread, 0) >= recording.step:
                    return recording.clock
            return {}

    def access(self, accesses, first, end, actor, writes, what, trail):
        """Add an access in the actor's current step to those of some memory; count those that it
        races with.
        """
        with self.lock:
            clock, kept = self._clocks[actor], []
            for old in accesses:
                if old.first < end and first < old.end:
                    is_ordered = clock.get(old.actor, 0) >= old.step
                    if not is_ordered and (writes or old.writes):
                        self.races[self._text(old), self._text_of(actor, writes, what, trail)] += 1
                    # Whatever is ordered behind the new access is ordered behind this one too.
                    if (
                        is_ordered
                        and first <= old.first
                        and old.end <= end
                        and (writes or not old.writes)
                    ):
                        continue
                kept.append(old)
            accesses[:] = [*kept, Access(first, end, actor, clock[actor], writes, what, trail)]

    def _text(self, access):
        return self._text_of(access.actor, access.writes, access.what, access.trail)

    def _text_of(self, actor, writes, what, trail):
        return (
            f"{what} {'writes' if writes else 'reads'} on {self._names[actor]} at "
            f"{self.describe(trail)}"
        )


class TrackedLock:
    """A lock that orders what its holders do one after the other."""

    def __init__(self, ordering, lock):
        self._ordering, self._lock, self._clock = ordering, lock, dict[int, int]()

    def acquire(self, blocking=True, timeout=-1):
        if not self._lock.acquire(blocking, timeout):
            return False
        self._join()
        return True

    def release(self):
        self._leave()
        self._lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()

    def locked(self):
        return self._lock.locked()

    def _at_fork_reinit(self):
        self._lock._at_fork_reinit()

    def _join(self):
        self._ordering.join(self._ordering.thread(), self._clock)

    def _leave(self):
        with self._ordering.lock:
            thread = self._ordering.thread()
            for actor, step in self._ordering.snapshot(thread).items():
                self._clock[actor] = max(step, self._clock.get(actor, 0))


class TrackedRLock(TrackedLock):
    """The same for `threading.RLock`, with what `threading.Condition` asks of one."""

    def _release_save(self):
        self._leave()
        return self._lock._release_save()

    def _acquire_restore(self, state):
        self._lock._acquire_restore(state)
        self._join()

    def _is_owned(self):
        return self._lock._is_owned()
