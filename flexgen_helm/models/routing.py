"""Compute a mixture of experts once a router has selected them, whoever computes the router and an expert.

Shapes: T tokens, H hidden size, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts of each token.

    selected: their numbers, [T, K].
    weights: their shares of the token's result, [T, K].
    num_experts: E.
    """

    selected: Tensor
    weights: Tensor
    num_experts: int

    def apply(
        self,
        x: Tensor,
        announce: Callable[[Sequence[int]], None],
        expert: Callable[[int, Tensor], Tensor],
        weighs_input: bool = False,
    ) -> Tensor:
        """Each token x [T, H] through its experts -> their weighted sum [T, H] (Shazeer et al., 2017).

        Tokens are sorted by expert, so that an expert multiplies all of them in one product:

            sorted   | tokens of expert 0 | of 1 |  | of 3 …        bounds: 0 … first of each expert … T K

        announce: is given the experts that have tokens, in order, before the first is computed.
        expert: number, tokens [t, H] -> results [t, H], which are overwritten.
        weighs_input: the shares are factors on what experts are given instead of on their results (Llama 4).
        """
        sorted_experts, order = self.selected.flatten().sort(stable=True)  # [T K]: each token K times
        tokens = order // self.selected.shape[1]
        token_weights = self.weights.flatten()[order, None].to(x.dtype)
        experts = torch.arange(self.num_experts + 1, device=x.device)
        bounds = torch.searchsorted(sorted_experts, experts).tolist()  # the one wait for a device
        parts = [(number, slice(*ends)) for number, ends in enumerate(pairwise(bounds)) if ends[0] < ends[1]]
        announce([number for number, _ in parts])
        out = torch.zeros_like(x)
        for number, part in parts:
            given, weights = x.index_select(0, tokens[part]), token_weights[part]
            y = expert(number, given.mul_(weights)) if weighs_input else expert(number, given).mul_(weights)
            out.index_add_(0, tokens[part], y)
        return out

    def largest_weights(self) -> Tensor:
        """Return the largest share that any token gives to each expert, 0 where none selects it; [E] in float32."""
        shares = self.weights.flatten().float()
        return shares.new_zeros(self.num_experts).scatter_reduce_(0, self.selected.flatten(), shares, "amax")
