"""What a CUDA device runs, mirrored on the CPU: products and caches in 16 bits, attention by the direct formula."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.models import attention
from tests.helpers.parity import differences, prompts
from tests.helpers.tiny_models import TinyModel

# Log-probabilities in 16-bit compute: each within 5e-2, on the mean within 5e-3.
WORST, MEAN = 5e-2, 5e-3


def requests(**options):
    return [
        GenerationRequest(prompt_token_ids=[1, *ids], echo_logprobs=True, seed=i, ignore_eos=True, **options)
        for i, ids in enumerate(prompts(9, 60))
    ]


@pytest.fixture
def half(monkeypatch):
    """Compute as a device does whose products are in 16 bits."""
    monkeypatch.setattr("flexgen_helm.engine.engine.compute_dtype", lambda device, rest: torch.float16)
    monkeypatch.setattr(attention, "_FUSED", None)


@pytest.mark.parametrize("variant", ["llama", "opt-350m", "gemma2", "bloom"])
def test_16_bit_compute_stays_within_its_tolerance(tiny, half, variant):
    model, asked = tiny(variant), [*requests(max_tokens=6), *requests(max_tokens=6, n=3, temperature=1.0)]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(asked)
        assert engine.last_run["hardware"]["compute_dtype"] == "float16"
    found = [x for r, result in zip(asked, results) for x in differences(model.logprobs, r.prompt_token_ids, result)]
    assert max(found) < WORST and sum(found) / len(found) < MEAN
    assert max(found) > 1e-4  # it did run in 16 bits


@pytest.mark.parametrize("variant", ["gemma3", "mixtral"])
def test_where_16_bits_cost_more_transformers_pays_the_same(tiny, half, variant):
    """Gemma's sums outgrow 16 bits, and a router changes its mind where two experts are nearly equal."""
    model, asked = tiny(variant), requests(max_tokens=0)
    rounded = TinyModel(model.path, AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float16).eval())
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(asked)
    ours, theirs = [], []
    for request, result in zip(asked, results):
        ids = torch.tensor(request.prompt_token_ids)
        rows, halves = model.logprobs(ids.tolist()), rounded.logprobs(ids.tolist())
        ours += differences(lambda _, rows=rows: rows, ids.tolist(), result)
        theirs += (halves - rows)[:-1].gather(1, ids[1:, None]).abs()[:, 0].tolist()
    if variant == "gemma3":
        assert max(ours) < 2 * max(theirs)
    # How far off a token is after a router has changed its mind is chance; how often it does is not.
    assert max(ours) > 1e-4 and sum(ours) < 2 * sum(theirs)
    assert sorted(ours)[-len(ours) // 20] < 2 * sorted(theirs)[-len(theirs) // 20]
