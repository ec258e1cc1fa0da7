"""Compute a mixture of experts once a router has selected them, whoever computes the router and an
expert.

An expert is wanted once for all tokens of a pass, so that it is read once. So each batch runs in a
coroutine of its own (a greenlet: the code of a module cannot be left otherwise) until it comes to
its experts, and waits there for the rest:

    batch 0   attention, router |                        | sum, …
    batch 1                     attention, router |      |       sum, …
    experts                                         0 1 2 …    each with its tokens of all batches

Shapes: T tokens of a batch, H hidden size, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexgen_helm.concurrency import stop_point

# Called with the experts that tokens use, in order, and the number of these tokens
# (`StageWeights.use_experts`).
Announce = Callable[[Sequence[int], int], None]
# Rows of one product with an expert: bounds the workspace without changing a result.
_EXPERT_ROWS = 4096


@dataclass(frozen=True, eq=False)
class RowExperts:
    """The experts of rows that are sorted by expert.

    sizes: number of an expert -> its rows, in the rows' order.
    numbers: of each row's expert, [rows] on the device; an integer where all rows have one expert.
    """

    sizes: Mapping[int, int]
    numbers: Any


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Tokens of a batch on their way through the experts of a layer.

    x: [T, H], of which `norm` makes what experts are given, row by row, once they compute: so the
        normed rows take no memory while batches wait.
    selected: numbers of the experts of each token, [T, K].
    weights: their shares of the token's result, [T, K].
    num_experts: E.
    experts: of each row, and tokens [rows, H] -> results [rows, H]; both may be overwritten.
    at_once: many experts multiply in one call, each its rows (`StageWeights.holds_experts`); else
        one after the other.
    weighs_input: the shares are factors on what experts are given instead of on their results
        (Llama 4).
    """

    x: Tensor
    selected: Tensor
    weights: Tensor
    num_experts: int
    experts: Callable[[RowExperts, Tensor], Tensor]
    at_once: bool
    weighs_input: bool = False
    norm: Callable[[Tensor], Tensor] = Tensor.contiguous

    def products(self, experts: RowExperts, x: Tensor, shares: Tensor) -> Tensor:
        """Return the results of rows x [rows, H] by their experts times their shares [rows, 1]."""
        stop_point()
        x = self.norm(x)
        if self.weighs_input:
            return self.experts(experts, x.mul_(shares))
        return self.experts(experts, x).mul_(shares)


def run_together(
    batches: Iterable[Callable[[], Tensor]], announce: Announce
) -> Generator[Tensor, None, None]:
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
    """Return the results of a batch of `run_together`, [T, H], once all its batches wait for
    theirs.
    """
    from greenlet import getcurrent

    parent = getcurrent().parent
    assert parent is not None, "a layer with experts was not called by `run_together`"
    result: Tensor = parent.switch(tokens)
    return result


def through_experts(batches: Sequence[RoutedTokens], announce: Announce) -> list[Tensor]:
    """Return of each batch the weighted sums of its tokens' experts, [T, H] (Shazeer et al., 2017).

    Tokens are sorted by expert, so that an expert multiplies all of them in one product, of
    `_EXPERT_ROWS` at most:

        sorted   | tokens of expert 0 | of 1 |  | of 3 …
        bounds   0 … first of each expert and batch … T K

    A token's results are added in the order of expert numbers, whatever else is in its batch.

    announce: called before the first is computed.
    """
    first, device, count = batches[0], batches[0].x.device, len(batches)
    sizes = [len(batch.x) for batch in batches]
    numbers = [batch.selected.flatten() * count + index for index, batch in enumerate(batches)]
    # by expert, then by batch; each token K times
    keys, order = torch.cat(numbers).sort(stable=True)
    tokens = torch.cat([torch.arange(size, device=device) for size in sizes])[
        order // first.selected.shape[1]
    ]
    shares = torch.cat([batch.weights.flatten() for batch in batches])[order, None].to(
        first.x.dtype
    )
    edges = torch.searchsorted(keys, torch.arange(first.num_experts * count + 1, device=device))
    bounds = edges.tolist()  # the one wait for a device
    used = [
        number
        for number in range(first.num_experts)
        if bounds[number * count] < bounds[(number + 1) * count]
    ]
    announce(used, sum(sizes))
    if first.at_once:
        assert count == 1, "experts that rest on the device wait for no other batch"
        return [_at_once(first, keys, tokens, shares, bounds)]
    out = [torch.zeros_like(batch.x) for batch in batches]
    for number in used:
        for rows, parts in _tiles(bounds[number * count : (number + 1) * count + 1]):
            gathered = [batches[index].x.index_select(0, tokens[part]) for index, part in parts]
            x = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
            y = first.products(RowExperts({number: len(x)}, number), x, shares[rows])
            for index, part in parts:
                out[index].index_add_(
                    0, tokens[part], y[part.start - rows.start : part.stop - rows.start]
                )
    return out


def _at_once(
    batch: RoutedTokens, experts: Tensor, tokens: Tensor, shares: Tensor, bounds: Sequence[int]
) -> Tensor:
    """Take a batch that is alone through many experts at once: what else a product needs is one
    launch for all.
    """
    results = batch.x.new_empty((len(tokens), batch.x.shape[1]))
    for rows, parts in _tiles(bounds):
        sizes = {number: part.stop - part.start for number, part in parts}
        x = batch.x.index_select(0, tokens[rows])
        results[rows] = batch.products(RowExperts(sizes, experts[rows]), x, shares[rows])
    out = torch.zeros_like(batch.x)
    # Of each token a row: of its lowest expert number first, as `index_add_` has them above.
    for rows_of_tokens in tokens.argsort(stable=True).view(len(out), -1).unbind(1):
        out.add_(results.index_select(0, rows_of_tokens))
    return out


def _tiles(bounds: Sequence[int]) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """Divide the rows between the first and the last bound into tiles; yield each with its parts
    between two bounds, and the number of the first of these.
    """
    for begin in range(bounds[0], bounds[-1], _EXPERT_ROWS):
        end = min(begin + _EXPERT_ROWS, bounds[-1])
        cuts = [min(max(begin, bound), end) for bound in bounds]
        yield (
            slice(begin, end),
            [(number, slice(*cut)) for number, cut in enumerate(pairwise(cuts)) if cut[0] < cut[1]],
        )
