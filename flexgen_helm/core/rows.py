"""What moves through the model: rows, the slots that hold their cache, and the batches of a pass. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class SlotGroup:
    """Rows whose KV cache lies in one tensor a layer: row `i` of `rows` owns slot `i`, of `capacity` tokens.

    Active rows fill the first slots: a row that retires swaps places with the last one, so that attention reads
    one contiguous slice and never a retired row. page_tokens: the cache grows by so many tokens a slot as the rows
    do; 0: it has its whole capacity from the first token on. row_tokens: what every slot takes beside, in positions;
    beside: what the group does.
    """

    capacity: int
    num_slots: int
    rows: list["Row"]
    page_tokens: int = 0
    row_tokens: int = 0
    beside: int = 0

    def positions(self, tokens: int) -> int:
        """Positions of cache that the group takes when its longest row has `tokens`."""
        return self.num_slots * (self.paged(tokens) + self.row_tokens) + self.beside

    def paged(self, tokens: int) -> int:
        """Tokens a slot that are allocated when the longest row has `tokens`."""
        if not self.page_tokens:
            return self.capacity
        return min(self.capacity, -(-tokens // self.page_tokens) * self.page_tokens)


@dataclass(eq=False)
class Row:
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
    parents: tuple["Row", ...] = ()
    max_new: int = 0
    score: bool = False
    following: int | None = None
    draws: int = 0
    keeps_cache: bool = False
    computed: int = 0
    branch: int = 0
    group: SlotGroup | None = None
    slot: int = -1

    @property
    def pending(self) -> int:
        """Tokens to feed next. The last token of a prompt that nothing follows predicts nothing and is not fed."""
        end = len(self.tokens) if self.max_new else len(self.tokens) - 1
        return max(0, end - self.computed)

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def is_trunk(self) -> bool:
        """Tokens that only other rows go on from, which attend to this one's cache: it does not decode itself."""
        return self.keeps_cache and self.max_new == 1

    @property
    def is_prefix(self) -> bool:
        """A trunk that is no whole prompt but the beginning of several."""
        return self.is_trunk and not self.draws

    @property
    def targets(self) -> list[int]:
        """What the tokens that are fed next predict, of the prompt."""
        following = [] if self.following is None else [self.following]
        return self.tokens[self.computed + 1 : self.prompt_len] + following

    @property
    def cache_tokens(self) -> int:
        """Slot capacity that the row can come to need: the last token that may be drawn is never fed."""
        return self.prompt_len + max(0, self.max_new - 1)


@dataclass(frozen=True, eq=False)
class Chunk:
    """`count` tokens of one row, from `row.computed` on, in one batch."""

    row: Row
    count: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Chunks whose tokens lie side by side, computed together; decoding chunks are in slot order by group."""

    chunks: tuple[Chunk, ...]
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, eq=False)
class Family:
    """Rows that are admitted together: a prompt, and room for the continuations that will branch off it. A prefix is a
    family of its own, and the families that need it follow it in the queue."""

    prompt: Row
    num_branches: int = 0
    branch_tokens: int = 0

    @property
    def max_fed(self) -> int:
        """Tokens that pass through the model at most: the prompt, and every drawn token but the last."""
        grown = max(0, self.prompt.max_new - 1) + self.num_branches * self.branch_tokens
        return self.prompt.pending + grown
