"""Which beginnings of prompts are computed once for several of them. No torch.

All prompts of a run form a tree of token prefixes. Where prompts part, the tokens since they last
did become a shared prefix if that saves more than it costs: every batch with users of a prefix
attends to one segment more, and each of their tokens merges one partial result more.

    a b c d e f           prefix [a b c] with the users [d e f], [d g] and [x y]
    a b c d g             [d] would save one token of two users: not worth a segment
    a b c x y

A prefix ends before the last token of every user, so that each has a token of its own to compute.
Where prompts are scored it ends one token earlier: what its last token predicts is then the same
for all users.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.tiers import UNLIMITED

# Most prefixes on a path of the tree: a batch attends to each of them.
MAX_DEPTH = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt as the tree sees it.

    tokens: as they are computed.
    scored: their log-probabilities are wanted.
    steps: tokens that may be generated and computed behind them.
    """

    tokens: list[int]
    scored: bool
    steps: int


@dataclass(eq=False)
class PrefixNode:
    """Tokens [start, end) that prompts share.

    users: indices of all prompts below.
    members: the prompts, by index, and longer prefixes directly below.
    """

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
    """What a prefix costs, in tokens that could be computed instead, and what it may not exceed.

    room: positions of cache that a prompt and its prefixes may take together.
    overhead: cost of one more segment for each batch.
    group_tokens: prefixes end at a multiple of it.
    slot_overhead: positions that each sequence takes beside its own.
    token_overhead: cost of one more segment for each token.
    step_overhead: positions that every step takes beside its token.
    """

    room: int
    overhead: float
    group_tokens: int = 1
    slot_overhead: int = 0
    token_overhead: float = 0.0
    step_overhead: int = 0

    def of_prefix(self, end: int, users: Sequence[Prompt]) -> float:
        """Return the cost of a prefix up to `end`; prompts and every step count as a batch each."""
        later_tokens = sum(len(user.tokens) - end + user.steps for user in users)
        num_batches = 1 + max(user.steps for user in users)
        return self.overhead * num_batches + self.token_overhead * later_tokens


# Shares what prompts have in common however short it is.
EVERY_BEGINNING = PrefixCostModel(UNLIMITED, 0.0)


def plan_prefixes(prompts: Sequence[Prompt], cost: PrefixCostModel) -> list[PrefixNode | int]:
    """Return a forest in which the index of every prompt occurs once, the longest prompts first."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].tokens)
    roots: list[PrefixNode | int] = []
    deepest: dict[int, PrefixNode] = {}  # chosen prefix of a prompt, by its index
    path: list[tuple[PrefixNode, int]] = []  # chosen prefixes that are open, with their last prompt
    for first, last, depth in _branchings([prompts[index].tokens for index in order]):
        while path and path[-1][1] < first:
            path.pop()
        if len(path) == MAX_DEPTH:
            continue
        parent = path[-1][0] if path else None
        users = order[first : last + 1]
        # of sorted prompts the first may be the whole prefix
        end = min(depth, len(prompts[users[0]].tokens) - 1)
        if any(prompts[index].scored for index in users):
            end = min(end, depth - 1)
        prefix = PrefixNode(end // cost.group_tokens * cost.group_tokens, parent, users)
        sharing = [prompts[index] for index in users]
        if prefix.end <= prefix.start or prefix.saved < cost.of_prefix(prefix.end, sharing):
            continue
        if not _fits(prefix, sharing, len(path) + 1, cost):
            continue
        path.append((prefix, last))
        (parent.members if parent is not None else roots).append(prefix)
        deepest.update(dict.fromkeys(users, prefix))
    for index in order:
        (deepest[index].members if index in deepest else roots).append(index)
    _sort(roots, prompts)
    return roots


def shared_prefixes(
    users: Iterable[Sequence[Prompt]], cost: PrefixCostModel
) -> list[PrefixNode | int]:
    """Return the forest of prompt beginnings that are worth computing once; its leaves are numbers
    of requests.

    users: `Request.prefix_users` of each request; its number occurs as often as it has prompts.
    """
    prompts = [(number, prompt) for number, of_request in enumerate(users) for prompt in of_request]
    return _renumbered(
        plan_prefixes([prompt for _, prompt in prompts], cost), [number for number, _ in prompts]
    )


def _renumbered(
    members: Sequence[PrefixNode | int], numbers: Sequence[int]
) -> list[PrefixNode | int]:
    """Return the forest with `numbers[index]` in place of every index; changes its nodes."""
    for member in members:
        if isinstance(member, PrefixNode):
            member.users = [numbers[index] for index in member.users]
            member.members = _renumbered(member.members, numbers)
    return [member if isinstance(member, PrefixNode) else numbers[member] for member in members]


def _fits(prefix: PrefixNode, users: Sequence[Prompt], depth: int, cost: PrefixCostModel) -> bool:
    """Return whether the path down to a prefix fits, and no user that fits alone is kept out by its
    overhead.
    """
    overhead = depth * cost.slot_overhead
    if prefix.end + overhead > cost.room:
        return False
    if not overhead:
        return True
    step = 1 + cost.step_overhead
    needs_alone = (
        len(user.tokens) + user.steps * step + cost.slot_overhead for user in users if user.steps
    )
    largest = max((need for need in needs_alone if need <= cost.room), default=0)
    return largest + overhead <= cost.room


def prefixes_of(members: Sequence[PrefixNode | int]) -> Iterator[PrefixNode]:
    """Yield all prefixes of a forest."""
    for member in members:
        if isinstance(member, PrefixNode):
            yield member
            yield from prefixes_of(member.members)


def dissolve(
    members: Sequence[PrefixNode | int],
    dissolved: Collection[PrefixNode],
    parent: PrefixNode | None = None,
) -> list[PrefixNode | int]:
    """Return the forest without some prefixes: what was below them is below their parents.

    Changes the nodes that it keeps.
    """
    forest: list[PrefixNode | int] = []
    for member in members:
        if isinstance(member, PrefixNode):
            if member in dissolved:
                forest += dissolve(member.members, dissolved, parent)
                continue
            member.parent = parent
            member.members = dissolve(member.members, dissolved, member)
        forest.append(member)
    return forest


def _branchings(prompts: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return the maximal runs (first, last, depth) of sorted prompts that share `depth` tokens;
    outer ones first.

    A run ends, deepest first, where the next prompt shares fewer tokens with its neighbour.
    """
    runs: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # depth and first prompt of runs that go on
    for end in range(1, len(prompts) + 1):
        depth = common_length(prompts[end - 1], prompts[end]) if end < len(prompts) else 0
        first = end - 1
        while open_ and open_[-1][0] > depth:
            deeper, first = open_.pop()
            runs.append((first, end - 1, deeper))
        if depth and (not open_ or open_[-1][0] < depth):
            open_.append((depth, first))
    return sorted(runs, key=lambda run: (run[0], -run[1]))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two prompts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sort(members: list[PrefixNode | int], prompts: Sequence[Prompt]) -> None:
    """Sort by length, longest first: neighbours share cache blocks, and what does not fit shows
    early.
    """
    longest: dict[PrefixNode | int, tuple[int, int]] = {}
    for member in members:
        if isinstance(member, PrefixNode):
            _sort(member.members, prompts)
        users = member.users if isinstance(member, PrefixNode) else [member]
        longest[member] = max((len(prompts[index].tokens), prompts[index].steps) for index in users)
    members.sort(key=lambda member: longest[member], reverse=True)


# What it costs to share a beginning of prompts: one segment more, for a batch and for each of its
# tokens.

# Seconds that a batch takes in one layer for one more segment of keys: a few small operations.
_SEGMENT_S = 1e-4
# Operations that a token takes for one more segment, for each element of its queries: passes over
# queries and merged outputs, in operations of products that take as long (7 % of computing the
# token for SmolLM2-135M on two cores, 1 % for 7B).
_SEGMENT_FLOPS = 900.0
# Rates that the two are weighed with. Not measured: what is shared, and with it the last bits of a
# result, must not change between two processes.
_TYPICAL_FLOPS = {"cpu": 2e11, "cuda": 1e14}


def prefix_cost(config: ModelConfig, device: str) -> PrefixCostModel:
    """Return what sharing a prefix costs in tokens, over all layers; room is left open. device: its
    type in torch.
    """
    flops_per_layer = config.linear_flops_per_token / config.num_layers
    return PrefixCostModel(
        UNLIMITED,
        _SEGMENT_S * _TYPICAL_FLOPS[device] / flops_per_layer,
        token_overhead=_SEGMENT_FLOPS * config.q_size / flops_per_layer,
    )
