"""The staging ring against a model of pages: slots never overlap, and the oldest goes first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.offload.prefetcher import StagingRing
from flexgen_helm.offload.staging import ALIGNMENT, aligned


def has_room(used, size, capacity):
    """Whether `size` bytes are free behind the newest slot or at the start, by looking at every
    page.
    """
    if not used:
        return size <= capacity
    is_used = [
        any(s.offset <= p < s.offset + s.size for s in used) for p in range(0, capacity, ALIGNMENT)
    ]
    pages = size // ALIGNMENT
    first = (used[-1].offset + used[-1].size) // ALIGNMENT
    behind = [first + i for i in range(pages)]
    from_start = list(range(pages)) if used[0].offset <= used[-1].offset else []  # not wrapped yet
    return any(
        run and run[-1] < len(is_used) and not any(is_used[p] for p in run)
        for run in (behind, from_start)
    )


@settings(max_examples=150)
@given(
    pages=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT), st.integers(0, 9)), max_size=40
    ),
)
def test_slots_never_overlap_and_the_oldest_make_room_first(pages, steps):
    ring = StagingRing(pages * ALIGNMENT)
    used = []  # in order; also released ones behind an older one that is not
    stamps = {}
    for number, (acquires, size, which) in enumerate(steps):
        if acquires:
            size = min(size, ring.capacity)
            slot = ring.acquire(size)
            assert (slot is not None) == has_room(used, aligned(size), ring.capacity)
            if slot is None:
                continue
            assert slot.offset % ALIGNMENT == 0 and slot.size == aligned(size) and slot.offset >= 0
            assert slot.end <= ring.capacity
            assert all(slot.end <= earlier.offset or earlier.end <= slot.offset for earlier in used)
            used.append(slot)
            stamps[id(slot)] = number % 250 + 1
            ring.memory(slot).fill_(stamps[id(slot)])
        elif living := [slot for slot in used if not slot.released]:
            slot = living[which % len(living)]
            assert bool((ring.memory(slot) == stamps[id(slot)]).all()), "another slot wrote here"
            ring.release(slot, None)
            while used and used[0].released:
                used.pop(0)
        assert ring.in_use == sum(slot.size for slot in used)
