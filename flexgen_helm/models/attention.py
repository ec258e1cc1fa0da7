"""Attention over segments of keys, and the merge of partial results by log-sum-exp.

A query attends to several segments: a shared prefix, its own past, its own prompt. Each segment
gives a partial result, the output and the logarithm of the softmax's denominator. The merge weighs
the outputs by those, which equals attention over the concatenation:

    softmax([a, b]) [Va; Vb] = (e^la oa + e^lb ob) / (e^la + e^lb)
    la = logsumexp(a), oa = softmax(a) Va

Shapes: T tokens, B sequences, Hq query heads, Hk key heads (Hq = G Hk), S keys, D elements of a
    head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexgen_helm.hardware.fast_paths import ATTENTION, switched_off
from flexgen_helm.models.config import Window
from flexgen_helm.shared_sizes import QUERY_CHUNK_TOKENS, SCORE_TOKENS

PartialAttention = tuple[Tensor, Tensor]  # output, log-sum-exp
KeysValues = tuple[Tensor, Tensor]

# Elements that rows of masks begin at multiples of: 16 bytes in 16 bits.
_ALIGNMENT = 8
# Elements of keys in 16 bits that the host upcasts at once: with their values 2 MiB, which stay in
# its caches.
_UPCAST_ELEMENTS = 1 << 18


@dataclass(frozen=True, eq=False)
class AttentionConfig:
    """How a query scores a key: scale q·k, then c tanh(score / c) with a soft cap c, then minus
    slope times distance.

    slopes: [Hq] in float32 (ALiBi: Press et al., 2021), or None.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None

    @cached_property
    def on_host(self) -> AttentionConfig:
        """The same for attention that the host computes; copied once."""
        return self if self.slopes is None else replace(self, slopes=self.slopes.cpu())

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q [..., T, D] and k [..., S, D] -> scores [..., T, S] in float32, without ALiBi.

        Where k has fewer dimensions, or sizes of 1, it is not copied, as it would be by a batched
        product.
        """
        scale = self.scale
        if q.dtype == torch.float16:  # q·k may exceed 65,504; the power of two changes no digit
            power = 2.0 ** math.floor(math.log2(scale))
            q, scale = q * power, scale / power
        scores = torch.einsum("...td,...sd->...ts", q, k).float().mul_(scale)
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def head_slopes(self, key_heads: int) -> Tensor | None:
        """Slopes [Hk, G]."""
        return None if self.slopes is None else self.slopes.view(key_heads, -1)


class Positions(NamedTuple):
    """Positions that ALiBi measures the distance between.

    queries: [T].
    keys: [S] in parts; empty: 0 … S - 1.
    """

    queries: Tensor
    keys: tuple[Tensor, ...] = ()


def attend_causal(
    q: Tensor,
    keys_values: KeysValues,
    config: AttentionConfig,
    window: Window | None = None,
    start: int = 0,
) -> PartialAttention:
    """Attend to the token itself and the earlier ones, as far as a window shows them.

    start: absolute position of the first token.

    q [T, Hq, D], keys and values [T, Hk, D] -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    tokens, device = len(q), q.device
    k, v = (x.transpose(0, 1) for x in keys_values)
    if window is None or window.oldest(tokens - 1, start) <= 0:
        return _attend_rows(q, (k, v), config)
    parts = []
    for first in range(0, tokens, QUERY_CHUNK_TOKENS):
        end, oldest = min(first + QUERY_CHUNK_TOKENS, tokens), max(0, window.oldest(first, start))
        at, keys = torch.arange(first, end, device=device), torch.arange(oldest, end, device=device)
        hidden = (keys > at[:, None]) | (keys < window.oldest(at, start)[:, None])
        mask = additive_mask(hidden, mask_dtype(device, q.dtype))
        parts.append(
            _attend_rows(
                q[first:end],
                (k[:, oldest:end], v[:, oldest:end]),
                config,
                Positions(at, (keys,)),
                mask,
            )
        )
    return _joined(parts)


def joins_prompts(q: Tensor, config: AttentionConfig, window: Window | None) -> bool:
    """Return whether one kernel attends to all prompts of a batch (`attend_prompts`)."""
    has_bias = (
        config.softcap is not None
        or config.slopes is not None
        or (window is not None and window.is_chunked)
    )
    return (
        not has_bias
        and q.device.type == "cuda"
        and _varlen() is not None
        and fused_kernel(q, None) == FLASH
    )


def attend_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: AttentionConfig,
    window: Window | None,
    borders: Tensor,
    longest: int,
) -> PartialAttention:
    """Attend as `attend_causal` within each of several prompts, which lie behind each other.

    borders: [n + 1] in 32 bits, the first token of each prompt, and the end of the last one.
    longest: tokens of the longest prompt.

    q [T, Hq, D], k and v [T, Hk, D] -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    module, seen = _varlen(), (-1 if window is None else window.tokens - 1, 0)
    out, lse = module.varlen_attn(
        q, k, v, borders, borders, longest, longest,
        return_aux=module.AuxRequest(lse=True), scale=config.scale, window_size=seen,
        enable_gqa=True,
    )  # fmt: skip
    return out, lse.t()


@cache
def _varlen() -> Any:
    """Return PyTorch's module of attention over sequences of any length; None before the release
    that has all of it.
    """
    try:
        module = import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    return module if "enable_gqa" in signature(module.varlen_attn).parameters else None


def _attend_rows(
    q: Tensor,
    keys_values: KeysValues,
    config: AttentionConfig,
    positions: Positions | None = None,
    mask: Tensor | None = None,
) -> PartialAttention:
    """Attend with all queries to the same keys.

    keys_values: [Hk, S, D].
    positions: None: query t attends to the keys 0 … t alone.
    mask: additive [T, S], or None.

    q [T, Hq, D] -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    tokens, heads, dim = q.shape
    key_heads = len(keys_values[0])
    group = heads // key_heads
    # Query heads of one key head become a batch dimension.
    queries = q.view(tokens, key_heads, group, dim).permute(2, 1, 0, 3)
    keys, values = (x[None] for x in keys_values)
    bias, slopes = None if mask is None else mask[None, None], config.head_slopes(key_heads)
    if slopes is not None:
        # Softmax does not change if all scores of a query change alike, so its position is left
        # out, and with it a matrix. The log-sum-exp, by which segments are merged, gets it back
        # afterwards.
        parts = positions.keys if positions else ()
        at_keys = torch.cat(parts or (torch.arange(keys_values[0].shape[1], device=q.device),))
        by_key = slopes.t()[:, :, None, None] * at_keys
        bias = by_key.expand(-1, -1, tokens, -1) if bias is None else by_key + bias
    out, lse = attend(queries, (keys, values), config, positions is None, bias)
    if slopes is not None:
        at_queries = at_keys if positions is None else positions.queries
        lse = lse - slopes.t()[:, :, None] * at_queries
    return out.permute(2, 1, 0, 3).reshape(tokens, heads, dim), lse.permute(2, 1, 0).reshape(
        tokens, heads
    )


def _joined(parts: Sequence[PartialAttention], dim: int = 0) -> PartialAttention:
    """Join the results of consecutive queries."""
    outs, lses = zip(*parts)
    return parts[0] if len(parts) == 1 else (torch.cat(outs, dim), torch.cat(lses, dim))


@dataclass(frozen=True, eq=False)
class QueryChunk:
    """Consecutive queries of a prompt, with the quantized and the full-precision keys visible to
    them.

    queries: slice of the prompt's tokens.
    quantized, plain: slices of the keys' two versions, concatenated S keys.
    mask: additive [t, S].
    positions: of the queries, and of the keys of both versions.
    num_selected: [t], of the quantized keys, with sparse attention; max_selected: the largest.
    """

    queries: slice
    quantized: slice
    plain: slice
    mask: Tensor
    positions: Positions
    num_selected: Tensor | None = None
    max_selected: int = 0


def attend_two_versions(
    q: Tensor,
    quantized: KeysValues,
    plain: KeysValues,
    config: AttentionConfig,
    chunks: Iterable[QueryChunk],
) -> PartialAttention:
    """Attend to older keys and values as they were quantized, and to newer ones in full precision.

    q [T, Hq, D]; quantized, plain: keys and values [n, Hk, D], in order of position; chunks: of all
    queries, in order -> output [T, Hq, D], log-sum-exp [T, Hq].
    """
    parts = []
    for chunk in chunks:
        k, v = (
            torch.cat((old[chunk.quantized], new[chunk.plain])).transpose(0, 1)
            for old, new in zip(quantized, plain)
        )
        parts.append(_attend_rows(q[chunk.queries], (k, v), config, chunk.positions, chunk.mask))
    return _joined(parts)


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """What each of some queries sees of some keys.

    mask: additive, [B, 1, 1, S] or [t, S]; None: every query sees all keys.
    sees_none: [B] or [t], true for queries that see no key; None: there is none.
    num_selected: [B], of these keys, with sparse attention; max_selected: the largest.
    key_positions: [B, S] where the keys are not in order of position.
    """

    mask: Tensor | None = None
    sees_none: Tensor | None = None
    num_selected: Tensor | None = None
    max_selected: int = 0
    key_positions: Tensor | None = None


_ALL_VISIBLE = VisibleKeys()


def attend_cached(
    q: Tensor,
    keys_values: KeysValues,
    config: AttentionConfig,
    positions: Tensor,
    visible: VisibleKeys = _ALL_VISIBLE,
) -> PartialAttention:
    """Attend with one query per sequence to the sequence's own cache.

    q: [B, Hq, D].
    keys_values: [B, Hk, S, D].
    positions: [B], of the queries among the keys.
    Returns output [B, Hq, D] and log-sum-exp [B, Hq]; 0 and minus infinity of queries that see no
    key.
    """
    (batch, heads, dim), (_, key_heads, size, _) = q.shape, keys_values[0].shape
    group, mask = heads // key_heads, visible.mask
    # The G query heads of a key head take the place of a prompt's tokens, so each key is read once.
    queries = q.view(batch, key_heads, group, dim)
    bias, slopes = mask, config.head_slopes(key_heads)
    if slopes is not None:
        keys = visible.key_positions
        keys = torch.arange(size, device=q.device) if keys is None else keys
        distance = keys - positions[:, None]
        bias = slopes[None, :, :, None] * distance[:, None, None, :]  # [B, Hk, G, S]
        bias = bias if mask is None else bias + mask
    elif mask is not None:
        bias = mask.expand(batch, 1, group, mask.shape[-1])
    out, lse = attend(queries, keys_values, config, mask=bias)
    out, lse = out.reshape(batch, heads, dim), lse.reshape(batch, heads)
    return _without_hidden(out, lse, visible.sees_none)


def attend_prefix(
    q: Tensor,
    keys_values: KeysValues,
    config: AttentionConfig,
    positions: Tensor,
    visible: VisibleKeys = _ALL_VISIBLE,
) -> PartialAttention:
    """Attend with all tokens to one shared segment.

    q: [T, Hq, D].
    keys_values: [Hk, S, D].
    positions: [T], of the queries, counted from the segment's first key.
    Returns output [T, Hq, D] and log-sum-exp [T, Hq]; 0 and minus infinity of queries that see no
    key.
    """
    mask = visible.mask
    # A bias of [T, S], which a mask and ALiBi give each head of attention, is bounded by the
    # chunks.
    rows_at_once = len(q) if mask is None and config.slopes is None else QUERY_CHUNK_TOKENS
    parts = []
    for first in range(0, len(q), rows_at_once):
        rows = slice(first, first + rows_at_once)
        chunk_mask = None if mask is None else mask[rows]
        parts.append(
            _attend_rows(q[rows], keys_values, config, Positions(positions[rows]), chunk_mask)
        )
    return _without_hidden(*_joined(parts), visible.sees_none)


def merge_partial(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Merge partial results over disjoint keys: outputs [..., D], log-sum-exps [...]."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)  # of b: e^lb / (e^la + e^lb)
    # in float32, as the log-sum-exps
    out = torch.lerp(out_a.to(weight.dtype), out_b.to(weight.dtype), weight)
    return out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return minus infinity where `hidden` [..., S] is true, 0 elsewhere.

    Rows begin at multiples of `_ALIGNMENT` elements in memory, as the fused kernels of devices
    require.
    """
    keys = hidden.shape[-1]
    aligned = -(-keys // _ALIGNMENT) * _ALIGNMENT
    mask = torch.zeros((*hidden.shape[:-1], aligned), dtype=dtype, device=hidden.device)[..., :keys]
    return mask.masked_fill_(hidden, -math.inf)


def mask_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of masks for queries in `dtype`: on the host, attention is computed in
    float32.
    """
    return torch.float32 if device.type == "cpu" else dtype


def _without_hidden(out: Tensor, lse: Tensor, sees_none: Tensor | None) -> PartialAttention:
    """Make queries that see no key merge to nothing; out [T, Hq, D], lse [T, Hq], sees_none [T]."""
    if sees_none is None:
        return out, lse
    return out.masked_fill(sees_none[:, None, None], 0.0), lse.masked_fill(
        sees_none[:, None], -math.inf
    )


def attend(
    q: Tensor,
    keys_values: KeysValues,
    config: AttentionConfig,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> PartialAttention:
    """Attend by the fastest kernel that takes these queries, or by the formula.

    q [B, H, Tq, D], keys and values [B or 1, H, S, D] -> output [B, H, Tq, D], log-sum-exp [B, H,
    Tq].

    PyTorch offers the fused kernels that return the log-sum-exp under internal names only.
    """
    kernel = None if config.softcap is not None else fused_kernel(q, mask)
    if kernel is None:
        return attend_unfused(q, keys_values, config, is_causal, mask)
    k, v = (x.expand(len(q), -1, -1, -1) for x in keys_values)
    if kernel == HOST:
        return _attend_on_host(q, (k, v), mask, is_causal, config.scale)
    if kernel == FLASH:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, scale=config.scale
        )
        return out, lse
    bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=config.scale
    )
    return out, lse[..., : q.shape[2]]  # the kernel pads it to a multiple of 32


def attend_unfused(
    q: Tensor,
    keys_values: KeysValues,
    config: AttentionConfig,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> PartialAttention:
    """Attend as `attend` by the formula itself, for every device and dtype, with scores in float32,
    in slices of query rows.
    """
    parts, (k, v) = [], keys_values
    for first in range(0, q.shape[2], SCORE_TOKENS):
        rows = slice(first, min(first + SCORE_TOKENS, q.shape[2]))
        last = rows.stop if is_causal else k.shape[2]
        scores = config.scores(q[:, :, rows], k[:, :, :last])
        if is_causal:
            key = torch.arange(last, device=q.device)
            scores.masked_fill_(key > key[rows, None], -math.inf)
        if mask is not None:
            scores += mask[:, :, rows if mask.shape[2] > 1 else slice(None), :last]
        parts.append(_attend_scores(scores, v[:, :, :last]))
    return _joined(parts, dim=2)


def _attend_scores(scores: Tensor, v: Tensor) -> PartialAttention:
    """Scores [..., T, S], v [..., S, D] -> output, log-sum-exp; 0 and minus infinity where all
    scores are masked.
    """
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    return torch.einsum("...ts,...sd->...td", weights.to(v.dtype), v), lse


HOST, FLASH, EFFICIENT = "host", "flash", "efficient"
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def fused_kernel(q: Tensor, mask: Tensor | None) -> str | None:
    """Choose a kernel; None: the formula, which gives the same numbers more slowly."""
    if q.device.type == "cpu":
        return None if _FUSED is None else HOST
    if ATTENTION in switched_off:
        return None
    if mask is not None:
        offsets = mask.storage_offset(), *mask.stride()[:-1]
        if mask.dtype != q.dtype or any(offset % _ALIGNMENT for offset in offsets):
            return None
    return device_kernel(q.device, q.dtype, q.shape[-1], mask is not None)


def has_fused_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a fused kernel attends where neither soft cap nor ALiBi forbid it."""
    return fused_kernel(torch.empty((0, head_dim), dtype=dtype, device=device), None) is not None


@lru_cache
def device_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, has_mask: bool
) -> str | None:
    """Choose by the rules that PyTorch documents for its kernels (`torch.nn.attention.SDPBackend`);
    None: no kernel.

    Both: compute capability up to 12.1, heads of whole 16 bytes.
    Flash attention: from 8.0 on, 16 bits, heads up to 256 elements, no mask.
    Memory-efficient attention: float16 and float32, bfloat16 from 8.0 on.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability > (12, 1) or head_dim * dtype.itemsize % 16:
        return None
    in_16_bits, ampere = dtype in (torch.float16, torch.bfloat16), capability >= (8, 0)
    if in_16_bits and ampere and head_dim <= 256 and not has_mask:
        return FLASH
    return EFFICIENT if ampere or dtype != torch.bfloat16 else None


def _attend_on_host(
    q: Tensor, keys_values: KeysValues, mask: Tensor | None, is_causal: bool, scale: float
) -> PartialAttention:
    """Attend as `attend` in float32. Keys and values in 16 bits, which CPUs multiply slowly, are
    upcast for a few sequences or heads at a time.
    """
    assert _FUSED is not None
    if q.dtype == torch.float32:
        return _FUSED(q, *keys_values, 0.0, is_causal, attn_mask=mask, scale=scale)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    num_heads, tokens, dim = keys_values[0].shape[1:]
    heads_at_once = max(1, _UPCAST_ELEMENTS // (tokens * dim))
    for sequence in range(0, len(q), step := max(1, heads_at_once // num_heads)):
        for head in range(0, num_heads, heads_at_once):
            part = slice(sequence, sequence + step), slice(head, head + heads_at_once)
            part_mask = None
            if mask is not None:  # which may be one for all sequences, or for all heads
                part_mask = mask[
                    tuple(rows if size > 1 else slice(None) for rows, size in zip(part, mask.shape))
                ]
            operands = (x[part].float() for x in (q, *keys_values))
            out[part], lse[part] = _FUSED(
                *operands, 0.0, is_causal, attn_mask=part_mask, scale=scale
            )
    return out, lse


# Sparse attention: of the older tokens, a query takes the values of those with the largest weights
# (paper, section 5).

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class TopK:
    """Selected keys.

    keys: [B, Hk, k], their indices.
    scores: [B, Hk, G, k], minus infinity in sequences that select fewer than k.
    """

    keys: Tensor
    scores: Tensor

    def attend(self, values: Tensor) -> PartialAttention:
        """Values [B, Hk, k, D] of the keys -> output [B, Hq, D], log-sum-exp [B, Hq]."""
        out, lse = _attend_scores(self.scores, values)
        return out.flatten(1, 2), lse.flatten(1, 2)


def select_top_k(
    q: Tensor, k: Tensor, config: AttentionConfig, positions: Tensor, visible: VisibleKeys
) -> TopK:
    """Select the older keys of one query per sequence.

    q: [B, Hq, D].
    k: [B, Hk, S, D].
    positions: [B], of the queries among the keys.
    """
    mask, counts, largest = visible.mask, visible.num_selected, visible.max_selected
    assert mask is not None and counts is not None
    scores = config.scores(q.unflatten(1, (k.shape[1], -1)), k)
    scores = _with_slopes(scores, config, positions[:, None]) + mask
    keys = _weights(scores).topk(largest, dim=-1).indices
    selected = scores.gather(3, keys[:, :, None].expand(-1, -1, scores.shape[2], -1))
    surplus = torch.arange(largest, device=q.device) >= counts[:, None]
    return TopK(keys, selected.masked_fill(surplus[:, None, None], -math.inf))


def attend_top_k(
    q: Tensor,
    quantized: KeysValues,
    plain: KeysValues,
    config: AttentionConfig,
    chunks: Iterable[QueryChunk],
) -> PartialAttention:
    """Attend to a share of the older keys and to all newer ones; else as `attend_two_versions`."""
    parts = []
    for chunk in chunks:
        queries, older = q[chunk.queries], chunk.quantized.stop - chunk.quantized.start
        positions = chunk.positions.queries
        k, v = (x[chunk.plain].transpose(0, 1) for x in plain)
        newer = VisibleKeys(chunk.mask[:, older:])
        part = attend_prefix(queries, (k, v), config, positions - chunk.plain.start, newer)
        if older:
            selected = _attend_selected(
                queries, quantized, config, positions - chunk.quantized.start, chunk
            )
            part = merge_partial(part, selected)
        parts.append(part)
    return _joined(parts)


def _attend_selected(
    q: Tensor, quantized: KeysValues, config: AttentionConfig, positions: Tensor, chunk: QueryChunk
) -> PartialAttention:
    """As `attend_prefix`, to the quantized keys that each query [T, Hq, D] of a chunk selects."""
    assert chunk.num_selected is not None
    k, v = (x[chunk.quantized].transpose(0, 1) for x in quantized)
    queries = q.unflatten(1, (len(k), -1))  # [T, Hk, G, D]
    scores = _with_slopes(config.scores(queries, k), config, positions[:, None])
    scores = scores + chunk.mask[:, None, None, : k.shape[1]]
    weights = _weights(scores)
    largest = weights.topk(max(1, chunk.max_selected), dim=-1).values
    threshold = largest.gather(
        2, (chunk.num_selected - 1).clamp_min(0)[:, None, None].expand(-1, len(k), 1)
    )
    out, lse = _attend_scores(scores.masked_fill((weights < threshold)[:, :, None], -math.inf), v)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _with_slopes(scores: Tensor, config: AttentionConfig, positions: Tensor) -> Tensor:
    """Add ALiBi to scores [B, Hk, G, S] of queries at `positions` [B, 1] with keys 0 … S - 1."""
    slopes = config.head_slopes(scores.shape[1])
    if slopes is not None:
        distance = torch.arange(scores.shape[-1], device=scores.device) - positions
        scores = scores + slopes[..., None] * distance[:, None, None]
    return scores


def _weights(scores: Tensor) -> Tensor:
    """Scores [B, Hk, G, S] -> softmax weights [B, Hk, S], summed over G; 0 if a query sees no
    key.
    """
    return torch.softmax(scores, -1).nan_to_num_(0.0).sum(2)


def num_selected(visible: int, share: float) -> int:
    """Return how many of the visible keys a query selects; the share's own rounding error adds no
    key.
    """
    return math.ceil(visible * share - _ROUNDING)


def num_selected_tensor(visible: Tensor, share: float) -> Tensor:
    """As `num_selected`, for each element."""
    return torch.ceil(visible.double() * share - _ROUNDING).long()
