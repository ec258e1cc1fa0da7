"""Attention of decoding tokens equals the formula in float64, whatever each sees, and whoever decodes beside it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.engine import attention_metadata
from flexgen_helm.kernels import decode_attention
from flexgen_helm.kernels.decode_attention import Row, RowTable, attend_rows, can_attend_rows
from tests.helpers.tiny_models import VOCABULARY

compiled = pytest.importorskip("flexgen_helm.kernels.compiled")

DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if compiled.CONVERTS_HALVES else [])]
PIECE = compiled.PIECE_KEYS


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, slopes: Tensor | None):
    """q [Hq, D], k and v [Hk, S, D], of which the last is the query's own -> output [Hq, D], log-sum-exp [Hq]."""
    k, v = (x.double().repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = torch.einsum("hd,hsd->hs", q.double(), k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores + slopes.double()[:, None] * torch.arange(1 - k.shape[1], 1)
    return torch.einsum("hs,hsd->hd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    key_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([4, 8, 16, 20, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    has_slopes=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_rows(seed, key_heads, group, dim, dtype, softcap, has_slopes, threads) -> None:
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    count, heads = draw.randrange(1, 5), key_heads * group
    rows = []
    for _ in range(count):
        last = draw.choice([0, 1, 6, 63, PIECE - 1, PIECE, 2 * PIECE + 37])
        rows.append(Row(draw.choice([0, 0, draw.randrange(last + 1)]), last, draw.random() < 0.3))
    size = max(row.last for row in rows) + 1
    # A wider cache of more slots, as blocks have; what nobody sees is no number.
    cache = torch.full((2, count + 1, key_heads, size + 3, dim), math.nan, dtype=dtype)
    for slot, row in enumerate(rows):
        seen = torch.randn(2, key_heads, row.last + 1 - row.first, dim, generator=numbers)
        cache[:, slot, :, row.first : row.last + 1] = seen.to(dtype)
    k, v = (x[:count, :, :size] for x in cache)
    q = torch.randn(heads, count, dim, generator=numbers).transpose(0, 1) * draw.choice([0.1, 1.0, 5.0])
    slopes = torch.rand(heads, generator=numbers) if has_slopes else None
    earlier = torch.randn(count, heads, dim, generator=numbers), 3 * torch.randn(count, heads, generator=numbers)
    earlier[0][0], earlier[1][0] = 0.0, -math.inf  # of a query that sees none of the earlier keys
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = earlier[0].clone(), earlier[1].clone()
        out, lse = attend_rows(RowTable.of(rows), q, k, v, dim**-0.5, softcap, slopes, given)
    finally:
        torch.set_num_threads(before)
    for slot, row in enumerate(rows):
        own = slice(row.first, row.last + 1)
        expected, expected_lse = formula(q[slot], k[slot, :, own], v[slot, :, own], dim**-0.5, softcap, slopes)
        if row.follows:
            total = torch.logaddexp(earlier[1][slot].double(), expected_lse)
            share = (expected_lse - total).exp()[:, None]
            expected, expected_lse = share * expected + (1 - share) * earlier[0][slot], total
        # A score is off by some units in its last place, and a weight by as much of itself.
        bound = 1e-6 * (10 + expected_lse.abs().max().item())
        torch.testing.assert_close(out[slot].double(), expected, rtol=0, atol=5 * bound)
        torch.testing.assert_close(lse[slot].double(), expected_lse, rtol=0, atol=bound)


def test_scores_beyond_what_an_exponential_holds() -> None:
    """A key that outweighs all others, in the first piece and in the last; equal scores."""
    size = 3 * PIECE
    k, v = torch.zeros(1, 1, size, 16), torch.arange(float(size))[:, None].expand(1, 1, size, 16).contiguous()
    table, q = RowTable.of([Row(0, size - 1)]), torch.ones(1, 1, 16)
    out, lse = attend_rows(table, q, k, v, 1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 16), (size - 1) / 2))
    torch.testing.assert_close(lse, torch.tensor([[math.log(size)]]))
    for key in (0, size - 1):
        k[:] = -500.0
        k[0, 0, key] = 500.0
        out, lse = attend_rows(table, q, k, v, 1.0)
        assert out.eq(key).all() and lse.eq(8000.0).all()


def test_the_same_bits_whoever_decodes_beside_it_on_any_number_of_threads() -> None:
    lasts = [10, 700, 2 * PIECE - 1, 300]
    q, (k, v) = torch.randn(4, 6, 64), torch.randn(2, 4, 2, 701, 64)
    alone = [attend_rows(RowTable.of([Row(0, last)]), q[i : i + 1], k[i : i + 1], v[i : i + 1], 0.125)
             for i, last in enumerate(lasts)]  # fmt: skip
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, lse = attend_rows(RowTable.of([Row(0, last) for last in lasts]), q, k, v, 0.125)
            for i, (own_out, own_lse) in enumerate(alone):
                assert torch.equal(out[i], own_out[0]) and torch.equal(lse[i], own_lse[0])
    finally:
        torch.set_num_threads(before)


def test_a_value_that_is_not_finite_stays_in_its_sequence() -> None:
    q, (k, v) = torch.randn(3, 2, 16), torch.randn(2, 3, 2, 400, 16)
    k[1, 0, 7] = math.nan
    out, _ = attend_rows(RowTable.of([Row(0, 399)] * 3), q, k, v, 0.25)
    assert out[::2].isfinite().all() and out[1, 1].isfinite().all() and out[1, 0].isnan().all()


def test_what_it_does_not_take() -> None:
    assert can_attend_rows(torch.device("cpu"), torch.float32)
    assert not can_attend_rows(torch.device("cpu"), torch.float64)
    assert not can_attend_rows(torch.device("meta"), torch.float32)


def test_a_trial_with_wrong_numbers_ends_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    right, loops = decode_attention.attend_rows, decode_attention._compiled()
    assert loops is not None and decode_attention._is_right(loops)
    for spoil in (lambda out, lse: (out + 1e-3, lse), lambda out, lse: (out, lse + 1e-3)):
        monkeypatch.setattr(decode_attention, "attend_rows", lambda *given, spoil=spoil: spoil(*right(*given)))
        assert not decode_attention._is_right(loops)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma2", "bloom"])
def test_an_engine_answers_the_same_without_it(tiny, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """With shared beginnings, windows, soft caps, and ALiBi; and it is what computes."""
    draw = random.Random(5)
    stem = [draw.randrange(2, VOCABULARY) for _ in range(40)]
    asked = [
        GenerationRequest(
            prompt_token_ids=stem[: 40 * (n > 5)] + [draw.randrange(2, VOCABULARY) for _ in range(n)], max_tokens=9
        )
        for n in (1, 9, 17, 30)
    ]
    calls = []

    def counted(table: RowTable, *given):
        calls.append(table)
        return attend_rows(table, *given)

    with Engine.from_pretrained(tiny(family).path, device="cpu") as engine:
        engine.share_every_beginning()
        monkeypatch.setattr(attention_metadata, "attend_rows", counted)
        compiled_loop = engine.run(asked)
        assert calls
        monkeypatch.setattr(attention_metadata, "can_attend_rows", lambda *given: False)
        one_by_one, seen = engine.run(asked), len(calls)
    assert seen == len(calls)
    for a, b in zip(compiled_loop, one_by_one):
        assert a.completions[0].token_ids == b.completions[0].token_ids
        assert a.completions[0].logprobs == pytest.approx(b.completions[0].logprobs, abs=1e-5)
