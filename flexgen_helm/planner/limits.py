"""What one pass of a run may hold: all that the scheduler knows of memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_helm.shared_sizes import BLOCK_SEQUENCES
from flexgen_helm.tiers import UNLIMITED


@dataclass(frozen=True)
class SchedulerLimits:
    """What one pass may hold.

    batch_tokens, batch_sequences: of one batch; a longer sequence is a batch of its own.
    max_sequences: sequences with a cache.
    cache_tokens: positions of KV cache over all sequences.
    pass_tokens: prompt tokens that one pass admits, so that running sequences do not wait; a longer
        prompt is admitted alone.
    page_tokens: 0 allocates a sequence's whole cache at admission. Otherwise caches grow by pages,
        and as many sequences are admitted as are expected to fit.
    slot_overhead: positions that each sequence takes besides its tokens (residual window, last disk
        page).
    step_overhead: positions that each decode step of a block takes besides its tokens (last disk
        page).
    max_states: sequences and shared prefixes whose states are on the compute tier while their cache
        is offloaded.
    block_sequences: sequences of a cache block; above `BLOCK_SEQUENCES` only neighbours of similar
        length.
    """

    batch_tokens: int
    batch_sequences: int
    max_sequences: int
    cache_tokens: int
    pass_tokens: int
    page_tokens: int = 0
    slot_overhead: int = 0
    step_overhead: int = 0
    max_states: int = UNLIMITED
    block_sequences: int = BLOCK_SEQUENCES
