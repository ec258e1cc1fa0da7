"""Simulated time of the device in host memory: how long copies, products and threads take, and what overlaps.

Threads run one at a time, each until it blocks; what blocks is known, because locks are those of the clock. Time passes
only while all threads are blocked, to the next moment at which one goes on. So what a run takes does not depend on the
machine, nor on the speed of Python: a thread takes no time but where it says so (`host`, `wake_s`).

    stream of products   | attention, layer 3 | MLP, layer 3 |        lanes: first in, first out
    stream of a loader        | unit | unit |                         a unit's copy takes its bytes by the link's rate
    resources            compute, in, out: each runs one operation at a time, of the lane that was ready first
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_RESOURCES = {"copy to the device": "in", "copy to the host": "out"}


@dataclass(eq=False)
class Op:
    """One operation of a lane. after: of another lane, which ends before this one begins."""

    resource: str
    seconds: float
    after: Op | None
    begun: bool = False
    done: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Lane:
    """A stream: operations that are not done; last: the latest one, done or not."""

    ops: deque[Op] = field(default_factory=deque)
    last: Op | None = None


class Clock:
    """The simulated time of one machine, in seconds; made by the thread that runs first.

    rates: bytes a second of 'compute', 'in' and 'out'; a kernel takes the time of the bytes that it reads and writes.
    wake_s: what a thread that waited for the device takes to go on.
    busy: seconds by resource, and of 'host'.
    """

    def __init__(self, wake_s: float = 0.0, **rates: float) -> None:
        self.now, self.wake_s, self.rates = 0.0, wake_s, {"compute": 1e9, "in": 1e9, "out": 1e9, **rates}
        self.busy: Counter[str] = Counter()
        self._queues: defaultdict[str, deque[tuple[Lane, Op]]] = defaultdict(deque)
        self._serving: set[str] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._mutex = _thread.allocate_lock()
        self._ready: deque[Any] = deque()
        self._blocked: set[Any] = set()
        self._coming, self._is_dead = 0, False
        self._own = threading.local()
        self._running: Any = None
        self._gate()

    # Threads: one runs, and hands on when it blocks

    def starts(self) -> None:
        """Expect a new thread."""
        self._coming += 1

    def ends(self) -> None:
        """Let the calling thread end."""
        self._hand_on()

    def block(self) -> None:
        """Wait until `wake`."""
        gate = self._gate()
        self._blocked.add(gate)
        self._hand_on()
        gate.acquire()
        self._blocked.discard(gate)
        if self._is_dead:
            raise RuntimeError("all threads wait for each other")

    def wake(self, gate: Any) -> None:
        with self._mutex:
            if self._running is None:
                self._running = gate
                gate.release()
            else:
                self._ready.append(gate)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time, next(self._numbers), action))

    def sleep(self, seconds: float) -> None:
        gate = self._gate()
        self.at(self.now + seconds, lambda: self.wake(gate))
        self.block()

    def host(self, seconds: float) -> None:
        """Let the calling thread compute."""
        self.busy["host"] += seconds
        self.sleep(seconds)

    def _gate(self) -> Any:
        """Return what the calling thread waits at; one that is new waits for its turn."""
        gate = getattr(self._own, "gate", None)
        if gate is None:
            gate = self._own.gate = _thread.allocate_lock()
            gate.acquire()
            with self._mutex:
                self._coming = max(0, self._coming - 1)
                runs = self._running is None
                if runs:
                    self._running = gate
                else:
                    self._ready.append(gate)
            if not runs:
                gate.acquire()
        return gate

    def _hand_on(self) -> None:
        while True:
            with self._mutex:
                if self._ready:
                    self._running = self._ready.popleft()
                    self._running.release()
                    return
                if self._coming or not (self._timers or self._blocked):
                    self._running = None
                    return
            if not self._timers:
                self._is_dead = True
                for gate in self._blocked:
                    self.wake(gate)
                continue
            self.now, _, action = heapq.heappop(self._timers)
            action()

    # The device

    def run(self, lane: Lane, what: str, num_bytes: int) -> None:
        """Append a kernel or a copy."""
        resource = _RESOURCES.get(what, "compute")
        self.append(lane, Op(resource, num_bytes / self.rates[resource], None))

    def append(self, lane: Lane, op: Op) -> None:
        lane.last = op
        lane.ops.append(op)
        self._advance(lane)

    def wait_for(self, op: Op | None) -> None:
        if op is None or op.done:
            return
        gate = self._gate()
        op.then.append(lambda: self.wake(gate))
        self.block()
        if self.wake_s:
            self.sleep(self.wake_s)

    def _advance(self, lane: Lane) -> None:
        """Begin what is first in a lane, and end what takes no time."""
        while lane.ops and not (op := lane.ops[0]).begun:
            op.begun = True
            if op.after is not None and not op.after.done:
                op.after.then.append(lambda: self._end(lane))
                return
            if op.seconds:
                self._queues[op.resource].append((lane, op))
                self._serve(op.resource)
                return
            self._end(lane)

    def _serve(self, resource: str) -> None:
        if resource in self._serving or not self._queues[resource]:
            return
        lane, op = self._queues[resource].popleft()
        self._serving.add(resource)

        def ended() -> None:
            self.busy[resource] += op.seconds
            self._serving.discard(resource)
            self._end(lane)
            self._serve(resource)

        self.at(self.now + op.seconds, ended)

    def _end(self, lane: Lane) -> None:
        op = lane.ops.popleft()
        op.done = True
        for action in op.then:
            action()
        self._advance(lane)


class ClockLock:
    """`threading.Lock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._held, self._waiters = clock, False, deque[Any]()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        clock, gate = self._clock, self._clock._gate()
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        waiter = [gate]
        self._waiters.append(waiter)
        if timeout >= 0:

            def give_up() -> None:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    waiter.append(None)
                    clock.wake(gate)

            clock.at(clock.now + timeout, give_up)
        clock.block()
        return len(waiter) == 1

    def release(self) -> None:
        assert self._held
        if self._waiters:
            self._clock.wake(self._waiters.popleft()[0])  # it has the lock now
        else:
            self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held = False
