"""Attention over segments: exact parts with their log-sum-exp, and the merge that joins them.

A query attends to several segments of keys (a shared prefix, its own past, itself). Each part yields its output and
the logarithm of its softmax denominator; the merge weighs the parts by those, which is plain attention over the
concatenation:

    softmax([a, b]) [Va; Vb] = (e^la oa + e^lb ob) / (e^la + e^lb),   la = logsumexp(a), oa = softmax(a) Va

Shapes: T tokens, B rows, Hq query heads, Hk key heads (Hq = G Hk), S keys, D elements a head.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]  # output, log-sum-exp

# Rows of scores that the direct formula materializes at once, so that a long prompt cannot exhaust the workspace.
_DIRECT_ROWS = 1024


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Part:
    """Each token sees itself and the earlier ones, with a window only the last `window` of them.

    q [T, Hq, D], k and v [T, Hk, D] -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    tokens, heads, dim = q.shape
    key_heads = k.shape[1]
    group = heads // key_heads
    # Query heads of one key head become a batch dimension over expanded (not copied) keys and values.
    queries = q.view(tokens, key_heads, group, dim).permute(2, 1, 0, 3)
    keys = k.transpose(0, 1).expand(group, key_heads, tokens, dim)
    values = v.transpose(0, 1).expand(group, key_heads, tokens, dim)
    if window is not None and tokens > window:
        out, lse = _attend(queries, keys, values, scale, mask=_band(tokens, window, q.device))
    else:
        out, lse = _attend(queries, keys, values, scale, is_causal=True)
    return out.permute(2, 1, 0, 3).reshape(tokens, heads, dim), lse.permute(2, 1, 0).reshape(tokens, heads)


def cached(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Part:
    """One query a row, each over its own row of a cache.

    q [B, Hq, D], k and v [B, Hk, S, D], mask None or additive [B, 1, 1, S] -> output [B, Hq, D], log-sum-exp [B, Hq].
    """
    rows, heads, dim = q.shape
    key_heads = k.shape[1]
    # The G query heads of a key head stand where a prompt's tokens would, so each key is read once.
    queries = q.view(rows, key_heads, heads // key_heads, dim)
    if mask is not None:
        mask = mask.expand(rows, 1, heads // key_heads, mask.shape[-1])
    out, lse = _attend(queries, k, v, scale, mask=mask)
    return out.reshape(rows, heads, dim), lse.reshape(rows, heads)


def shared(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Part:
    """All tokens see all keys of one segment (or those that a mask leaves), in one product per key head.

    q [T, Hq, D], k and v [Hk, S, D], mask None or additive [T, S] -> output [T, Hq, D], log-sum-exp [T, Hq]; a token
    that the mask leaves no key has the output 0 and the log-sum-exp minus infinity, which merges to nothing.
    """
    tokens, heads, dim = q.shape
    key_heads = k.shape[0]
    group = heads // key_heads
    queries = q.view(tokens, key_heads, group, dim).transpose(0, 1).reshape(1, key_heads, tokens * group, dim)
    spread = None if mask is None else mask.repeat_interleave(group, dim=0)[None, None]
    out, lse = _attend(queries, k[None], v[None], scale, mask=spread)
    if spread is not None:
        empty = torch.isneginf(spread).all(-1).expand(lse.shape)
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
    out = out.view(key_heads, tokens, group, dim).transpose(0, 1).reshape(tokens, heads, dim)
    return out, lse.view(key_heads, tokens, group).transpose(0, 1).reshape(tokens, heads)


def merge(a: Part, b: Part) -> Part:
    """Join two parts over disjoint keys; outputs [..., D], log-sum-exps [...]."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    out = out_a * (weight_a / total).unsqueeze(-1) + out_b * (weight_b / total).unsqueeze(-1)
    return out.to(out_a.dtype), top + torch.log(total)  # weighed in float32, the log-sum-exps' type


def before(queries: Tensor, keys: Tensor, window: int, device: torch.device) -> Tensor:
    """Additive mask of positions queries [..., T] over keys [S] that leaves the last `window`, itself included."""
    hidden = queries[..., None] - keys >= window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).to(device)


@lru_cache(maxsize=8)
def _band(tokens: int, window: int, device: torch.device) -> Tensor:
    """Additive mask [1, 1, T, T] of a causal window."""
    positions = torch.arange(tokens)
    ahead = positions[None, :] > positions[:, None]
    return (
        before(positions, positions, window, torch.device("cpu")).masked_fill_(ahead, -math.inf)[None, None].to(device)
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool = False, mask: Tensor | None = None
) -> Part:
    """q [B, H, Tq, D], k and v [B, H, S, D] -> output [B, H, Tq, D], log-sum-exp [B, H, Tq]."""
    if q.device.type == "cpu" and q.dtype == torch.float32 and _FUSED is not None:
        return _FUSED(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return _direct(q, k, v, scale, is_causal, mask)


def _direct(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, mask: Tensor | None) -> Part:
    """The formula itself, scores in float32: every device and type, in slices of query rows."""
    outs, lses = [], []
    for first in range(0, q.shape[2], _DIRECT_ROWS):
        rows = slice(first, min(first + _DIRECT_ROWS, q.shape[2]))
        last = rows.stop if is_causal else k.shape[2]
        scores = torch.matmul(q[:, :, rows], k[:, :, :last].transpose(2, 3)).float() * scale
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
