"""PyTorch's fused attention kernels of CUDA, slowly: their rules, layouts and log-sum-exps, on
tensors of the CPU.

Rules are those of PyTorch's sources (`sdp_utils.cpp`, `attention.cu`, `kernel_forward.h`). A call
that breaks one, which a device would refuse or compute wrongly, raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


class KernelRuleError(RuntimeError):
    """A call that the real kernel does not allow."""


def flash_attention(
    q,
    k,
    v,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    """`aten::_scaled_dot_product_flash_attention`; keys and values may have fewer heads."""
    _check(q.dtype in (torch.float16, torch.bfloat16), f"dtype {q.dtype}")
    _check_operands(q, k, v)
    _check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"heads of {q.shape[-1]}")
    _check(q.shape[1] % k.shape[1] == 0, "query heads are no multiple of key heads")
    _check(
        not is_causal or q.shape[2] == k.shape[2], "causal with other numbers of queries and keys"
    )
    group = q.shape[1] // k.shape[1]
    out, lse = _formula(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), None, is_causal, scale
    )
    unused = [torch.zeros(1) for _ in range(5)]
    return _as_tokens_first(out), lse, *unused[:2], q.shape[2], k.shape[2], *unused[2:]


def efficient_attention(
    q,
    k,
    v,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
):
    """`aten::_scaled_dot_product_efficient_attention`; its log-sum-exp is padded with infinity."""
    _check(q.dtype in (torch.float16, torch.bfloat16, torch.float32), f"dtype {q.dtype}")
    _check_operands(q, k, v)
    _check(q.shape[1] == k.shape[1], "other numbers of query and key heads")
    alignment = 16 // q.dtype.itemsize
    for x in (q, k, v, *(() if attn_bias is None else (attn_bias,))):
        starts = (
            x.storage_offset(),
            *(stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1),
        )
        _check(
            not any(start % alignment for start in starts),
            f"strides {x.stride()} at {x.storage_offset()}",
        )
    if attn_bias is not None:
        _check(attn_bias.dtype == q.dtype, f"bias in {attn_bias.dtype}")
        _check(
            attn_bias.shape == (*q.shape[:3], k.shape[2]), f"bias of shape {tuple(attn_bias.shape)}"
        )
        _check(attn_bias.stride(-1) == 1, f"bias with strides {attn_bias.stride()}")
    out, lse = _formula(q, k, v, attn_bias, is_causal, scale)
    padded = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), math.inf)
    padded[..., : q.shape[2]] = lse
    return (
        _as_tokens_first(out),
        padded if compute_log_sumexp else padded[..., :0],
        torch.zeros(()),
        torch.zeros(()),
    )


def varlen_attention(
    q,
    k,
    v,
    borders,
    key_borders,
    max_q,
    max_k,
    is_causal=False,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    *_,
):
    """`torch_attn::_varlen_attn`, as causal attention of several sequences; its log-sum-exp is [Hq,
    T].
    """
    assert key_borders is not None
    _check(q.dtype in (torch.float16, torch.bfloat16), f"dtype {q.dtype}")
    _check(borders.dtype == torch.int32 and torch.equal(borders, key_borders), "borders")
    _check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"heads of {q.shape[-1]}")
    _check(q.shape[1] == k.shape[1] or (enable_gqa and q.shape[1] % k.shape[1] == 0), "heads")
    _check(
        int(borders[0]) == 0 and int(borders[-1]) == len(q) == len(k),
        "borders that are not those of the tokens",
    )
    lengths = borders.diff().tolist()
    _check(max(lengths) == max_q == max_k and min(lengths) > 0, "lengths")
    _check(
        is_causal == (tuple(window_size) == (-1, 0)) and window_size[1] == 0,
        f"window {window_size}",
    )
    outs, lses, group = [], [], q.shape[1] // k.shape[1]
    for one_q, one_k, one_v in zip(*(x.split(lengths) for x in (q, k, v))):
        queries, keys, values = (x.transpose(0, 1)[None] for x in (one_q, one_k, one_v))
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        bias = None
        if window_size[0] >= 0:
            age = torch.arange(len(one_q))[:, None] - torch.arange(len(one_q))
            bias = torch.zeros(age.shape).masked_fill(age > window_size[0], -math.inf)
        out, lse = _formula(queries, keys, values, bias, True, scale)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1), torch.zeros(2, dtype=torch.uint64)


KERNELS: Mapping[str, Callable[..., Any]] = {
    "torch_attn::_varlen_attn": varlen_attention,
    "aten::_scaled_dot_product_flash_attention": flash_attention,
    "aten::_scaled_dot_product_efficient_attention": efficient_attention,
}


def _check_operands(q, k, v):
    _check(q.dim() == k.dim() == v.dim() == 4 and k.shape == v.shape, "shapes")
    _check(
        q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3],
        f"{tuple(q.shape)} with {tuple(k.shape)}",
    )
    _check(q.dtype == k.dtype == v.dtype, "dtypes")
    _check(all(x.stride(-1) == 1 for x in (q, k, v)), "elements of a head are not adjacent")
    _check(min(q.shape[2], k.shape[2]) > 0, "no tokens")


def _check(allowed, what):
    if not allowed:
        raise KernelRuleError(what)


def _formula(q, k, v, bias, is_causal, scale):
    scores = (
        q.float() @ k.float().transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    )
    if bias is not None:
        scores = scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[2:]).triu(1).bool()
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype), torch.logsumexp(scores, -1)


def _as_tokens_first(out):
    """Both kernels write [B, T, H, D] and return it transposed."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)
