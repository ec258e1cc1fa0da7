"""Units on simulated workers: whatever dies, fails or hangs, all is answered, and once."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.distributed.board import Board, RequestUnit
from flexgen_helm.distributed.engine import MAX_ATTEMPTS, ClusterRun
from flexgen_helm.distributed.worker import Answered, Failure, UnitRecord
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult

RESULT = GenerationResult((), [], None, Cost())
LOST = Failure("killed", is_lost=True)


def requests_of(number):
    return [
        GenerationRequest(prompt_token_ids=(i * 7919 % number, i), max_tokens=2)
        for i in range(number)
    ]


class Simulation:
    """What a run knows of `RayWorkers`.

    poison: requests that end their worker, or fail its unit.
    """

    def __init__(self, number, num_workers, seed, poison=frozenset()):
        self.is_alone, self.num_expected = num_workers == 1, num_workers
        self.poison, self.waiting = poison, dict[int, RequestUnit]()
        self.sizes: list[int] = []
        self.answers = Counter[int]()
        self.draw = np.random.default_rng(seed)
        self.run = ClusterRun(
            requests_of(number),
            self,  # type: ignore[arg-type]
            lambda index, result: self.answers.update([index]),
        )

    def submit(self, units):
        assert not self.waiting.keys() & units.keys()
        self.waiting |= units
        self.sizes += map(len, units.values())

    def forget(self, units):
        for unit in units:
            self.waiting.pop(unit, None)

    def step(self, end):
        """Compute a unit; one that fails has answered some of its requests."""
        number = int(self.draw.choice(list(self.waiting)))
        indexes = self.draw.permutation(list(self.waiting.pop(number)))
        most = len(indexes) if isinstance(end, UnitRecord) else self.draw.integers(len(indexes) + 1)
        for index in indexes[:most].tolist():
            if index in self.poison:
                end = LOST if index % 2 else Failure("poison")
                break
            self.run.receive(f"w{number}", number, Answered(index, RESULT))
        self.run.receive(f"w{number}", number, end)

    def finish(self):
        while self.run.units:
            assert self.run.units.keys() == self.waiting.keys()
            self.step(UnitRecord({}))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 400), st.integers(1, 4), st.integers(0, 1 << 16),
    st.lists(st.sampled_from([UnitRecord({}), LOST, Failure("memory ran out")]), max_size=40),
)  # fmt: skip
def test_every_request_is_answered_once_whatever_dies_when(number, num_workers, seed, events):
    simulation = Simulation(number, num_workers, seed)
    for event in events:
        if simulation.run.units:
            simulation.step(event)
    simulation.finish()
    answered, failures = set(simulation.answers), set(simulation.run.failures)
    assert set(simulation.answers.values()) <= {1} and not answered & failures
    assert answered | failures == set(range(number))
    if sum(isinstance(event, Failure) for event in events) < MAX_ATTEMPTS:
        assert not failures  # else a request may have been where three units failed


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.sets(st.integers(0, 299), max_size=3), st.integers(1, 4))
def test_requests_that_bring_every_worker_down_take_few_others_with_them(number, poison, workers):
    poison = {index for index in poison if index < number}
    simulation = Simulation(number, workers, 0, frozenset(poison))
    first = max(simulation.sizes)
    simulation.finish()
    failures = set(simulation.run.failures)
    assert poison <= failures and set(simulation.answers) == set(range(number)) - failures
    assert len(failures) <= max(1, first // 16) * len(poison)  # a quarter of a quarter


def test_units_are_neighbours_and_even():
    simulation = Simulation(1000, 8, 0)
    expected = sorted(request.prompt_token_ids or () for request in requests_of(1000))
    units = simulation.waiting.values()
    assert [request.prompt_token_ids for unit in units for request in unit.values()] == expected
    assert simulation.sizes == [32] * 31 + [8]
    assert Simulation(40, 8, 0).sizes == [16, 16, 8]
    assert Simulation(1000, 1, 0).sizes == [1000]  # nobody to share with


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_is_given_up_says_why(is_lost):
    simulation = Simulation(1, 1, 0)
    for _ in range(MAX_ATTEMPTS):
        (number,) = simulation.waiting
        failure = Failure("it burns", is_lost=is_lost)
        simulation.run.receive("w", number, failure)
    why = "worker w is lost: it burns" if is_lost else "it burns"
    assert simulation.run.failures == {0: why} and not simulation.waiting


def test_what_hangs_or_begins_again_is_lost():
    """A worker that says nothing, one that died, and a unit that nobody begins."""

    async def hear() -> None:
        board = Board(silence_s=0.2)

        async def lost() -> list[tuple[str, int | None]]:
            return [
                (worker, unit)
                for worker, unit, report in await board.news(0.0)
                if any(isinstance(event, Failure) for event in report)
            ]

        await board.submit({number: {number: requests_of(4)[number]} for number in range(4)})
        assert [await board.next_unit() for _ in range(4)] == [*range(4)]
        for number, name in enumerate(("hangs", "dies", "lives")):
            assert list(await board.begin(number, name)) == [number]
        assert await board.begin(1, "again") == {} and await lost() == [("dies", 1)]
        await board.forget([1])
        assert not await board.tell("dies", 1, [])
        await asyncio.sleep(0.3)
        assert await board.tell("lives", 2, [])
        assert await lost() == [("hangs", 0)]
        await asyncio.sleep(0.3)
        assert await lost() == [("hangs", 0), ("lives", 2), ("", 3)]  # nobody is heard

    asyncio.run(hear())
