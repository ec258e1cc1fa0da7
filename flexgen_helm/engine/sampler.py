"""Draw tokens from logits: a true argmax, or an inverse of the cumulative distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_helm.planner.constants import SAMPLED_ELEMENTS
from flexgen_helm.scheduling.sampling import SamplingParams


def sample_tokens(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Draw one token for each row; logits [R, V] in float32 -> token ids [R].

    Sampling inverts the cumulative distribution in float64: of the tempered softmax in vocabulary order or, with
    top_p < 1, of its nucleus (the fewest most probable tokens whose mass reaches top_p) in order of probability.
    A row's token does not depend on the other rows, and nothing here waits for an accelerator.
    """
    tokens = logits.argmax(dim=-1)
    forced = [row for row, params in enumerate(sampling) if params.forced is not None]
    if forced:
        tokens[_tensor(forced, logits)] = _tensor([sampling[row].forced for row in forced], logits)
    drawn = [row for row, params in enumerate(sampling) if params.forced is None and params.temperature > 0.0]
    many = max(1, SAMPLED_ELEMENTS // logits.shape[1])
    for rows in (
        [row for row in drawn if sampling[row].top_p == 1.0],
        [row for row in drawn if sampling[row].top_p < 1.0],
    ):
        for part in (rows[first : first + many] for first in range(0, len(rows), many)):
            where = _tensor(part, logits)
            tokens[where] = _sample(logits.index_select(0, where), [sampling[row] for row in part])
    return tokens


def _sample(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Draw one token for each row; `top_p` is 1 for all rows or for none."""
    temperatures, top_ps, uniforms = (
        torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]
        for values in zip(*((params.temperature, params.top_p, params.uniform) for params in sampling))
    )
    probabilities = torch.softmax(logits.double() / temperatures, dim=-1)
    order = kept = None
    if sampling[0].top_p < 1.0:
        # Stable, so that equally probable tokens keep the vocabulary's order on every device.
        probabilities, order = torch.sort(probabilities, descending=True, stable=True)
        kept = probabilities.cumsum(-1) - probabilities < top_ps
        probabilities = probabilities.masked_fill_(~kept, 0.0)
    cumulative = probabilities.cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    if order is None or kept is None:
        return index[:, 0].clamp_max(logits.shape[1] - 1)
    return order.gather(1, torch.minimum(index, kept.sum(-1, keepdim=True) - 1))[:, 0]


def _tensor(values: Sequence[int | None], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
