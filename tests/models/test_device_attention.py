"""Attention as a device computes it: the choice of a kernel, and the layouts of PyTorch's fused kernels."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm.models import attention
from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.config import Window
from tests.helpers import fused_attention

PLAIN = AttentionConfig(0.4)
CUDA = torch.device("cuda")
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(params=["flash", "efficient"])
def kernel(request, monkeypatch):
    """Tensors of the CPU take a kernel of a device, where its rules allow it; the fixture counts its calls."""
    calls = []

    def counted(function):
        def call(*arguments, **named):
            calls.append(function.__name__)
            return function(*arguments, **named)

        return call

    ops = torch.ops.aten
    monkeypatch.setattr(ops, "_scaled_dot_product_flash_attention", counted(fused_attention.flash_attention))
    monkeypatch.setattr(ops, "_scaled_dot_product_efficient_attention", counted(fused_attention.efficient_attention))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (8, 0) if request.param == "flash" else (7, 5)
    )
    monkeypatch.setattr(attention, "mask_dtype", lambda device, dtype: dtype)
    choose = attention.device_kernel
    choose.cache_clear()

    def on_device(q, mask):
        assert mask is None or (mask.dtype == q.dtype and not mask.storage_offset() % 8), "rules are checked before"
        return choose(CUDA, q.dtype, q.shape[-1], mask is not None)

    monkeypatch.setattr(attention, "fused_kernel", on_device)
    yield calls
    choose.cache_clear()


def explicit(monkeypatch, function, *arguments):
    """The same by the formula in float32."""
    with monkeypatch.context() as patch:
        patch.setattr(attention, "fused_kernel", lambda q, mask: None)
        return function(*(x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments))


def close(part, expected):
    assert all(torch.equal(torch.isinf(a), torch.isinf(b)) for a, b in zip(part, expected))
    return all((a - b).nan_to_num(0.0).abs().max() < 5e-3 for a, b in zip(part, expected))


def half(*shape):
    return torch.randn(*shape, dtype=HALF)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize(("tokens", "window"), [(1, None), (70, None), (33, Window(9)), (70, Window(40))])
def test_prompts(kernel, monkeypatch, key_heads, tokens, window):
    monkeypatch.setattr(attention, "QUERY_CHUNK_TOKENS", 32)
    attention._window_chunk_mask.cache_clear()
    q, k, v = half(tokens, 6, 16), half(tokens, key_heads, 16), half(tokens, key_heads, 16)
    part = attention.attend_causal(q, k, v, PLAIN, window)
    attention._window_chunk_mask.cache_clear()
    assert kernel
    assert close(part, explicit(monkeypatch, attention.attend_causal, q, k, v, PLAIN, window))


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("lengths", [(13, 13, 13), (1, 9, 13)])
def test_decoding(kernel, monkeypatch, key_heads, lengths):
    lengths = torch.tensor(lengths)
    q, k, v = half(3, 6, 16), half(3, key_heads, 24, 16)[:, :, :13], half(3, key_heads, 24, 16)[:, :, :13]
    hidden = torch.arange(13) >= lengths[:, None]
    mask = attention.additive_mask(hidden[:, None, None], HALF) if hidden.any() else None
    arguments = q, k, v, PLAIN, lengths - 1, mask
    assert close(attention.attend_cached(*arguments), explicit(monkeypatch, attention.attend_cached, *arguments))
    assert len(kernel) == 1


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_shared_prefixes(kernel, monkeypatch, key_heads):
    """Some queries see some of the keys, one sees none, and a part's mask is cut into chunks of queries."""
    monkeypatch.setattr(attention, "QUERY_CHUNK_TOKENS", 16)
    q, k, v = half(21, 6, 16), half(key_heads, 19, 16), half(key_heads, 19, 16)
    at = torch.arange(19, 40)
    hidden = torch.arange(19) >= torch.arange(21)[:, None]
    for arguments in (
        (q, k, v, PLAIN, at),
        (q, k, v, PLAIN, at, attention.additive_mask(hidden, HALF), hidden.all(-1)),
    ):
        part = attention.attend_prefix(*arguments)
        assert close(part, explicit(monkeypatch, attention.attend_prefix, *arguments))
        assert not part[0].isnan().any()
    assert torch.isneginf(part[1][0]).all() and not part[0][0].any()
    assert kernel


def test_products_of_16_bits_do_not_overflow(monkeypatch):
    """|q·k| is 4e5 and the score 16,000 and below: float16 ends at 65,504."""
    monkeypatch.setattr(attention, "_FUSED", None)
    q = torch.full((3, 2, 64), 80.0, dtype=HALF)
    k, v = torch.linspace(60, 80, 3)[:, None, None].expand(3, 2, 64).to(HALF), half(3, 2, 64)
    out, lse = attention.attend_causal(q, k, v, AttentionConfig(0.04))
    expected = attention.attend_causal(q.float(), k.float(), v.float(), AttentionConfig(0.04))
    assert (q[0].double() @ k[0].double().T).max() > 3e5
    assert lse.isfinite().all() and (lse / expected[1] - 1).abs().max() < 1e-3
    assert (out.float() - expected[0]).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "masked", "name"),
    [
        ((7, 5), HALF, 128, False, attention.EFFICIENT),
        ((7, 5), HALF, 128, True, attention.EFFICIENT),
        ((7, 5), BRAIN, 128, False, None),
        ((7, 5), FULL, 128, False, attention.EFFICIENT),
        ((8, 0), HALF, 128, False, attention.FLASH),
        ((8, 6), BRAIN, 256, False, attention.FLASH),
        ((9, 0), BRAIN, 264, False, attention.EFFICIENT),
        ((9, 0), BRAIN, 128, True, attention.EFFICIENT),
        ((9, 0), FULL, 128, False, attention.EFFICIENT),
        ((9, 0), HALF, 12, False, None),
        ((9, 0), FULL, 12, False, attention.EFFICIENT),
        ((13, 0), HALF, 128, False, None),
    ],
)
def test_the_kernel_follows_from_device_and_dtype(monkeypatch, capability, dtype, dim, masked, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    attention.device_kernel.cache_clear()
    chosen = attention.device_kernel(CUDA, dtype, dim, masked)
    attention.device_kernel.cache_clear()
    assert chosen == name


def test_other_biases_take_the_formula(monkeypatch):
    monkeypatch.setattr(attention, "device_kernel", lambda *_: attention.EFFICIENT)
    q = torch.empty(2, 4, 1, 16, dtype=HALF, device="meta")
    aligned = attention.additive_mask(torch.empty(2, 1, 1, 13, dtype=torch.bool, device="meta"), HALF)
    assert attention.fused_kernel(q, aligned) == attention.EFFICIENT
    assert attention.fused_kernel(q, aligned.float()) is None  # ALiBi
    assert attention.fused_kernel(q, aligned[..., 3:]) is None
    assert attention.fused_kernel(q, torch.zeros(2, 1, 1, 13, dtype=HALF, device="meta")) is None


@pytest.mark.parametrize("key_heads", [2, 6])
@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_the_host_attends_to_16_bits_in_float32(monkeypatch, key_heads, at_once):
    """A few heads at a time, or a few sequences."""
    monkeypatch.setattr(attention, "_UPCAST_ELEMENTS", at_once * 13 * 16)
    lengths = torch.tensor([1, 9, 13, 13, 2])
    q, k, v = half(5, 6, 16), half(5, key_heads, 13, 16), half(5, key_heads, 13, 16)
    mask = attention.additive_mask((torch.arange(13) >= lengths[:, None])[:, None, None], FULL)
    for config in (PLAIN, AttentionConfig(0.4, slopes=torch.tensor([0.5, 0.25, 0.06, 0.9, 0.3, 0.01]))):
        arguments = q, k, v, config, lengths - 1, mask
        part = attention.attend_cached(*arguments)
        assert part[0].dtype == HALF and part[1].dtype == FULL
        assert close(part, explicit(monkeypatch, attention.attend_cached, *arguments))
