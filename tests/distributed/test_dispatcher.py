"""Units on simulated workers with a simulated clock: whatever dies when, every request is answered once."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.distributed.dispatcher import MAX_ATTEMPTS, MIN_UNIT_S, UNIT_S, Dispatcher, Unit
from flexgen_helm.request import GenerationRequest


@dataclass
class SimulatedWorker:
    """rate: cost a second; 0 hangs. joins, dies: seconds. kills, breaks: requests that end it, or fail its unit.

    overhead_s: of each unit.
    """

    rate: float = 10.0
    joins: float = 0.0
    dies: float = float("inf")
    kills: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()
    overhead_s: float = 0.0
    units: list[Unit] = field(default_factory=list)


class Simulation:
    """Runs a dispatcher to its end; `answers` counts first answers, `computed` all."""

    def __init__(self, requests: list[GenerationRequest], workers: dict[str, SimulatedWorker], seed: int = 0) -> None:
        self.dispatcher, self.workers = Dispatcher(requests), workers
        self.dispatcher.expected_workers = sum(worker.joins == 0 for worker in workers.values())
        self.answers: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()
        self.now = 0.0
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, str, str, int, Unit | None]] = []
        self._number = 0
        for name, worker in workers.items():
            self._at(worker.joins, name, "join")
            if worker.dies < float("inf"):
                self._at(worker.dies, name, "die")

    def _at(self, when: float, name: str, what: str, place: int = -1, unit: Unit | None = None) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, name, what, place, unit))

    def run(self) -> Simulation:
        tick_at = 1.0
        self._at(tick_at, "", "tick")
        while not self.dispatcher.is_done:
            assert self._events, "nothing will ever happen"
            self.now, _, name, what, place, unit = heapq.heappop(self._events)
            assert self.now < 1e6, "it does not end"
            self._happens(name, what, place, unit)
            if what == "tick":
                if not self.dispatcher._workers and not any(e[3] == "join" for e in self._events):
                    break  # nobody is left
                self._at(self.now + 1.0, "", "tick")
            self._hand_out()
        return self

    def _happens(self, name: str, what: str, place: int, unit: Unit | None) -> None:
        dispatcher = self.dispatcher
        if what == "join":
            dispatcher.join(name)
        if what == "die":
            dispatcher.leave(name, "killed")
        if unit is None or dispatcher.unit_of(name) is not unit:
            return  # of a unit that was stopped, or of a worker that is gone
        if what == "answer":
            self.computed[place] += 1
            self.answers[place] += dispatcher.answer(name, place)
            unit.done_share = min(0.999, unit.done_share + 1 / len(unit.requests))
        elif what == "kill":
            dispatcher.leave(name, "killed by a request")
            restarted = f"{name}'"
            self.workers[restarted] = self.workers[name]
            self._at(self.now + 5.0, restarted, "join")
        elif what == "break":
            dispatcher.fail(name, "broken by a request")
        elif what == "finish":
            dispatcher.finish(name, self.now)

    def _hand_out(self) -> None:
        for name in self.dispatcher.needless():
            self.dispatcher.stop(name)
        for name in list(self.dispatcher._workers):
            unit = self.dispatcher.next_unit(name, self.now)
            if unit is not None:
                self._start(name, self.workers[name], unit)

    def _start(self, name: str, worker: SimulatedWorker, unit: Unit) -> None:
        worker.units.append(unit)
        if not worker.rate:
            return  # it hangs
        when, order = self.now + worker.overhead_s, list(unit.requests)
        self._draw.shuffle(order)
        for place in order:
            when += self.dispatcher._work.costs[place] / worker.rate
            what = "kill" if place in worker.kills else "break" if place in worker.breaks else "answer"
            self._at(when, name, what, place, unit)
            if what != "answer":
                return
        self._at(when, name, "finish", unit=unit)


def requests_of(count: int, tokens: int = 10) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=(place % 7, *range(tokens - 1)), max_tokens=2) for place in range(count)]


RATES = st.floats(0.5, 200.0)
WORKERS = st.lists(
    st.builds(
        SimulatedWorker,
        rate=RATES,
        joins=st.floats(0, 100),
        dies=st.one_of(st.just(float("inf")), st.floats(0, 200)),
        overhead_s=st.floats(0, 3),
    ),
    min_size=0,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 300), WORKERS, RATES, st.booleans(), st.integers(0, 1 << 16))
def test_every_request_is_answered_once_whatever_dies_when(
    count: int, others: list[SimulatedWorker], rate: float, one_hangs: bool, seed: int
) -> None:
    """One worker lives; the others come, die, come back, hang, and differ in speed by up to 400 times."""
    workers = {"survivor": SimulatedWorker(rate)}
    for index, worker in enumerate(others):
        workers[f"w{index}"] = worker
        if worker.dies < float("inf"):
            workers[f"w{index} again"] = SimulatedWorker(worker.rate, joins=worker.dies + 10)
    if one_hangs:
        workers["hung"] = SimulatedWorker(rate=0)
    done = Simulation(requests_of(count), workers, seed).run()
    lost = sum(worker.dies < float("inf") for worker in others)
    if lost < MAX_ATTEMPTS:  # else a request may have been where three workers died
        assert not done.dispatcher.failures
    assert set(done.answers) | set(done.dispatcher.failures) == set(range(count))
    assert not set(done.answers) & set(done.dispatcher.failures) and set(done.answers.values()) <= {1}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200), st.sets(st.integers(0, 199), max_size=3), st.sampled_from(["kills", "breaks"]),
    st.integers(1, 4),
)  # fmt: skip
def test_requests_that_bring_every_worker_down_take_few_others_with_them(
    count: int, poison: set[int], how: str, num_workers: int
) -> None:
    poison = {place for place in poison if place < count}
    bad = {how: frozenset(poison)}
    workers = {f"w{i}": SimulatedWorker(10.0 + i, **bad) for i in range(num_workers)}  # type: ignore[arg-type]
    done = Simulation(requests_of(count), workers).run()
    failures = set(done.dispatcher.failures)
    assert poison <= failures and set(done.answers) == set(range(count)) - failures
    # A unit with it has at most 256 requests, the next one 64, the last 16.
    assert len(failures) <= 16 * len(poison)
    assert all("by a request" in why or "killed" in why for why in done.dispatcher.failures.values())


def test_the_retry_of_what_one_machine_cannot_is_elsewhere() -> None:
    """The small machine fails with every seventh request, the large one computes all; none is given up."""
    hard = frozenset(range(0, 100, 7))
    workers = {"small": SimulatedWorker(10.0, breaks=hard), "large": SimulatedWorker(2.0)}
    done = Simulation(requests_of(100), workers).run()
    assert not done.dispatcher.failures and set(done.answers) == set(range(100))


def test_unequal_workers_end_at_the_same_time() -> None:
    rates = {"a": 40.0, "b": 10.0, "c": 10.0}
    workers = {name: SimulatedWorker(rate, overhead_s=0.2) for name, rate in rates.items()}
    done = Simulation(requests_of(600), workers).run()
    ideal = sum(done.dispatcher._work.costs) / sum(rates.values())
    assert done.now < 1.15 * ideal + 2
    assert sum(done.computed.values()) <= 1.1 * 600  # little is computed twice


def test_the_rest_of_a_worker_that_slows_down_is_computed_by_others() -> None:
    """A machine that swaps: it takes its first unit and hardly goes on."""
    workers = {"fast": SimulatedWorker(20.0), "swaps": SimulatedWorker(0.05)}
    done = Simulation(requests_of(300), workers).run()
    alone = sum(done.dispatcher._work.costs) / 20.0
    assert done.now < 1.5 * alone
    # The inverse: without stealing one waits for the slow worker's whole unit.
    first = workers["swaps"].units[0]
    assert sum(done.dispatcher._work.costs[place] for place in first.requests) / 0.05 > 20 * alone


def test_units_take_minutes_and_get_smaller_towards_the_end() -> None:
    workers = {"a": SimulatedWorker(10.0), "b": SimulatedWorker(10.0)}
    done = Simulation(requests_of(20_000), workers).run()
    seconds = [sum(done.dispatcher._work.costs[p] for p in unit.requests) / 10.0 for unit in workers["a"].units]
    assert max(seconds[1:]) <= 1.3 * UNIT_S and max(seconds[1:]) > UNIT_S / 2
    assert min(seconds[1:-2]) >= 0.7 * MIN_UNIT_S
    assert len(seconds) < 40


def test_a_worker_alone_is_not_given_crumbs() -> None:
    worker = SimulatedWorker(10.0)
    Simulation(requests_of(200), {"a": worker}).run()
    assert [len(unit.requests) for unit in worker.units] == [200]


def test_a_unit_has_at_least_a_block_of_a_plan_that_streams_weights() -> None:
    dispatcher = Dispatcher(requests_of(1000))
    dispatcher.join("a"), dispatcher.join("b")
    first = dispatcher.next_unit("a", 0.0)
    assert first is not None
    for place in first.requests:
        dispatcher.answer("a", place)
    dispatcher.finish("a", 10_000.0, block=400)
    second = dispatcher.next_unit("a", 10_000.0)
    assert second is not None and len(second.requests) >= 400
    dispatcher = Dispatcher(requests_of(1000))
    dispatcher.join("a"), dispatcher.join("b")
    first = dispatcher.next_unit("a", 0.0)
    assert first is not None
    for place in first.requests:
        dispatcher.answer("a", place)
    dispatcher.finish("a", 10_000.0)
    second = dispatcher.next_unit("a", 10_000.0)
    assert second is not None and len(second.requests) < 200


@pytest.mark.parametrize("way", ["leave", "fail"])
def test_a_duplicate_goes_on_when_the_original_is_lost(way: str) -> None:
    dispatcher = Dispatcher(requests_of(8))
    dispatcher.join("slow")
    unit = dispatcher.next_unit("slow", 0.0)
    assert unit is not None and len(unit.requests) == 8
    dispatcher.join("fast")
    assert dispatcher.next_unit("fast", 1.0) is None  # it may be done in a moment
    copy = dispatcher.next_unit("fast", 60.0)
    assert copy is not None and 0 < len(copy.requests) < 8
    dispatcher.leave("slow", "gone") if way == "leave" else dispatcher.fail("slow", "gone")
    for place in copy.requests:
        assert dispatcher.answer("fast", place) and not dispatcher.answer("slow", place)
    dispatcher.finish("fast", 70.0)
    rest = dispatcher.next_unit("fast", 70.0)
    assert rest is not None and not set(rest.requests) & set(copy.requests)
