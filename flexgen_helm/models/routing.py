"""Compute a mixture of experts once a router has selected them, whoever computes the router and an expert.

An expert is wanted once for all tokens of a pass, so that it is read once. So each batch runs in a coroutine of its own
(a greenlet: the code of a module cannot be left otherwise) until it comes to its experts, and waits there for the rest:

    batch 0   attention, router |                        | sum, …
    batch 1                     attention, router |      |       sum, …
    experts                                         0 1 2 …            each with its tokens of all batches

Shapes: T tokens of a batch, H hidden size, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_helm.concurrency import stop_point

# Called with the experts that tokens use, in order, and the number of these tokens (`StageWeights.use_experts`).
Announce = Callable[[Sequence[int], int], None]
# How many rows of sorted tokens each of some experts has, by number, in order.
ExpertSizes = Mapping[int, int]
# Rows of one product with an expert: bounds the workspace without changing a result.
_EXPERT_ROWS = 4096


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Tokens of a batch on their way through the experts of a layer.

    x: [T, H].
    selected: numbers of the experts of each token, [T, K].
    weights: their shares of the token's result, [T, K].
    num_experts: E.
    experts: sizes, expert of each row [rows] or the one of all, tokens [rows, H] -> results [rows, H], which are
        overwritten.
    at_once: experts multiply many at once, each its rows (`StageWeights.holds_experts`); else one after the other.
    weighs_input: the shares are factors on what experts are given instead of on their results (Llama 4).
    """

    x: Tensor
    selected: Tensor
    weights: Tensor
    num_experts: int
    experts: Callable[[ExpertSizes, Tensor | int, Tensor], Tensor]
    at_once: bool
    weighs_input: bool = False


def run_together(batches: Iterable[Callable[[], Tensor]], announce: Announce) -> Generator[Tensor, None, None]:
    """Run a layer for each batch, and their experts together; yield what each returns, in order.

    batches: each calls `wait_for_experts`. The next one is asked for when the one before waits.
    announce: called once the experts of all batches are known.
    """
    from greenlet import greenlet  # mixtures alone need it

    waiting: deque[tuple[greenlet, RoutedTokens]] = deque()
    try:
        for batch in batches:
            layer = greenlet(batch)
            layer.gr_context = copy_context()
            waiting.append((layer, layer.switch()))
        if not waiting:
            return
        results = deque(through_experts([tokens for _, tokens in waiting], announce))
        while waiting:
            layer = waiting[0][0]
            out = layer.switch(results.popleft())
            while not layer.dead:  # a layer with a second mixture
                out = layer.switch(*through_experts([out], announce))
            waiting.popleft()
            yield out
    finally:
        for layer, _ in waiting:  # behind an error
            layer.throw()


def wait_for_experts(tokens: RoutedTokens) -> Tensor:
    """Return the results of a batch of `run_together`, [T, H], once those of the others are wanted, too."""
    from greenlet import getcurrent

    parent = getcurrent().parent
    assert parent is not None, "a layer with experts was not called by `run_together`"
    result: Tensor = parent.switch(tokens)
    return result


def through_experts(batches: Sequence[RoutedTokens], announce: Announce) -> list[Tensor]:
    """Return of each batch the weighted sums of its tokens' experts, [T, H] (Shazeer et al., 2017).

    Tokens are sorted by expert, so that an expert multiplies all of them in one product, of `_EXPERT_ROWS` at most:

        sorted   | tokens of expert 0 | of 1 |  | of 3 …        bounds: 0 … first of each expert and batch … T K

    A token's results are added in the order of expert numbers, whatever else is in its batch. A batch that multiplies
    with many experts at once is alone; then what else a product needs takes one launch of a device for all of them.

    announce: called before the first is computed.
    """
    first, device = batches[0], batches[0].x.device
    per_token, count = first.selected.shape[1], len(batches)
    sizes = [len(batch.x) for batch in batches]
    numbers = [batch.selected.flatten() * count + index for index, batch in enumerate(batches)]
    keys, order = torch.cat(numbers).sort(stable=True)  # by expert, then by batch; each token K times
    tokens = torch.cat([torch.arange(size, device=device) for size in sizes])[order // per_token]
    shares = torch.cat([batch.weights.flatten() for batch in batches])[order, None].to(first.x.dtype)
    edges = torch.searchsorted(keys, torch.arange(first.num_experts * count + 1, device=device))
    bounds = edges.tolist()  # the one wait for a device
    parts = [
        (number, index, row, min(row + _EXPERT_ROWS, end))
        for number in range(first.num_experts)
        for index in range(count)
        if (end := bounds[number * count + index + 1]) > (begin := bounds[number * count + index])
        for row in range(begin, end, _EXPERT_ROWS)
    ]
    announce([*dict.fromkeys(number for number, *_ in parts)], sum(sizes))
    out = [torch.zeros_like(batch.x) for batch in batches]
    results = first.x.new_empty((first.at_once * len(keys), first.x.shape[1]))
    for tile in _tiles(parts, first.at_once):
        stop_point()
        rows, of_experts = slice(tile[0][2], tile[-1][3]), Counter[int]()
        for number, _, begin, end in tile:
            of_experts[number] += end - begin
        if first.at_once:
            tile = [(0, 0, rows.start, rows.stop)]
        given = [batches[index].x.index_select(0, tokens[begin:end]) for _, index, begin, end in tile]
        x = given[0] if len(given) == 1 else torch.cat(given)
        x = x.mul_(shares[rows]) if first.weighs_input else x
        y = first.experts(of_experts, keys[rows] if first.at_once else number, x)
        y = y if first.weighs_input else y.mul_(shares[rows])
        if first.at_once:
            results[rows] = y
            continue
        for _, index, begin, end in tile:
            out[index].index_add_(0, tokens[begin:end], y[begin - rows.start : end - rows.start])
    if first.at_once:
        for of_rank in tokens.argsort(stable=True).view(-1, per_token).unbind(1):
            out[0].add_(results.index_select(0, of_rank))
    return out


# Expert, batch, and rows of the sorted tokens.
_Part = tuple[int, int, int, int]


def _tiles(parts: Sequence[_Part], of_many: bool) -> Iterator[list[_Part]]:
    """Join neighbouring parts, of one expert or of many, to tiles of at most `_EXPERT_ROWS` rows."""
    tile: list[_Part] = []
    for part in parts:
        if tile and (part[3] - tile[0][2] > _EXPERT_ROWS or not (of_many or part[0] == tile[0][0])):
            yield tile
            tile = []
        tile.append(part)
    yield tile
