"""Attention over segments: exact parts with their log-sum-exp, and the merge that joins them.

A query attends to several segments of keys (a shared prefix, its own past, itself). Each part yields its output and
the logarithm of its softmax denominator; the merge weighs the parts by those, which is plain attention over the
concatenation:

    softmax([a, b]) [Va; Vb] = (e^la oa + e^lb ob) / (e^la + e^lb),   la = logsumexp(a), oa = softmax(a) Va

Shapes: T tokens, B rows, Hq query heads, Hk key heads (Hq = G Hk), S keys, D elements a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

PartialAttention = tuple[Tensor, Tensor]  # output, log-sum-exp


@dataclass(frozen=True, eq=False)
class AttentionConfig:
    """How a query scores a key: `scale` q·k, bent to c tanh(score / c) by a soft cap c, less the distance by slope.

    slopes: [Hq] in float32 (ALiBi: Press et al., 2021), or None.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None

    def to_device(self, device: torch.device) -> AttentionConfig:
        """The same, for tensors that lie on `device`."""
        return self if self.slopes is None else replace(self, slopes=self.slopes.to(device))


# Rows of scores that the direct formula materializes at once, so that a long prompt cannot exhaust the workspace.
_DIRECT_ROWS = 1024
# Tokens whose masks or biases over a shared segment exist at once, for each head.
_BIASED_TOKENS = 256


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, scoring: AttentionConfig, window: int | None = None
) -> PartialAttention:
    """Each token sees itself and the earlier ones, with a window only the last `window` of them.

    q [T, Hq, D], k and v [T, Hk, D] -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    tokens, heads, dim = q.shape
    if window is not None and tokens > window:
        return attend_two_versions(q, (k[:0], v[:0]), (k, v), scoring, _window_chunks(tokens, window, q.device))
    key_heads = k.shape[1]
    group = heads // key_heads
    # Query heads of one key head become a batch dimension over expanded (not copied) keys and values.
    queries = q.view(tokens, key_heads, group, dim).permute(2, 1, 0, 3)
    keys = k.transpose(0, 1).expand(group, key_heads, tokens, dim)
    values = v.transpose(0, 1).expand(group, key_heads, tokens, dim)
    mask, by_head = None, _slopes_by_key_head(scoring, key_heads)
    if by_head is not None:
        mask = _alibi_bias(by_head.t(), tokens).expand(group, key_heads, tokens, tokens)
    out, lse = _attend(queries, keys, values, scoring, is_causal=True, mask=mask)
    if by_head is not None:
        lse = lse - by_head.t()[:, :, None] * torch.arange(tokens, device=q.device)
    return out.permute(2, 1, 0, 3).reshape(tokens, heads, dim), lse.permute(2, 1, 0).reshape(tokens, heads)


@dataclass(frozen=True, eq=False)
class QueryChunk:
    """What some neighbouring queries of a prompt see of two versions of its keys: `first` [n, Hk, D] and `second`.

    mask [t, S], additive, over the keys of both slices side by side; keys [S]: their positions; queries: a slice too.
    """

    queries: slice
    quantized: slice
    plain: slice
    key_positions: Tensor
    mask: Tensor


def attend_two_versions(
    q: Tensor, first: PartialAttention, second: PartialAttention, scoring: AttentionConfig, sights: Iterable[QueryChunk]
) -> PartialAttention:
    """A prompt whose tokens see other versions of the older keys and values than of the newer ones.

    q [T, Hq, D]; first, second: keys and values [n, Hk, D], each in position order; sights: of all queries, in order
    -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    heads, dim = q.shape[1:]
    key_heads = first[0].shape[1]
    group = heads // key_heads
    by_head = _slopes_by_key_head(scoring, key_heads)
    outs, lses = [], []
    for sight in sights:
        queries = q[sight.queries].view(-1, key_heads, group, dim).permute(2, 1, 0, 3)
        keys, values = (
            torch.cat((old[sight.quantized], new[sight.plain])).transpose(0, 1).expand(group, key_heads, -1, dim)
            for old, new in zip(first, second)
        )
        mask = sight.mask[None, None]
        if by_head is not None:
            mask = mask + by_head.t()[:, :, None, None] * sight.key_positions
        out, lse = _attend(queries, keys, values, scoring, mask=mask)
        if by_head is not None:
            at = torch.arange(sight.queries.start, sight.queries.stop, device=q.device)
            lse = lse - by_head.t()[:, :, None] * at
        outs.append(out.permute(2, 1, 0, 3).reshape(-1, heads, dim))
        lses.append(lse.permute(2, 1, 0).reshape(-1, heads))
    return torch.cat(outs), torch.cat(lses)


def attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: AttentionConfig,
    positions: Tensor,
    mask: Tensor | None,
    key_positions: Tensor | None = None,
) -> PartialAttention:
    """One query a row, each over its own row of a cache.

    q [B, Hq, D], k and v [B, Hk, S, D], positions [B]: the key that is the query's own, mask None or additive
    [B, 1, 1, S], key_positions [B, S] where the keys are not in order -> output [B, Hq, D], log-sum-exp [B, Hq]; a
    row that the mask leaves no key has the output 0 and the log-sum-exp minus infinity.
    """
    rows, heads, dim = q.shape
    key_heads = k.shape[1]
    group = heads // key_heads
    # The G query heads of a key head stand where a prompt's tokens would, so each key is read once.
    queries = q.view(rows, key_heads, group, dim)
    by_head, hidden = _slopes_by_key_head(scoring, key_heads), mask
    if by_head is not None:
        at = torch.arange(k.shape[2], device=q.device) if key_positions is None else key_positions
        distance = at - positions[:, None]
        falloff = by_head[None, :, :, None] * distance[:, None, None, :]  # [B, Hk, G, S]
        mask = falloff if mask is None else falloff + mask
    elif mask is not None:
        mask = mask.expand(rows, 1, group, mask.shape[-1])
    out, lse = _attend(queries, k, v, scoring, mask=mask)
    out, lse = out.reshape(rows, heads, dim), lse.reshape(rows, heads)
    if hidden is not None:
        empty = torch.isneginf(hidden).all(-1).view(rows, 1)
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
    return out, lse


def attend_prefix(
    q: Tensor, k: Tensor, v: Tensor, scoring: AttentionConfig, positions: Tensor, mask: Tensor | None = None
) -> PartialAttention:
    """All tokens see all keys of one segment (or those that a mask leaves), in one product per key head.

    q [T, Hq, D], k and v [Hk, S, D], positions [T]: of the queries, counted from the segment's first key, mask None
    or additive [T, S] -> output [T, Hq, D], log-sum-exp [T, Hq]; a token that the mask leaves no key has the output
    0 and the log-sum-exp minus infinity, which merges to nothing.
    """
    tokens, heads, dim = q.shape
    if tokens > _BIASED_TOKENS and (mask is not None or scoring.slopes is not None):
        slices = [slice(first, first + _BIASED_TOKENS) for first in range(0, tokens, _BIASED_TOKENS)]
        parts = [
            attend_prefix(q[some], k, v, scoring, positions[some], None if mask is None else mask[some])
            for some in slices
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    key_heads = k.shape[0]
    group = heads // key_heads
    queries = q.view(tokens, key_heads, group, dim).transpose(0, 1).reshape(1, key_heads, tokens * group, dim)
    hidden = None if mask is None else mask.repeat_interleave(group, dim=0)[None, None]
    bias, by_head = hidden, _slopes_by_key_head(scoring, key_heads)
    if by_head is not None:
        falloff = _alibi_bias(by_head, k.shape[1]).transpose(1, 2)  # [Hk, 1, G, S]
        falloff = falloff.expand(-1, tokens, -1, -1).reshape(1, key_heads, tokens * group, k.shape[1])
        bias = falloff if hidden is None else falloff + hidden
    out, lse = _attend(queries, k[None], v[None], scoring, mask=bias)
    if hidden is not None:
        empty = torch.isneginf(hidden).all(-1).expand(lse.shape)
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
    out = out.view(key_heads, tokens, group, dim).transpose(0, 1).reshape(tokens, heads, dim)
    lse = lse.view(key_heads, tokens, group).transpose(0, 1).reshape(tokens, heads)
    return out, lse if scoring.slopes is None else lse - scoring.slopes * positions[:, None]


def _slopes_by_key_head(scoring: AttentionConfig, key_heads: int) -> Tensor | None:
    """Slopes [Hk, G]."""
    return None if scoring.slopes is None else scoring.slopes.view(key_heads, -1)


def _alibi_bias(slopes: Tensor, keys: int) -> Tensor:
    """Additive bias [..., 1, S] by key alone, slopes [...].

    Softmax does not notice what is the same for all keys of a query, so the query's position is left out, and with
    it a whole matrix of scores; the log-sum-exp, which segments are merged by, gets it back afterwards.
    """
    return slopes[..., None, None] * torch.arange(keys, device=slopes.device)


def merge_partial(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Join two parts over disjoint keys; outputs [..., D], log-sum-exps [...]."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    share = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)  # of b: e^lb / (e^la + e^lb)
    out = torch.lerp(out_a.to(share.dtype), out_b.to(share.dtype), share)  # in float32, the log-sum-exps' type
    return out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


def window_mask(queries: Tensor, keys: Tensor, window: int, device: torch.device) -> Tensor:
    """Additive mask of positions queries [..., T] over keys [S] that leaves the last `window`, itself included."""
    hidden = queries[..., None] - keys >= window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).to(device)


def _window_chunks(tokens: int, window: int, device: torch.device) -> Iterator[QueryChunk]:
    """A causal window, some neighbouring queries at a time: keys that none of them sees are not computed."""
    for first in range(0, tokens, _BIASED_TOKENS):
        end, oldest = min(first + _BIASED_TOKENS, tokens), max(0, first - window + 1)
        mask = _window_chunk_mask(end - first, first - oldest, window, device)
        yield QueryChunk(
            slice(first, end), slice(0, 0), slice(oldest, end), torch.arange(oldest, end, device=device), mask
        )


@lru_cache(maxsize=16)
def _window_chunk_mask(queries: int, older: int, window: int, device: torch.device) -> Tensor:
    """Additive mask [t, older + t] of neighbouring queries over so many older keys and their own."""
    keys = torch.arange(older + queries)
    at = keys[older:]
    ahead = keys > at[:, None]
    return window_mask(at, keys, window, torch.device("cpu")).masked_fill_(ahead, -math.inf).to(device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scoring: AttentionConfig, *, is_causal: bool = False, mask: Tensor | None = None
) -> PartialAttention:
    """q [B, H, Tq, D], k and v [B, H, S, D] -> output [B, H, Tq, D], log-sum-exp [B, H, Tq]."""
    if q.device.type == "cpu" and q.dtype == torch.float32 and scoring.softcap is None and _FUSED is not None:
        return _FUSED(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scoring.scale)
    return _attend_unfused(q, k, v, scoring, is_causal, mask)


def _attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, scoring: AttentionConfig, is_causal: bool, mask: Tensor | None
) -> PartialAttention:
    """The formula itself, scores in float32: every device and type, in slices of query rows."""
    outs, lses = [], []
    for first in range(0, q.shape[2], _DIRECT_ROWS):
        rows = slice(first, min(first + _DIRECT_ROWS, q.shape[2]))
        last = rows.stop if is_causal else k.shape[2]
        scores = torch.matmul(q[:, :, rows], k[:, :, :last].transpose(2, 3)).float() * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if is_causal:
            query, key = torch.arange(rows.start, rows.stop), torch.arange(last)
            scores.masked_fill_((key[None, :] > query[:, None]).to(q.device), -math.inf)
        if mask is not None:
            scores += mask[:, :, rows if mask.shape[2] > 1 else slice(None), :last]
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), v[:, :, :last]))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


# PyTorch's fused CPU kernel returns the log-sum-exp too, but only under its internal name; where a release drops it,
# the direct formula gives the same numbers more slowly (tests compare the two).
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
