"""Draws: true argmax, the softmax's distribution, the nucleus, and randomness that belongs to the
request.

`test_company.py`, `test_long_answers.py`: draws do not depend on a batch. `test_parity.py`:
log-probabilities of draws.
"""

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from flexgen_helm.engine.sampler import sample_tokens
from flexgen_helm.scheduling.sampling_params import SamplingParams, draw_key

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.5, -9.0, 1.5]])


def draws(temperature, top_p, count=4000):
    rows = LOGITS.expand(count, -1)
    return sample_tokens(
        rows, [SamplingParams(temperature, top_p, draw_key(7, i, 3)) for i in range(count)]
    ).numpy()


def test_samples_follow_the_tempered_softmax():
    for temperature in (0.7, 1.0, 2.0):
        expected = torch.softmax(LOGITS[0].double() / temperature, 0).numpy()
        observed = np.bincount(draws(temperature, 1.0), minlength=6)
        # too few for the test's approximation: counted with the next one
        rare = expected * 4000 < 5
        expected, observed = (
            [*v[~rare][:-1], v[~rare][-1] + v[rare].sum()] for v in (expected, observed)
        )
        assert stats.chisquare(observed, [4000 * p for p in expected]).pvalue > 1e-4


@settings(max_examples=60)
@given(st.data())
def test_a_row_is_drawn_as_a_slow_direct_formula_draws_it(data):
    """Any mixture of greedy, forced, tempered and nucleus rows; ties and tiny nuclei as well."""
    rows, vocabulary = (
        data.draw(st.integers(1, 9)),
        data.draw(st.sampled_from([1, 2, 7, 300, 70_000])),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, vocabulary, generator=generator) * data.draw(
        st.sampled_from([0.1, 1.0, 30.0])
    )
    if data.draw(st.booleans()):
        logits = logits.round()
    sampling = [
        SamplingParams(
            data.draw(
                st.sampled_from([0.0, 0.3, 1.0, 2.0, 5e-324, 1e-308, 1e-30, 1e-3, 50.0, 1e300])
            ),
            data.draw(st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0])),
            data.draw(st.sampled_from([0, -1, 1 << 62, -(1 << 63), draw_key(1, 2, 3)])),
            data.draw(st.sampled_from([None, None, None, 0])),
        )
        for _ in range(rows)
    ]
    for token, row in zip(sample_tokens(logits, sampling).tolist(), zip(logits, sampling)):
        assert token == drawn_alone(*row)


def drawn_alone(logits, params):
    """Gumbel-max with SplitMix64 in numpy's unsigned integers, over the nucleus found token by
    token.
    """
    if params.forced is not None:
        return params.forced
    if params.temperature == 0.0:
        return int(logits.argmax())
    values = logits.double().numpy()
    # a quotient below the least number is minus infinity, whose power is 0
    with np.errstate(over="ignore"):
        scores = (values - values.max()) / params.temperature
        powers = np.exp(scores)
    if params.top_p < 1:
        probabilities = powers / powers.sum()
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(np.append(0, probabilities[order[:-1]]))
        # The sampler subtracts, so rounding may decide otherwise at the border: such cases are left
        # out.
        assume(np.abs(before - params.top_p).min() > 1e-12)
        scores[order[before >= params.top_p]] = -np.inf
    counters = np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = counters + np.uint64(params.key % (1 << 64))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    uniforms = ((bits % np.uint64(1 << 52)).astype(np.float64) + 0.5) / 2**52
    return int(np.argmax(scores - np.log(-np.log(uniforms))))


def test_draws_of_seeds_completions_and_steps_are_independent():
    """Pairs of draws from even logits follow the product of their distributions, as those of a good
    generator do.
    """
    even = torch.zeros(1, 8)
    triples = [
        (seed, completion, step)
        for seed in range(-9, 10)
        for completion in range(20)
        for step in range(20)
    ]
    params = {triple: SamplingParams(1.0, 1.0, draw_key(*triple)) for triple in triples}
    tokens = dict(
        zip(triples, sample_tokens(even.expand(len(triples), -1), [*params.values()]).tolist())
    )
    assert len({p.key for p in params.values()}) == len(triples)
    for axis in range(3):
        pairs = np.zeros((8, 8))
        for triple, token in tokens.items():
            following = tuple(number + (i == axis) for i, number in enumerate(triple))
            if following in tokens:
                pairs[token, tokens[following]] += 1
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
    assert -(1 << 63) <= draw_key(1 << 200, 0, 0) < 1 << 63
