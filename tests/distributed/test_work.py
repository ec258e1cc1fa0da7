"""Cutting the requests of a run into units."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.distributed.work import WorkList, prompt_of
from flexgen_helm.request import GenerationRequest


def requests_of(prompts: list[tuple[int, ...]], max_tokens: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens) for prompt in prompts]


def new_tokens(prompts: list[tuple[int, ...]], unit: list[int]) -> int:
    """Distinct beginnings of the unit's prompts: what a prefix tree computes."""
    return len({prompts[place][:end] for place in unit for end in range(1, len(prompts[place]) + 1)})


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1 << 32))
def test_units_are_all_requests_once_and_cost_what_is_asked(count: int, cost: int, seed: int) -> None:
    draw = random.Random(seed)
    prompts = [tuple(draw.choices(range(3), k=draw.randint(1, 8))) for _ in range(count)]
    work = WorkList(requests_of(prompts))
    assert abs(work.cost - sum(work.costs)) < 1e-6
    units = []
    while len(work):
        before = len(work)
        unit = work.take(cost)
        assert unit and len(work) == before - len(unit)
        if draw.random() < 0.2:  # lost on the way
            returned = unit[draw.randrange(len(unit)) :]
            work.give_back(returned)
            unit = unit[: -len(returned)]
        units.append(unit)
        # The largest request may exceed it alone.
        assert sum(work.costs[place] for place in unit) <= cost * 1.25 + max(work.costs)
    assert sorted(place for unit in units for place in unit) == list(range(len(prompts)))
    assert abs(work.cost) < 1e-6


def test_the_cost_of_all_is_that_of_a_prefix_tree() -> None:
    prompts = [(1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6), (7,)]
    work = WorkList(requests_of(prompts))
    assert sum(work.costs) == new_tokens(prompts, [0, 1, 2, 3]) == 7
    assert sum(WorkList(requests_of(prompts, max_tokens=4)).costs) == 7 + 4 * 2


def test_groups_that_share_a_prefix_are_kept_together() -> None:
    """Two subjects of nine questions each, in any order: the cut is between the subjects, though not in the middle."""
    subjects = [[(s, *([s] * 50), question) for question in range(count)] for s, count in ((1, 8), (2, 10))]
    prompts = [prompt for subject in subjects for prompt in subject]
    random.Random(0).shuffle(prompts)
    work = WorkList(requests_of(prompts))
    first = work.take(sum(work.costs) / 2)
    second = work.take(float("inf"))
    assert {prompts[place][0] for place in first} == {1} and {prompts[place][0] for place in second} == {2}
    assert new_tokens(prompts, first) + new_tokens(prompts, second) == new_tokens(prompts, first + second)


def test_a_large_group_is_cut_all_the_same() -> None:
    prompts = [(*([1] * 50), question) for question in range(100)]
    work = WorkList(requests_of(prompts))
    units = []
    while len(work):
        units.append(work.take(30))
    assert len(units) >= 4 and max(map(len, units)) <= 38


def test_limits_and_refusals() -> None:
    prompts = [(i,) for i in range(20)]
    work = WorkList(requests_of(prompts))
    assert len(work.take(1, at_least=5)) == 5
    assert len(work.take(100, limit_of=lambda place: 3)) == 3
    assert work.take(100, may_take=lambda place: place != 8 and place < 11) == [9, 10]
    assert work.take(100, may_take=lambda place: False) == []
    assert work.take(100) == [8, *range(11, 20)] and not len(work)


def test_prompts_without_token_ids_have_an_order_too() -> None:
    assert prompt_of(GenerationRequest(prompt="ab")) == (97, 98)
    assert prompt_of(GenerationRequest(messages=[{"role": "user", "content": "a"}]))
