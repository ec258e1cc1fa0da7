"""Units on simulated workers: whatever dies, fails or hangs when, a run ends, and every request is answered once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.distributed import engine
from flexgen_helm.distributed.engine import MAX_ATTEMPTS, ClusterRun
from flexgen_helm.distributed.worker import Failure, UnitRecord, WorkerIdentity
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult

IDENTITY = WorkerIdentity("host", 1, "0", None, "print", "cpu", "float32", 1.0)
RESULT = GenerationResult((), [], None, Cost())


def requests_of(number: int) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=(i * 7919 % number, i), max_tokens=2) for i in range(number)]


class Simulation:
    """poison: requests that end their worker, or fail its unit. Of the workers, hung ones answer nothing."""

    def __init__(self, number: int, workers: list[str], seed: int, poison: frozenset[int] = frozenset(), how: str = ""):
        self.answers: Counter[int] = Counter()
        self.run = ClusterRun(requests_of(number), lambda index, result: self.answers.update([index]))
        self.alive = list(workers)
        for name in workers:
            self.run.join(name, IDENTITY)
        self.poison, self.how = poison, how
        self.draw = np.random.default_rng(seed)
        self.todo: dict[str, list[int]] = {}  # places in the unit that are not answered yet
        self.num_lost = 0

    def step(self, event: str, restarts: bool) -> None:
        run = self.run
        for name in self.alive:
            if name not in run.running and run.next_unit(name, len(self.alive)):
                self.todo[name] = list(self.draw.permutation(len(run.running[name].requests)))
        if not run.running:
            return
        name = str(self.draw.choice(sorted(run.running)))
        if event == "die":
            self.lose(name, restarts)
        elif event == "fail":
            run.end_unit(name, Failure("memory ran out"))
        else:
            while todo := self.todo[name]:
                index = todo.pop()
                if run.running[name].requests[index] in self.poison:
                    return self.lose(name, True) if self.how == "kill" else run.end_unit(name, Failure("poison"))
                run.receive(name, index, RESULT)
                if event == "answer":
                    return None
            run.end_unit(name, UnitRecord({}))

    def lose(self, name: str, restarts: bool) -> None:
        self.alive.remove(name)
        self.num_lost += 1
        self.run.end_unit(name, Failure("killed", is_lost=True))
        if restarts:
            self.alive.append(f"{name}'")
            self.run.join(f"{name}'", IDENTITY)

    def finish(self) -> None:
        for _ in range(100_000):
            if self.run.is_over or not self.alive:
                return
            self.step("finish", False)
        raise AssertionError("it does not end")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 400), st.integers(1, 4), st.integers(0, 1 << 16),
    st.lists(st.tuples(st.sampled_from(["answer", "finish", "die", "fail"]), st.booleans()), max_size=40),
)  # fmt: skip
def test_every_request_is_answered_once_whatever_dies_when(number, num_workers, seed, events):
    simulation = Simulation(number, [f"w{i}" for i in range(num_workers)], seed)
    for event, restarts in events:
        simulation.step(event, restarts)
    simulation.finish()
    answered, failures = set(simulation.answers), set(simulation.run.failures)
    assert set(simulation.answers.values()) <= {1} and not answered & failures
    if simulation.alive:
        assert answered | failures == set(range(number))
    if simulation.num_lost + sum(event == "fail" for event, _ in events) < MAX_ATTEMPTS:
        assert not failures  # else a request may have been where three units failed


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.sets(st.integers(0, 299), max_size=3), st.sampled_from(["kill", "break"]), st.integers(1, 4)
)
def test_requests_that_bring_every_worker_down_take_few_others_with_them(number, poison, how, num_workers):
    poison = {index for index in poison if index < number}
    simulation = Simulation(number, [f"w{i}" for i in range(num_workers)], 0, frozenset(poison), how)
    simulation.finish()
    failures = set(simulation.run.failures)
    assert poison <= failures and set(simulation.answers) == set(range(number)) - failures
    assert len(failures) <= 16 * len(poison)  # units of at most 256 requests, then 64, then 16


def test_the_retry_of_what_one_machine_cannot_is_elsewhere():
    """The small machine fails with its unit and is idle first: it waits for the large one, which is busy."""
    run = ClusterRun(requests_of(64))
    run.join("small", IDENTITY), run.join("large", IDENTITY)
    assert run.next_unit("small", 2) and run.next_unit("large", 2)
    run.end_unit("small", Failure("memory ran out"))
    while run.next_unit("small", 2):
        run.end_unit("small", UnitRecord({}))  # what is fresh; its answers are missing
    assert run.next_unit("small", 2) == () and not run.is_over
    run.end_unit("large", Failure("it hangs", is_lost=True))
    assert run.next_unit("small", 2)  # nobody else is left


@pytest.mark.parametrize(
    "rate, policy, num_workers, expected",
    [
        (None, None, 1, 256),  # the first unit of a worker alone
        (None, None, 8, 62),  # half of its share
        (0.1, None, 1, 30),  # five minutes at most
        (0.001, None, 1, 16),
        (10.0, {"gpu_batch_size": 100, "num_gpu_batches": 2}, 8, 200),  # a block of a plan that streams weights
    ],
)
def test_size_of_a_unit(monkeypatch, rate, policy, num_workers, expected):
    run = ClusterRun(requests_of(1000))
    run.join("a", IDENTITY)
    worker = run.workers["a"]
    if rate:
        unit = engine.Unit(range(100))
        monkeypatch.setattr(engine.time, "monotonic", lambda: unit.began + 100 / rate)
        worker.end_unit(unit, UnitRecord({"policy": policy}))
    unit_requests = run.next_unit("a", num_workers)
    assert len(unit_requests) == expected
    prompts = [request.prompt_token_ids for request in unit_requests]
    assert prompts == sorted(request.prompt_token_ids or () for request in requests_of(1000))[:expected]
