"""Units on simulated workers with a simulated clock: whatever dies when, every request is answered once."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexgen_helm.distributed.dispatcher import MAX_ATTEMPTS, MIN_UNIT_S, UNIT_S, Dispatcher, Unit, prompt_of
from flexgen_helm.request import GenerationRequest

_numbers = count()


@dataclass
class SimulatedWorker:
    """rate: cost a second; 0 hangs. joins, dies: seconds. kills, breaks: requests that end it, or fail its unit.

    overhead_s: of each unit. is_silent: while it hangs, so that it is given up.
    """

    rate: float = 10.0
    joins: float = 0.0
    dies: float = float("inf")
    kills: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()
    overhead_s: float = 0.0
    is_silent: bool = False
    units: list[Unit] = field(default_factory=list)


class Simulation:
    """Runs a dispatcher to its end; `answers` counts first answers, `computed` all."""

    def __init__(self, requests: list[GenerationRequest], workers: dict[str, SimulatedWorker], seed: int = 0) -> None:
        self.dispatcher, self.workers = Dispatcher(requests), workers
        self.num_workers = sum(worker.joins == 0 for worker in workers.values())
        self.alive: list[str] = []
        self.answers: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()
        self.now = 0.0
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, str, str, int, Unit | None]] = []
        for name, worker in workers.items():
            self._at(worker.joins, name, "join")
            if worker.dies < float("inf"):
                self._at(worker.dies, name, "die")

    def _at(self, when: float, name: str, what: str, index: int = -1, unit: Unit | None = None) -> None:
        heapq.heappush(self._events, (when, next(_numbers), name, what, index, unit))

    def run(self) -> Simulation:
        self._at(1.0, "", "tick")
        while self.dispatcher.open:
            self.now, _, name, what, index, unit = heapq.heappop(self._events)
            assert self.now < 1e6, "it does not end"
            if what == "tick":
                if not self.alive and not any(event[3] == "join" for event in self._events):
                    break  # nobody is left
                self._at(self.now + 1.0, "", "tick")
            self._happens(name, what, index, unit)
            self._hand_out()
        return self

    def _happens(self, name: str, what: str, index: int, unit: Unit | None) -> None:
        dispatcher = self.dispatcher
        if what == "join":
            dispatcher.join(name)
            self.alive.append(name)
        if what == "die" and name in self.alive:
            self._lose(name, "killed")
        if unit is None or dispatcher.units.get(name) is not unit:
            return  # of a unit that was stopped, or of a worker that is gone
        if what == "answer":
            unit.num_reported += 1
            self.computed[index] += 1
            self.answers[index] += index in dispatcher.open
            dispatcher.open.discard(index)
        elif what == "kill":
            self._lose(name, "killed by a request")
            restarted = f"{name}'"
            self.workers[restarted] = self.workers[name]
            self._at(self.now + 5.0, restarted, "join")
        elif what == "silent":
            self._lose(name, "it has not answered")
        elif what == "break":
            dispatcher.fail(name, self.now, "broken by a request")
        elif what == "finish":
            dispatcher.finish(name, self.now)

    def _lose(self, name: str, why: str) -> None:
        self.alive.remove(name)
        self.dispatcher.leave(name, self.now, why)

    def _hand_out(self) -> None:
        for name in self.alive:
            if self.dispatcher.is_needless(name):
                self.dispatcher.fail(name, self.now, "stopped")
            if name not in self.dispatcher.units:
                unit = self.dispatcher.next_unit(name, self.now, self.num_workers)
                if unit is not None:
                    assert unit.requests and set(unit.requests) <= self.dispatcher.open
                    self._start(name, self.workers[name], unit)

    def _start(self, name: str, worker: SimulatedWorker, unit: Unit) -> None:
        worker.units.append(unit)
        if not worker.rate:
            if worker.is_silent:
                self._at(self.now + 180, name, "silent", unit=unit)
            return  # it hangs
        when, order = self.now + worker.overhead_s, list(unit.requests)
        self._draw.shuffle(order)
        for index in order:
            when += self.dispatcher.costs[index] / worker.rate
            what = "kill" if index in worker.kills else "break" if index in worker.breaks else "answer"
            self._at(when, name, what, index, unit)
            if what != "answer":
                return
        self._at(when, name, "finish", unit=unit)


def requests_of(number: int, tokens: int = 10) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=(i % 7, *range(tokens - 1)), max_tokens=2) for i in range(number)]


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


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 300), WORKERS, RATES, st.lists(st.booleans(), max_size=3), st.integers(0, 1 << 16))
@example(276, [SimulatedWorker(1.1, joins=1.0, dies=7.02)], 114.0, [False], 0)
@example(276, [SimulatedWorker(1.1, joins=1.0, dies=7.02)], 114.0, [True, False, False], 0)
def test_every_request_is_answered_once_whatever_dies_when(
    num_requests: int, mortals: list[SimulatedWorker], rate: float, hung: list[bool], seed: int
) -> None:
    """One worker lives; others come, die, come back, hang silently or not, and differ in speed by up to 400 times."""
    workers = {f"hung{i}": SimulatedWorker(rate=0, is_silent=is_silent) for i, is_silent in enumerate(hung)}
    for i, worker in enumerate(mortals):
        workers[f"w{i}"] = dataclasses.replace(worker, units=[])
        if worker.dies < float("inf"):
            workers[f"w{i} again"] = SimulatedWorker(worker.rate, joins=worker.dies + 10)
    workers["survivor"] = SimulatedWorker(rate)
    done = Simulation(requests_of(num_requests), workers, seed).run()
    lost = sum(worker.dies < float("inf") for worker in mortals) + sum(hung)
    if lost < MAX_ATTEMPTS:  # else a request may have been where three workers died
        assert not done.dispatcher.failures
    assert set(done.answers) | set(done.dispatcher.failures) == set(range(num_requests))
    assert set(done.answers.values()) <= {1}
    if not lost:  # what hangs costs the survivor no more than the waits for copies
        assert done.now < 2 * sum(done.dispatcher.costs) / rate + 400


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200), st.sets(st.integers(0, 199), max_size=3), st.sampled_from(["kills", "breaks"]),
    st.integers(1, 4),
)  # fmt: skip
def test_requests_that_bring_every_worker_down_take_few_others_with_them(
    num_requests: int, poison: set[int], how: str, num_workers: int
) -> None:
    poison = {index for index in poison if index < num_requests}
    bad = {how: frozenset(poison)}
    workers = {f"w{i}": SimulatedWorker(10.0 + i, **bad) for i in range(num_workers)}  # type: ignore[arg-type]
    done = Simulation(requests_of(num_requests), workers).run()
    failures = set(done.dispatcher.failures)
    assert poison <= failures and set(done.answers) == set(range(num_requests)) - failures
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
    ideal = sum(done.dispatcher.costs) / sum(rates.values())
    assert done.now < 1.15 * ideal + 2
    assert sum(done.computed.values()) <= 1.1 * 600  # little is computed twice


def test_the_rest_of_a_worker_that_slows_down_is_computed_by_others() -> None:
    """A machine that swaps: it takes its first unit and hardly goes on."""
    workers = {"fast": SimulatedWorker(20.0), "swaps": SimulatedWorker(0.05)}
    done = Simulation(requests_of(300), workers).run()
    alone = sum(done.dispatcher.costs) / 20.0
    assert done.now < 1.5 * alone
    # The inverse: without stealing one waits for the slow worker's whole unit.
    first = workers["swaps"].units[0]
    assert sum(done.dispatcher.costs[place] for place in first.requests) / 0.05 > 20 * alone


def test_units_take_minutes_and_get_smaller_towards_the_end() -> None:
    workers = {"a": SimulatedWorker(10.0), "b": SimulatedWorker(10.0)}
    done = Simulation(requests_of(20_000), workers).run()
    seconds = [sum(done.dispatcher.costs[p] for p in unit.requests) / 10.0 for unit in workers["a"].units]
    assert max(seconds[1:]) <= 1.3 * UNIT_S and max(seconds[1:]) > UNIT_S / 2
    assert min(seconds[1:-2]) >= 0.7 * MIN_UNIT_S
    assert len(seconds) < 40


def test_a_worker_alone_is_not_given_crumbs() -> None:
    worker = SimulatedWorker(10.0)
    Simulation(requests_of(200), {"a": worker}).run()
    assert [len(unit.requests) for unit in worker.units] == [200]


@pytest.mark.parametrize("block", [1, 400])
def test_a_unit_has_at_least_a_block_of_a_plan_that_streams_weights(block: int) -> None:
    dispatcher = Dispatcher(requests_of(1000))
    dispatcher.join("a"), dispatcher.join("b")
    first = dispatcher.next_unit("a", 0.0)
    assert first is not None
    dispatcher.open -= set(first.requests)
    dispatcher.finish("a", 10_000.0, block)
    second = dispatcher.next_unit("a", 10_000.0)
    assert second is not None and (len(second.requests) >= 400) == (block == 400)
    assert len(second.requests) > 400 or len(second.requests) < 200 or block == 400


@pytest.mark.parametrize("way", ["leave", "fail"])
def test_a_copy_goes_on_when_the_original_is_lost(way: str) -> None:
    dispatcher = Dispatcher(requests_of(8))
    dispatcher.join("slow")
    unit = dispatcher.next_unit("slow", 0.0)
    assert unit is not None and len(unit.requests) == 8
    dispatcher.join("fast")
    assert dispatcher.next_unit("fast", 1.0) is None  # it may be done in a moment
    copy = dispatcher.next_unit("fast", 60.0)
    assert copy is not None and 0 < len(copy.requests) < 8
    getattr(dispatcher, way)("slow", 61.0, "gone")
    dispatcher.open -= set(copy.requests)
    dispatcher.finish("fast", 70.0)
    rest = dispatcher.next_unit("fast", 70.0)
    assert rest is not None and not set(rest.requests) & set(copy.requests)


def test_a_retry_does_not_wait_for_ever_for_a_worker_that_is_never_idle() -> None:
    """The other worker hangs and goes on reporting."""
    dispatcher = Dispatcher(requests_of(40))
    dispatcher.join("hung"), dispatcher.join("fails once")
    assert dispatcher.next_unit("hung", 0.0) and (unit := dispatcher.next_unit("fails once", 0.0))
    dispatcher.fail("fails once", 1.0, "memory ran out")
    retried = []
    for now in (1.0, 2.0 + UNIT_S):
        while more := dispatcher.next_unit("fails once", now):
            dispatcher.open -= set(more.requests)
            dispatcher.finish("fails once", now + 1)
            retried.append(bool(set(more.requests) & set(unit.requests)))
    assert not retried[0] and any(retried) and not dispatcher.open and not dispatcher.failures


def units_of(prompts: list[tuple[int, ...]], num_workers: int) -> list[list[int]]:
    """Requests of the units that one of many workers is given."""
    dispatcher = Dispatcher([GenerationRequest(prompt_token_ids=prompt, max_tokens=0) for prompt in prompts])
    dispatcher.join("a")
    units = []
    while unit := dispatcher.next_unit("a", 0.0, num_workers):
        dispatcher.open -= set(unit.requests)
        units.append(list(unit.requests))
        dispatcher.units.clear()
    assert sorted(sum(units, [])) == list(range(len(prompts))) and abs(dispatcher.waiting_cost) < 1e-6
    return units


def new_tokens(prompts: list[tuple[int, ...]], unit: list[int]) -> int:
    """Distinct beginnings of the unit's prompts: what a prefix tree computes."""
    return len({prompts[index][:end] for index in unit for end in range(1, len(prompts[index]) + 1)})


def test_the_cost_of_all_is_that_of_a_prefix_tree() -> None:
    prompts = [(1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6), (7,)]
    for max_tokens in (0, 4):
        requests = [GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens) for prompt in prompts]
        assert sum(Dispatcher(requests).costs) == new_tokens(prompts, [0, 1, 2, 3]) + 2 * max_tokens
    assert new_tokens(prompts, [0, 1, 2, 3]) == 7


def test_groups_that_share_a_prefix_are_kept_together() -> None:
    """Two subjects, in any order: the cut is between them, though half of the cost is elsewhere."""
    subjects = ((1, 8), (2, 40))
    prompts = [(s, *([s] * 5), question) for s, num_questions in subjects for question in range(num_questions)]
    random.Random(0).shuffle(prompts)
    assert [prompts[index][0] for index in units_of(prompts, 2)[0]] == [1] * 8


def test_a_large_group_is_cut_all_the_same() -> None:
    units = units_of([(*([1] * 50), question) for question in range(100)], 2)
    assert len(units) >= 4 and max(map(len, units)) < 50


def test_prompts_without_token_ids_have_an_order_too() -> None:
    assert prompt_of(GenerationRequest(prompt="ab")) == (97, 98)
    assert prompt_of(GenerationRequest(messages=[{"role": "user", "content": "a"}]))
