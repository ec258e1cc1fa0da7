"""The staging ring against a model on paper: blocks never overlap, the oldest goes first, waits can be called off."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.offload.staging import ALIGNMENT, RingCancelled, RingSlot, StagingRing, aligned
from tests.helpers.threads import in_thread

WAIT_S = 10.0


def has_room(held: list[RingSlot], size: int, capacity: int) -> bool:
    """Whether the free run behind the newest block, or the one at the start, holds `size` bytes; found byte by byte
    (page by page), not as the ring does it."""
    if not held:
        return size <= capacity
    taken = [any(b.offset <= p < b.offset + b.size for b in held) for p in range(0, capacity, ALIGNMENT)]
    pages = size // ALIGNMENT
    first = (held[-1].offset + held[-1].size) // ALIGNMENT
    behind = [first + i for i in range(pages)]
    from_start = list(range(pages)) if held[0].offset <= held[-1].offset else []  # not wrapped yet
    return any(run and run[-1] < len(taken) and not any(taken[p] for p in run) for run in (behind, from_start))


@settings(max_examples=150, deadline=None)
@given(
    pages=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT), st.integers(0, 9)), max_size=40),
)
def test_blocks_never_overlap_and_the_oldest_make_room_first(pages, steps):
    ring = StagingRing(pages * ALIGNMENT)
    held: list[RingSlot] = []  # in the order taken, given back or not, until all older ones are back
    stamps: dict[int, int] = {}
    for number, (takes, size, which) in enumerate(steps):
        if takes:
            size = min(size, ring.capacity)
            if not has_room(held, aligned(size), ring.capacity):
                continue  # it would wait for ever
            block = ring.acquire(size)
            assert block.offset % ALIGNMENT == 0 and block.size == aligned(size)
            assert block.offset >= 0 and block.offset + block.size <= ring.capacity
            for other in held:
                assert block.offset + block.size <= other.offset or other.offset + other.size <= block.offset
            held.append(block)
            stamps[id(block)] = number % 250 + 1
            ring.bytes_of(block).fill_(stamps[id(block)])
        elif living := [block for block in held if not block.given_back]:
            block = living[which % len(living)]
            assert bool((ring.bytes_of(block) == stamps[id(block)]).all()), "another block wrote here"
            ring.release(block)
            while held and held[0].given_back:
                held.pop(0)
        assert ring.in_use == sum(block.size for block in held)


def test_the_paper_model_would_notice_an_overlap():
    """The guard's inverse: a ring that forgets its oldest block hands its bytes out twice."""
    ring = StagingRing(2 * ALIGNMENT)
    first = ring.acquire(1)
    ring.acquire(1)
    ring._blocks.popleft()
    again = ring.acquire(1)
    assert again.offset == first.offset and not first.given_back


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9 * ALIGNMENT), min_size=1, max_size=40),
    behind=st.integers(1, 4),
)
def test_a_stream_of_blocks_flows_through_any_ring(capacity, sizes, behind):
    """One thread takes, another gives back a few blocks later: every wait ends, every block keeps its bytes."""
    ring = StagingRing(capacity * ALIGNMENT)
    sizes = [min(size, ring.capacity) for size in sizes]
    taken: deque[tuple[int, RingSlot]] = deque()
    changed = threading.Condition()
    wrong = []

    def take():
        for number, size in enumerate(sizes):
            block = ring.acquire(size)
            ring.bytes_of(block).fill_(number)
            with changed:
                taken.append((number, block))
                changed.notify()

    def give():
        for _ in sizes:
            with changed:
                # A few blocks behind, unless the ring is full: then the oldest must go.
                changed.wait_for(lambda: len(taken) > behind, timeout=0.002)
                changed.wait_for(lambda: taken)
                number, block = taken.popleft()
            if not bool((ring.bytes_of(block) == number).all()):
                wrong.append(number)
            ring.release(block)

    threads = [in_thread(take), in_thread(give)]
    for thread, found in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive() and found == [None], found
    assert not wrong and ring.in_use == 0


def test_a_block_given_back_early_waits_for_the_older_ones():
    ring = StagingRing(3 * ALIGNMENT)
    blocks = [ring.acquire(1) for _ in range(3)]
    ring.release(blocks[1])
    thread, found = in_thread(lambda: ring.acquire(1))
    thread.join(0.1)
    assert thread.is_alive(), "the middle block was reused before the oldest was back"
    ring.release(blocks[0])
    thread.join(WAIT_S)
    assert found[0].offset == 0 and ring.in_use == 2 * ALIGNMENT


def test_cancelling_ends_the_wait_until_the_ring_is_resumed():
    ring = StagingRing(ALIGNMENT)
    block = ring.acquire(1)
    thread, found = in_thread(lambda: ring.acquire(1))
    thread.join(0.05)
    assert thread.is_alive()
    ring.cancel()
    thread.join(WAIT_S)
    assert isinstance(found[0], RingCancelled)
    with pytest.raises(RingCancelled):
        ring.acquire(1)
    ring.release(block)
    ring.resume()
    assert ring.acquire(1).offset == 0


def test_memory_is_aligned_and_may_be_given():
    ring = StagingRing(5000)
    assert ring.capacity == 2 * ALIGNMENT and ring.bytes_of(ring.acquire(ALIGNMENT)).data_ptr() % ALIGNMENT == 0
    memory = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    given = StagingRing(ALIGNMENT, memory)
    given.bytes_of(given.acquire(1)).fill_(7)
    assert bool((memory == 7).all())


def test_a_block_beyond_the_ring_is_a_defect_that_is_named():
    with pytest.raises(AssertionError, match="in a ring of"):
        StagingRing(ALIGNMENT).acquire(ALIGNMENT + 1)
