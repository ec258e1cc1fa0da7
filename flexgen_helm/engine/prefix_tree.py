"""Which beginnings of prompts are computed once for several of them. No torch.

All prompts of a run form a tree of token prefixes. Where some of them part, the tokens since the last such place are
computed once if that saves more than it costs: every batch with users of a prefix attends to one segment more, and
every token of them merges one part more.

    a b c d e f           prefix [a b c], its users [d e f], [d g] and [x y]
    a b c d g             [d] would save one token of two users, and is not worth a segment
    a b c x y

A prefix ends before the last token of every user, which has something of its own to feed that way, and one token
earlier where prompts are scored: what its last token predicts is then the same for all users.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

# Prefixes behind each other: every batch attends to each of them.
MAX_DEPTH = 16


@dataclass(frozen=True)
class Prompt:
    """tokens: as fed; scored: log-probabilities of them are wanted; steps: tokens that may be drawn behind them."""

    tokens: list[int]
    scored: bool
    steps: int


@dataclass(eq=False)
class PrefixNode:
    """Tokens [start, end) of some prompts. members: prompts (their places) and longer prefixes directly below; users:
    all prompts below."""

    end: int
    parent: PrefixNode | None = None
    users: list[int] = field(default_factory=list)
    members: list[PrefixNode | int] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.parent.end if self.parent is not None else 0

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return (self.end - self.start) * (len(self.users) - 1)


@dataclass(frozen=True)
class PrefixCostModel:
    """What a prefix must be. room: positions that a prompt and its prefixes may take together; row_tokens: what each
    of them takes beside its own, in positions; step_tokens: what every step does; group_tokens: prefixes end where a
    group of so many tokens does; overhead, token_overhead: tokens that could be computed while a batch attends to one
    segment more, and while a token of it does."""

    room: int
    overhead: float
    group_tokens: int = 1
    slot_overhead: int = 0
    token_overhead: float = 0.0
    step_overhead: int = 0

    def costs(self, end: int, users: Sequence[Prompt]) -> float:
        """What a prefix up to `end` costs, in tokens; prompts and every step are taken for a batch each."""
        behind = sum(len(user.tokens) - end + user.steps for user in users)
        return self.overhead * (1 + max(user.steps for user in users)) + self.token_overhead * behind


def plan_prefixes(prompts: Sequence[Prompt], rules: PrefixCostModel) -> list[PrefixNode | int]:
    """A forest with every prompt's place in it once, the longest first."""
    order = sorted(range(len(prompts)), key=lambda place: prompts[place].tokens)
    roots: list[PrefixNode | int] = []
    under: dict[int, PrefixNode] = {}  # the deepest prefix of a prompt
    path: list[tuple[PrefixNode, int]] = []  # chosen prefixes that contain the place at hand, with their last place
    for first, last, depth in _branchings([prompts[place].tokens for place in order]):
        while path and path[-1][1] < first:
            path.pop()
        if len(path) == MAX_DEPTH:
            continue
        parent = path[-1][0] if path else None
        users = order[first : last + 1]
        end = min(depth, len(prompts[users[0]].tokens) - 1)  # of sorted prompts the first may be the whole prefix
        if any(prompts[place].scored for place in users):
            end = min(end, depth - 1)
        prefix = PrefixNode(end // rules.group_tokens * rules.group_tokens, parent, users)
        theirs = [prompts[place] for place in users]
        if prefix.end <= prefix.start or prefix.saved < rules.costs(prefix.end, theirs):
            continue
        if not _fits(prefix, theirs, len(path) + 1, rules):
            continue
        path.append((prefix, last))
        (parent.members if parent is not None else roots).append(prefix)
        under.update(dict.fromkeys(users, prefix))
    for place in order:
        (under[place].members if place in under else roots).append(place)
    _sort(roots, prompts)
    return roots


def _fits(prefix: PrefixNode, users: Sequence[Prompt], depth: int, rules: PrefixCostModel) -> bool:
    """Whether the chain down to a prefix fits, and no user is kept out by what prefixes take beside their tokens."""
    beside = depth * rules.slot_overhead
    if prefix.end + beside > rules.room:
        return False
    each = 1 + rules.step_overhead
    alone = (len(user.tokens) + user.steps * each + rules.slot_overhead for user in users if user.steps)
    return not beside or max((need for need in alone if need <= rules.room), default=0) + beside <= rules.room


def prefixes_of(members: Sequence[PrefixNode | int]) -> Iterator[PrefixNode]:
    """All prefixes of a forest."""
    for member in members:
        if isinstance(member, PrefixNode):
            yield member
            yield from prefixes_of(member.members)


def dissolve(
    members: Sequence[PrefixNode | int], dissolved: Collection[PrefixNode], parent: PrefixNode | None = None
) -> list[PrefixNode | int]:
    """The forest without some prefixes: what was below them is below their parents."""
    found: list[PrefixNode | int] = []
    for member in members:
        if isinstance(member, PrefixNode):
            if member in dissolved:
                found += dissolve(member.members, dissolved, parent)
                continue
            member.parent = parent
            member.members = dissolve(member.members, dissolved, member)
        found.append(member)
    return found


def _branchings(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Of sorted prompts, every run first … last that shares `depth` tokens and no longer run does; outer ones first."""
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # depth, first
    for place in range(1, len(prompts) + 1):
        depth = _common(prompts[place - 1], prompts[place]) if place < len(prompts) else 0
        first = place - 1
        while open_ and open_[-1][0] > depth:
            deeper, first = open_.pop()
            found.append((first, place - 1, deeper))
        if depth and (not open_ or open_[-1][0] < depth):
            open_.append((depth, first))
    return iter(sorted(found, key=lambda run: (run[0], -run[1])))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that two prompts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sort(members: list[PrefixNode | int], prompts: Sequence[Prompt]) -> None:
    """Longest first: neighbours share shapes, and what does not fit shows early."""
    longest: dict[PrefixNode | int, tuple[int, int]] = {}
    for member in members:
        if isinstance(member, PrefixNode):
            _sort(member.members, prompts)
        users = member.users if isinstance(member, PrefixNode) else [member]
        longest[member] = max((len(prompts[place].tokens), prompts[place].steps) for place in users)
    members.sort(key=lambda member: longest[member], reverse=True)
