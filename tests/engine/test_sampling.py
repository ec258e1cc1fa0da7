"""Draws: true argmax, the softmax's distribution, the nucleus, and randomness that belongs to the request."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.engine.sampler import sample_tokens
from flexgen_helm.scheduling.sequence import SamplingParams, draw_key

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.5, -9.0, 1.5]])


def draws(temperature: float, top_p: float, count: int = 4000) -> np.ndarray:
    rows = LOGITS.expand(count, -1)
    return sample_tokens(rows, [SamplingParams(temperature, top_p, draw_key(7, i, 3)) for i in range(count)]).numpy()


def test_samples_follow_the_tempered_softmax():
    for temperature in (0.7, 1.0, 2.0):
        expected = torch.softmax(LOGITS[0].double() / temperature, 0).numpy()
        observed = np.bincount(draws(temperature, 1.0), minlength=6)
        rare = expected * 4000 < 5  # too few for the test's approximation: counted with the next one
        expected, observed = ([*v[~rare][:-1], v[~rare][-1] + v[rare].sum()] for v in (expected, observed))
        assert stats.chisquare(observed, [4000 * p for p in expected]).pvalue > 1e-4


def test_the_chi_square_test_would_notice_the_wrong_temperature():
    expected = torch.softmax(LOGITS[0].double(), 0).numpy()
    assert stats.chisquare(np.bincount(draws(1.3, 1.0), minlength=6), expected * 4000).pvalue < 1e-6


@settings(max_examples=60)
@given(st.data())
def test_a_row_is_drawn_as_a_slow_direct_formula_draws_it(data):
    """Any mixture of greedy, forced, tempered and nucleus rows; ties and tiny nuclei as well."""
    rows, vocabulary = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 7, 300, 70_000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, vocabulary, generator=generator) * data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    if data.draw(st.booleans()):
        logits = logits.round()
    sampling = [
        SamplingParams(
            data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0, 5e-324, 1e-308, 1e-30, 1e-3, 50.0, 1e300])),
            data.draw(st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0])),
            data.draw(st.sampled_from([0, -1, 1 << 62, -(1 << 63), draw_key(1, 2, 3)])),
            data.draw(st.sampled_from([None, None, None, 0])),
        )
        for _ in range(rows)
    ]
    for token, row in zip(sample_tokens(logits, sampling).tolist(), zip(logits, sampling)):
        assert token == drawn_alone(*row)


def drawn_alone(logits: torch.Tensor, params: SamplingParams) -> int:
    """Gumbel-max with SplitMix64 in numpy's unsigned integers, over the nucleus found token by token."""
    if params.forced is not None:
        return params.forced
    if params.temperature == 0.0:
        return int(logits.argmax())
    values = logits.double().numpy()
    with np.errstate(over="ignore"):  # a quotient below the least number is minus infinity, whose power is 0
        scores = (values - values.max()) / params.temperature
        powers = np.exp(scores)
    if params.top_p < 1:
        probabilities = powers / powers.sum()
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(np.append(0, probabilities[order[:-1]]))
        # The sampler subtracts, so rounding may decide otherwise at the border: such cases are left out.
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
    """Pairs of draws from even logits follow the product of their distributions, as those of a good generator do."""
    even = torch.zeros(1, 8)
    triples = [(seed, completion, step) for seed in range(-9, 10) for completion in range(20) for step in range(20)]
    params = {triple: SamplingParams(1.0, 1.0, draw_key(*triple)) for triple in triples}
    tokens = dict(zip(triples, sample_tokens(even.expand(len(triples), -1), [*params.values()]).tolist()))
    assert len({p.key for p in params.values()}) == len(triples)
    for axis in range(3):
        pairs = np.zeros((8, 8))
        for triple, token in tokens.items():
            following = tuple(number + (i == axis) for i, number in enumerate(triple))
            if following in tokens:
                pairs[token, tokens[following]] += 1
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
    assert -(1 << 63) <= draw_key(1 << 200, 0, 0) < 1 << 63


def test_rounding_of_the_logits_changes_almost_no_draw():
    """As another batch rounds; the inverse of a cumulative distribution changed some 45 of 2,000 such draws."""
    torch.manual_seed(0)
    peaked = -1.1 * torch.arange(1, 49_153).log()[torch.randperm(49_152)]
    changed = 0
    for first in range(0, 2000, 50):
        params = [SamplingParams(1.0, 1.0, draw_key(0, completion, 0)) for completion in range(first, first + 50)]
        alone = peaked.repeat(50, 1)
        among = alone + 1e-5 * torch.randn(alone.shape)
        changed += int((sample_tokens(alone, params) != sample_tokens(among, params)).sum())
    assert changed <= 2


def test_logprobs_are_of_the_raw_softmax_at_any_temperature(tiny):
    model = tiny("llama")
    prompt = [5, 9, 33, 120]
    for temperature in (0.0, 0.7, 1.0):
        request = GenerationRequest(
            prompt_token_ids=prompt, max_tokens=10, temperature=temperature, top_p=0.9, seed=1, ignore_eos=True
        )
        with Engine.from_pretrained(model.path) as engine:
            completion = engine.run([request])[0].completions[0]
        reference = model.logprobs(prompt + list(completion.token_ids))
        for i, token in enumerate(completion.token_ids):
            assert math.isclose(completion.logprobs[i], reference[3 + i, token].item(), abs_tol=1e-4)


def test_a_sample_does_not_depend_on_its_batch(tiny):
    wanted = GenerationRequest(prompt_token_ids=[7, 8, 9], max_tokens=14, temperature=1.0, seed=42, n=3)
    company = [
        GenerationRequest(prompt_token_ids=[i, i + 1], max_tokens=20, temperature=1.0, seed=i) for i in range(2, 12)
    ]
    with Engine.from_pretrained(tiny("opt").path) as engine:
        alone = engine.run([wanted])[0]
        together = engine.run([*company, wanted])[-1]
        other_seed = engine.run([GenerationRequest(**{**vars(wanted), "seed": 43})])[0]
    ids = [c.token_ids for c in alone.completions]
    assert ids == [c.token_ids for c in together.completions]
    assert ids != [c.token_ids for c in other_seed.completions]
    assert len(set(ids)) == 3
