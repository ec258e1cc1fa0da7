"""The scheduler on paper: everyone is served, no limit is passed, slots stay contiguous. No torch."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.engine.schedule import WorkItem, work_items
from flexgen_helm.engine.scheduler import Scheduler
from flexgen_helm.planner.memory import SchedulerLimits
from flexgen_helm.sequence import Admission, Sequence

families_strategy = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 12), st.sampled_from([0, 0, 0, 1, 4])), min_size=1, max_size=25
)


def make(shape: tuple[int, int, int]) -> Admission:
    prompt_len, max_new, branches = shape
    if branches and max_new > 1:
        row = Sequence([1] * prompt_len, prompt_len, None, max_new_tokens=1, num_draws=branches, needs_cache=True)
        row.owner = max_new
        return Admission(row, branches, max_new - 1)
    row = Sequence(
        [1] * prompt_len,
        prompt_len,
        max_new,
        max_new_tokens=max_new,
        num_draws=int(max_new > 0),
        needs_cache=max_new > 1,
    )
    return Admission(row)


@settings(max_examples=150, deadline=None)
@given(
    shapes=families_strategy,
    batch_tokens=st.integers(1, 60),
    batch_rows=st.integers(1, 8),
    max_rows=st.integers(1, 20),
    extra_cache=st.integers(0, 100),
    pass_tokens=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_everyone_is_served_within_the_limits(
    shapes, batch_tokens, batch_rows, max_rows, extra_cache, pass_tokens, seed
):
    ends = random.Random(seed)
    families = [make(shape) for shape in shapes if shape[0] > 1 or shape[1]]
    need = max([f.prompt.cache_tokens + f.num_continuations * f.continuation_tokens for f in families], default=0)
    limits = SchedulerLimits(batch_tokens, batch_rows, max_rows, need + extra_cache, pass_tokens)
    scheduler = Scheduler(families, limits)
    served: dict[Sequence, int] = {}
    living_branches: dict[Sequence, int] = {}

    def end(row: Sequence) -> None:
        gone = scheduler.retire(row)
        if gone is not None and gone.source is not None:
            assert gone.source == len(gone.group.sequences) and gone.target < gone.source
        for parent in row.prefixes:
            living_branches[parent] -= 1
            if not living_branches[parent]:
                scheduler.retire(parent)

    for _ in range(10_000):
        batches = scheduler.next_pass()
        if not batches:
            break
        assert scheduler.cache_tokens <= limits.cache_tokens
        prefilled = [batch for batch in batches if batch.is_prefill]
        tokens_in = sum(batch.num_tokens for batch in prefilled)
        assert tokens_in <= pass_tokens or sum(len(batch.scheduled) for batch in prefilled) == 1
        in_pass = [chunk.sequence for batch in batches for chunk in batch.scheduled]
        assert len(set(in_pass)) == len(in_pass)
        for batch in batches:
            if batch.is_prefill:
                assert len(batch.scheduled) <= batch_rows
                assert batch.num_tokens <= batch_tokens or len(batch.scheduled) == 1
            for chunk in batch.scheduled:
                row = chunk.sequence
                assert chunk.count == row.num_pending > 0
                if row.block is not None:
                    assert row.block.sequences[row.slot] is row
                    assert row.num_computed + chunk.count <= row.block.capacity
        for batch in batches:
            for chunk in batch.scheduled:
                row = chunk.sequence
                row.num_computed += chunk.count
                served[row] = served.get(row, 0) + 1
                if row.is_shared:
                    alive = [
                        Sequence([2], 0, None, start=row.prompt_len, prefixes=(row,), max_new_tokens=row.owner,
                            num_draws=1, needs_cache=True)
                        for _ in range(row.num_draws) if ends.random() < 0.8
                    ]  # fmt: skip
                    scheduler.branch(row, alive)
                    living_branches[row] = len(alive)
                    if not alive:
                        scheduler.retire(row)
                elif (
                    not row.num_draws
                    or len(row.tokens) - row.prompt_len + 1 >= row.max_new_tokens
                    or ends.random() < 0.1
                ):
                    end(row)
                else:
                    row.tokens.append(2)
    else:
        raise AssertionError("the scheduler never ends")
    assert all(family.prompt in served for family in families)
    assert scheduler.num_running == 0 and scheduler.cache_tokens == 0


def seated(lengths: list[int], cache_tokens: int, group_rows: int) -> list[list[int]]:
    """Slots that the rows of each group need, where all prompts are let in by one pass."""
    families = [make((length, 10, 0)) for length in sorted(lengths, reverse=True)]
    scheduler = Scheduler(
        families, SchedulerLimits(10**6, 10**6, 10**6, cache_tokens, 10**6, block_sequences=group_rows)
    )
    batches = scheduler.next_pass()
    groups = {chunk.sequence.block: None for batch in batches for chunk in batch.scheduled if chunk.sequence.block}
    return [[row.cache_tokens for row in group.sequences] for group in groups]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(20, 60), min_size=1, max_size=150), more=st.integers(0, 20_000))
def test_large_groups_are_of_neighbours_and_a_small_part_of_the_cache(lengths, more):
    room = 70 * len(lengths) + more
    groups = seated(lengths, room, 128)
    assert sorted(sum(groups, [])) == sorted(length + 9 for length in lengths)
    for group in groups:
        assert len(group) <= 32 or (len(group) * max(group) <= room / 8 and len(group) <= 128)
        assert all(length >= 7 / 8 * max(group) for length in group[32:])


def test_rows_of_one_length_share_a_group_where_there_is_room():
    assert [len(group) for group in seated([50] * 100, 10**6, 128)] == [100]
    assert [len(group) for group in seated([50] * 100, 10**6, 32)] == [32, 32, 32, 4]
    assert [len(group) for group in seated([50] * 100, 8 * 59 * 40, 128)] == [40, 40, 20]
    assert [len(group) for group in seated([500] * 40 + [50] * 60, 10**6, 128)] == [40, 60]


@given(stages=st.integers(1, 6), batches=st.integers(1, 6))
def test_schedules_visit_every_item_once_and_a_batch_in_order(stages, batches):
    for name in ("row", "zigzag"):
        items = list(work_items(name, stages, batches))
        assert sorted(items, key=lambda i: (i.stage, i.batch)) == [
            WorkItem(s, b) for s in range(stages) for b in range(batches)
        ]
        for batch in range(batches):
            assert [i.stage for i in items if i.batch == batch] == list(range(stages))


def test_zigzag_needs_each_weight_once_a_pass_and_row_once_a_batch():
    def loads(name: str) -> int:
        order = [item.stage for item in work_items(name, 5, 4)]
        return sum(a != b for a, b in zip([None, *order], order))

    assert (loads("zigzag"), loads("row")) == (5, 20)
