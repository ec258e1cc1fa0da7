"""Which worker computes what: a value that changes with what workers report, and knows neither clocks nor machines.

A worker without work is given a unit: of the requests that nobody computes, or, where none are left, of those that a
slow worker has not answered. The first answer counts; a worker whose unit has no open request is told to stop. The
open requests of a lost worker or a failed unit are given out again, in smaller units and to other workers, so that
one request that brings workers down takes few others with it.

A unit is half of the worker's share of what is left, at least `MIN_UNIT_S` and at most `UNIT_S` at the rate that the
worker has shown. So units get smaller towards the end, and fast workers get more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flexgen_helm.distributed.work import WorkList
from flexgen_helm.request import GenerationRequest

# Seconds that a unit is to take: its end is a good moment to hand out the next one, and each costs a plan and the
# beginnings that its prompts share with those of other units.
UNIT_S, MIN_UNIT_S = 300.0, 5.0
# Most requests of a unit whose worker has shown no rate.
FIRST_UNIT_REQUESTS = 256
# A unit that is expected to end sooner is not shared with an idle worker.
MIN_STOLEN_S = 3.0
# How often a request may be part of a unit that fails, and how much smaller its next unit is each time.
MAX_ATTEMPTS, SHRINKING = 3, 4


@dataclass(eq=False)
class Unit:
    """Requests that a worker computes together.

    requests: places. open: those that nobody has answered. unreported: those that its own worker has not answered.
    began: seconds, by the caller's clock. done_share: of the unit's work, as its worker reports it.
    """

    worker: str
    requests: Sequence[int]
    began: float
    open: set[int]
    unreported: set[int]
    done_share: float = 0.0

    def remaining_s(self, now: float) -> float:
        """Return the seconds that the unit will still take, if it goes on as it did; at first as long as it took."""
        elapsed = now - self.began
        return elapsed * (1 - self.done_share) / self.done_share if self.done_share else elapsed


@dataclass(eq=False)
class _Worker:
    """unit: what it computes now. rate: cost a second, None before its first unit. block: see `Dispatcher.finish`."""

    unit: Unit | None = None
    rate: float | None = None
    block: int = 1


@dataclass(eq=False)
class _Attempts:
    """What failed with one request in it. limit: most requests of its next unit. avoid: workers that failed."""

    count: int = 0
    limit: float = float("inf")
    avoid: set[str] = field(default_factory=set)


class Dispatcher:
    """See the module's docstring. Not for several threads.

    failures: place -> why the request is given up.
    expected_workers: how many there will be soon; the first one leaves work for the others.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.expected_workers = 1
        self._work = WorkList(requests)
        self._workers: dict[str, _Worker] = {}
        self._attempts: dict[int, _Attempts] = {}
        self._units_with: dict[int, list[Unit]] = {}  # place -> running units
        self._unanswered = set(range(len(requests)))
        self.failures: dict[int, str] = {}

    @property
    def is_done(self) -> bool:
        """Whether each request has an answer or is given up."""
        return len(self._unanswered) == len(self.failures)

    @property
    def num_answered(self) -> int:
        return len(self._work.costs) - len(self._unanswered)

    @property
    def waiting_cost(self) -> float:
        """What nobody computes now, in tokens."""
        return self._work.cost

    # Workers come and go

    def join(self, worker: str) -> None:
        self._workers[worker] = _Worker()

    def leave(self, worker: str, why: str) -> None:
        """A worker is lost; it may not come back under this name."""
        unit = self._end(worker)
        self._workers.pop(worker, None)
        if unit is not None:
            self._abandon(unit, why)

    # What a worker does

    def next_unit(self, worker: str, now: float) -> Unit | None:
        """Return what an idle worker shall compute now, None if there is nothing for it."""
        state = self._workers[worker]
        if state.unit is not None:
            return None
        requests = self._take(worker, state) or self._steal(worker, now)
        if not requests:
            return None
        unit = state.unit = Unit(worker, requests, now, set(requests), set(requests))
        for place in requests:
            self._units_with.setdefault(place, []).append(unit)
        return unit

    def unit_of(self, worker: str) -> Unit | None:
        return self._workers[worker].unit if worker in self._workers else None

    def answer(self, worker: str, place: int) -> bool:
        """Note an answer; return whether it is the first."""
        if (own := self.unit_of(worker)) is not None:
            own.unreported.discard(place)
        if place not in self._unanswered or place in self.failures:
            return False
        self._unanswered.remove(place)
        for unit in self._units_with.get(place, ()):
            unit.open.discard(place)
        return True

    def finish(self, worker: str, now: float, block: int = 1) -> None:
        """A worker has answered its unit. block: requests that fewer of would not be faster, by the worker's plan."""
        unit, state = self._end(worker), self._workers[worker]
        if unit is None:
            return
        seconds = max(now - unit.began, 1e-3)
        rate = sum(self._work.costs[place] for place in unit.requests) / seconds
        state.rate = rate if state.rate is None else (state.rate + rate) / 2
        state.block = block
        if unit.open:
            self._abandon(unit, "answers are missing")

    def fail(self, worker: str, why: str) -> None:
        """A worker could not compute its unit; it lives on."""
        if (unit := self._end(worker)) is not None:
            self._abandon(unit, why)

    def stop(self, worker: str) -> None:
        """A worker has stopped its unit because it was told to."""
        self.fail(worker, "it was stopped")

    def needless(self) -> list[str]:
        """Return the workers whose units have been answered by others."""
        return [unit.worker for unit in self._running() if unit.unreported and not unit.open]

    # Deciding

    def _end(self, worker: str) -> Unit | None:
        """Return the worker's unit, which does not run any more; None if it has none."""
        if (state := self._workers.get(worker)) is None or state.unit is None:
            return None
        unit, state.unit = state.unit, None
        for place in unit.requests:
            self._units_with[place].remove(unit)
        return unit

    def _running(self) -> list[Unit]:
        return [state.unit for state in self._workers.values() if state.unit is not None]

    def _abandon(self, unit: Unit, why: str) -> None:
        """Give out the open requests of a unit again, or give those up that failed too often."""
        returned = []
        for place in unit.open:
            attempts = self._attempts.setdefault(place, _Attempts())
            attempts.count += 1
            attempts.avoid.add(unit.worker)
            attempts.limit = min(attempts.limit, max(1, len(unit.open) // SHRINKING))
            if self._units_with[place]:
                continue  # another worker computes it
            if attempts.count < MAX_ATTEMPTS:
                returned.append(place)
            else:
                self.failures[place] = why
        self._work.give_back(returned)

    def _may_compute(self, worker: str, place: int) -> bool:
        """Whether a request is for this worker: not if it failed there and another one has not tried it."""
        attempts = self._attempts.get(place)
        return attempts is None or worker not in attempts.avoid or attempts.avoid >= self._workers.keys()

    def _limit_of(self, place: int) -> float:
        attempts = self._attempts.get(place)
        return float("inf") if attempts is None else attempts.limit

    def _take(self, worker: str, state: _Worker) -> list[int]:
        """Take waiting requests: half of the worker's share of them, and all where it works alone."""
        rates = self._rates()
        num_workers = max(len(rates), self.expected_workers)
        total_rate = sum(rates.values()) * num_workers / len(rates)
        cost = self._work.cost * rates[worker] / total_rate / (1 if num_workers == 1 else 2)
        limit: float = FIRST_UNIT_REQUESTS
        if state.rate is not None:
            cost, limit = max(min(cost, state.rate * UNIT_S), state.rate * MIN_UNIT_S), float("inf")
        return self._work.take(
            cost,
            state.block,
            lambda place: min(limit, self._limit_of(place)),
            lambda place: self._may_compute(worker, place),
        )

    def _rates(self, default: float = 1.0) -> dict[str, float]:
        """Return a rate for each worker; one that has shown none counts as the mean of the others, or `default`."""
        known = [state.rate for state in self._workers.values() if state.rate is not None]
        mean = sum(known) / len(known) if known else default
        return {name: mean if state.rate is None else state.rate for name, state in self._workers.items()}

    def _steal(self, worker: str, now: float) -> list[int]:
        """Return open requests of the unit that will take longest, so that both workers end at the same time."""
        best: tuple[float, Unit, list[int]] | None = None
        for unit in self._running():
            mine = [
                place
                for place in unit.requests
                if place in unit.open and len(self._units_with[place]) == 1 and self._may_compute(worker, place)
            ]
            seconds = unit.remaining_s(now)
            if mine and seconds >= MIN_STOLEN_S and (best is None or seconds > best[0]):
                best = seconds, unit, mine
        if best is None:
            return []
        seconds, unit, mine = best
        left = sum(self._work.costs[place] for place in unit.open)
        their_rate = left / seconds
        own_rate = self._rates(default=their_rate)[worker]
        wanted, stolen = left * own_rate / (own_rate + their_rate), list[int]()
        for place in reversed(mine):
            if stolen and wanted < self._work.costs[place]:
                break
            stolen.append(place)
            wanted -= self._work.costs[place]
        return stolen[::-1]


def explain_failures(failures: Iterable[str]) -> str:
    """Join the reasons of failures, each once."""
    return "; ".join(dict.fromkeys(failures))
