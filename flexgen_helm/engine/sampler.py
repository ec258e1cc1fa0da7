"""Draw tokens from logits: a true argmax, or an argmax of logits by temperature plus Gumbel
noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_helm.offload.uploads import upload
from flexgen_helm.scheduling.sampling_params import SamplingParams
from flexgen_helm.shared_sizes import SAMPLED_ELEMENTS
from flexgen_helm.tiers import Tier

# PyTorch divides a longer row among threads, in another order than it sums one of several.
_SUMMED_AT_ONCE = 2048
# Exponent of a token that is never drawn: e^-1e4 is zero in float64, and no noise makes up for it.
_NO_CHANCE = -1e4
# SplitMix64 (Steele et al., 2014): the step of its counter, then shifts and factors of its mixing,
# as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the most probable token of each row, the first of equal ones; logits [R, V] -> [R]."""
    # The same token, found more than twice as fast on a CPU.
    return logits.max(dim=-1).indices if logits.device.type == "cpu" else logits.argmax(dim=-1)


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row and their tokens, [R, count]; logits [R, V].

    The first is the token that a temperature of 0 draws, also where two are equally probable.
    """
    values, tokens = logits.topk(count, dim=-1)
    greedy = greedy_tokens(logits)[:, None]
    tokens = tokens.where(tokens != greedy, tokens[:, :1])
    return values, torch.cat((greedy, tokens[:, 1:]), dim=-1)


def log_normalizers(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, by sums of one order for any rows and threads; logits [R,
    V] -> [R, 1].
    """
    if logits.device.type != "cpu":  # where rows have one order, and each call is a launch
        return logits.logsumexp(1, keepdim=True)
    in_blocks = logits.shape[1] // _SUMMED_AT_ONCE * _SUMMED_AT_ONCE
    blocks = logits[:, :in_blocks].unflatten(1, (-1, _SUMMED_AT_ONCE)).logsumexp(2)
    return torch.cat((blocks, logits[:, in_blocks:].logsumexp(1, keepdim=True)), 1).logsumexp(
        1, keepdim=True
    )


def sample_tokens(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Draw one token for each row; logits [R, V] in float32 -> token ids [R].

    The argmax of logits by temperature plus Gumbel noise, in float64, follows the tempered softmax;
    with top_p < 1, over its nucleus: the fewest most probable tokens whose mass reaches top_p.
    Rounding of the logits changes a token only where the two best sums are as near. A row's token
    does not depend on the other rows, and nothing here waits for an accelerator.
    """
    forced = [-1 if params.forced is None else params.forced for params in sampling]
    random_rows = [
        row for row, token in enumerate(forced) if token < 0 and sampling[row].temperature > 0.0
    ]
    if not random_rows and max(forced) < 0:
        return greedy_tokens(logits)
    plain = [row for row in random_rows if sampling[row].top_p == 1.0]
    nucleus = [row for row in random_rows if sampling[row].top_p < 1.0]
    params = [sampling[row] for row in (*plain, *nucleus)]
    forced_tokens, *rows, keys, temperatures, top_ps = upload(
        logits.device,
        (forced, plain, nucleus, [p.key for p in params]),
        ([p.temperature for p in params], [p.top_p for p in params]),
    )
    if min(forced) >= 0:
        return forced_tokens
    tokens = greedy_tokens(logits)
    tier: Tier = "cpu" if logits.device.type == "cpu" else "gpu"
    # `params` has the plain rows first, then those with a nucleus; a part of either at once.
    first, most_rows = 0, max(1, SAMPLED_ELEMENTS[tier] // logits.shape[1])
    for numbers, uploaded in zip((plain, nucleus), rows):
        for part in uploaded.split(most_rows) if numbers else ():
            span = slice(first, first := first + len(part))
            scores = _exponents(logits.index_select(0, part), temperatures[span, None])
            if numbers is nucleus:
                scores.masked_fill_(~_nucleus(scores, top_ps[span, None]), _NO_CHANCE)
            tokens[part] = greedy_tokens(
                scores.sub_(_negative_gumbel_noise(keys[span, None], logits.shape[1]))
            )
    return tokens if max(forced) < 0 else torch.where(forced_tokens < 0, tokens, forced_tokens)


def _nucleus(exponents: Tensor, top_ps: Tensor) -> Tensor:
    """Return which tokens [R, V] each row's nucleus has; of equally probable ones, the first.
    top_ps [R, 1].
    """
    # Stable, so that equally probable tokens keep the vocabulary's order on every device.
    probabilities, order = torch.sort(
        torch.softmax(exponents, dim=-1), descending=True, stable=True
    )
    kept = probabilities.cumsum(-1).sub_(probabilities) < top_ps
    return torch.empty_like(kept).scatter_(1, order, kept)


def _negative_gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Return log(-log(u)), the negative of Gumbel noise, for uniform u in (0, 1) by key and token
    id; keys [R, 1].
    """
    bits = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=keys.device) * _STEP + keys
    for shift, factor in _MIXING:
        shifted = (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)  # without the sign
        bits.bitwise_xor_(shifted).mul_(factor)
    # 52 bits and a half are exact in float64, and neither 0 nor 1.
    uniforms = bits.bitwise_and_((1 << 52) - 1).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniforms.log_().neg_().log_()


def _exponents(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits by temperature in float64, less each row's largest one: finite at any
    temperature above 0.

    So a temperature near 0 leaves the most probable token. One below the normal numbers may count
    as 0 on a device.
    """
    exponents = logits.to(torch.float64, copy=True)
    exponents -= exponents.amax(-1, keepdim=True)
    exponents /= temperatures.clamp_min(torch.finfo(torch.float64).tiny)
    return exponents.clamp_min_(_NO_CHANCE)
