"""What one pass of a run may hold: all that the scheduler knows of memory. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexgen_helm.planner.constants import BLOCK_SEQUENCES, PACED_AGES, PAGE_TOKENS, UNLIMITED


@dataclass(frozen=True)
class SchedulerLimits:
    """What one pass may hold.

    batch_tokens, batch_sequences: of one batch; a longer sequence is a batch of its own.
    max_sequences: sequences with a cache.
    cache_tokens: positions of KV cache over all sequences.
    pass_tokens: prompt tokens that one pass admits, so that running sequences do not wait; a longer prompt is admitted
        alone.
    page_tokens: 0 allocates a sequence's whole cache at admission. Otherwise caches grow by pages, and as many
        sequences are admitted as are expected to fit.
    is_paced: sequences are admitted in small groups, so that young and old ones share the memory (diagonal schedule).
    slot_overhead: positions that each sequence takes besides its tokens (residual window, last disk page).
    step_overhead: positions that each decode step of a block takes besides its tokens (last disk page).
    max_windows: sequences and shared prefixes whose residual window is on the compute tier while the rest of their
        cache is offloaded.
    block_sequences: sequences of a cache block; above `BLOCK_SEQUENCES` only neighbours of similar length.
    """

    batch_tokens: int
    batch_sequences: int
    max_sequences: int
    cache_tokens: int
    pass_tokens: int
    page_tokens: int = 0
    slot_overhead: int = 0
    step_overhead: int = 0
    max_windows: int = UNLIMITED
    block_sequences: int = BLOCK_SEQUENCES
    is_paced: bool = False


def paced_positions(prompt: float, steps: float, page_tokens: int = PAGE_TOKENS) -> float:
    """Return the positions of a paced sequence's cache, on average: half of its steps, of a page, and of an age."""
    return prompt + (steps + page_tokens + max(1.0, steps / PACED_AGES)) / 2


def paced_group(sequences: float, steps: float) -> float:
    """Return how many of `sequences` of all ages begin together at least."""
    return max(1.0, sequences / max(1.0, steps), sequences / PACED_AGES)


def pacing_pays(sequences: float, mixed: float, together: float) -> bool:
    """Whether `mixed` of all ages take fewer passes than `together` that begin and end together.

    sequences: of the run. Filling and emptying takes as many passes as one sequence.
    """
    return sequences / mixed + 1 < math.ceil(sequences / together)
