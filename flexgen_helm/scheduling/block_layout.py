"""Which sequences share a cache block, and how large the block is. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from flexgen_helm.planner.constants import BLOCK_SEQUENCES
from flexgen_helm.planner.scheduler_limits import SchedulerLimits
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence

# A block of more than `BLOCK_SEQUENCES` takes at most this share of the cache. At most this share of the slots of a
# block that is that large, or that was joined from two, is unused.
_LARGE_BLOCK_SHARE = 1 / 8


class BlockLayout:
    """Lays sequences out in cache blocks, within the limits of a run.

    One attention call a layer reads a whole block, so few large blocks are fast. But every slot is as wide as the
    longest sequence needs, so sequences of one block should be of about one length.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def new_block(self, sequences: list[Sequence]) -> CacheBlock:
        """Return a block for these sequences; they are not seated yet."""
        limits = self._limits
        steps = max(sequence.cache_tokens - sequence.prompt_len for sequence in sequences)
        return CacheBlock(
            self._width(sequences), len(sequences), sequences, limits.slot_overhead, steps * limits.step_overhead
        )

    def positions(self, block: CacheBlock, is_replaced: bool) -> int:
        """Return the positions of a block as it is, or of one that replaces it without its free slots."""
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
        """Group each block that is replaced with others of its tier and about its length, to become one block.

        decoding: all blocks that may take part; each is in one group at most.
        room: positions that joined blocks may take beyond what their parts take alone.
        """
        left = dict.fromkeys(sorted(decoding, key=lambda block: block.longest))
        groups = []
        for block in [block for block in left if block in replaced]:
            if block not in left:
                continue
            group, more = [block], 0
            del left[block]
            for other in list(left):
                widening = self._widening([*group, other], replaced)
                # Continuations that have just branched off have nothing in the cache yet, and so no tier.
                if other.tier == block.tier and widening is not None and widening <= room:
                    group.append(other)
                    more = max(0, widening)
                    del left[other]
            room -= more
            groups.append(group)
        return groups

    @property
    def _most_sequences(self) -> int:
        return min(self._limits.block_sequences, self._limits.batch_sequences)

    def _is_large(self, positions: int) -> bool:
        """Return whether a block of more than `BLOCK_SEQUENCES` would take too much of the cache."""
        return positions > _LARGE_BLOCK_SHARE * self._limits.cache_tokens

    def _width(self, sequences: Iterable[Sequence]) -> int:
        """Return the capacity of a slot for the widest of these sequences: up to its end, or of the pages so far."""
        page, widest = self._limits.page_tokens, 0
        for sequence in sequences:
            width = sequence.cache_tokens
            if page and not sequence.is_shared:
                width = min(width, -(-(sequence.num_cached + 1) // page) * page)
            widest = max(widest, width)
        return widest

    def _widening(self, group: SequenceOf[CacheBlock], replaced: Collection[CacheBlock]) -> int | None:
        """Return the positions that blocks take more as one than apart; None if they do not belong together."""
        widths = [self._width([sequence]) for block in group for sequence in block.sequences]
        total = len(widths) * max(widths)
        if len(widths) > self._most_sequences or total - sum(widths) > _LARGE_BLOCK_SHARE * total:
            return None
        if len(widths) > BLOCK_SEQUENCES and self._is_large(total):
            return None
        apart = sum(self.positions(block, block in replaced) for block in group)
        return total + len(widths) * self._limits.slot_overhead - apart
