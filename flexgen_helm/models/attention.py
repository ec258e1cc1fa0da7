"""Attention over segments of keys, and the merge of partial results by log-sum-exp.

A query attends to several segments: a shared prefix, its own past, its own prompt. Each segment gives a partial result,
the output and the logarithm of the softmax's denominator. The merge weighs the outputs by those, which equals attention
over the concatenation:

    softmax([a, b]) [Va; Vb] = (e^la oa + e^lb ob) / (e^la + e^lb),   la = logsumexp(a), oa = softmax(a) Va

Shapes: T tokens, B sequences, Hq query heads, Hk key heads (Hq = G Hk), S keys, D elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from flexgen_helm.models.config import QUERY_CHUNK_TOKENS, SCORE_TOKENS

PartialAttention = tuple[Tensor, Tensor]  # output, log-sum-exp
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class AttentionConfig:
    """How a query scores a key: scale q·k, then c tanh(score / c) with a soft cap c, then minus slope times distance.

    slopes: [Hq] in float32 (ALiBi: Press et al., 2021), or None.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None

    def to_device(self, device: torch.device) -> AttentionConfig:
        return self if self.slopes is None else replace(self, slopes=self.slopes.to(device))

    def scores(self, products: Tensor) -> Tensor:
        """Products q·k -> scores in float32, without ALiBi."""
        scores = products.float() * self.scale
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def head_slopes(self, key_heads: int) -> Tensor | None:
        """Slopes [Hk, G]."""
        return None if self.slopes is None else self.slopes.view(key_heads, -1)


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, window: int | None = None
) -> PartialAttention:
    """Attend to the own token and the earlier ones, with a window only to the last `window` of them.

    q [T, Hq, D], k and v [T, Hk, D] -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    tokens, heads, dim = q.shape
    if window is not None and tokens > window:
        return attend_two_versions(q, (k[:0], v[:0]), (k, v), config, _window_chunks(tokens, window, q.device))
    key_heads = k.shape[1]
    group = heads // key_heads
    # Query heads of one key head become a batch dimension over expanded (not copied) keys and values.
    queries = q.view(tokens, key_heads, group, dim).permute(2, 1, 0, 3)
    keys = k.transpose(0, 1).expand(group, key_heads, tokens, dim)
    values = v.transpose(0, 1).expand(group, key_heads, tokens, dim)
    mask, slopes = None, config.head_slopes(key_heads)
    if slopes is not None:
        mask = _alibi_bias(slopes.t(), tokens).expand(group, key_heads, tokens, tokens)
    out, lse = _attend(queries, keys, values, config, is_causal=True, mask=mask)
    if slopes is not None:
        lse = lse - slopes.t()[:, :, None] * torch.arange(tokens, device=q.device)
    return out.permute(2, 1, 0, 3).reshape(tokens, heads, dim), lse.permute(2, 1, 0).reshape(tokens, heads)


@dataclass(frozen=True, eq=False)
class QueryChunk:
    """Consecutive queries of a prompt, with the quantized and the full-precision keys visible to them.

    queries: slice of the prompt's tokens.
    quantized, plain: slices of the keys' two versions, concatenated S keys.
    key_positions: [S].
    mask: additive [t, S].
    """

    queries: slice
    quantized: slice
    plain: slice
    key_positions: Tensor
    mask: Tensor


def attend_two_versions(
    q: Tensor, quantized: KeysValues, plain: KeysValues, config: AttentionConfig, chunks: Iterable[QueryChunk]
) -> PartialAttention:
    """Attend to older keys and values as they were quantized, and to newer ones in full precision.

    q [T, Hq, D]; quantized, plain: keys and values [n, Hk, D], in order of position; chunks: of all queries, in order
    -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    heads, dim = q.shape[1:]
    key_heads = quantized[0].shape[1]
    group = heads // key_heads
    slopes = config.head_slopes(key_heads)
    outs, lses = [], []
    for chunk in chunks:
        queries = q[chunk.queries].view(-1, key_heads, group, dim).permute(2, 1, 0, 3)
        keys, values = (
            torch.cat((old[chunk.quantized], new[chunk.plain])).transpose(0, 1).expand(group, key_heads, -1, dim)
            for old, new in zip(quantized, plain)
        )
        mask = chunk.mask[None, None]
        if slopes is not None:
            mask = mask + slopes.t()[:, :, None, None] * chunk.key_positions
        out, lse = _attend(queries, keys, values, config, mask=mask)
        if slopes is not None:
            positions = torch.arange(chunk.queries.start, chunk.queries.stop, device=q.device)
            lse = lse - slopes.t()[:, :, None] * positions
        outs.append(out.permute(2, 1, 0, 3).reshape(-1, heads, dim))
        lses.append(lse.permute(2, 1, 0).reshape(-1, heads))
    return torch.cat(outs), torch.cat(lses)


def attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    positions: Tensor,
    mask: Tensor | None,
    key_positions: Tensor | None = None,
) -> PartialAttention:
    """Attend with one query per sequence to the sequence's own cache.

    q: [B, Hq, D].
    k, v: [B, Hk, S, D].
    positions: [B], of the queries among the keys.
    mask: additive [B, 1, 1, S], or None.
    key_positions: [B, S] where keys are not in order of position.
    Returns output [B, Hq, D] and log-sum-exp [B, Hq]; 0 and minus infinity where the mask hides all keys.
    """
    batch, heads, dim = q.shape
    key_heads = k.shape[1]
    group = heads // key_heads
    # The G query heads of a key head take the place of a prompt's tokens, so each key is read once.
    queries = q.view(batch, key_heads, group, dim)
    bias, slopes = mask, config.head_slopes(key_heads)
    if slopes is not None:
        keys = torch.arange(k.shape[2], device=q.device) if key_positions is None else key_positions
        distance = keys - positions[:, None]
        bias = slopes[None, :, :, None] * distance[:, None, None, :]  # [B, Hk, G, S]
        bias = bias if mask is None else bias + mask
    elif mask is not None:
        bias = mask.expand(batch, 1, group, mask.shape[-1])
    out, lse = _attend(queries, k, v, config, mask=bias)
    out, lse = out.reshape(batch, heads, dim), lse.reshape(batch, heads)
    return (out, lse) if mask is None else _without_hidden(out, lse, torch.isneginf(mask).all(-1).view(batch, 1))


def attend_prefix(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, positions: Tensor, mask: Tensor | None = None
) -> PartialAttention:
    """Attend with all tokens to one shared segment, in one product per key head.

    q: [T, Hq, D].
    k, v: [Hk, S, D].
    positions: [T], of the queries, counted from the segment's first key.
    mask: additive [T, S], or None.
    Returns output [T, Hq, D] and log-sum-exp [T, Hq]; 0 and minus infinity where the mask hides all keys.
    """
    tokens, heads, dim = q.shape
    if tokens > QUERY_CHUNK_TOKENS and (mask is not None or config.slopes is not None):
        parts = [
            attend_prefix(q[rows], k, v, config, positions[rows], None if mask is None else mask[rows])
            for rows in (slice(first, first + QUERY_CHUNK_TOKENS) for first in range(0, tokens, QUERY_CHUNK_TOKENS))
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    key_heads = k.shape[0]
    group = heads // key_heads
    queries = q.view(tokens, key_heads, group, dim).transpose(0, 1).reshape(1, key_heads, tokens * group, dim)
    row_mask = None if mask is None else mask.repeat_interleave(group, dim=0)[None, None]
    bias, slopes = row_mask, config.head_slopes(key_heads)
    if slopes is not None:
        bias = _alibi_bias(slopes, k.shape[1]).transpose(1, 2)  # [Hk, 1, G, S]
        bias = bias.expand(-1, tokens, -1, -1).reshape(1, key_heads, tokens * group, k.shape[1])
        bias = bias if row_mask is None else bias + row_mask
    out, lse = _attend(queries, k[None], v[None], config, mask=bias)
    if row_mask is not None:
        out, lse = _without_hidden(out, lse, torch.isneginf(row_mask).all(-1).expand(lse.shape))
    out = out.view(key_heads, tokens, group, dim).transpose(0, 1).reshape(tokens, heads, dim)
    lse = lse.view(key_heads, tokens, group).transpose(0, 1).reshape(tokens, heads)
    return out, lse if config.slopes is None else lse - config.slopes * positions[:, None]


def merge_partial(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Merge partial results over disjoint keys: outputs [..., D], log-sum-exps [...]."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)  # of b: e^lb / (e^la + e^lb)
    out = torch.lerp(out_a.to(weight.dtype), out_b.to(weight.dtype), weight)  # in float32, as the log-sum-exps
    return out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


def window_mask(queries: Tensor, keys: Tensor, window: int, device: torch.device) -> Tensor:
    """Additive mask [..., T, S] of queries at positions [..., T] that see the last `window` of keys at [S]."""
    hidden = queries[..., None] - keys >= window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).to(device)


def _without_hidden(out: Tensor, lse: Tensor, hidden: Tensor) -> PartialAttention:
    """Make queries that see no key merge to nothing; hidden: their mask, in the shape of `lse`."""
    return out.masked_fill(hidden[..., None], 0.0), lse.masked_fill(hidden, -math.inf)


def _alibi_bias(slopes: Tensor, keys: int) -> Tensor:
    """Additive bias [..., 1, S] by key alone; slopes [...].

    Softmax does not change if all scores of a query change alike, so the query's own position is left out, and with it
    a whole matrix. The log-sum-exp, by which segments are merged, gets it back afterwards.
    """
    return slopes[..., None, None] * torch.arange(keys, device=slopes.device)


def _window_chunks(tokens: int, window: int, device: torch.device) -> Iterator[QueryChunk]:
    """A causal window in chunks of queries, without the keys that no query of a chunk sees."""
    for first in range(0, tokens, QUERY_CHUNK_TOKENS):
        end, oldest = min(first + QUERY_CHUNK_TOKENS, tokens), max(0, first - window + 1)
        mask = _window_chunk_mask(end - first, first - oldest, window, device)
        positions = torch.arange(oldest, end, device=device)
        yield QueryChunk(slice(first, end), slice(0, 0), slice(oldest, end), positions, mask)


@lru_cache(maxsize=16)
def _window_chunk_mask(queries: int, older: int, window: int, device: torch.device) -> Tensor:
    """Additive mask [t, older + t] of t queries over `older` keys and their own."""
    keys = torch.arange(older + queries)
    positions = keys[older:]
    future = keys > positions[:, None]
    return window_mask(positions, keys, window, torch.device("cpu")).masked_fill_(future, -math.inf).to(device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, *, is_causal: bool = False, mask: Tensor | None = None
) -> PartialAttention:
    """q [B, H, Tq, D], k and v [B, H, S, D] -> output [B, H, Tq, D], log-sum-exp [B, H, Tq]."""
    if q.device.type == "cpu" and q.dtype == torch.float32 and config.softcap is None and _FUSED is not None:
        return _FUSED(q, k, v, 0.0, is_causal, attn_mask=mask, scale=config.scale)
    return _attend_unfused(q, k, v, config, is_causal, mask)


def _attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, is_causal: bool, mask: Tensor | None
) -> PartialAttention:
    """The formula itself for every device and dtype, with scores in float32, in slices of query rows."""
    outs, lses = [], []
    for first in range(0, q.shape[2], SCORE_TOKENS):
        rows = slice(first, min(first + SCORE_TOKENS, q.shape[2]))
        last = rows.stop if is_causal else k.shape[2]
        scores = config.scores(torch.matmul(q[:, :, rows], k[:, :, :last].transpose(2, 3)))
        if is_causal:
            query, key = torch.arange(rows.start, rows.stop), torch.arange(last)
            scores.masked_fill_((key[None, :] > query[:, None]).to(q.device), -math.inf)
        if mask is not None:
            scores += mask[:, :, rows if mask.shape[2] > 1 else slice(None), :last]
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), v[:, :, :last]))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


# PyTorch's fused CPU kernel returns the log-sum-exp too, but only under its internal name. Without it, the unfused
# formula gives the same numbers more slowly; tests compare the two.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
