"""The scheduler on paper: everyone is served, no limit is passed, slots stay contiguous. No torch."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.scheduling.schedule import WorkItem, work_items
from flexgen_helm.scheduling.scheduler import Scheduler, SchedulerLimits
from flexgen_helm.scheduling.sequence import Sequence, SequenceKind

shapes_strategy = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 12), st.sampled_from([0, 0, 0, 1, 4])), min_size=1, max_size=25
)


def make(shape: tuple[int, int, int]) -> Sequence:
    """A prompt of some tokens that generates up to `max_new`, in place or as several continuations."""
    prompt_len, max_new, continuations = shape
    tokens = [1] * prompt_len
    if continuations and max_new > 1:
        return Sequence(
            SequenceKind.PROMPT, (), tokens, prompt_len, max_new_tokens=1, num_draws=continuations,
            num_continuations=continuations, continuation_tokens=max_new - 1, needs_cache=True,
        )  # fmt: skip
    return Sequence(
        SequenceKind.PROMPT, (), tokens, prompt_len, max_new_tokens=max_new, num_draws=int(max_new > 0),
        needs_cache=max_new > 1,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    shapes=shapes_strategy,
    batch_tokens=st.integers(1, 60),
    batch_sequences=st.integers(1, 8),
    max_sequences=st.integers(1, 20),
    extra_cache=st.integers(0, 100),
    pass_tokens=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_everyone_is_served_within_the_limits(
    shapes, batch_tokens, batch_sequences, max_sequences, extra_cache, pass_tokens, seed
):
    ends = random.Random(seed)
    prompts = [make(shape) for shape in shapes if shape[0] > 1 or shape[1]]
    need = max([p.cache_tokens + p.num_continuations * p.continuation_tokens for p in prompts], default=0)
    limits = SchedulerLimits(batch_tokens, batch_sequences, max_sequences, need + extra_cache, pass_tokens)
    scheduler = Scheduler(prompts, limits)
    served: dict[Sequence, int] = {}

    def end(sequence: Sequence) -> None:
        move = scheduler.retire(sequence)
        if move is not None and move.source is not None:
            assert move.source == len(move.block.sequences) and move.target < move.source
        for prefix in sequence.prefixes:
            prefix.num_readers -= 1
            if not prefix.num_readers:
                scheduler.retire(prefix)

    for _ in range(10_000):
        batches = scheduler.next_pass()
        if not batches:
            break
        assert scheduler.cache_tokens <= limits.cache_tokens
        prefilled = [batch for batch in batches if batch.is_prefill]
        tokens_in = sum(batch.num_tokens for batch in prefilled)
        assert tokens_in <= pass_tokens or sum(len(batch.scheduled) for batch in prefilled) == 1
        in_pass = [item.sequence for batch in batches for item in batch.scheduled]
        assert len(set(in_pass)) == len(in_pass)
        for batch in batches:
            if batch.is_prefill:
                assert len(batch.scheduled) <= batch_sequences
                assert batch.num_tokens <= batch_tokens or len(batch.scheduled) == 1
            for item in batch.scheduled:
                sequence = item.sequence
                assert item.count == sequence.num_pending > 0
                if sequence.block is not None:
                    assert sequence.block.sequences[sequence.slot] is sequence
                    assert sequence.num_computed + item.count <= sequence.block.capacity
        for batch in batches:
            for item in batch.scheduled:
                sequence = item.sequence
                sequence.num_computed += item.count
                served[sequence] = served.get(sequence, 0) + 1
                if sequence.is_shared:
                    alive = [
                        Sequence(
                            SequenceKind.CONTINUATION, (), [2], 0, sequence.prompt_len, (sequence,),
                            max_new_tokens=sequence.continuation_tokens + 1, num_draws=1, needs_cache=True,
                        )
                        for _ in range(sequence.num_draws) if ends.random() < 0.8
                    ]  # fmt: skip
                    scheduler.branch(sequence, alive)
                    sequence.num_readers = len(alive)
                    if not alive:
                        scheduler.retire(sequence)
                elif (
                    not sequence.num_draws
                    or len(sequence.tokens) - sequence.prompt_len + 1 >= sequence.max_new_tokens
                    or ends.random() < 0.1
                ):
                    end(sequence)
                else:
                    sequence.tokens.append(2)
    else:
        raise AssertionError("the scheduler never ends")
    assert all(prompt in served for prompt in prompts)
    assert scheduler.num_running == 0 and scheduler.cache_tokens == 0


def seated(lengths: list[int], cache_tokens: int, block_sequences: int) -> list[list[int]]:
    """Slots that the sequences of each block need, where all prompts are let in by one pass."""
    prompts = [make((length, 10, 0)) for length in sorted(lengths, reverse=True)]
    scheduler = Scheduler(
        prompts, SchedulerLimits(10**6, 10**6, 10**6, cache_tokens, 10**6, block_sequences=block_sequences)
    )
    batches = scheduler.next_pass()
    blocks = {item.sequence.block: None for batch in batches for item in batch.scheduled if item.sequence.block}
    return [[sequence.cache_tokens for sequence in block.sequences] for block in blocks]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(20, 60), min_size=1, max_size=150), more=st.integers(0, 20_000))
def test_large_blocks_are_of_neighbours_and_a_small_part_of_the_cache(lengths, more):
    room = 70 * len(lengths) + more
    blocks = seated(lengths, room, 128)
    assert sorted(sum(blocks, [])) == sorted(length + 9 for length in lengths)
    for block in blocks:
        assert len(block) <= 32 or (len(block) * max(block) <= room / 8 and len(block) <= 128)
        assert all(length >= 7 / 8 * max(block) for length in block[32:])


def test_sequences_of_one_length_share_a_block_where_there_is_room():
    assert [len(block) for block in seated([50] * 100, 10**6, 128)] == [100]
    assert [len(block) for block in seated([50] * 100, 10**6, 32)] == [32, 32, 32, 4]
    assert [len(block) for block in seated([50] * 100, 8 * 59 * 40, 128)] == [40, 40, 20]
    assert [len(block) for block in seated([500] * 40 + [50] * 60, 10**6, 128)] == [40, 60]


@given(stages=st.integers(1, 6), batches=st.integers(1, 6))
def test_schedules_visit_every_item_once_and_a_batch_in_order(stages, batches):
    for name in ("sequence", "zigzag"):
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
