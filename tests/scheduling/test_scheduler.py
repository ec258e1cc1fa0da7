"""The scheduler on paper: everyone is served, no limit is passed, slots stay contiguous. No
torch.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.scheduling.forecast import AnswerLengths
from flexgen_helm.scheduling.scheduler import Scheduler, SchedulerLimits
from flexgen_helm.scheduling.sequence import Sequence, SequenceKind
from tests.helpers.shares import share_of

shapes_strategy = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 12), st.sampled_from([0, 0, 0, 1, 4])),
    min_size=1,
    max_size=25,
)


def make(shape):
    """A prompt of some tokens that generates up to `max_new`, in place or as several
    continuations.
    """
    prompt_len, max_new, continuations = shape
    tokens = [1] * prompt_len
    if continuations and max_new > 1:
        return Sequence(
            SequenceKind.PROMPT, (), tokens, prompt_len, max_new_tokens=1, num_draws=continuations,
            num_continuations=continuations, continuation_tokens=max_new - 1, needs_cache=True,
            length_group=max_new,
        )  # fmt: skip
    return Sequence(
        SequenceKind.PROMPT, (), tokens, prompt_len, max_new_tokens=max_new, num_draws=int(max_new > 0),
        needs_cache=max_new > 1, length_group=max_new,
    )  # fmt: skip


CASES = st.fixed_dictionaries(
    {
        "batch_tokens": st.integers(1, 60),
        "batch_sequences": st.integers(1, 8),
        "max_sequences": st.integers(1, 20),
        "extra_cache": st.integers(0, 100),
        "pass_tokens": st.integers(1, 100),
        "page_tokens": st.sampled_from([0, 0, 1, 4, 7]),
        "slot_overhead": st.integers(0, 3),
        "more_states": st.sampled_from([None, None, 0, 1, 4]),
        "prefix": st.sampled_from([(0, 1), (0, 1), (5, 2), (20, 4)]),
        "ending": st.sampled_from([0.0, 0.1, 0.4]),
        "known_ends": st.integers(0, 20),
        "seed": st.integers(0, 1000),
    }
).map(lambda drawn: SimpleNamespace(**drawn))


@settings(max_examples=share_of(400, 4))
@given(shapes=shapes_strategy, case=CASES)
def test_everyone_is_served_within_the_limits(shapes, case):
    """Slots are followed as a cache follows them, so a sequence always finds its tokens where it
    left them.
    """
    ends = random.Random(case.seed)
    prompts = [make(shape) for shape in shapes if shape[0] > 1 or shape[1]]
    need = max(
        [
            p.cache_tokens + p.num_continuations * (p.continuation_tokens + case.slot_overhead)
            for p in prompts
        ],
        default=0,
    )
    prefix_len, num_users = case.prefix
    need += case.slot_overhead + (prefix_len + case.slot_overhead if prefix_len else 0)
    limits = SchedulerLimits(
        case.batch_tokens,
        case.batch_sequences,
        case.max_sequences,
        need + case.extra_cache,
        case.pass_tokens,
        case.page_tokens,
        case.slot_overhead,
    )
    if case.more_states is not None:  # than one prompt with its continuations needs behind a prefix
        alone = max([1 + prompt.num_continuations for prompt in prompts], default=1) + (
            prefix_len > 0
        )
        limits = replace(limits, max_states=alone + case.more_states)
    waiting = prompts if not prefix_len else with_prefixes(prompts, prefix_len, num_users)
    lengths = AnswerLengths()
    for _ in range(case.known_ends):  # so that more is expected to end than does
        for _, max_new, _ in shapes:
            lengths.count_token(max_new), lengths.count_end(max_new)
    scheduler = Scheduler(waiting, limits, lengths)
    served = {}
    content = {}  # whose tokens are in each slot
    widest = {prompt: prompt.cache_tokens for prompt in prompts}

    def end(sequence):
        move = scheduler.retire(sequence)
        if move is not None and move.source is not None:
            assert move.source == len(move.block.sequences) and move.target < move.source
            content[move.block][move.target] = content[move.block][move.source]
        for shared in sequence.prefixes:
            shared.num_readers -= 1
            if not shared.num_readers:
                end(shared)

    for _ in range(10_000):
        changes = scheduler.make_room()
        for block in changes.freed:
            assert not block.sequences
            content.pop(block, None)
        for regroup in changes.regroups:
            if not any(block in content for block, _ in regroup.sources):  # nothing was written yet
                assert not any(sequence.num_computed for sequence in regroup.block.sequences)
                continue
            moved = [content[block][slot] for block, slot in regroup.sources]
            assert moved == regroup.block.sequences
            for block in {block for block, _ in regroup.sources}:
                del content[block]
            content[regroup.block] = list(moved)
            regroup.block.tier = "cpu"
        assert case.page_tokens or not (changes.freed or changes.regroups)
        assert scheduler.cache_tokens <= limits.cache_tokens
        batches = scheduler.next_pass()
        if not batches:
            break
        assert scheduler.cache_tokens <= limits.cache_tokens
        assert sum(block.num_slots for block in scheduler._blocks) <= limits.max_states
        prefilled = [batch for batch in batches if batch.is_prefill]
        tokens_in = sum(batch.num_tokens for batch in prefilled)
        assert (
            tokens_in <= case.pass_tokens or sum(len(batch.scheduled) for batch in prefilled) == 1
        )
        in_pass = [item.sequence for batch in batches for item in batch.scheduled]
        assert len(set(in_pass)) == len(in_pass)
        for batch in batches:
            if batch.is_prefill:
                assert len(batch.scheduled) <= case.batch_sequences
                assert batch.num_tokens <= case.batch_tokens or len(batch.scheduled) == 1
            for item in batch.scheduled:
                sequence = item.sequence
                assert item.count == sequence.num_pending > 0
                if sequence.block is not None:
                    assert sequence.block.sequences[sequence.slot] is sequence
                    assert sequence.num_computed + item.count <= sequence.block.capacity
                    assert sequence.cache_tokens == widest.setdefault(
                        sequence, sequence.cache_tokens
                    )
                    slots = content.setdefault(sequence.block, [None] * sequence.block.num_slots)
                    sequence.block.tier = "cpu"  # the cache says where it has put a block
                    if sequence.is_prefill or not sequence.num_computed:
                        slots[sequence.slot] = sequence
                    assert slots[sequence.slot] is sequence
        for batch in batches:
            for item in batch.scheduled:
                sequence = item.sequence
                sequence.num_computed += item.count
                served[sequence] = served.get(sequence, 0) + 1
                if sequence.kind is SequenceKind.SHARED_PREFIX:
                    continue
                if sequence.is_shared:
                    alive = [
                        Sequence(
                            SequenceKind.CONTINUATION, (), [2], 0, sequence.prompt_len, (*sequence.prefixes, sequence),
                            max_new_tokens=sequence.continuation_tokens + 1, num_draws=1, needs_cache=True,
                            length_group=sequence.length_group,
                        )
                        for _ in range(sequence.num_draws) if ends.random() < 0.8
                    ]  # fmt: skip
                    scheduler.branch(sequence, alive)
                    for shared in (*sequence.prefixes, sequence):
                        shared.num_readers += len(alive)
                    if not alive:
                        end(sequence)
                elif (
                    not sequence.num_draws
                    or len(sequence.tokens) - sequence.prompt_len + 1 >= sequence.max_new_tokens
                    or ends.random() < case.ending
                ):
                    lengths.count_end(sequence.length_group)
                    end(sequence)
                else:
                    lengths.count_token(sequence.length_group)
                    sequence.tokens.append(2)
    else:
        raise AssertionError("the scheduler never ends")
    assert all(prompt in served for prompt in prompts)
    assert scheduler.expected_tokens() == 0
    assert scheduler.num_running == 0 and scheduler.cache_tokens == 0


def with_prefixes(prompts, length, num_users):
    """Put a shared prefix before every `num_users` prompts."""
    waiting = []
    for first in range(0, len(prompts), num_users):
        users = prompts[first : first + num_users]
        shared = Sequence(
            SequenceKind.SHARED_PREFIX, (), [1] * length, length, max_new_tokens=1, needs_cache=True,
            num_readers=len(users),
        )  # fmt: skip
        for user in users:
            user.prefixes = (shared,)
        waiting += [shared, *users]
    return waiting


def test_the_youngest_are_preempted_where_more_was_expected_to_end():
    """Answers that end late are admitted as if they ended early, and all of them are served."""
    room, prompts = 200, [make((4, 60, 0)) for _ in range(12)]
    lengths = AnswerLengths()
    for _ in range(50):
        lengths.count_token(60), lengths.count_end(60)
    scheduler = Scheduler(
        prompts, SchedulerLimits(10**6, 10**6, 10**6, room, 10**6, page_tokens=8), lengths
    )
    most = most_running(scheduler, room, lambda: None)
    assert all(len(prompt.tokens) == 64 for prompt in prompts)
    assert most > room // 64 and scheduler.num_preempted > 0 and not prompts[0].is_recomputed


def most_running(scheduler, room, count_token):
    """Go on until answers of 60 tokens have ended; return how many sequences ran at once."""
    most = 0
    for _ in range(2000):
        scheduler.make_room()
        if not (batches := scheduler.next_pass()):
            break
        most = max(most, scheduler.num_running)
        assert scheduler.cache_tokens <= room
        for sequence in [item.sequence for batch in batches for item in batch.scheduled]:
            sequence.num_computed += sequence.num_pending
            sequence.tokens.append(2)
            count_token()
            if len(sequence.tokens) == 64:
                scheduler.retire(sequence)
    return most


@pytest.mark.fast(40)
@pytest.mark.parametrize("ends", range(1, 12))
@pytest.mark.parametrize("room", range(63, 80))
def test_a_preempted_sequence_that_is_left_alone_goes_on(room, ends):
    """Whatever is expected of it: its own answer fits."""
    prompts, lengths = [make((4, 60, 0)) for _ in range(3)], AnswerLengths()
    for _ in range(ends):
        lengths.count_token(60), lengths.count_end(60)
    scheduler = Scheduler(
        prompts, SchedulerLimits(10**6, 10**6, 10**6, room, 10**6, page_tokens=4), lengths
    )
    most_running(scheduler, room, lambda: lengths.count_token(60))
    assert all(len(prompt.tokens) == 64 for prompt in prompts)


def test_without_pages_the_longest_answer_is_reserved():
    """The inverse: nothing is ever preempted, and fewer sequences run at once."""
    prompts = [make((4, 60, 0)) for _ in range(12)]
    scheduler = Scheduler(prompts, SchedulerLimits(10**6, 10**6, 10**6, 200, 10**6))
    scheduler.next_pass()
    assert scheduler.num_running == 200 // 63


@given(rate=st.floats(0.001, 0.5), most=st.integers(1, 300))
def test_expected_lengths_are_those_of_a_geometric_distribution(rate, most):
    lengths = AnswerLengths()
    lengths.end_rate = lambda group: rate
    expected = sum((1 - rate) ** step for step in range(most))
    assert abs(lengths.expected_tokens(most, most) - expected) < 1e-6 * expected
    assert AnswerLengths().expected_tokens(None, most) == most


def seated(lengths, cache_tokens, block_sequences):
    """Slots that the sequences of each block need, where all prompts are let in by one pass."""
    prompts = [make((length, 10, 0)) for length in sorted(lengths, reverse=True)]
    scheduler = Scheduler(
        prompts,
        SchedulerLimits(10**6, 10**6, 10**6, cache_tokens, 10**6, block_sequences=block_sequences),
    )
    batches = scheduler.next_pass()
    blocks = {
        item.sequence.block: None
        for batch in batches
        for item in batch.scheduled
        if item.sequence.block
    }
    return [[sequence.cache_tokens for sequence in block.sequences] for block in blocks]


@settings(max_examples=100)
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
