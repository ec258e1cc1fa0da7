"""Attention as its formula says, in float64."""

import math

import torch


def attention(
    q, k, v, allowed, at, scale, softcap,
    slopes,
):  # fmt: skip
    """Return output [T, Hq, D] and log-sum-exp [T, Hq].

    q: [T, Hq, D].
    k, v: [S, Hk, D].
    allowed: [T, S], which keys a query sees.
    at: [T], the queries' positions among the keys.
    slopes: [Hq], of ALiBi.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->ths", q.double(), k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores - slopes.double()[:, None] * (at[:, None] - torch.arange(len(k)))[:, None]
    scores = scores.masked_fill(~allowed[:, None], -math.inf)
    return torch.einsum("ths,shd->thd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)
