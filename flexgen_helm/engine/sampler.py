"""Draw tokens from logits: a true argmax, or an inverse of the cumulative distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_helm.engine.logits import greedy_tokens
from flexgen_helm.engine.small_tensors import host_and_device
from flexgen_helm.planner.constants import SAMPLED_ELEMENTS
from flexgen_helm.planner.placement import Tier
from flexgen_helm.scheduling.sampling import SamplingParams

# Exponent of a token that is never drawn: e^-1e4 is zero in float64.
_NO_CHANCE = -1e4


def sample_tokens(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Draw one token for each row; logits [R, V] in float32 -> token ids [R].

    Sampling inverts the cumulative distribution in float64: of the tempered softmax in vocabulary order or, with
    top_p < 1, of its nucleus (the fewest most probable tokens whose mass reaches top_p) in order of probability.
    A row's token does not depend on the other rows, and nothing here waits for an accelerator.
    """
    forced = [-1 if params.forced is None else params.forced for params in sampling]
    drawn = [row for row, token in enumerate(forced) if token < 0 and sampling[row].temperature > 0.0]
    if not drawn and max(forced) < 0:
        return greedy_tokens(logits)
    plain = [row for row in drawn if sampling[row].top_p == 1.0]
    nucleus = [row for row in drawn if sampling[row].top_p < 1.0]
    values = [
        (params.temperature, params.top_p, params.uniform) for params in (sampling[row] for row in (*plain, *nucleus))
    ]
    _, (forced_tokens, *rows, temperatures, top_ps, uniforms) = host_and_device(
        logits.device, (forced, plain, nucleus), [*zip(*values)] or ((), (), ())
    )
    if min(forced) >= 0:
        return forced_tokens
    tokens = greedy_tokens(logits)
    tier: Tier = "cpu" if logits.device.type == "cpu" else "gpu"
    first, many = 0, max(1, SAMPLED_ELEMENTS[tier] // logits.shape[1])
    for numbers, where in zip((plain, nucleus), rows):
        for part in where.split(many) if numbers else ():
            own = slice(first, first := first + len(part))
            chosen = logits if len(part) == len(logits) else logits.index_select(0, part)
            tokens[part] = _sample(chosen, temperatures[own, None], uniforms[own, None],
                                   top_ps[own, None] if numbers is nucleus else None)  # fmt: skip
    return tokens if max(forced) < 0 else torch.where(forced_tokens < 0, tokens, forced_tokens)


def _sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor, top_ps: Tensor | None) -> Tensor:
    """Draw one token for each row; top_ps: None where all are 1. Parameters [R, 1]."""
    probabilities = torch.softmax(_exponents(logits, temperatures), dim=-1)
    order = kept = None
    if top_ps is not None:
        # Stable, so that equally probable tokens keep the vocabulary's order on every device.
        probabilities, order = torch.sort(probabilities, descending=True, stable=True)
        kept = probabilities.cumsum(-1) - probabilities < top_ps
        probabilities = probabilities.masked_fill_(~kept, 0.0)
    cumulative = probabilities.cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    if order is None or kept is None:
        return index[:, 0].clamp_max(logits.shape[1] - 1)
    # Of a row that is not finite nothing is kept; it fails by its log-probability.
    last = (kept.sum(-1, keepdim=True) - 1).clamp_min_(0)
    return order.gather(1, torch.minimum(index, last))[:, 0]


def _exponents(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits by temperature in float64, less each row's largest one: finite at any temperature above 0.

    So a temperature near 0 leaves the most probable token. One below the normal numbers may count as 0 on a device.
    """
    exponents = logits.to(torch.float64, copy=True)
    exponents -= exponents.amax(-1, keepdim=True)
    exponents /= temperatures.clamp_min(torch.finfo(torch.float64).tiny)
    return exponents.clamp_min_(_NO_CHANCE)
