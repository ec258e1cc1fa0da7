"""Figures of a divergence against direct sums; its intervals cover the truth in simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexgen_helm.report.divergence import ScoredTokens, divergence_between


def draw_tokens(draw, documents, tokens, mean):
    """Documents of random lengths with KL divergences of their own mean, and losses that change by as much."""
    own = np.repeat(np.arange(documents), draw.integers(tokens // 2, tokens * 3 // 2, documents))
    exact = draw.gamma(2.0, mean / 2, len(own)) * draw.gamma(20.0, 1 / 20, documents)[own]
    sampled = np.sort(draw.choice(len(own), len(own) // 5, replace=False))
    base = -draw.exponential(3.0, len(own))
    same = draw.random(len(own)) < 0.9
    return ScoredTokens(own, base, base - exact, same, exact * 0.75, sampled, exact[sampled]), exact


def test_figures_are_direct_sums():
    scored, exact = draw_tokens(np.random.default_rng(1), 30, 40, 0.1)
    found = divergence_between("fp16", "4bit", scored)
    assert (found.tokens, found.documents, found.same_top) == (len(exact), 30, scored.same_top.sum() / len(exact))
    assert found.perplexity == pytest.approx(math.exp(-scored.other.mean()))
    assert found.ratio == pytest.approx(found.perplexity / found.baseline_perplexity) == math.exp(exact.mean())
    assert found.kl.mean == pytest.approx(exact[scored.sampled].mean()) and found.kl.tokens == len(exact) // 5
    assert found.kl_bound.mean == pytest.approx(0.75 * exact.mean()) and found.bound_share == pytest.approx(0.75)
    ordered = np.sort(0.75 * exact)
    assert found.kl_bound.largest == ordered[-1] and found.kl_bound.median == pytest.approx(np.median(ordered))
    assert ordered[int(0.99 * len(ordered)) - 1] <= found.kl_bound.p99 <= ordered[int(0.99 * len(ordered)) + 1]
    for interval, value in ((found.interval, found.ratio), (found.kl.interval, found.kl.mean)):
        assert interval[0] < value < interval[1]


def test_one_document_has_no_interval_and_no_difference_has_no_share():
    nothing = np.zeros(5)
    scored = ScoredTokens(nothing.astype(int), nothing - 1, nothing - 1, nothing == 0, nothing, np.arange(5), nothing)
    found = divergence_between("fp16", "8bit", scored)
    assert found.interval is found.kl.interval is found.kl_bound.interval is found.bound_share is None
    assert (found.ratio, found.same_top, found.kl.largest, found.documents) == (1.0, 1.0, 0.0, 1)


def test_a_broken_precision_has_an_infinite_perplexity():
    ones = np.ones(4)
    scored = ScoredTokens(np.arange(4), -ones, -1e4 * ones, ones == 0, ones, np.arange(4), ones)
    assert divergence_between("fp16", "4bit", scored).perplexity == math.inf


@pytest.mark.slow
def test_intervals_cover_the_mean_whose_documents_differ():
    """Tokens of a document resemble each other; an interval over tokens would cover far less."""
    draw, covered, covered_by_tokens = np.random.default_rng(2), 0, 0
    for _ in range(400):
        scored, exact = draw_tokens(draw, 30, 40, 0.1)
        low, high = divergence_between("fp16", "4bit", scored).interval
        covered += low < math.exp(0.1) < high
        half = 1.96 * exact.std() / math.sqrt(len(exact))
        covered_by_tokens += abs(exact.mean() - 0.1) < half
    assert covered / 400 > 0.92 and covered_by_tokens / 400 < 0.75
