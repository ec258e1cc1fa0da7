"""Draw tokens from logits: a true argmax, or an inverse of the cumulative distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_helm.scheduling.sampling import SamplingParams


def sample_tokens(logits: Tensor, sampling: list[SamplingParams]) -> Tensor:
    """Draw one token for each row; logits [R, V] in float32 -> token ids [R].

    Sampling inverts the cumulative distribution in float64: of the tempered softmax in vocabulary order or, with
    top_p < 1, of its nucleus (the fewest most probable tokens whose mass reaches top_p) in order of probability.
    """
    tokens = logits.argmax(dim=-1)
    for row, params in enumerate(sampling):
        if params.forced is not None:
            tokens[row] = params.forced
        elif params.temperature > 0.0:
            tokens[row] = _sample(logits[row], params)
    return tokens


def _sample(logits: Tensor, params: SamplingParams) -> int:
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = None
    if params.top_p < 1.0:
        # Stable, so that equally probable tokens keep the vocabulary's order on every device.
        probabilities, order = torch.sort(probabilities, descending=True, stable=True)
        mass_before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[mass_before < params.top_p]
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, params.uniform * cumulative[-1], right=True))
    index = min(index, cumulative.shape[0] - 1)
    return index if order is None else int(order[index])
