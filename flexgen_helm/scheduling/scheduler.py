"""Which sequences are in the next pass: admission within the cache's limit, batches, retirement. No torch.

The scheduler decides by numbers alone: it knows sequences and how many positions of cache they take, no tensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from flexgen_helm.planner.constants import BLOCK_SEQUENCES
from flexgen_helm.planner.memory import SchedulerLimits
from flexgen_helm.scheduling.sequence import Batch, CacheBlock, ScheduledTokens, Sequence, SequenceKind

# A block of more than `BLOCK_SEQUENCES` takes at most this share of the cache, and leaves at most this share of a
# sequence's slot unused.
_LARGE_BLOCK_SHARE = 1 / 8


@dataclass(frozen=True)
class SlotMove:
    """What the cache must do after a sequence has left `block`; a block without sequences is freed.

    source: slot to copy, None where the last slot left.
    target: slot that takes the copy.
    tokens: to copy.
    stale_tokens: that the target held before.
    """

    block: CacheBlock
    source: int | None = None
    target: int = -1
    tokens: int = 0
    stale_tokens: int = 0


class Scheduler:
    """Forms passes from a queue of sequences, first come first served.

    A pass takes every running sequence one token further and admits waiting ones as long as their cache fits. A
    shared prefix precedes its users in the queue. A prompt with continuations reserves their cache when it is
    admitted. Sequences that end give their slots back at once. In which order the batches of a pass meet the layers
    is the schedule's choice (`scheduling.schedule`).
    """

    def __init__(self, waiting: Iterable[Sequence], limits: SchedulerLimits) -> None:
        self._waiting = deque(waiting)
        self._limits = limits
        self._blocks: list[CacheBlock] = []
        self._reserved: dict[Sequence, int] = {}  # positions for the continuations of a prompt
        self._pace = _admissions_per_pass(self._waiting, limits) if limits.page_tokens else None
        self._credit = 0.0  # admissions that the pace has allowed and that were not used

    @property
    def num_running(self) -> int:
        """Sequences with a cache, without shared prefixes."""
        return sum(len(block.sequences) for block in self._blocks if not _is_prefix(block.sequences[0]))

    @property
    def cache_tokens(self) -> int:
        """Positions of KV cache that are allocated or reserved now."""
        return sum(block.allocated_positions(_longest(block)) for block in self._blocks) + sum(self._reserved.values())

    def next_pass(self) -> list[Batch]:
        """Return the batches of the next pass, decoding first; empty when nothing is left.

        A sequence is in at most one batch.
        """
        decoding = list(self._decode_batches())  # before new blocks are opened
        return decoding + list(self._batches(([_pending(sequence)] for sequence in self._admit()), True))

    def another_pass_follows(self, batches: Iterable[Batch]) -> bool:
        """Return whether another pass follows these batches unless all their sequences meet an end early."""
        if self._waiting:
            return True
        sequences = [item.sequence for batch in batches for item in batch.scheduled]
        return any(
            sequence.max_new_tokens - (len(sequence.tokens) - sequence.prompt_len) > 1 or sequence in self._reserved
            for sequence in sequences
        )

    def halve(self, batches: Iterable[Batch]) -> list[Batch]:
        """Return the same tokens in batches half as large, and keep to that size from now on.

        A block that decodes stays together.
        """
        batches = list(batches)
        tokens = max(1, max(batch.num_tokens for batch in batches) // 2)
        sequences = max(1, max(len(batch.scheduled) for batch in batches) // 2)
        self._limits = replace(
            self._limits,
            batch_tokens=min(self._limits.batch_tokens, tokens),
            batch_sequences=min(self._limits.batch_sequences, sequences),
        )
        halves: list[Batch] = []
        for batch in batches:
            if batch.is_prefill:
                halves += self._batches(([item] for item in batch.scheduled), True)
            else:
                by_block = groupby(batch.scheduled, key=lambda item: item.sequence.block)
                halves += self._batches((list(items) for _, items in by_block), False)
        return halves

    def branch(self, prompt: Sequence, continuations: list[Sequence]) -> None:
        """Give the continuations of a prompt the cache that it reserved; those that ended already need none."""
        del self._reserved[prompt]
        if continuations:
            self._open(continuations)

    def retire(self, sequence: Sequence) -> SlotMove | None:
        """Take back the slot of a sequence whose cache nobody needs any more; None if it never had one."""
        block, slot = sequence.block, sequence.slot
        if block is None:
            return None
        last = block.sequences.pop()
        sequence.block, sequence.slot = None, -1
        move = SlotMove(block)
        if last is not sequence:
            # The last one's prompt may be written already although its batch has not passed the head yet.
            tokens = max(last.num_computed, last.prompt_len)
            move = SlotMove(block, last.slot, slot, tokens, max(sequence.num_computed, sequence.prompt_len))
            block.sequences[slot] = last
            last.slot = slot
        if not block.sequences:
            self._blocks.remove(block)
        return move

    def _admit(self) -> list[Sequence]:
        """Admit waiting sequences while their number, prompt tokens and cache are within the limits."""
        limits = self._limits
        admitted: list[Sequence] = []
        seated: list[Sequence] = []  # admitted sequences that will share the next block
        num_running = self.num_running
        num_windows = sum(len(block.sequences) for block in self._blocks)
        prompt_tokens = 0
        growth = self._growth()
        if self._pace is not None:
            self._credit += self._pace
        while self._waiting:
            sequence = self._waiting[0]
            if admitted and prompt_tokens + sequence.num_pending > limits.pass_tokens:
                break
            if sequence.needs_cache:
                # A sequence that others read has a block of its own, because it does not decode with its neighbours.
                if seated and (sequence.is_shared or self._is_full([*seated, sequence])):
                    growth, seated = self._seat(seated), []
                # The continuations that may branch off share one block.
                reserved = sequence.continuation_tokens * (sequence.num_continuations + limits.step_overhead)
                if not self._fits(growth, [*seated, sequence], reserved):
                    if not seated:
                        break
                    growth, seated = self._seat(seated), []
                    continue
                num_slots = int(not _is_prefix(sequence)) + sequence.num_continuations
                if num_running and num_running + num_slots > limits.max_sequences:
                    break
                # If nothing runs and nothing was admitted, the only live caches are the shared prefixes of the
                # queue's head, so it must be admitted.
                if (num_running or admitted) and num_windows + 1 > limits.max_windows:
                    break
                if not _is_prefix(sequence):
                    if self._pace is not None and num_running and self._credit < 1:
                        break
                    self._credit -= 1
                num_running += num_slots
                num_windows += 1
                if sequence.is_shared:
                    if not _is_prefix(sequence):
                        self._reserved[sequence] = reserved
                    block = self._open([sequence])
                    more = reserved + block.allocated_positions(block.capacity)
                    growth = [taken + more for taken in growth]
                else:
                    seated.append(sequence)
            admitted.append(sequence)
            prompt_tokens += sequence.num_pending
            self._waiting.popleft()
        if seated:
            self._open(seated)
        assert admitted or self._blocks or not self._waiting, "a sequence that fits alone is always admitted"
        return admitted

    def _is_full(self, sequences: list[Sequence]) -> bool:
        """Return whether the last of these sequences belongs into another block."""
        limits = self._limits
        if len(sequences) > min(limits.block_sequences, limits.batch_sequences):
            return True
        if len(sequences) <= BLOCK_SEQUENCES:
            return False
        widest = max(sequence.cache_tokens for sequence in sequences)
        uneven = sequences[-1].cache_tokens < (1 - _LARGE_BLOCK_SHARE) * widest
        return uneven or len(sequences) * widest > _LARGE_BLOCK_SHARE * limits.cache_tokens

    def _seat(self, sequences: list[Sequence]) -> list[int]:
        self._open(sequences)
        return self._growth()

    def _growth(self) -> list[int]:
        """Return the positions of cache in use after 0, 1, 2 … more passes, if no sequence ends early."""
        constant, futures = sum(self._reserved.values()), []
        for block in self._blocks:
            if block.sequences[0].is_shared:  # stays as long as it has readers
                constant += block.allocated_positions(block.capacity)
            else:
                futures.append(_future(block, _longest(block)))
        steps = max(map(len, futures), default=1)
        return [constant + sum(future[i] for future in futures if i < len(future)) for i in range(steps)]

    def _fits(self, growth: list[int], sequences: list[Sequence], reserved: int) -> bool:
        """Return whether a block of these sequences never makes the cache exceed its limit, now or later."""
        block = self._block(sequences)
        if sequences[-1].is_shared:
            return max(growth) + block.allocated_positions(block.capacity) + reserved <= self._limits.cache_tokens
        own = _future(block, max(sequence.prompt_len + 1 for sequence in sequences))
        steps = range(max(len(growth), len(own)))
        peak = max((growth[i] if i < len(growth) else 0) + (own[i] if i < len(own) else 0) for i in steps)
        return peak + reserved <= self._limits.cache_tokens

    def _open(self, sequences: list[Sequence]) -> CacheBlock:
        """Seat sequences in a new block, as wide as the widest of them needs."""
        block = self._block(sequences)
        for slot, sequence in enumerate(sequences):
            sequence.block, sequence.slot = block, slot
        self._blocks.append(block)
        return block

    def _block(self, sequences: list[Sequence]) -> CacheBlock:
        widest, limits = max(sequence.cache_tokens for sequence in sequences), self._limits
        steps = max(sequence.cache_tokens - sequence.prompt_len for sequence in sequences)
        block_overhead = steps * limits.step_overhead
        return CacheBlock(widest, len(sequences), sequences, limits.page_tokens, limits.slot_overhead, block_overhead)

    def _decode_batches(self) -> Iterator[Batch]:
        """Yield the running sequences that have a token to compute; those of a block stay together in slot order."""
        bundles = []
        for block in self._blocks:
            items = [_pending(sequence) for sequence in block.sequences if sequence.num_pending]
            assert len(items) in (0, len(block.sequences)), "a block decodes as one"
            if items:
                bundles.append(items)
        return self._batches(bundles, False)

    def _batches(self, bundles: Iterable[list[ScheduledTokens]], is_prefill: bool) -> Iterator[Batch]:
        """Yield batches of as many bundles as the limits allow; what is bundled stays together."""
        items: list[ScheduledTokens] = []
        tokens = 0
        for bundle in bundles:
            count = sum(item.count for item in bundle)
            many = len(items) + len(bundle) > self._limits.batch_sequences
            if items and (many or tokens + count > self._limits.batch_tokens):
                yield Batch(tuple(items), is_prefill)
                items, tokens = [], 0
            items += bundle
            tokens += count
        if items:
            yield Batch(tuple(items), is_prefill)


def _pending(sequence: Sequence) -> ScheduledTokens:
    return ScheduledTokens(sequence, sequence.num_pending)


def _is_prefix(sequence: Sequence) -> bool:
    return sequence.kind is SequenceKind.SHARED_PREFIX


def _longest(block: CacheBlock) -> int:
    """Return the tokens of the block's longest sequence, the one that it computes next included."""
    return max(max(sequence.num_computed, sequence.prompt_len) + 1 for sequence in block.sequences)


def _future(block: CacheBlock, tokens: int) -> list[int]:
    """Return the positions that a block takes after 0, 1, 2 … more passes, until its last sequence must end."""
    steps = range(max(1, block.capacity - tokens + 2))
    return [block.allocated_positions(min(tokens + i, block.capacity)) for i in steps]


def _admissions_per_pass(waiting: Iterable[Sequence], limits: SchedulerLimits) -> float | None:
    """Return how many sequences to admit each pass so that all ages fill the memory; None where that brings nothing.

    With s prompt tokens, n steps and room for M tokens, a block that begins together holds M / (s + n) sequences,
    because its end is its largest. Sequences of all ages take s + n/2 on average, so M / (s + n/2) of them run.
    Filling up and emptying cost n passes once (the paper's appendix, 'I/O-optimal').
    """
    decoding = [sequence for sequence in waiting if sequence.needs_cache and not sequence.is_shared]
    if not decoding:
        return None
    prompt = sum(sequence.prompt_len for sequence in decoding) / len(decoding) + limits.slot_overhead
    steps = sum(sequence.cache_tokens - sequence.prompt_len for sequence in decoding) / len(decoding)
    together = max(1.0, limits.cache_tokens // (prompt + steps))
    mixed = min(limits.cache_tokens / (prompt + (steps + limits.page_tokens) / 2), float(limits.max_sequences))
    if len(decoding) * steps / mixed + steps >= math.ceil(len(decoding) / together) * steps:
        return None
    return mixed / max(1.0, steps)
