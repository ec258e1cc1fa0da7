"""Attention of a batch's prompts equals the formula in float64, whatever they share and whatever a
window hides.
"""

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels import attention
from flexgen_helm.kernels.attention import (
    BLOCK_KEYS,
    AttentionState,
    ScoreOptions,
    Segment,
    SegmentTable,
    TokenGroup,
    attend_segments,
    can_attend_caches,
)
from flexgen_helm.models.config import Window
from tests.helpers.attention_formula import attention as attention_formula

emit = pytest.importorskip("flexgen_helm.kernels.emit")
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if emit.CONVERTS_HALVES else [])]


def formula(q, k, v, positions, scale, window, *rest):
    """rest: soft cap and slopes."""
    at = torch.arange(len(k))
    allowed = at <= positions[:, None]
    if window is not None:
        allowed &= (
            at
            >= torch.tensor([window.oldest(position) for position in positions.tolist()])[:, None]
        )
    return attention_formula(q, k, v, allowed, positions, scale, *rest)


def by_head(k, v):
    """Keys and values of tokens [T, Hk, D] as a source has them."""
    return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def one_prompt(k, v):
    groups = [TokenGroup(0, len(k), [Segment("new", 0, len(k))])]
    return SegmentTable.of(groups, range(len(k))).with_addresses([by_head(k, v)])


def caches(k, v, lasts):
    """Tokens over their sequences' caches [slots, Hk, S, D]."""
    groups = [
        TokenGroup(slot, 1, [Segment("cache", 0, last + 1, slot)])
        for slot, last in enumerate(lasts)
    ]
    return SegmentTable.of(groups, lasts).with_addresses([(k, v)])


def assert_close(out, lse, exact, exact_lse, largest):
    """A score is off by some units in its last place, and a weight by as much of itself; largest:
    of the values.
    """
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
    "window": st.sampled_from(
        [None, None, Window(1), Window(7), Window(100), Window(7, True), Window(100, True)]
    ),
}


@settings(max_examples=60)
@given(**DRAWN)
def test_any_batch(seed, key_heads, group, dim, window, softcap, has_slopes, threads):
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=numbers)

    # A beginning of all prompts, and longer ones of some, as a tree of prefixes has them.
    lengths = [draw.choice([1, 5, 64, 130]) for _ in range(draw.randrange(4))]
    starts = [0, *[lengths[0]] * (len(lengths) - 1)] if lengths else []
    stored = [
        tuple(normal(key_heads, length + 3, dim)[:, 2:-1] for _ in "kv") for length in lengths
    ]
    counts = [draw.randrange(1, 120) for _ in range(draw.randrange(1, 6))]
    total = sum(counts)
    k, v = (normal(total, key_heads, dim + 4)[..., :dim] for _ in "kv")
    q = normal(group * key_heads, total, dim).transpose(0, 1) * draw.choice([0.1, 1.0, 20.0])
    groups, positions, first = [], [], 0
    for count in counts:
        shared = (
            []
            if not lengths
            else [0, *draw.sample(range(1, len(lengths)), k=min(1, len(lengths) - 1))]
        )
        shared = shared[: draw.randrange(len(shared) + 1)]
        is_prompt = not shared or draw.random() < 0.7
        end = sum(lengths[number] for number in shared)
        segments = [Segment(number, starts[number], lengths[number]) for number in shared]
        new = [Segment("new", end, count, first=first)] if is_prompt else []
        groups.append((first, count, shared, is_prompt, [*segments, *new]))
        # Tokens that decode are at any positions behind what they share.
        positions += (
            range(end, end + count)
            if is_prompt
            else [end + draw.randrange(90) for _ in range(count)]
        )
        first += count
    table = SegmentTable.of(
        [TokenGroup(first, count, segments) for first, count, *_, segments in groups], positions
    )
    given = {**{i: (k[None], v[None]) for i, (k, v) in enumerate(stored)}, "new": by_head(k, v)}
    slopes = torch.rand(group * key_heads, generator=numbers) if has_slopes else None
    seen = None if window is None else (window.tokens, window.is_chunked)
    torch.set_num_threads(threads)
    segments = table.with_addresses([given[source] for source in table.sources])
    out, lse = attend_segments(q, segments, ScoreOptions(dim**-0.5, seen, softcap, slopes))
    for first, count, shared, is_prompt, _ in groups:
        part = slice(first, first + count)
        keys, values = (
            torch.cat([*(stored[number][i].transpose(0, 1) for number in shared), x])
            for i, x in enumerate((k[part], v[part]) if is_prompt else (k[:0], v[:0]))
        )
        expected = formula(
            q[part], keys, values, torch.tensor(positions[part]), dim**-0.5, window, softcap, slopes
        )
        sees_none = expected[1].isinf()
        expected[0][sees_none] = 0.0
        assert_close(out[part], lse[part], *expected, values.abs().max().item())


def test_scores_beyond_what_an_exponential_holds():
    """Differences of thousands between scores; equal scores; a first key that outweighs all later
    blocks.
    """
    q = torch.ones(200, 1, 16)
    k, v = (
        torch.zeros(200, 1, 16),
        torch.arange(200.0)[:, None, None].expand(200, 1, 16).contiguous(),
    )
    out, lse = attend_segments(q, one_prompt(k, v), ScoreOptions(1.0))
    torch.testing.assert_close(out[:, 0, 0], torch.arange(200.0) / 2)
    torch.testing.assert_close(lse[:, 0], torch.arange(1.0, 201.0).log())
    k[0] = 500.0
    out, lse = attend_segments(q, one_prompt(k, v), ScoreOptions(1.0))
    assert out.abs().max() == 0.0 and torch.equal(lse, torch.full((200, 1), 8000.0))
    k[0], k[-1] = -500.0, 500.0
    out, lse = attend_segments(q, one_prompt(k, v), ScoreOptions(1.0))
    assert out[0].eq(0).all() and lse[0] == -8000.0 and out[-1].eq(199).all() and lse[-1] == 8000.0


@pytest.mark.parametrize("keys", [8_000, 100_000])
def test_what_each_of_many_keys_adds_beside_a_sink_is_not_lost(keys):
    """A first key of weight 1, as trained models have, and many of e^-17: less than a unit in the
    sum's last place.

    One sum in 32 bits would lose it. (Wherever segments end, bits are the same.)
    """
    q, k, v = torch.zeros(70, 1, 16), torch.zeros(keys, 1, 16), torch.ones(keys, 1, 16)
    q[..., 0], k[1:, 0, 0], v[0] = 1.0, -17.0, 0.0
    last = keys - 70
    segments = [Segment("prefix", 0, last), Segment("new", last, 70)]
    table = SegmentTable.of([TokenGroup(0, 70, segments)], range(last, keys))
    behind = table.with_addresses([by_head(k[:last], v[:last]), by_head(k[last:], v[last:])])
    out, lse = (x[-1] for x in attend_segments(q, behind, ScoreOptions(1.0)))
    added = (keys - 1) * math.exp(-17)
    assert (out.double() - added / (1 + added)).abs().max() < 1e-8 and abs(
        lse.item() - math.log1p(added)
    ) < 1e-8
    in_order = (torch.cat((torch.ones(1), torch.full((keys - 1,), math.exp(-17)))).numpy()).cumsum(
        dtype="float32"
    )[-1]
    assert abs(math.log(in_order) - math.log1p(added)) > 1e-4


@pytest.mark.parametrize("loops_are_used", [True, False])
def test_scores_of_minus_infinity_alone_have_no_number(loops_are_used, monkeypatch):
    """As elsewhere, where a softmax of them is none; a token that sees no key at all has 0, to be
    merged.
    """
    if not loops_are_used:
        monkeypatch.setattr(attention, "loops", lambda: None)
    q, k, v = torch.ones(3, 1, 16), torch.full((3, 1, 16), -math.inf), torch.ones(3, 1, 16)
    out, _ = attend_segments(q, one_prompt(k, v), ScoreOptions(1.0))
    assert out.isnan().all()
    unseen = SegmentTable.of([TokenGroup(0, 1, [Segment("prefix", 0, 3)])], [9])
    out, lse = attend_segments(
        q[:1], unseen.with_addresses([by_head(k, v)]), ScoreOptions(1.0, (2, False))
    )
    assert out.eq(0).all() and lse.eq(-math.inf).all()


@settings(max_examples=60)
@given(dtype=st.sampled_from(DTYPES), **DRAWN)
def test_any_caches(seed, key_heads, group, dim, dtype, window, softcap, has_slopes, threads):
    """Decoding tokens over caches as they rest."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    count, heads = draw.randrange(1, 5), key_heads * group
    lasts = [draw.choice([0, 1, 6, 63, 64, 255, 300]) for _ in range(count)]
    # A wider cache of more slots, as blocks have; what nobody sees is no number.
    cache = torch.full((2, count + 1, key_heads, max(lasts) + 4, dim), math.nan, dtype=dtype)
    for slot, last in enumerate(lasts):
        cache[:, slot, :, : last + 1] = torch.randn(
            2, key_heads, last + 1, dim, generator=numbers
        ).to(dtype)
    k, v = (x[:count, :, : max(lasts) + 1] for x in cache)
    q = torch.randn(heads, count, dim, generator=numbers).transpose(0, 1) * draw.choice(
        [0.1, 1.0, 5.0]
    )
    slopes = torch.rand(heads, generator=numbers) if has_slopes else None
    seen = None if window is None else (window.tokens, window.is_chunked)
    torch.set_num_threads(threads)
    out, lse = attend_segments(
        q, caches(k, v, lasts), ScoreOptions(dim**-0.5, seen, softcap, slopes)
    )
    for slot, last in enumerate(lasts):
        keys, values = (x[slot, :, : last + 1].float().transpose(0, 1) for x in (k, v))
        at = torch.tensor([last])
        (expected,), (expected_lse,) = formula(
            q[slot : slot + 1], keys, values, at, dim**-0.5, window, softcap, slopes
        )
        assert_close(out[slot], lse[slot], expected, expected_lse, 5.0)


def test_the_same_bits_whoever_decodes_beside_it_on_any_number_of_threads():
    lasts = [10, 700, 511, 300]
    q, (k, v) = torch.randn(4, 6, 64), torch.randn(2, 4, 2, 701, 64)

    def attended(*rows):
        segments = caches(k[[*rows]], v[[*rows]], [lasts[row] for row in rows])
        return attend_segments(q[[*rows]], segments, ScoreOptions(0.125))

    alone = [attended(row) for row in range(4)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for row, one in enumerate(alone):
            assert all(
                torch.equal(whole[row], part[0]) for whole, part in zip(attended(*range(4)), one)
            )


@settings(max_examples=40)
@given(**DRAWN)
def test_the_same_bits_wherever_segments_end(
    seed, key_heads, group, dim, window, softcap, has_slopes, threads
):
    """A prompt in one piece, behind any shared prefixes, and its last token as one that decodes."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    total, heads = draw.randrange(2, 400), key_heads * group
    q, k, v = (torch.randn(total, n, dim, generator=numbers) for n in (heads, key_heads, key_heads))
    slopes = torch.rand(heads, generator=numbers) if has_slopes else None
    seen = None if window is None else (window.tokens, window.is_chunked)
    options = ScoreOptions(dim**-0.5, seen, softcap, slopes)
    torch.set_num_threads(threads)
    whole = attend_segments(q, one_prompt(k, v), options)
    ends = sorted(draw.sample(range(total), k=min(total - 1, draw.randrange(4))) + [0])
    shared = [Segment(i, start, end - start) for i, (start, end) in enumerate(pairwise(ends))]
    last = ends[-1]
    rest = Segment("rest", last, total - last)
    given = {
        i: by_head(k[start:end], v[start:end]) for i, (start, end) in enumerate(pairwise(ends))
    }
    given["rest"] = by_head(k[last:], v[last:])

    def attended(queries, state=None, **bounds):
        group = TokenGroup(0, len(queries), [*shared, rest], **bounds)
        table = SegmentTable.of([group], range(total - len(queries), total))
        segments = table.with_addresses([given[source] for source in table.sources])
        return attend_segments(queries, segments, options, state)

    assert all(torch.equal(x[last:], y) for x, y in zip(whole, attended(q[last:])))
    begin, state = last // BLOCK_KEYS * BLOCK_KEYS, AttentionState.empty(q[-1:])
    if begin:
        attended(q[-1:], state, end=begin)
    decoded = attended(q[-1:], state, begin=begin)
    assert all(torch.equal(x[-1:], y) for x, y in zip(whole, decoded))


def test_what_it_does_not_take():
    assert can_attend_caches(torch.device("cpu"), torch.float32)
    assert not can_attend_caches(torch.device("cpu"), torch.float64)
    assert not can_attend_caches(torch.device("meta"), torch.float32)
