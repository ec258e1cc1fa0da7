"""What moves through the model: rows, the slots that hold their cache, and the batches of a pass. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class CacheBlock:
    """Rows whose KV cache lies in one tensor a layer: row `i` of `rows` owns slot `i`, of `capacity` tokens.

    Active rows fill the first slots: a row that retires swaps places with the last one, so that attention reads
    one contiguous slice and never a retired row. page_tokens: the cache grows by so many tokens a slot as the rows
    do; 0: it has its whole capacity from the first token on. row_tokens: what every slot takes beside, in positions;
    beside: what the group does.
    """

    capacity: int
    num_slots: int
    sequences: list["Sequence"]
    page_tokens: int = 0
    slot_overhead: int = 0
    block_overhead: int = 0

    def allocated_positions(self, tokens: int) -> int:
        """Positions of cache that the group takes when its longest row has `tokens`."""
        return self.num_slots * (self.allocated_tokens(tokens) + self.slot_overhead) + self.block_overhead

    def allocated_tokens(self, tokens: int) -> int:
        """Tokens a slot that are allocated when the longest row has `tokens`."""
        if not self.page_tokens:
            return self.capacity
        return min(self.capacity, -(-tokens // self.page_tokens) * self.page_tokens)


@dataclass(eq=False)
class Sequence:
    """One line of tokens: a prompt with its continuation, or one of n continuations of a shared prompt.

    tokens: the row's own tokens, prompt first; the continuation grows at the end. start: absolute position of
    tokens[0]. parents: rows whose whole cache precedes this row's (shared prefixes, outermost first). max_new:
    tokens that may follow the prompt. score: log-probabilities of the prompt's tokens are wanted, and of `following`,
    the token that all rows behind this one begin with. draws:
    tokens to draw from each last position (n on a prompt whose n continuations branch off, else 1 or 0). computed:
    leading tokens that have gone through the model. owner: the caller's record of the request; branch: the completion
    that this row continues.
    """

    tokens: list[int]
    prompt_len: int
    owner: Any
    start: int = 0
    prefixes: tuple["Sequence", ...] = ()
    max_new_tokens: int = 0
    needs_scores: bool = False
    next_token: int | None = None
    num_draws: int = 0
    needs_cache: bool = False
    num_computed: int = 0
    completion: int = 0
    block: CacheBlock | None = None
    slot: int = -1

    @property
    def num_pending(self) -> int:
        """Tokens to feed next. The last token of a prompt that nothing follows predicts nothing and is not fed."""
        end = len(self.tokens) if self.max_new_tokens else len(self.tokens) - 1
        return max(0, end - self.num_computed)

    @property
    def is_prefill(self) -> bool:
        return self.num_computed < self.prompt_len

    @property
    def is_shared(self) -> bool:
        """Tokens that only other rows go on from, which attend to this one's cache: it does not decode itself."""
        return self.needs_cache and self.max_new_tokens == 1

    @property
    def is_shared_prefix(self) -> bool:
        """A trunk that is no whole prompt but the beginning of several."""
        return self.is_shared and not self.num_draws

    @property
    def targets(self) -> list[int]:
        """What the tokens that are fed next predict, of the prompt."""
        following = [] if self.next_token is None else [self.next_token]
        return self.tokens[self.num_computed + 1 : self.prompt_len] + following

    @property
    def cache_tokens(self) -> int:
        """Slot capacity that the row can come to need: the last token that may be drawn is never fed."""
        return self.prompt_len + max(0, self.max_new_tokens - 1)


@dataclass(frozen=True, eq=False)
class ScheduledTokens:
    """`count` tokens of one row, from `row.computed` on, in one batch."""

    sequence: Sequence
    count: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Chunks whose tokens lie side by side, computed together; decoding chunks are in slot order by group."""

    scheduled: tuple[ScheduledTokens, ...]
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.scheduled)


@dataclass(frozen=True, eq=False)
class Admission:
    """Rows that are admitted together: a prompt, and room for the continuations that will branch off it. A prefix is a
    family of its own, and the families that need it follow it in the queue."""

    prompt: Sequence
    num_continuations: int = 0
    continuation_tokens: int = 0

    @property
    def max_computed_tokens(self) -> int:
        """Tokens that pass through the model at most: the prompt, and every drawn token but the last."""
        grown = max(0, self.prompt.max_new_tokens - 1) + self.num_continuations * self.continuation_tokens
        return self.prompt.num_pending + grown
