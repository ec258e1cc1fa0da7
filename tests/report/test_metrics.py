"""Standard errors against direct formulas and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from flexgen_helm.report.paired import metric_named


def test_the_error_of_a_mean_is_the_samples():
    right = np.array([1.0, 0, 1, 1, 0, 1, 1])
    error = metric_named("exact_match").standard_error(right, np.ones(7))
    assert error == pytest.approx(scipy.stats.sem(right)) == pytest.approx(math.sqrt(5 / 7 * 2 / 7 / 6))


@pytest.mark.parametrize("name", ["target_perplexity", "word_perplexity", "bits_per_byte", "logprob_per_byte"])
def test_other_errors_are_those_of_a_bootstrap(name):
    draw = np.random.default_rng(0)
    weights = np.ones(800) if name == "target_perplexity" else draw.integers(50, 500, 800).astype(float)
    logprobs = -weights * draw.normal(2.0, 0.4, 800)
    metric = metric_named(name)
    bootstrap = scipy.stats.bootstrap(
        (logprobs, weights), metric.value, paired=True, vectorized=True, n_resamples=2000, random_state=draw
    )
    assert metric.standard_error(logprobs, weights) == pytest.approx(bootstrap.standard_error, rel=0.06)


def test_the_error_of_a_perplexity_is_that_of_its_logarithm_times_itself():
    logprobs = np.array([-3.0, -4.0, -2.5, -3.5])
    metric = metric_named("target_perplexity")
    expected = math.exp(-logprobs.mean()) * scipy.stats.sem(logprobs)
    assert metric.standard_error(logprobs, np.ones(4)) == pytest.approx(expected)


def test_what_has_no_error():
    metric = metric_named("target_perplexity")
    assert metric.standard_error(np.array([-3.0]), np.ones(1)) is None
    assert metric.standard_error(np.array([-3.0, -math.inf]), np.ones(2)) is None
    assert metric.standard_error(np.array([-3.0, math.nan]), np.ones(2)) is None
    assert metric.value(np.array([-3.0, -5000.0]), np.ones(2)) == math.inf
