"""Requests in an order in which neighbours share prefixes, and where to cut it. No torch.

Sorted by their tokens, prompts that share a prefix are neighbours. A unit is a run of neighbours, so it computes each
of its prefixes once. Where two units meet, what their prompts share is computed once more, and so a cut is made
where that is little:

    a b c d  |  a b c e  |  a b c f  ||  x y z  |  x y u
           3           3           0          2          tokens that a cut there computes once more
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.prefix_tree import common_length

# How far from the wanted cost a unit may be cut, as a share of it.
_TOLERANCE = 0.25


def prompt_of(request: GenerationRequest) -> tuple[int, ...]:
    """Return what the order compares: token ids, or the characters of a text that is not encoded yet."""
    if request.prompt_token_ids is not None:
        return tuple(request.prompt_token_ids)
    return tuple(map(ord, request.prompt if request.prompt is not None else str(request.messages)))


class WorkList:
    """The requests that nobody computes now.

    order: places of all requests, by prompt.
    costs: of each request by place, in tokens: those of its prompt that its predecessor does not have, and half of
        those that it may generate.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._prompts = [prompt_of(request) for request in requests]
        self.order = sorted(range(len(requests)), key=self._prompts.__getitem__)
        self._rank = {place: rank for rank, place in enumerate(self.order)}
        self.costs = [0.0] * len(requests)
        before: int | None = None
        for place in self.order:
            request = requests[place]
            new_tokens = len(self._prompts[place]) - (0 if before is None else self._shared(before, place))
            self.costs[place] = max(1, new_tokens) + request.n * request.max_tokens / 2
            before = place
        self._waiting = deque(self.order)
        self.cost = sum(self.costs)

    def __len__(self) -> int:
        return len(self._waiting)

    def _shared(self, one: int, other: int) -> int:
        return common_length(self._prompts[one], self._prompts[other])

    def give_back(self, places: Iterable[int]) -> None:
        """Take back requests that were taken out and not answered."""
        returned = list(places)
        self._waiting = deque(sorted([*self._waiting, *returned], key=self._rank.__getitem__))
        self.cost += sum(self.costs[place] for place in returned)

    def take(
        self, cost: float, at_least: int = 1, limit_of: Callable[[int], float] | None = None,
        may_take: Callable[[int], bool] | None = None,
    ) -> list[int]:  # fmt: skip
        """Take out neighbours that cost about `cost` in all, cut where few tokens are shared; empty if there are none.

        at_least: least number of requests, if there are so many.
        limit_of: most requests that a unit with this one may have.
        may_take: False for a request that is left where it is.
        """
        skipped, taken = self._take_run(cost, at_least, limit_of, may_take)
        keep = self._best_cut(taken, cost, at_least)
        self._waiting.extendleft(reversed([*skipped, *taken[keep:]]))
        self.cost -= sum(self.costs[place] for place in taken[:keep])
        return taken[:keep]

    def _take_run(
        self, cost: float, at_least: int, limit_of: Callable[[int], float] | None,
        may_take: Callable[[int], bool] | None,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Take requests out up to the farthest place where a cut may be; also return those skipped before the first."""
        skipped: list[int] = []
        while self._waiting and may_take is not None and not may_take(self._waiting[0]):
            skipped.append(self._waiting.popleft())
        taken: list[int] = []
        so_far, limit = 0.0, float("inf")
        while self._waiting:
            place = self._waiting[0]
            limit = min(limit, limit_of(place) if limit_of is not None else limit)
            is_enough = so_far >= cost * (1 + _TOLERANCE) and len(taken) >= at_least
            if taken and (is_enough or len(taken) >= limit):
                break
            if may_take is not None and not may_take(place):
                break
            taken.append(self._waiting.popleft())
            so_far += self.costs[place]
        return skipped, taken

    def _best_cut(self, taken: Sequence[int], cost: float, at_least: int) -> int:
        """Return how many of `taken` to keep: within the tolerance, the cut that computes fewest tokens once more."""
        following = self._waiting[0] if self._waiting else None
        so_far, candidates = 0.0, []
        for count, place in enumerate(taken, start=1):
            so_far += self.costs[place]
            if count < len(taken) and (so_far < cost * (1 - _TOLERANCE) or count < at_least):
                continue
            after = taken[count] if count < len(taken) else following
            shared = 0 if after is None else self._shared(place, after)
            candidates.append((shared, abs(so_far - cost), count))
        return min(candidates)[2] if candidates else 0
