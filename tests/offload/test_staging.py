"""The staging ring against a model of pages: slots never overlap, the oldest goes first, waits end when cancelled."""

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


def has_room(used: list[RingSlot], size: int, capacity: int) -> bool:
    """Whether `size` bytes are free behind the newest slot or at the start, by looking at every page."""
    if not used:
        return size <= capacity
    is_used = [any(s.offset <= p < s.offset + s.size for s in used) for p in range(0, capacity, ALIGNMENT)]
    pages = size // ALIGNMENT
    first = (used[-1].offset + used[-1].size) // ALIGNMENT
    behind = [first + i for i in range(pages)]
    from_start = list(range(pages)) if used[0].offset <= used[-1].offset else []  # not wrapped yet
    return any(run and run[-1] < len(is_used) and not any(is_used[p] for p in run) for run in (behind, from_start))


@settings(max_examples=150, deadline=None)
@given(
    pages=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT), st.integers(0, 9)), max_size=40),
)
def test_slots_never_overlap_and_the_oldest_make_room_first(pages, steps):
    ring = StagingRing(pages * ALIGNMENT)
    used: list[RingSlot] = []  # in order; also released ones behind an older one that is not
    stamps: dict[int, int] = {}
    for number, (acquires, size, which) in enumerate(steps):
        if acquires:
            size = min(size, ring.capacity)
            if not has_room(used, aligned(size), ring.capacity):
                continue  # it would wait for ever
            slot = ring.acquire(size)
            assert slot.offset % ALIGNMENT == 0 and slot.size == aligned(size)
            assert slot.offset >= 0 and slot.offset + slot.size <= ring.capacity
            for other in used:
                assert slot.offset + slot.size <= other.offset or other.offset + other.size <= slot.offset
            used.append(slot)
            stamps[id(slot)] = number % 250 + 1
            ring.memory(slot).fill_(stamps[id(slot)])
        elif living := [slot for slot in used if not slot.released]:
            slot = living[which % len(living)]
            assert bool((ring.memory(slot) == stamps[id(slot)]).all()), "another slot wrote here"
            ring.release(slot)
            while used and used[0].released:
                used.pop(0)
        assert ring.in_use == sum(slot.size for slot in used)


def test_the_model_would_notice_an_overlap():
    """The guard's inverse: a ring that forgets its oldest slot hands its bytes out twice."""
    ring = StagingRing(2 * ALIGNMENT)
    first = ring.acquire(1)
    ring.acquire(1)
    ring._slots.popleft()
    third = ring.acquire(1)
    assert third.offset == first.offset and not first.released


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9 * ALIGNMENT), min_size=1, max_size=40),
    behind=st.integers(1, 4),
)
def test_a_stream_of_slots_flows_through_any_ring(capacity, sizes, behind):
    """One thread acquires, another releases a few slots later: every wait ends, every slot keeps its bytes."""
    ring = StagingRing(capacity * ALIGNMENT)
    sizes = [min(size, ring.capacity) for size in sizes]
    acquired: deque[tuple[int, RingSlot]] = deque()
    changed = threading.Condition()
    wrong = []

    def acquire():
        for number, size in enumerate(sizes):
            slot = ring.acquire(size)
            ring.memory(slot).fill_(number)
            with changed:
                acquired.append((number, slot))
                changed.notify()

    def release():
        for _ in sizes:
            with changed:
                # A few slots behind, unless the ring is full: then the oldest must go.
                changed.wait_for(lambda: len(acquired) > behind, timeout=0.002)
                changed.wait_for(lambda: acquired)
                number, slot = acquired.popleft()
            if not bool((ring.memory(slot) == number).all()):
                wrong.append(number)
            ring.release(slot)

    threads = [in_thread(acquire), in_thread(release)]
    for thread, results in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive() and results == [None], results
    assert not wrong and ring.in_use == 0


def test_a_slot_released_early_waits_for_the_older_ones():
    ring = StagingRing(3 * ALIGNMENT)
    slots = [ring.acquire(1) for _ in range(3)]
    ring.release(slots[1])
    thread, results = in_thread(lambda: ring.acquire(1))
    thread.join(0.1)
    assert thread.is_alive(), "the middle slot was reused before the oldest was released"
    ring.release(slots[0])
    thread.join(WAIT_S)
    assert results[0].offset == 0 and ring.in_use == 2 * ALIGNMENT


def test_cancelling_ends_the_wait_until_the_ring_is_resumed():
    ring = StagingRing(ALIGNMENT)
    slot = ring.acquire(1)
    thread, results = in_thread(lambda: ring.acquire(1))
    thread.join(0.05)
    assert thread.is_alive()
    ring.cancel()
    thread.join(WAIT_S)
    assert isinstance(results[0], RingCancelled)
    with pytest.raises(RingCancelled):
        ring.acquire(1)
    ring.release(slot)
    ring.resume()
    assert ring.acquire(1).offset == 0


def test_memory_is_aligned_and_may_be_the_callers():
    ring = StagingRing(5000)
    assert ring.capacity == 2 * ALIGNMENT and ring.memory(ring.acquire(ALIGNMENT)).data_ptr() % ALIGNMENT == 0
    memory = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    ring = StagingRing(ALIGNMENT, memory)
    ring.memory(ring.acquire(1)).fill_(7)
    assert bool((memory == 7).all())


def test_a_slot_larger_than_the_ring_is_refused():
    with pytest.raises(AssertionError, match="in a ring of"):
        StagingRing(ALIGNMENT).acquire(ALIGNMENT + 1)
