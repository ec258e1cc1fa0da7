"""Attention over segments against the formula in float64, and the merge against the concatenation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.models import attention
from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.config import Window

PLAIN = AttentionConfig(0.4)
CONFIGS = {
    "plain": PLAIN,
    "capped": AttentionConfig(0.4, softcap=1.5),
    "alibi": AttentionConfig(0.4, slopes=torch.tensor([0.5, 0.25, 0.06, 0.9, 0.3, 0.01])),
    "both": AttentionConfig(0.4, softcap=0.7, slopes=torch.tensor([0.5, 0.25, 0.06, 0.9, 0.3, 0.01])),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def formula(q, k, v, config, allowed, at=None):
    """q [T, Hq, D], k and v [S, Hk, D], allowed [T, S] -> output and log-sum-exp in float64, one query at a time.

    at [T]: the queries' positions among the keys, by default their number.
    """
    at = range(len(q)) if at is None else at
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = (k[:, h // group] @ q[t, h]) * config.scale
            if config.softcap is not None:
                scores = config.softcap * torch.tanh(scores / config.softcap)
            if config.slopes is not None:
                scores = scores - config.slopes[h].double() * (int(at[t]) - torch.arange(len(k)))
            scores[~allowed[t]] = -math.inf
            lse[t, h] = torch.logsumexp(scores, 0)
            out[t, h] = torch.softmax(scores, 0) @ v[:, h // group]
    return out, lse


@pytest.fixture(params=["fused", "direct"])
def kernel(request, monkeypatch):
    if request.param == "direct":
        monkeypatch.setattr(attention, "_FUSED", None)
        monkeypatch.setattr(attention, "SCORE_TOKENS", 7)
    return request.param


def close(part, expected):
    return all((a.double() - b).abs().max() < 1e-5 for a, b in zip(part, expected))


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("tokens", "window", "start"),
    [
        (1, None, 0), (2, None, 0), (19, None, 0), (70, None, 0), (19, Window(1), 0), (19, Window(5), 0),
        (19, Window(18), 0), (19, Window(40), 0), (50, Window(7), 0), (50, Window(25), 0), (50, Window(47), 0),
        (19, Window(1, is_chunked=True), 3), (19, Window(5, is_chunked=True), 0), (19, Window(5, is_chunked=True), 13),
        (19, Window(19, is_chunked=True), 3), (19, Window(40, is_chunked=True), 3),
    ],
)  # fmt: skip
def test_causal(kernel, config, key_heads, tokens, window, start, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_CHUNK_TOKENS", 16)
    q, k, v = torch.randn(tokens, 6, 8), torch.randn(tokens, key_heads, 8), torch.randn(tokens, key_heads, 8)
    at = torch.arange(start, start + tokens)
    allowed = at[:, None] >= at
    if window is not None and window.is_chunked:
        allowed &= at[:, None] // window.tokens == at // window.tokens
    elif window is not None:
        allowed &= at[:, None] - at < window.tokens
    found = attention.attend_causal(q, k, v, config, window, start)
    assert close(found, formula(q, k, v, config, allowed))


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_cached_rows_see_as_many_keys_as_they_have(kernel, config, key_heads):
    lengths = torch.tensor([1, 9, 4, 13])
    q = torch.randn(4, 6, 8)
    k, v = torch.randn(4, key_heads, 20, 8)[:, :, :13], torch.randn(4, key_heads, 20, 8)[:, :, :13]
    mask = torch.zeros(4, 13).masked_fill_(torch.arange(13)[None] >= lengths[:, None], -math.inf)[:, None, None]
    out, lse = attention.attend_cached(q, k, v, config, lengths - 1, mask)
    for row in range(4):
        allowed = torch.arange(13)[None] < lengths[row]
        keys, values = k[row].transpose(0, 1), v[row].transpose(0, 1)
        one = slice(row, row + 1)
        assert close((out[one], lse[one]), formula(q[one], keys, values, config, allowed, at=lengths[one] - 1))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_a_window_shows(is_chunked):
    """By integers as by tensors, wherever positions are counted from."""
    window = Window(4, is_chunked)
    for start in range(9):
        for position in range(9):
            shown = [at for at in range(start + position + 1) if start + position - at < 4]
            if is_chunked:
                shown = [at for at in range(start + position + 1) if (start + position) // 4 == at // 4]
            assert max(0, window.oldest(position + start)) == shown[0]
            oldest = window.oldest(torch.tensor([position]), torch.tensor([start]))
            assert window.oldest(position, start) == oldest.item() and max(0, oldest.item() + start) == shown[0]


@pytest.mark.parametrize("window", [2, 6, 9, 30])
def test_a_window_over_a_shared_segment_merges_with_the_rest(kernel, config, window):
    """Eight shared keys, then five tokens of one sequence; later tokens see none of the shared keys."""
    q, k, v = torch.randn(5, 6, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    at = torch.arange(8, 13)
    hidden = at[:, None] - torch.arange(8) >= window
    mask = attention.additive_mask(hidden, torch.float32)
    common = attention.attend_prefix(q, k[:8].transpose(0, 1), v[:8].transpose(0, 1), config, at, mask, hidden.all(-1))
    rest = attention.attend_causal(q, k[8:], v[8:], config, Window(window))
    distance = at[:, None] - torch.arange(13)[None, :]
    expected = formula(q, k, v, config, (distance >= 0) & (distance < window), at)
    assert close(attention.merge_partial(rest, common), expected)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    tokens=st.integers(1, 12),
    border=st.integers(1, 15),
    keys=st.integers(2, 16),
    seed=st.integers(0, 99),
)
def test_merged_segments_equal_the_concatenation(name, tokens, border, keys, seed):
    torch.manual_seed(seed)
    border, config, at = min(border, keys - 1), CONFIGS[name], torch.arange(tokens) + 3
    q, k, v = torch.randn(tokens, 6, 8) * 4, torch.randn(keys, 2, 8), torch.randn(keys, 2, 8)
    parts = [
        attention.attend_prefix(q, k[part].transpose(0, 1), v[part].transpose(0, 1), config, at - part.start)
        for part in (slice(0, border), slice(border, keys))
    ]
    everything = torch.ones(tokens, keys).bool()
    assert close(attention.merge_partial(*parts), formula(q, k, v, config, everything, at))


def test_merge_survives_scores_of_any_size():
    out = torch.ones(1, 1, 4)
    merged, lse = attention.merge_partial((out, torch.tensor([[-900.0]])), (2 * out, torch.tensor([[800.0]])))
    assert torch.equal(merged, 2 * out) and lse.item() == 800.0
