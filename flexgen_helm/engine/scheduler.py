"""Who is in the next pass: admission within the cache's limit, prefill batches, decode batches, retirement. No torch.

A pass takes every running row one token further and lets waiting rows in as long as their cache fits. Rows that end
give their slots back at once. The order in which the batches of a pass meet the layers is `schedule`'s business.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from flexgen_helm.planner.constants import BLOCK_SEQUENCES
from flexgen_helm.planner.memory import SchedulerLimits
from flexgen_helm.sequence import Admission, Batch, CacheBlock, ScheduledTokens, Sequence

# Where more are allowed, a larger group takes at most this share of the cache, and so much of a further row's slot may
# stay unused.
_LARGE_GROUP = 1 / 8


@dataclass(frozen=True)
class SlotMove:
    """What the cache must do after a row has left `group`: copy `length` tokens from slot `source` (None where the
    last row left) to slot `target`, which held `stale` tokens, and free the group once it has no rows."""

    group: CacheBlock
    source: int | None = None
    target: int = -1
    length: int = 0
    stale: int = 0


class Scheduler:
    """Forms passes from a queue of families, in the order given."""

    def __init__(self, families: Iterable[Admission], limits: SchedulerLimits) -> None:
        self._waiting: deque[Admission] = deque(families)
        self._limits = limits
        self._groups: list[CacheBlock] = []
        self._reserved: dict[Sequence, int] = {}
        self._pace = _pace(self._waiting, limits) if limits.page_tokens else None
        self._credit = 0.0

    @property
    def num_running(self) -> int:
        """Rows with a cache, without prefixes."""
        return sum(len(group.sequences) for group in self._groups if not group.sequences[0].is_shared_prefix)

    @property
    def cache_tokens(self) -> int:
        """Positions of KV cache that are allocated or set aside now."""
        held = sum(group.allocated_positions(_age(group)) for group in self._groups)
        return held + sum(self._reserved.values())

    def next_pass(self) -> list[Batch]:
        """Batches of the next pass, decoding first; empty when nothing is left. A row is in at most one batch."""
        decoding = list(self._decode_batches())
        return decoding + list(self._prefill_batches(self._admit()))

    def will_go_on(self, batches: Iterable[Batch]) -> bool:
        """Whether another pass follows these batches unless all their rows meet an end-of-text or a stop string."""
        if self._waiting:
            return True
        rows = [chunk.sequence for batch in batches for chunk in batch.scheduled]
        return any(row.max_new_tokens - (len(row.tokens) - row.prompt_len) > 1 or row in self._reserved for row in rows)

    def halve(self, batches: Iterable[Batch]) -> list[Batch]:
        """The same chunks in batches half as large, and so from now on; a slot group that decodes stays together."""
        batches = list(batches)
        tokens = max(1, max(batch.num_tokens for batch in batches) // 2)
        rows = max(1, max(len(batch.scheduled) for batch in batches) // 2)
        self._limits = replace(
            self._limits,
            batch_tokens=min(self._limits.batch_tokens, tokens),
            batch_sequences=min(self._limits.batch_sequences, rows),
        )
        halves: list[Batch] = []
        for batch in batches:
            if batch.is_prefill:
                halves += self._batches(([chunk] for chunk in batch.scheduled), True)
            else:
                together = groupby(batch.scheduled, key=lambda chunk: chunk.sequence.block)
                halves += self._batches((list(chunks) for _, chunks in together), False)
        return halves

    def branch(self, prompt: Sequence, branches: list[Sequence]) -> None:
        """Give the continuations of a prompt the slots set aside at admission; those that ended already need none."""
        del self._reserved[prompt]
        if branches:
            self._open(branches)

    def retire(self, row: Sequence) -> SlotMove | None:
        """The row needs its cache no more; None if it never had one."""
        group, slot = row.block, row.slot
        if group is None:
            return None
        last = group.sequences.pop()
        row.block, row.slot = None, -1
        retired = SlotMove(group)
        if last is not row:
            retired = SlotMove(group, last.slot, slot, last.num_computed, row.num_computed)
            group.sequences[slot] = last
            last.slot = slot
        if not group.sequences:
            self._groups.remove(group)
        return retired

    def _admit(self) -> list[Sequence]:
        """Let waiting families in, first come first served, while rows and cache fit."""
        admitted: list[Sequence] = []
        seats: list[Sequence] = []  # rows that will share the next group
        rows = self.num_running
        tails = sum(len(group.sequences) for group in self._groups)
        tokens = 0
        growth = self._growth()
        if self._pace is not None:
            self._credit += self._pace
        while self._waiting:
            family = self._waiting[0]
            prompt = family.prompt
            if admitted and tokens + prompt.num_pending > self._limits.pass_tokens:
                break
            if prompt.needs_cache:
                alone = prompt.is_shared  # what others read does not decode: it keeps to itself
                if seats and (alone or self._is_full([*seats, prompt])):
                    growth = self._seat(seats)
                    seats = []
                # The seats of this pass become as wide as their widest row.
                set_aside = self._set_aside(family)
                if not self._fits(growth, [*seats, prompt], set_aside):
                    if not seats:
                        break
                    growth = self._seat(seats)
                    seats = []
                    continue
                if rows and rows + _rows(family) > self._limits.max_sequences:
                    break
                # Where nobody runs and nothing was let in, what is held are prefixes of the next one in the queue.
                if (rows or admitted) and tails + 1 > self._limits.max_windows:
                    break
                if not prompt.is_shared_prefix:
                    if self._pace is not None and rows and self._credit < 1:
                        break
                    self._credit -= 1
                rows += _rows(family)
                tails += 1
                if alone:
                    more = 0
                    if not prompt.is_shared_prefix:
                        more = self._reserved[prompt] = set_aside
                    self._open([prompt])
                    more += self._groups[-1].allocated_positions(self._groups[-1].capacity)
                    growth = [taken + more for taken in growth]
                else:
                    seats.append(prompt)
            admitted.append(prompt)
            tokens += prompt.num_pending
            self._waiting.popleft()
        if seats:
            self._seat(seats)
        assert admitted or self._groups or not self._waiting, "a family that fits alone is always admitted"
        return admitted

    def _is_full(self, rows: list[Sequence]) -> bool:
        """Whether the last of these rows is better seated in another group."""
        limits = self._limits
        if len(rows) > min(limits.block_sequences, limits.batch_sequences):
            return True
        if len(rows) <= BLOCK_SEQUENCES:
            return False
        widest = max(row.cache_tokens for row in rows)
        uneven = rows[-1].cache_tokens < (1 - _LARGE_GROUP) * widest
        return uneven or len(rows) * widest > _LARGE_GROUP * limits.cache_tokens

    def _seat(self, rows: list[Sequence]) -> list[int]:
        self._open(rows)
        return self._growth()

    def _growth(self) -> list[int]:
        """Positions of cache in use after 0, 1, 2 … more passes, if no row ends before it must."""
        set_aside, futures = sum(self._reserved.values()), []
        for group in self._groups:
            if group.sequences[0].is_shared:  # stays as long as others need it
                set_aside += group.allocated_positions(group.capacity)
            else:
                futures.append(_future(group, _age(group)))
        steps = max(map(len, futures), default=1)
        return [set_aside + sum(future[i] for future in futures if i < len(future)) for i in range(steps)]

    def _set_aside(self, family: Admission) -> int:
        """Positions for the continuations that will branch off a prompt, in one group."""
        return family.continuation_tokens * (
            family.num_continuations + (self._limits.step_overhead if family.num_continuations else 0)
        )

    def _fits(self, growth: list[int], rows: list[Sequence], set_aside: int) -> bool:
        """Whether a group of these rows never makes the cache exceed its limit, now or later."""
        group = self._group(rows)
        if rows[-1].is_shared:
            return max(growth) + group.allocated_positions(group.capacity) + set_aside <= self._limits.cache_tokens
        own = _future(group, max(row.prompt_len + 1 for row in rows))
        steps = range(max(len(growth), len(own)))
        peak = max((growth[i] if i < len(growth) else 0) + (own[i] if i < len(own) else 0) for i in steps)
        return peak + set_aside <= self._limits.cache_tokens

    def _open(self, rows: list[Sequence]) -> None:
        """Seat rows in a new group, as wide as its widest row."""
        group = self._group(rows)
        for slot, row in enumerate(rows):
            row.block, row.slot = group, slot
        self._groups.append(group)

    def _group(self, rows: list[Sequence]) -> CacheBlock:
        widest, limits = max(row.cache_tokens for row in rows), self._limits
        steps = max(row.cache_tokens - row.prompt_len for row in rows)
        return CacheBlock(
            widest, len(rows), rows, limits.page_tokens, limits.slot_overhead, steps * limits.step_overhead
        )

    def _decode_batches(self) -> Iterator[Batch]:
        """Running rows with a token to feed; the rows of a group stay together in slot order."""
        groups = []
        for group in self._groups:
            rows = [row for row in group.sequences if row.num_pending]
            assert len(rows) in (0, len(group.sequences)), "a group decodes as one"
            if rows:
                groups.append([ScheduledTokens(row, row.num_pending) for row in rows])
        return self._batches(groups, False)

    def _prefill_batches(self, rows: list[Sequence]) -> Iterator[Batch]:
        return self._batches(([ScheduledTokens(row, row.num_pending)] for row in rows), True)

    def _batches(self, bundles: Iterable[list[ScheduledTokens]], is_prefill: bool) -> Iterator[Batch]:
        """Chunks in order, as many in a batch as the limits allow; what is bundled stays together."""
        chunks: list[ScheduledTokens] = []
        tokens = 0
        for bundle in bundles:
            count = sum(chunk.count for chunk in bundle)
            full = (
                len(chunks) + len(bundle) > self._limits.batch_sequences or tokens + count > self._limits.batch_tokens
            )
            if chunks and full:
                yield Batch(tuple(chunks), is_prefill)
                chunks, tokens = [], 0
            chunks += bundle
            tokens += count
        if chunks:
            yield Batch(tuple(chunks), is_prefill)


def _rows(family: Admission) -> int:
    """Rows that will decode, and those of prompts that have a cache."""
    return int(family.prompt.needs_cache and not family.prompt.is_shared_prefix) + family.num_continuations


def _age(group: CacheBlock) -> int:
    """Tokens of the group's longest row, the one that it feeds next included."""
    return max(max(row.num_computed, row.prompt_len) + 1 for row in group.sequences)


def _future(group: CacheBlock, age: int) -> list[int]:
    """Positions that the group takes after 0, 1, 2 … more passes, until its last row must end."""
    return [group.allocated_positions(min(age + i, group.capacity)) for i in range(max(1, group.capacity - age + 2))]


def _pace(waiting: Iterable[Admission], limits: SchedulerLimits) -> float | None:
    """Rows to let in each pass so that the memory is filled by rows of all ages; None where that brings nothing.

    With s prompt tokens, n steps and room for M tokens, a block that begins together holds M / (s + n) rows, for its
    end is its largest; rows of all ages take s + n/2 on the average, so M / (s + n/2) of them are under way. Filling
    up and emptying cost n passes once (the paper's appendix, 'I/O-optimal').
    """
    rows = [family.prompt for family in waiting if family.prompt.needs_cache and not family.prompt.is_shared]
    if not rows:
        return None
    prompt = sum(row.prompt_len for row in rows) / len(rows) + limits.slot_overhead
    steps = sum(row.cache_tokens - row.prompt_len for row in rows) / len(rows)
    together = max(1.0, limits.cache_tokens // (prompt + steps))
    mixed = min(limits.cache_tokens / (prompt + (steps + limits.page_tokens) / 2), float(limits.max_sequences))
    if len(rows) * steps / mixed + steps >= math.ceil(len(rows) / together) * steps:
        return None
    return mixed / max(1.0, steps)
