"""Attention of a batch's prompts equals the formula in float64, whatever they share and whatever a window hides."""

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
from flexgen_helm.kernels import attention
from flexgen_helm.kernels.attention import (
    BLOCK_KEYS,
    Begun,
    SegmentTable,
    TokenGroup,
    attend_segments,
    can_attend,
    can_attend_caches,
)
from flexgen_helm.models.config import Window
from tests.helpers.attention_formula import attention as attention_formula
from tests.helpers.tiny_models import VOCABULARY

emit = pytest.importorskip("flexgen_helm.kernels.emit")
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if emit.CONVERTS_HALVES else [])]


def formula(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: Window | None, *rest):
    """rest: soft cap and slopes."""
    at = torch.arange(len(k))
    allowed = at <= positions[:, None]
    if window is not None:
        allowed &= at >= torch.tensor([window.oldest(position) for position in positions.tolist()])[:, None]
    return attention_formula(q, k, v, allowed, positions, scale, *rest)


def assert_close(out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor, largest: float) -> None:
    """A score is off by some units in its last place, and a weight by as much of itself; largest: of the values."""
    bound = 1e-6 * (10 + max(exact_lse[~exact_lse.isinf()].abs().tolist(), default=0))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound * largest)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=bound)


DRAWN = {
    "seed": st.integers(0, 2**32),
    "key_heads": st.integers(1, 3),
    "group": st.sampled_from([1, 2, 3, 4, 5, 7]),
    "dim": st.sampled_from([4, 8, 16, 20, 64, 80, 128]),
    "softcap": st.sampled_from([None, None, 2.0, 50.0]),
    "has_slopes": st.booleans(),
    "threads": st.integers(1, 3),
    "window": st.sampled_from([None, None, Window(1), Window(7), Window(100), Window(7, True), Window(100, True)]),
}


@settings(deadline=None, max_examples=60)
@given(**DRAWN)
def test_any_batch(seed, key_heads, group, dim, window, softcap, has_slopes, threads):
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    # A beginning of all prompts, and longer ones of some, as a tree of prefixes has them.
    lengths = [draw.choice([1, 5, 64, 130]) for _ in range(draw.randrange(4))]
    starts = [0, *[lengths[0]] * (len(lengths) - 1)] if lengths else []
    stored = [tuple(normal(key_heads, length + 3, dim)[:, 2:-1] for _ in "kv") for length in lengths]
    counts = [draw.randrange(1, 120) for _ in range(draw.randrange(1, 6))]
    total = sum(counts)
    k, v = (normal(total, key_heads, dim + 4)[..., :dim] for _ in "kv")
    q = normal(group * key_heads, total, dim).transpose(0, 1) * draw.choice([0.1, 1.0, 20.0])
    groups, positions, first = [], [], 0
    for count in counts:
        shared = [] if not lengths else [0, *draw.sample(range(1, len(lengths)), k=min(1, len(lengths) - 1))]
        shared = shared[: draw.randrange(len(shared) + 1)]
        is_prompt = not shared or draw.random() < 0.7
        groups.append(TokenGroup(first, count, shared, is_prompt=is_prompt))
        end = sum(lengths[number] for number in shared)
        # Tokens that decode are at any positions behind what they share.
        positions += range(end, end + count) if is_prompt else [end + draw.randrange(90) for _ in range(count)]
        first += count
    table = SegmentTable.of(groups, positions, [*zip(lengths, starts)])
    slopes = torch.rand(group * key_heads, generator=numbers) if has_slopes else None
    seen = None if window is None else (window.tokens, window.is_chunked)
    torch.set_num_threads(threads)
    out, lse = attend_segments(q, table.at(stored, (k, v)), dim**-0.5, seen, softcap, slopes)
    for tokens in groups:
        part = slice(tokens.first, tokens.first + tokens.count)
        keys, values = (
            torch.cat([*(stored[number][i].transpose(0, 1) for number in tokens.shared), x])
            for i, x in enumerate((k[part], v[part]) if tokens.is_prompt else (k[:0], v[:0]))
        )
        expected = formula(q[part], keys, values, torch.tensor(positions[part]), dim**-0.5, window, softcap, slopes)
        sees_none = expected[1].isinf()
        expected[0][sees_none] = 0.0
        assert_close(out[part], lse[part], *expected, values.abs().max().item())


def test_scores_beyond_what_an_exponential_holds():
    """Differences of thousands between scores; equal scores; a first key that outweighs all later blocks."""
    q = torch.ones(200, 1, 16)
    k, v = torch.zeros(200, 1, 16), torch.arange(200.0)[:, None, None].expand(200, 1, 16).contiguous()
    table = SegmentTable.of([TokenGroup(0, 200, is_prompt=True)], range(200))
    out, lse = attend_segments(q, table.at([], (k, v)), 1.0)
    torch.testing.assert_close(out[:, 0, 0], torch.arange(200.0) / 2)
    torch.testing.assert_close(lse[:, 0], torch.arange(1.0, 201.0).log())
    k[0] = 500.0
    out, lse = attend_segments(q, table.at([], (k, v)), 1.0)
    assert out.abs().max() == 0.0 and torch.equal(lse, torch.full((200, 1), 8000.0))
    k[0], k[-1] = -500.0, 500.0
    out, lse = attend_segments(q, table.at([], (k, v)), 1.0)
    assert out[0].eq(0).all() and lse[0] == -8000.0 and out[-1].eq(199).all() and lse[-1] == 8000.0


@pytest.mark.parametrize("keys", [8_000, 100_000])
def test_what_each_of_many_keys_adds_beside_a_sink_is_not_lost(keys):
    """A first key of weight 1, as trained models have, and many of e^-17: less than a unit in the sum's last place.

    The last tokens are behind a prefix, or decode, at once or in two steps; one sum in 32 bits would lose it.
    """
    q, k, v = torch.zeros(70, 1, 16), torch.zeros(keys, 1, 16), torch.ones(keys, 1, 16)
    q[..., 0], k[1:, 0, 0], v[0] = 1.0, -17.0, 0.0
    last, pair = keys - 70, tuple(x.transpose(0, 1) for x in (k, v))
    behind = SegmentTable.of([TokenGroup(0, 70, (0,), is_prompt=True)], range(last, keys), [(last, 0)])
    alone = SegmentTable.of([TokenGroup(0, 1, (), (0, 0))], [keys - 1])
    half = last // 2 // BLOCK_KEYS * BLOCK_KEYS
    steps = [SegmentTable.of([TokenGroup(0, 1, (0,), begin=at, end=to)], [keys - 1], [(keys, 0)])
             for at, to in ((0, half), (half, 0))]  # fmt: skip
    prefix = pair[0][:, :last], pair[1][:, :last]
    found = [[x[-1] for x in attend_segments(q, behind.at([prefix], (k[last:], v[last:])), 1.0)]]
    found.append([x[0] for x in attend_segments(q[:1], alone.at(caches=(pair[0][None], pair[1][None])), 1.0)])
    begun = Begun.empty(q[:1])
    found.append([[x[0] for x in attend_segments(q[:1], step.at([pair]), 1.0, begun=begun)] for step in steps][-1])
    added = (keys - 1) * math.exp(-17)
    for out, lse in found:
        assert (out.double() - added / (1 + added)).abs().max() < 1e-8 and abs(lse.item() - math.log1p(added)) < 1e-8
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
    in_order = (torch.cat((torch.ones(1), torch.full((keys - 1,), math.exp(-17)))).numpy()).cumsum(dtype="float32")[-1]
    assert abs(math.log(in_order) - math.log1p(added)) > 1e-4


@pytest.mark.parametrize("loops_are_used", [True, False])
def test_scores_of_minus_infinity_alone_have_no_number(loops_are_used, monkeypatch):
    """As elsewhere, where a softmax of them is none; a token that sees no key at all has 0, to be merged."""
    if not loops_are_used:
        monkeypatch.setattr(attention, "loops", lambda: None)
    q, k, v = torch.ones(3, 1, 16), torch.full((3, 1, 16), -math.inf), torch.ones(3, 1, 16)
    out, _ = attend_segments(q, SegmentTable.of([TokenGroup(0, 3, is_prompt=True)], range(3)).at([], (k, v)), 1.0)
    assert out.isnan().all()
    pair, unseen = tuple(x.transpose(0, 1) for x in (k, v)), SegmentTable.of([TokenGroup(0, 1, (0,))], [9], [(3, 0)])
    out, lse = attend_segments(q[:1], unseen.at([pair]), 1.0, (2, False))
    assert out.eq(0).all() and lse.eq(-math.inf).all()


def test_a_value_that_is_not_finite_stays_in_its_prompt():
    """A number that is none must reach the scores of its own prompt, which are then refused, and no others."""
    q, k, v = (torch.randn(30, 2, 16) for _ in "qkv")
    k[12] = math.nan
    prompts = [TokenGroup(first, 10, is_prompt=True) for first in (0, 10, 20)]
    table = SegmentTable.of(prompts, [*range(10)] * 3)
    out, _ = attend_segments(q, table.at([], (k, v)), 0.25)
    assert out[:12].isfinite().all() and out[20:].isfinite().all()
    assert out[12:20].isnan().all()


def test_the_same_bits_on_any_number_of_threads():
    q, k, v = (torch.randn(500, heads, 64) for heads in (6, 2, 2))
    table = SegmentTable.of(
        [TokenGroup(0, 300, is_prompt=True), TokenGroup(300, 200, is_prompt=True)], [*range(300), *range(200)]
    )
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(attend_segments(q, table.at([], (k, v)), 0.125))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_the_same_bits_whoever_decodes_beside_it():
    """A window begins elsewhere for each token of a tile."""
    positions, pair = [300, 420, 350, 301, 777], tuple(torch.randn(2, 300, 64) for _ in "kv")
    q = torch.randn(5, 6, 64)

    def attended(*tokens: int) -> tuple[Tensor, Tensor]:
        group = TokenGroup(0, len(tokens), (0,))
        table = SegmentTable.of([group], [positions[token] for token in tokens], [(300, 0)])
        return attend_segments(q[[*tokens]], table.at([pair]), 0.125, (210, False))

    together = attended(*range(5))
    for token in range(5):
        for whole, (alone,) in zip(together, attended(token)):
            assert torch.equal(whole[token], alone)
    assert together[1][4].eq(-math.inf).all() and together[0][4].eq(0).all()


@settings(deadline=None, max_examples=60)
@given(dtype=st.sampled_from(DTYPES), **DRAWN)
def test_any_caches(seed, key_heads, group, dim, dtype, window, softcap, has_slopes, threads):
    """Decoding tokens, some behind a prefix whose result they go on from, over caches as they rest."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    count, heads, prefix = draw.randrange(1, 5), key_heads * group, draw.choice([1, 64, 90])
    lasts = [draw.choice([0, 1, 6, 63, 64, 255, 300]) for _ in range(count)]
    follows = [draw.random() < 0.4 for _ in range(count)]
    starts = [prefix * goes_on for goes_on in follows]
    positions = [start + last for start, last in zip(starts, lasts)]
    # A wider cache of more slots, as blocks have; what nobody sees is no number.
    cache = torch.full((2, count + 1, key_heads, max(lasts) + 4, dim), math.nan, dtype=dtype)
    for slot, last in enumerate(lasts):
        seen = torch.randn(2, key_heads, last + 1, dim, generator=numbers)
        cache[:, slot, :, : last + 1] = seen.to(dtype)
    k, v = (x[:count, :, : max(lasts) + 1] for x in cache)
    pair = tuple(torch.randn(key_heads, prefix, dim, generator=numbers) for _ in "kv")
    q = torch.randn(heads, count, dim, generator=numbers).transpose(0, 1) * draw.choice([0.1, 1.0, 5.0])
    slopes = torch.rand(heads, generator=numbers) if has_slopes else None
    way = None if window is None else (window.tokens, window.is_chunked), softcap, slopes
    torch.set_num_threads(threads)
    pair = tuple(x.to(dtype) for x in pair)
    begun, given = Begun.empty(q), (dim**-0.5, *way)
    for part in begun:
        part.fill_(math.nan)
    whole = prefix // BLOCK_KEYS * BLOCK_KEYS
    if whole and any(follows):
        groups = [TokenGroup(token, 1, (0,), end=whole) for token in range(count) if follows[token]]
        attend_segments(q, SegmentTable.of(groups, positions, [(prefix, 0)]).at([pair]), *given, begun)
    groups = [
        TokenGroup(slot, 1, (0,) if goes_on else (), (slot, start), begin=whole * goes_on)
        for slot, (start, goes_on) in enumerate(zip(starts, follows))
    ]
    segments = SegmentTable.of(groups, positions, [(prefix, 0)]).at([pair], caches=(k, v))
    out, lse = attend_segments(q, segments, *given, begun)
    for slot, (last, goes_on) in enumerate(zip(lasts, follows)):
        keys, values = (
            torch.cat([*([first] if goes_on else []), x[slot, :, : last + 1]], 1).float().transpose(0, 1)
            for first, x in zip(pair, (k, v))
        )
        at = torch.tensor(positions[slot : slot + 1])
        (expected,), (expected_lse,) = formula(q[slot : slot + 1], keys, values, at, dim**-0.5, window, softcap, slopes)
        assert_close(out[slot], lse[slot], expected, expected_lse, 5.0)


def test_the_same_bits_whoever_decodes_beside_it_on_any_number_of_threads():
    lasts = [10, 700, 511, 300]
    q, (k, v) = torch.randn(4, 6, 64), torch.randn(2, 4, 2, 701, 64)

    def attended(*rows: int) -> tuple[Tensor, Tensor]:
        groups = [TokenGroup(slot, 1, cache=(slot, 0)) for slot in range(len(rows))]
        table = SegmentTable.of(groups, [lasts[row] for row in rows])
        return attend_segments(q[[*rows]], table.at(caches=(k[[*rows]], v[[*rows]])), 0.125)

    alone = [attended(row) for row in range(4)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for row, one in enumerate(alone):
            assert all(torch.equal(whole[row], part[0]) for whole, part in zip(attended(*range(4)), one))


@settings(deadline=None, max_examples=40)
@given(**DRAWN)
def test_the_same_bits_wherever_segments_end(seed, key_heads, group, dim, window, softcap, has_slopes, threads):
    """A prompt in one piece, behind any shared prefixes, and its last token as one that decodes."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    total, heads = draw.randrange(2, 400), key_heads * group
    q, k, v = (torch.randn(total, n, dim, generator=numbers) for n in (heads, key_heads, key_heads))
    slopes = torch.rand(heads, generator=numbers) if has_slopes else None
    way = dim**-0.5, None if window is None else (window.tokens, window.is_chunked), softcap, slopes
    torch.set_num_threads(threads)
    table = SegmentTable.of([TokenGroup(0, total, is_prompt=True)], range(total))
    whole = attend_segments(q, table.at(batch=(k, v)), *way)
    ends = sorted(draw.sample(range(total), k=min(total - 1, draw.randrange(4))) + [0])
    shared, pairs = [], []
    for start, end in zip(ends, ends[1:]):
        shared.append((end - start, start))
        pairs.append(tuple(x[start:end].transpose(0, 1) for x in (k, v)))
    last = ends[-1]
    table = SegmentTable.of(
        [TokenGroup(0, total - last, range(len(pairs)), is_prompt=True)], range(last, total), shared
    )
    behind = attend_segments(q[last:], table.at(pairs, (k[last:], v[last:])), *way)
    assert all(torch.equal(x[last:], y) for x, y in zip(whole, behind))
    begin, begun = last // BLOCK_KEYS * BLOCK_KEYS, Begun.empty(q[-1:])
    if begin:
        table = SegmentTable.of([TokenGroup(0, 1, range(len(pairs)), end=begin)], [total - 1], shared)
        attend_segments(q[-1:], table.at(pairs), *way, begun)
    groups = [TokenGroup(0, 1, range(len(pairs)), (0, last), begin=begin)]
    caches = tuple(x[last:].transpose(0, 1)[None] for x in (k, v))
    table = SegmentTable.of(groups, [total - 1], shared)
    decoded = attend_segments(q[-1:], table.at(pairs, caches=caches), *way, begun)
    assert all(torch.equal(x[-1:], y) for x, y in zip(whole, decoded))


def test_what_it_does_not_take():
    x = torch.randn(3, 2, 16)
    assert can_attend(x, x)
    assert not can_attend(x, x.half())
    assert not can_attend(x.transpose(1, 2), x)
    assert can_attend_caches(torch.device("cpu"), torch.float32)
    assert not can_attend_caches(torch.device("cpu"), torch.float64)
    assert not can_attend_caches(torch.device("meta"), torch.float32)


@pytest.mark.parametrize("spoil", [lambda out, lse: out.add_(1e-3), lambda out, lse: lse.add_(1e-3)])
def test_a_trial_with_wrong_numbers_ends_its_use(monkeypatch, spoil):
    plain = attention._attend_plainly
    assert attention.loops() is not None

    def spoilt(*given):
        found = plain(*given)
        spoil(*found)
        return found

    attention.loops.forget()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_attend_plainly", spoilt)
        assert attention.loops() is None
    attention.loops.forget()


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_an_engine_answers_the_same_without_it(tiny, monkeypatch, family):
    """With shared beginnings, a window, and heads of 8 elements; and it is what computes."""
    draw = random.Random(5)
    stem = [draw.randrange(2, VOCABULARY) for _ in range(40)]
    asked = [
        GenerationRequest(
            prompt_token_ids=stem + [draw.randrange(2, VOCABULARY) for _ in range(n)], max_tokens=3, echo_logprobs=True
        )
        for n in (1, 9, 17, 30)
    ]
    calls = []

    def counted(q, segments, *given):
        calls.append(segments.table)
        return attend_segments(q, segments, *given)

    with Engine.from_pretrained(tiny(family).path, device="cpu") as engine:
        engine.share_every_beginning()
        monkeypatch.setattr(attention_metadata, "attend_segments", counted)
        fused = engine.run(asked)
        assert calls
        monkeypatch.setattr(attention_metadata, "can_attend_caches", lambda *given: False)
        one_by_one = engine.run(asked)
    for a, b in zip(fused, one_by_one):
        assert a.completions[0].token_ids == b.completions[0].token_ids
        assert a.prompt_logprobs[1:] == pytest.approx(b.prompt_logprobs[1:], abs=1e-5)
