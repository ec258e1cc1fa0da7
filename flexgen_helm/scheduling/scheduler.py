"""Which sequences are in the next pass: admission within the cache's limit, the layout of cache
blocks, their growth, preemption, batches. No torch.

The scheduler decides by numbers alone: it knows sequences and how many positions of cache they
take, no tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import groupby

from flexgen_helm.planner.limits import SchedulerLimits
from flexgen_helm.scheduling.forecast import AnswerLengths, CacheDemand, Forecast
from flexgen_helm.scheduling.sequence import (
    Batch,
    CacheBlock,
    ScheduledTokens,
    Sequence,
    SequenceKind,
)
from flexgen_helm.shared_sizes import BLOCK_SEQUENCES

# Which sequences share a cache block, and how large the block is.

# A block of more than `BLOCK_SEQUENCES` takes at most this share of the cache. At most this share
# of the slots of a block that is that large, or that was joined from two, is unused.
_LARGE_BLOCK_SHARE = 1 / 8


class BlockLayout:
    """Lays sequences out in cache blocks, within the limits of a run.

    One attention call a layer reads a whole block, so few large blocks are fast. But every slot is
    as wide as the longest sequence needs, so sequences of one block should be of about one length.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def new_block(self, sequences: list[Sequence]) -> CacheBlock:
        """Return a block for these sequences; they are not seated yet."""
        limits = self._limits
        steps = max(sequence.cache_tokens - sequence.prompt_len for sequence in sequences)
        return CacheBlock(
            self._width(sequences),
            len(sequences),
            sequences,
            limits.slot_overhead,
            steps * limits.step_overhead,
        )

    def positions(self, block: CacheBlock, is_replaced: bool) -> int:
        """Return the positions of a block as it is, or of one that replaces it without its free
        slots.
        """
        if not is_replaced:
            return block.positions
        return len(block.sequences) * (self._width(block.sequences) + self._limits.slot_overhead)

    def is_full(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether the last of these sequences belongs into another block than the others."""
        limits = self._limits
        if len(sequences) > self._most_sequences:
            return True
        widest = self._width(sequences)
        is_uneven = self._width(sequences[-1:]) < (1 - _LARGE_BLOCK_SHARE) * widest
        if len(sequences) > BLOCK_SEQUENCES:
            return is_uneven or self._is_large(len(sequences) * widest)
        return is_uneven and limits.page_tokens > 0

    def joined(
        self, replaced: Collection[CacheBlock], decoding: Iterable[CacheBlock], room: int
    ) -> list[list[CacheBlock]]:
        """Group each block that is replaced with others of its tier and about its length, to become
        one block.

        decoding: all blocks that may take part; each is in one group at most.
        room: positions that joined blocks may take beyond what their parts take alone.
        """
        ungrouped = dict.fromkeys(sorted(decoding, key=lambda block: block.longest))
        groups = []
        for block in [block for block in ungrouped if block in replaced]:
            if block not in ungrouped:
                continue
            group, widened = [block], 0
            del ungrouped[block]
            for neighbour in list(ungrouped):
                widening = self._widening([*group, neighbour], replaced)
                # Continuations that have just branched off have nothing in the cache yet, and so no
                # tier.
                if neighbour.tier == block.tier and widening is not None and widening <= room:
                    group.append(neighbour)
                    widened = max(0, widening)
                    del ungrouped[neighbour]
            room -= widened
            groups.append(group)
        return groups

    @property
    def _most_sequences(self) -> int:
        return min(self._limits.block_sequences, self._limits.batch_sequences)

    def _is_large(self, positions: int) -> bool:
        """Return whether a block of more than `BLOCK_SEQUENCES` would take too much of the
        cache.
        """
        return positions > _LARGE_BLOCK_SHARE * self._limits.cache_tokens

    def _width(self, sequences: Iterable[Sequence]) -> int:
        """Return the capacity of a slot for the widest of these sequences: up to its end, or of the
        pages so far.
        """
        page, widest = self._limits.page_tokens, 0
        for sequence in sequences:
            width = sequence.cache_tokens
            if page and not sequence.is_shared:
                width = min(width, -(-(sequence.num_cached + 1) // page) * page)
            widest = max(widest, width)
        return widest

    def _widening(
        self, group: SequenceOf[CacheBlock], replaced: Collection[CacheBlock]
    ) -> int | None:
        """Return how many positions more blocks take as one than apart; None if they do not belong
        together.
        """
        widths = [self._width([sequence]) for block in group for sequence in block.sequences]
        total = len(widths) * max(widths)
        if len(widths) > self._most_sequences or total - sum(widths) > _LARGE_BLOCK_SHARE * total:
            return None
        if len(widths) > BLOCK_SEQUENCES and self._is_large(total):
            return None
        apart = sum(self.positions(block, block in replaced) for block in group)
        return total + len(widths) * self._limits.slot_overhead - apart


# Where sequences wait, a block with at least this share of free slots is replaced by a smaller one.
_FREE_SLOTS_SHARE = 1 / 4


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


@dataclass(frozen=True)
class Regroup:
    """Sequences that move into a new cache block, in slot order.

    sources: the block and slot that each of them comes from.
    """

    block: CacheBlock
    sources: tuple[tuple[CacheBlock, int], ...]


@dataclass(frozen=True)
class CacheChanges:
    """What the cache must do before a pass: free blocks first, then move sequences into new
    ones.
    """

    freed: SequenceOf[CacheBlock] = ()
    regroups: SequenceOf[Regroup] = ()


class Scheduler:
    """Forms passes from a queue of sequences, first come first served.

    A pass takes every running sequence one token further and admits waiting ones as long as their
    cache fits. A shared prefix precedes its users in the queue. Sequences that end give their slots
    back at once. In which order the batches of a pass meet the layers is the schedule's choice
    (`Schedule.order`).

    Without pages (`SchedulerLimits.page_tokens`) a sequence gets the cache of its longest possible
    answer when it is admitted, and a prompt with continuations reserves theirs. With pages the
    cache grows with the answers:

    - Sequences are admitted while the cache that all of them are expected to need fits
      (`AnswerLengths`).
    - Where it does not suffice, the youngest sequences are preempted. They give their cache back,
      return to the head of the queue, and are computed again up to their newest token.
    - A deadlock is not possible: the oldest sequence is never preempted, and a sequence is admitted
      only if each one that runs or was preempted could run to its end beside the caches that others
      attend to.

    num_preempted: how often a sequence was preempted.
    """

    def __init__(
        self,
        waiting: Iterable[Sequence],
        limits: SchedulerLimits,
        lengths: AnswerLengths | None = None,
    ) -> None:
        """lengths: what is known of the lengths of answers; whoever draws tokens keeps it up to
        date.
        """
        self._waiting = deque(waiting)
        self._limits, self._layout = limits, BlockLayout(limits)
        self._lengths = lengths or AnswerLengths()
        self._blocks: list[CacheBlock] = []
        self._running: dict[Sequence, None] = {}  # those that decode, the oldest first
        self._preempted: set[Sequence] = set()
        self._reserved: dict[Sequence, int] = {}  # positions for the continuations of a prompt
        self._waiting_prompts = sum(sequence.num_pending for sequence in self._waiting)
        self._waiting_answers: Counter[tuple[int | None, int]] = Counter()
        for sequence in self._waiting:
            self._waiting_answers.update(_answers(sequence))
        self.num_preempted = 0

    @property
    def running(self) -> list[Sequence]:
        """Sequences that decode or branch off, without shared prefixes."""
        return [*self._running, *self._reserved]

    @property
    def num_running(self) -> int:
        """Sequences with a cache, without shared prefixes."""
        return sum(
            len(block.sequences) for block in self._blocks if not _is_prefix(block.sequences[0])
        )

    @property
    def cache_tokens(self) -> int:
        """Positions of KV cache that are allocated or reserved now."""
        return sum(block.positions for block in self._blocks) + sum(self._reserved.values())

    def expected_tokens(self) -> float:
        """Return how many more tokens are expected to pass through the model."""
        answers = self._waiting_answers.copy()
        for sequence in self.running:
            answers.update(_answers(sequence))
        expected = self._lengths.expected_tokens
        return self._waiting_prompts + sum(
            count * expected(*answer) for answer, count in answers.items()
        )

    def make_room(self) -> CacheChanges:
        """Let full cache blocks grow before the next pass; preempt the youngest sequences if memory
        does not suffice.

        A block grows by being replaced. Free slots are left behind, and blocks of similar length
        are joined, because each block costs one more attention call a layer.
        """
        if not self._limits.page_tokens:
            return CacheChanges()
        decoding = [block for block in self._blocks if not block.sequences[0].is_shared]
        replaced = {block for block in decoding if block.longest > block.capacity}
        if self._waiting:
            replaced |= {
                block
                for block in decoding
                if _free_slots(block) >= _FREE_SLOTS_SHARE * block.num_slots
            }
        freed: list[CacheBlock] = []
        while (needed := self._positions_with(replaced)) > self._limits.cache_tokens:
            with_free_slots = {
                block for block in decoding if block not in replaced and _free_slots(block)
            }
            if with_free_slots:
                replaced |= with_free_slots
                continue
            assert len(self._running) > 1, "the oldest sequence has room to its end"
            block = self._preempt(next(reversed(self._running)))
            replaced.add(block)
            if not block.sequences:
                replaced.remove(block)
                decoding.remove(block)
                self._blocks.remove(block)
                freed.append(block)
        groups = self._layout.joined(replaced, decoding, self._limits.cache_tokens - needed)
        return CacheChanges(freed, [self._replace(group) for group in groups])

    def preempt_block(self, block: CacheBlock) -> bool:
        """Preempt all sequences of a block whose cache is lost; False if no other sequence runs,
        which then ends.
        """
        if len(block.sequences) == len(self._running):
            return False
        for sequence in sorted(block.sequences, key=list(self._running).index, reverse=True):
            self._preempt(sequence)
        self._blocks.remove(block)
        return True

    def next_pass(self) -> list[Batch]:
        """Return the batches of the next pass, decoding first; empty when nothing is left.

        A sequence is in at most one batch.
        """
        decoding = list(self._decode_batches())  # before new blocks are opened
        return decoding + list(
            self._batches(([_pending(sequence)] for sequence in self._admit()), True)
        )

    def another_pass_follows(self, batches: Iterable[Batch]) -> bool:
        """Return whether another pass follows these batches unless all their sequences meet an end
        early.
        """
        if self._waiting:
            return True
        sequences = [item.sequence for batch in batches for item in batch.scheduled]
        return any(
            sequence.max_new_tokens - (len(sequence.tokens) - sequence.prompt_len) > 1
            or sequence in self._reserved
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
        self._layout = BlockLayout(self._limits)
        halves: list[Batch] = []
        for batch in batches:
            if batch.is_prefill:
                halves += self._batches(([item] for item in batch.scheduled), True)
            else:
                by_block = groupby(batch.scheduled, key=lambda item: item.sequence.block)
                halves += self._batches((list(items) for _, items in by_block), False)
        return halves

    def branch(self, prompt: Sequence, continuations: list[Sequence]) -> None:
        """Give the continuations of a prompt the cache that it reserved; those that ended already
        need none.
        """
        del self._reserved[prompt]
        if continuations:
            self._open(continuations)
            self._running.update(dict.fromkeys(continuations))

    def retire(self, sequence: Sequence) -> SlotMove | None:
        """Take back the slot of a sequence whose cache nobody needs any more; None if it never had
        one.
        """
        self._running.pop(sequence, None)
        block, slot = sequence.block, sequence.slot
        if block is None:
            return None
        last = block.sequences.pop()
        sequence.block, sequence.slot = None, -1
        move = SlotMove(block)
        if last is not sequence:
            # The last one's prompt may be written already although its batch has not passed the
            # head yet.
            move = SlotMove(block, last.slot, slot, last.num_cached, sequence.num_cached)
            block.sequences[slot] = last
            last.slot = slot
        if not block.sequences:
            self._blocks.remove(block)
        return move

    # Admission

    def _admit(self) -> list[Sequence]:
        """Admit waiting sequences while their number, prompt tokens and cache are within the
        limits.
        """
        limits = self._limits
        admitted: list[Sequence] = []
        seated: list[Sequence] = []  # admitted sequences that will share the next block
        num_running = self.num_running
        num_states = sum(block.num_slots for block in self._blocks)
        num_states += sum(prompt.num_continuations for prompt in self._reserved)
        prompt_tokens = 0
        taken = self.cache_tokens
        forecast = self._forecast() if limits.page_tokens and self._waiting else None
        while self._waiting:
            sequence = self._waiting[0]
            if admitted and prompt_tokens + sequence.num_pending > limits.pass_tokens:
                break
            if sequence.needs_cache:
                # What is read by others has a block for itself, because it does not decode with its
                # neighbours.
                if seated and (sequence.is_shared or self._layout.is_full([*seated, sequence])):
                    taken += self._seat(seated, forecast)
                    seated = []
                reserved = self._reservation(sequence)
                if not self._fits(taken, [*seated, sequence], reserved, forecast):
                    if not seated:
                        break
                    taken += self._seat(seated, forecast)
                    seated = []
                    continue
                num_slots = int(not _is_prefix(sequence)) + sequence.num_continuations
                new_states = 1 + sequence.num_continuations
                if num_running and num_running + num_slots > limits.max_sequences:
                    break
                # If nothing runs and nothing was admitted, the only live caches are the shared
                # prefixes of the queue's head, so it must be admitted.
                if (num_running or admitted) and num_states + new_states > limits.max_states:
                    break
                num_running += num_slots
                num_states += new_states
                if sequence.is_shared:
                    if not _is_prefix(sequence):
                        self._reserved[sequence] = reserved
                    taken += self._seat([sequence], forecast) + reserved
                else:
                    seated.append(sequence)
                    self._running[sequence] = None
            admitted.append(sequence)
            prompt_tokens += sequence.num_pending
            self._leave_queue(sequence)
        if seated:
            self._open(seated)
        assert admitted or self._blocks or not self._waiting, (
            "a sequence that fits alone is always admitted"
        )
        return admitted

    def _leave_queue(self, sequence: Sequence) -> None:
        """Take the head of the queue out of it, and out of what is expected of those that wait."""
        self._waiting.popleft()
        self._preempted.discard(sequence)
        self._waiting_prompts -= sequence.num_pending
        self._waiting_answers.subtract(_answers(sequence))

    def _reservation(self, sequence: Sequence) -> int:
        """Return the positions that continuations of a prompt need when they branch off; they share
        one block.
        """
        tokens, limits = sequence.continuation_tokens, self._limits
        if limits.page_tokens:
            tokens = min(tokens, limits.page_tokens)
        return (
            sequence.num_continuations * (tokens + limits.slot_overhead)
            + tokens * limits.step_overhead
        )

    def _fits(
        self, taken: int, sequences: list[Sequence], reserved: int, forecast: Forecast | None
    ) -> bool:
        """Return whether a block of these sequences fits beside `taken` positions, now and, as
        expected, later.
        """
        room = self._limits.cache_tokens
        if taken + self._layout.new_block(sequences).positions + reserved > room:
            return False
        if forecast is None:
            return True
        newest = sequences[-1]
        if not self._can_all_end(newest):
            return False
        # Where nothing runs, the head is admitted whatever is expected of it: its own answer fits.
        return not self._running or forecast.peak_with(self._demand(sequences, is_new=True)) <= room

    def _can_all_end(self, newest: Sequence) -> bool:
        """Return whether each sequence could run to its end beside shared caches alone, if `newest`
        were admitted.
        """
        shared = sum(block.positions for block in self._blocks if block.sequences[0].is_shared)
        if newest.is_shared:
            shared += self._layout.new_block([newest]).positions
        alone = [sequence.cache_tokens for sequence in (*self._running, *self._preempted)]
        alone += [prompt.continuation_tokens for prompt in self._reserved]
        alone.append(newest.continuation_tokens if newest.is_shared else newest.cache_tokens)
        return shared + max(alone) + self._limits.slot_overhead <= self._limits.cache_tokens

    def _forecast(self) -> Forecast:
        """Return the expected cache of what runs now."""
        limits = self._limits
        steps = [sequence.remaining_steps for sequence in self._running]
        steps += [steps for (_, steps), count in self._waiting_answers.items() if count]
        forecast = Forecast(max(steps, default=1), limits.page_tokens, limits.slot_overhead)
        for block in self._blocks:
            forecast.add(self._demand(block.sequences))
        return forecast

    def _demand(self, sequences: SequenceOf[Sequence], is_new: bool = False) -> CacheDemand:
        """Describe the sequences of one block to a forecast; is_new: it is not open yet."""
        newest, end_rate = sequences[-1], self._lengths.end_rate
        if not newest.is_shared:
            tokens = max(sequence.num_cached for sequence in sequences) + 1
            rates = [end_rate(sequence.length_group) for sequence in sequences]
            return CacheDemand(tokens, [sequence.remaining_steps for sequence in sequences], rates)
        count = newest.num_continuations if is_new else 0  # later they have a block of their own
        steps, rate = newest.continuation_tokens, end_rate(newest.length_group)
        return CacheDemand(
            1, [steps] * count, [rate] * count, self._layout.new_block([newest]).positions
        )

    def _seat(self, sequences: list[Sequence], forecast: Forecast | None) -> int:
        """Open a block, which the forecast counts from now on; return its positions."""
        if forecast is not None:
            forecast.add(self._demand(sequences, is_new=True))
        return self._open(sequences).positions

    def _open(self, sequences: list[Sequence]) -> CacheBlock:
        """Seat sequences in a new block, as wide as the widest of them needs; return it."""
        block = self._layout.new_block(sequences)
        for slot, sequence in enumerate(sequences):
            sequence.block, sequence.slot = block, slot
        self._blocks.append(block)
        return block

    # Growth and preemption

    def _positions_with(self, replaced: set[CacheBlock]) -> int:
        """Return the positions of cache in use once these blocks are replaced."""
        positions = (self._layout.positions(block, block in replaced) for block in self._blocks)
        return sum(positions) + sum(self._reserved.values())

    def _preempt(self, sequence: Sequence) -> CacheBlock:
        """Put a sequence back to the queue's head; return its block, whose other slots stay where
        they are.
        """
        del self._running[sequence]
        block = sequence.block
        assert block is not None
        block.sequences.remove(sequence)
        sequence.preempt()
        self._waiting.appendleft(sequence)
        self._preempted.add(sequence)
        self._waiting_prompts += sequence.num_pending
        self._waiting_answers.update(_answers(sequence))
        self.num_preempted += 1
        return block

    def _replace(self, group: list[CacheBlock]) -> Regroup:
        """Replace blocks by one new block."""
        sources = tuple((block, sequence.slot) for block in group for sequence in block.sequences)
        self._blocks = [block for block in self._blocks if block not in group]
        joined = self._open([sequence for block in group for sequence in block.sequences])
        joined.tier = group[0].tier
        return Regroup(joined, sources)

    # Batches

    def _decode_batches(self) -> Iterator[Batch]:
        """Yield the running sequences that have a token to compute; those of a block stay together
        in slot order.
        """
        bundles = []
        for block in self._blocks:
            items = [_pending(sequence) for sequence in block.sequences if sequence.num_pending]
            assert len(items) in (0, len(block.sequences)), "a block decodes as one"
            if items:
                bundles.append(items)
        return self._batches(bundles, False)

    def _batches(
        self, bundles: Iterable[list[ScheduledTokens]], is_prefill: bool
    ) -> Iterator[Batch]:
        """Yield batches of as many bundles as the limits allow; what is bundled stays together."""
        items: list[ScheduledTokens] = []
        tokens = 0
        for bundle in bundles:
            count = sum(item.count for item in bundle)
            too_many = len(items) + len(bundle) > self._limits.batch_sequences
            if items and (too_many or tokens + count > self._limits.batch_tokens):
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


def _free_slots(block: CacheBlock) -> int:
    return block.num_slots - len(block.sequences)


def _answers(sequence: Sequence) -> dict[tuple[int | None, int], int]:
    """Return how many answers a sequence may bring, by group and the most tokens that are fed of
    each.
    """
    if sequence.num_continuations:
        return {(sequence.length_group, sequence.continuation_tokens): sequence.num_continuations}
    return (
        {(sequence.length_group, sequence.remaining_steps): 1} if sequence.remaining_steps else {}
    )
