"""Sparse attention: of the older tokens, a query takes the values of those that weigh most (the paper, section 5).

A query's weights over its older keys are summed over the query heads of a key head, so that a key head's values are
loaded once for all of them. Of the n older keys that it may see, the ceil(share n) with the largest sums are taken;
the others count as if they were masked. The result is a part like any other (`models.attention`) and merges with that
of the newer tokens, which are all taken. Shapes and letters are those of `models.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_helm.models import attention
from flexgen_helm.models.attention import AttentionConfig, PartialAttention, QueryChunk


@dataclass(frozen=True, eq=False)
class TopK:
    """Keys that are taken. tokens [B, Hk, k]: their places; scores [B, Hk, G, k]: minus infinity where a row takes
    fewer than its neighbours."""

    tokens: Tensor
    scores: Tensor

    def attend(self, values: Tensor) -> PartialAttention:
        """values [B, Hk, k, D] of the tokens -> output [B, Hq, D], log-sum-exp [B, Hq]."""
        weights, lse = _normalized(self.scores)
        return torch.matmul(weights.to(values.dtype), values).flatten(1, 2), lse.flatten(1, 2)


def select_top_k(q: Tensor, k: Tensor, scoring: AttentionConfig, positions: Tensor, mask: Tensor, share: float) -> TopK:
    """What one query a row takes of its older keys.

    q [B, Hq, D], k [B, Hk, S, D], positions [B]: of the query among the keys, mask additive [B, 1, 1, S].
    """
    queries = q.unflatten(1, (k.shape[1], -1))
    scores = _scored(torch.matmul(queries, k.transpose(2, 3)), scoring, positions[:, None]) + mask
    counts = _counts(mask[:, 0, 0], share)
    tokens = _weights(scores).topk(int(counts.max()), dim=-1).indices
    taken = scores.gather(3, tokens[:, :, None].expand(-1, -1, scores.shape[2], -1))
    surplus = torch.arange(tokens.shape[-1], device=q.device) >= counts[:, None]
    return TopK(tokens, taken.masked_fill(surplus[:, None, None], -math.inf))


def attend_top_k(
    q: Tensor,
    first: PartialAttention,
    second: PartialAttention,
    scoring: AttentionConfig,
    sights: Iterable[QueryChunk],
    share: float,
) -> PartialAttention:
    """A prompt whose tokens take a share of the older keys (`first`) and all newer ones; else `attention.seen`."""
    parts = []
    for sight in sights:
        queries, old = q[sight.queries], sight.quantized.stop - sight.quantized.start
        at = torch.arange(sight.queries.start, sight.queries.stop, device=q.device)
        k, v = (x[sight.plain].transpose(0, 1) for x in second)
        part = attention.attend_prefix(queries, k, v, scoring, at - sight.plain.start, sight.mask[:, old:])
        if old:
            k, v = (x[sight.quantized].transpose(0, 1) for x in first)
            older = _older(queries, k, v, scoring, at - sight.quantized.start, sight.mask[:, :old], share)
            part = attention.merge_partial(part, older)
        parts.append(part)
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _older(
    q: Tensor, k: Tensor, v: Tensor, scoring: AttentionConfig, positions: Tensor, mask: Tensor, share: float
) -> PartialAttention:
    """q [T, Hq, D], k and v [Hk, S, D], positions [T] from the first key on, mask [T, S] -> [T, Hq, D], [T, Hq]."""
    tokens, heads, dim = q.shape
    key_heads, keys = k.shape[:2]
    group = heads // key_heads
    queries = q.view(tokens, key_heads, group, dim).transpose(0, 1).reshape(key_heads, tokens * group, dim)
    products = torch.matmul(queries, k.transpose(1, 2)).view(key_heads, tokens, group, keys).transpose(0, 1)
    scores = _scored(products, scoring, positions[:, None]) + mask[:, None, None]
    counts = _counts(mask, share)
    weights = _weights(scores)
    largest = weights.topk(max(1, int(counts.max())), dim=-1).values
    least = largest.gather(2, (counts - 1).clamp_min(0)[:, None, None].expand(-1, key_heads, 1))
    kept, lse = _normalized(scores.masked_fill((weights < least)[:, :, None], -math.inf))
    kept = kept.to(v.dtype).transpose(0, 1).reshape(key_heads, tokens * group, keys)
    out = torch.matmul(kept, v).view(key_heads, tokens, group, dim).transpose(0, 1)
    return out.reshape(tokens, heads, dim), lse.reshape(tokens, heads)


def _scored(products: Tensor, scoring: AttentionConfig, positions: Tensor) -> Tensor:
    """Products [B, Hk, G, S] of queries at `positions` [B, 1] and keys 0 … S - 1 -> scores, in float32."""
    scores = products.float() * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if scoring.slopes is not None:
        distance = torch.arange(scores.shape[-1], device=scores.device) - positions
        scores = scores + scoring.slopes.view(scores.shape[1], -1)[..., None] * distance[:, None, None]
    return scores


def _weights(scores: Tensor) -> Tensor:
    """Scores [B, Hk, G, S] -> weights [B, Hk, S], 0 where a query may see none."""
    return torch.softmax(scores, -1).nan_to_num_(0.0).sum(2)


def _counts(mask: Tensor, share: float) -> Tensor:
    """Keys to take [B] of those that an additive mask [B, S] leaves; a share's own rounding adds none."""
    visible = (mask == 0).sum(-1)
    return torch.ceil(visible.double() * share - 1e-9).long()


def _normalized(scores: Tensor) -> PartialAttention:
    """Scores [..., S] -> softmax, and the log-sum-exp [...]; zeros and minus infinity where nothing is left."""
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]), lse
