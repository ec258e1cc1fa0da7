"""Attention over segments against the formula in float64, and the merge against the concatenation.

The kernels of devices run in `tests/cuda`.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.models import attention
from flexgen_helm.models.attention import AttentionConfig, VisibleKeys
from flexgen_helm.models.config import Window
from tests.helpers.attention_formula import attention as attention_formula

PLAIN = AttentionConfig(0.4)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
CONFIGS = {
    "plain": PLAIN,
    "capped": AttentionConfig(0.4, softcap=1.5),
    "alibi": AttentionConfig(0.4, slopes=torch.tensor([0.5, 0.25, 0.06, 0.9, 0.3, 0.01])),
    "both": AttentionConfig(
        0.4, softcap=0.7, slopes=torch.tensor([0.5, 0.25, 0.06, 0.9, 0.3, 0.01])
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def formula(q, k, v, config, allowed, at):
    """allowed [T, S]; at [T]: the queries' positions among the keys."""
    return attention_formula(q, k, v, allowed, at, config.scale, config.softcap, config.slopes)


@pytest.fixture(params=["fused", "direct"])
def kernel(request, monkeypatch):
    if request.param == "direct":
        monkeypatch.setattr(attention, "_FUSED", None)
        monkeypatch.setattr(attention, "SCORE_TOKENS", 7)
    return request.param


def close(part, expected):
    return all((a.double() - b).abs().max() < 1e-5 for a, b in zip(part, expected))


def chunk(tokens):
    return Window(tokens, is_chunked=True)


# Tokens, window, and where positions begin.
CAUSAL = [
    (1, None, 0), (2, None, 0), (19, None, 0), (70, None, 0), (19, Window(1), 0),
    (19, Window(5), 0), (19, Window(18), 0), (19, Window(40), 0), (50, Window(7), 0),
    (50, Window(25), 0), (50, Window(47), 0), (19, chunk(1), 3), (19, chunk(5), 0),
    (19, chunk(5), 13), (19, chunk(19), 3), (19, chunk(40), 3),
]  # fmt: skip


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_causal(kernel, config, key_heads, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_CHUNK_TOKENS", 16)
    for tokens, window, start in CAUSAL:
        q, k, v = (
            torch.randn(tokens, 6, 8),
            torch.randn(tokens, key_heads, 8),
            torch.randn(tokens, key_heads, 8),
        )
        at = torch.arange(start, start + tokens)
        allowed = at[:, None] >= at
        if window is not None and window.is_chunked:
            allowed &= at[:, None] // window.tokens == at // window.tokens
        elif window is not None:
            allowed &= at[:, None] - at < window.tokens
        found = attention.attend_causal(q, (k, v), config, window, start)
        assert close(found, formula(q, k, v, config, allowed, at - start)), (tokens, window, start)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_cached_rows_see_as_many_keys_as_they_have(kernel, config, key_heads):
    lengths = torch.tensor([1, 9, 4, 13])
    q = torch.randn(4, 6, 8)
    k, v = torch.randn(4, key_heads, 20, 8)[:, :, :13], torch.randn(4, key_heads, 20, 8)[:, :, :13]
    mask = torch.zeros(4, 13).masked_fill_(torch.arange(13)[None] >= lengths[:, None], -math.inf)[
        :, None, None
    ]
    out, lse = attention.attend_cached(q, (k, v), config, lengths - 1, VisibleKeys(mask))
    for row in range(4):
        allowed = torch.arange(13)[None] < lengths[row]
        keys, values = k[row].transpose(0, 1), v[row].transpose(0, 1)
        one = slice(row, row + 1)
        assert close(
            (out[one], lse[one]), formula(q[one], keys, values, config, allowed, lengths[one] - 1)
        )


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_a_window_shows(is_chunked):
    """By integers as by tensors, wherever positions are counted from."""
    window = Window(4, is_chunked)
    for start in range(9):
        for position in range(9):
            shown = [at for at in range(start + position + 1) if start + position - at < 4]
            if is_chunked:
                shown = [
                    at for at in range(start + position + 1) if (start + position) // 4 == at // 4
                ]
            assert max(0, window.oldest(position + start)) == shown[0]
            oldest = window.oldest(torch.tensor([position]), torch.tensor([start]))
            assert (
                window.oldest(position, start) == oldest.item()
                and max(0, oldest.item() + start) == shown[0]
            )


@pytest.mark.parametrize("window", [2, 9, 30])
def test_a_window_over_a_shared_segment_merges_with_the_rest(kernel, config, window):
    """Eight shared keys, then five tokens of one sequence; later tokens see none of the shared
    keys.
    """
    q, k, v = torch.randn(5, 6, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    at = torch.arange(8, 13)
    hidden = at[:, None] - torch.arange(8) >= window
    mask = attention.additive_mask(hidden, torch.float32)
    keys_values = k[:8].transpose(0, 1), v[:8].transpose(0, 1)
    common = attention.attend_prefix(q, keys_values, config, at, VisibleKeys(mask, hidden.all(-1)))
    rest = attention.attend_causal(q, (k[8:], v[8:]), config, Window(window))
    distance = at[:, None] - torch.arange(13)[None, :]
    expected = formula(q, k, v, config, (distance >= 0) & (distance < window), at)
    assert close(attention.merge_partial(rest, common), expected)


@settings(max_examples=50)
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
        attention.attend_prefix(
            q, (k[part].transpose(0, 1), v[part].transpose(0, 1)), config, at - part.start
        )
        for part in (slice(0, border), slice(border, keys))
    ]
    everything = torch.ones(tokens, keys).bool()
    assert close(attention.merge_partial(*parts), formula(q, k, v, config, everything, at))


def test_merge_survives_scores_of_any_size():
    out = torch.ones(1, 1, 4)
    merged, lse = attention.merge_partial(
        (out, torch.tensor([[-900.0]])), (2 * out, torch.tensor([[800.0]]))
    )
    assert torch.equal(merged, 2 * out) and lse.item() == 800.0


def test_products_of_16_bits_do_not_overflow(monkeypatch):
    """|q·k| is 4e5 and the score 16,000 and below: float16 ends at 65,504."""
    monkeypatch.setattr(attention, "_FUSED", None)
    q = torch.full((3, 2, 64), 80.0, dtype=HALF)
    k, v = (
        torch.linspace(60, 80, 3)[:, None, None].expand(3, 2, 64).to(HALF),
        torch.randn(3, 2, 64, dtype=HALF),
    )
    out, lse = attention.attend_causal(q, (k, v), AttentionConfig(0.04))
    expected = attention.attend_causal(q.float(), (k.float(), v.float()), AttentionConfig(0.04))
    assert (q[0].double() @ k[0].double().T).max() > 3e5
    assert lse.isfinite().all() and (lse / expected[1] - 1).abs().max() < 1e-3
    assert (out.float() - expected[0]).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "masked", "name"),
    [
        ((7, 5), HALF, 128, False, attention.EFFICIENT), ((7, 5), BRAIN, 128, False, None),
        ((8, 0), HALF, 256, False, attention.FLASH),
        ((9, 0), BRAIN, 264, False, attention.EFFICIENT),
        ((9, 0), BRAIN, 128, True, attention.EFFICIENT), ((9, 0), HALF, 12, False, None),
        ((9, 0), FULL, 12, False, attention.EFFICIENT), ((13, 0), HALF, 128, False, None),
    ],
)  # fmt: skip
def test_the_kernel_follows_from_device_and_dtype(
    monkeypatch, capability, dtype, dim, masked, name
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choose = attention.device_kernel.__wrapped__
    assert choose(torch.device("cuda"), dtype, dim, masked) == name
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert choose(torch.device("cuda"), dtype, dim, masked) is None, "ROCm"


def test_other_biases_take_the_formula(monkeypatch):
    monkeypatch.setattr(attention, "device_kernel", lambda *_: attention.EFFICIENT)
    q = torch.empty(2, 4, 1, 16, dtype=HALF, device="meta")
    aligned = attention.additive_mask(
        torch.empty(2, 1, 1, 13, dtype=torch.bool, device="meta"), HALF
    )
    assert attention.fused_kernel(q, aligned) == attention.EFFICIENT
    assert attention.fused_kernel(q, aligned.float()) is None  # ALiBi
    assert attention.fused_kernel(q, aligned[..., 3:]) is None
    assert attention.fused_kernel(q, torch.zeros(2, 1, 1, 13, dtype=HALF, device="meta")) is None


@pytest.mark.parametrize("name", ["plain", "alibi"])
@pytest.mark.parametrize(("key_heads", "at_once"), [(2, 1), (2, 40), (6, 1 << 20)])
def test_the_host_attends_to_16_bits_in_float32(monkeypatch, name, key_heads, at_once):
    """A few heads at a time, or a few sequences."""
    monkeypatch.setattr(attention, "_UPCAST_ELEMENTS", at_once * 13 * 16)
    lengths = torch.tensor([1, 9, 13, 13, 2])
    q, k, v = (
        torch.randn(5, 6, 16),
        torch.randn(5, key_heads, 13, 16),
        torch.randn(5, key_heads, 13, 16),
    )
    q, k, v = (x.half().float() for x in (q, k, v))
    mask = attention.additive_mask((torch.arange(13) >= lengths[:, None])[:, None, None], FULL)
    rest = CONFIGS[name], lengths - 1, VisibleKeys(mask)
    out, lse = attention.attend_cached(q.half(), (k.half(), v.half()), *rest)
    assert out.dtype == HALF and lse.dtype == FULL
    expected, expected_lse = attention.attend_cached(q, (k, v), *rest)
    assert (out - expected).abs().max() < 5e-3 and (lse - expected_lse).abs().max() < 1e-4
