"""Figures of a divergence against direct sums; its intervals cover the truth in simulations."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest

from flexgen_helm.report.divergence import ScoredTokens, divergence_between


def draw_tokens(draw, documents, tokens, mean):
    """Documents of random lengths with KL divergences of their own mean, and losses that change by
    as much.
    """
    document_of = np.repeat(
        np.arange(documents), draw.integers(tokens // 2, tokens * 3 // 2, documents)
    )
    exact = (
        draw.gamma(2.0, mean / 2, len(document_of))
        * draw.gamma(20.0, 1 / 20, documents)[document_of]
    )
    base = -draw.exponential(3.0, len(document_of))
    same = (draw.random(len(document_of)) < 0.9).astype(float)
    return ScoredTokens(document_of, base, base - exact, exact, same)


def test_figures_are_direct_sums():
    scored = draw_tokens(np.random.default_rng(1), 30, 40, 0.1)
    found, exact = divergence_between("fp16", "4bit", scored), scored.kl
    assert (found.tokens, found.documents, found.same_top) == (
        len(exact),
        30,
        scored.same_top.sum() / len(exact),
    )
    assert found.perplexity == pytest.approx(math.exp(-scored.logprobs.mean()))
    assert (
        found.ratio
        == pytest.approx(found.perplexity / found.baseline_perplexity)
        == math.exp(exact.mean())
    )
    assert found.kl.mean == pytest.approx(exact.mean()) and found.kl.tokens == len(exact)
    for key, value in asdict(found.kl).items():  # losses change by as much here
        assert getattr(found.logprob, key) == pytest.approx(value)
    ordered = np.sort(exact)
    assert found.kl.largest == ordered[-1] and found.kl.median == pytest.approx(np.median(ordered))
    assert ordered[int(0.99 * len(ordered)) - 2] <= found.kl.p99 <= ordered[-1]
    for interval, value in ((found.interval, found.ratio), (found.kl.interval, found.kl.mean)):
        assert interval[0] < value < interval[1]


def test_what_is_never_negative_has_no_negative_interval():
    scored = draw_tokens(np.random.default_rng(3), 2, 3, 0.1)
    found = divergence_between("fp16", "4bit", scored)
    assert all(0 <= of.interval[0] <= of.mean < of.interval[1] for of in (found.kl, found.logprob))


def test_a_broken_precision_has_an_infinite_perplexity():
    ones = np.ones(4)
    scored = ScoredTokens(np.arange(4), -ones, -1e4 * ones, ones, 0 * ones)
    assert divergence_between("fp16", "4bit", scored).perplexity == math.inf
