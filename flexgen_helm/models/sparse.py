"""Sparse attention: of the older tokens, a query takes the values of those with the largest weights (paper, section 5).

A query's weights over the older keys are summed over the query heads of a key head, so that a key head's values are
loaded once for all of them. Of the n older keys visible to the query, the ceil(share n) with the largest sums are
selected (top-k); the others are masked. The partial result merges with that of the newer tokens, which are not sparse.
Shapes are those of `models.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_helm.models.attention import (
    AttentionConfig,
    KeysValues,
    PartialAttention,
    QueryChunk,
    attend_prefix,
    merge_partial,
)

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class TopK:
    """Selected keys.

    tokens: [B, Hk, k], indices of the keys.
    scores: [B, Hk, G, k], minus infinity in sequences that select fewer than k.
    """

    tokens: Tensor
    scores: Tensor

    def attend(self, values: Tensor) -> PartialAttention:
        """Values [B, Hk, k, D] of the tokens -> output [B, Hq, D], log-sum-exp [B, Hq]."""
        weights, lse = _softmax(self.scores)
        return torch.matmul(weights.to(values.dtype), values).flatten(1, 2), lse.flatten(1, 2)


def select_top_k(
    q: Tensor, k: Tensor, config: AttentionConfig, positions: Tensor, mask: Tensor, counts: Tensor, largest: int
) -> TopK:
    """Select the older keys of one query per sequence.

    q: [B, Hq, D].
    k: [B, Hk, S, D].
    positions: [B], of the queries among the keys.
    mask: additive [B, 1, 1, S].
    counts: [B], how many keys each query selects; largest: the largest of them.
    """
    scores = config.scores(q.unflatten(1, (k.shape[1], -1)), k)
    scores = _with_slopes(scores, config, positions[:, None]) + mask
    tokens = _weights(scores).topk(largest, dim=-1).indices
    selected = scores.gather(3, tokens[:, :, None].expand(-1, -1, scores.shape[2], -1))
    surplus = torch.arange(largest, device=q.device) >= counts[:, None]
    return TopK(tokens, selected.masked_fill(surplus[:, None, None], -math.inf))


def attend_top_k(
    q: Tensor,
    quantized: KeysValues,
    plain: KeysValues,
    config: AttentionConfig,
    chunks: Iterable[QueryChunk],
) -> PartialAttention:
    """Attend to a share of the older keys and to all newer ones; else as `attention.attend_two_versions`."""
    parts = []
    for chunk in chunks:
        queries, older = q[chunk.queries], chunk.quantized.stop - chunk.quantized.start
        positions = torch.arange(chunk.queries.start, chunk.queries.stop, device=q.device)
        k, v = (x[chunk.plain].transpose(0, 1) for x in plain)
        part = attend_prefix(queries, k, v, config, positions - chunk.plain.start, chunk.mask[:, older:])
        if older:
            k, v = (x[chunk.quantized].transpose(0, 1) for x in quantized)
            positions = positions - chunk.quantized.start
            part = merge_partial(part, _attend_selected(queries, k, v, config, positions, chunk))
        parts.append(part)
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_selected(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, positions: Tensor, chunk: QueryChunk
) -> PartialAttention:
    """As `attention.attend_prefix`, to the quantized keys that each query of a chunk selects."""
    assert chunk.num_selected is not None
    tokens, heads, dim = q.shape
    key_heads, keys = k.shape[:2]
    group = heads // key_heads
    queries = q.view(tokens, key_heads, group, dim).transpose(0, 1).reshape(key_heads, tokens * group, dim)
    scores = config.scores(queries, k).view(key_heads, tokens, group, keys).transpose(0, 1)
    scores = _with_slopes(scores, config, positions[:, None]) + chunk.mask[:, None, None, :keys]
    weights = _weights(scores)
    largest = weights.topk(max(1, chunk.max_selected), dim=-1).values
    threshold = largest.gather(2, (chunk.num_selected - 1).clamp_min(0)[:, None, None].expand(-1, key_heads, 1))
    weights, lse = _softmax(scores.masked_fill((weights < threshold)[:, :, None], -math.inf))
    weights = weights.to(v.dtype).transpose(0, 1).reshape(key_heads, tokens * group, keys)
    out = torch.matmul(weights, v).view(key_heads, tokens, group, dim).transpose(0, 1)
    return out.reshape(tokens, heads, dim), lse.reshape(tokens, heads)


def _with_slopes(scores: Tensor, config: AttentionConfig, positions: Tensor) -> Tensor:
    """Add ALiBi to scores [B, Hk, G, S] of queries at `positions` [B, 1] with keys 0 … S - 1."""
    slopes = config.head_slopes(scores.shape[1])
    if slopes is not None:
        distance = torch.arange(scores.shape[-1], device=scores.device) - positions
        scores = scores + slopes[..., None] * distance[:, None, None]
    return scores


def _weights(scores: Tensor) -> Tensor:
    """Scores [B, Hk, G, S] -> softmax weights [B, Hk, S], summed over G; 0 if a query sees no key."""
    return torch.softmax(scores, -1).nan_to_num_(0.0).sum(2)


def num_selected(visible: int, share: float) -> int:
    """Return how many of the visible keys a query selects; the share's own rounding error adds no key."""
    return math.ceil(visible * share - _ROUNDING)


def num_selected_tensor(visible: Tensor, share: float) -> Tensor:
    return torch.ceil(visible.double() * share - _ROUNDING).long()


def _softmax(scores: Tensor) -> PartialAttention:
    """Scores [..., S] -> softmax, and the log-sum-exp [...]; zeros and minus infinity if all scores are masked."""
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]), lse
