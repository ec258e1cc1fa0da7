"""What a CUDA device runs, mirrored on the CPU: products and caches in 16 bits, attention by the direct formula."""

from __future__ import annotations

import random

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.models import attention
from tests.helpers.tiny_models import VOCABULARY

# Log-probabilities in 16-bit compute: each within 5e-2, on the mean within 5e-3.
WORST, MEAN = 5e-2, 5e-3


STEADY = ["llama", "llama-untied-biases", "opt-350m", "mistral", "qwen3-windows", "gemma2", "bloom", "pythia"]


@pytest.mark.parametrize("variant", STEADY)
def test_16_bit_compute_stays_within_its_tolerance(tiny, variant, monkeypatch):
    monkeypatch.setattr("flexgen_helm.engine.engine.compute_dtype", lambda device, rest: torch.float16)
    monkeypatch.setattr(attention, "_FUSED", None)
    model = tiny(variant)
    draw = random.Random(0)
    prompts = [[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(2, 60))] for _ in range(9)]
    requests = [
        GenerationRequest(prompt_token_ids=p, max_tokens=6, echo_logprobs=True, n=1 + 2 * (i % 2), seed=i,
                          temperature=float(i % 2), ignore_eos=True)
        for i, p in enumerate(prompts)
    ]  # fmt: skip
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(requests)
        assert engine.last_run["hardware"]["compute_dtype"] == "float16"
    differences = []
    for prompt, result in zip(prompts, results):
        assert result.error is None, result.error
        for completion in result.completions:
            reference = model.logprobs(prompt + list(completion.token_ids))
            scores = [*result.prompt_logprobs[1:], *completion.logprobs]
            tokens = [*prompt[1:], *completion.token_ids]
            differences += [abs(s - reference[i, t].item()) for i, (s, t) in enumerate(zip(scores, tokens))]
    assert max(differences) < WORST and sum(differences) / len(differences) < MEAN
    assert max(differences) > 1e-4  # it did run in 16 bits


@pytest.mark.parametrize("variant", ["gemma3", "mixtral"])
def test_where_16_bits_cost_more_transformers_pays_the_same(tiny, variant, monkeypatch):
    """Gemma's sums outgrow 16 bits, and a router changes its mind where two experts are nearly equal."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("flexgen_helm.engine.engine.compute_dtype", lambda device, rest: torch.float16)
    monkeypatch.setattr(attention, "_FUSED", None)
    model = tiny(variant)
    half = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float16).eval()
    draw = random.Random(0)
    prompts = [[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(2, 60))] for _ in range(9)]
    requests = [GenerationRequest(prompt_token_ids=p, max_tokens=0, echo_logprobs=True) for p in prompts]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(requests)
    ours, theirs = [], []
    for prompt, result in zip(prompts, results):
        reference = model.logprobs(prompt)
        with torch.no_grad():
            rounded = torch.log_softmax(half(torch.tensor([prompt])).logits[0].float(), dim=-1)
        for i, token in enumerate(prompt[1:]):
            ours.append(abs(result.prompt_logprobs[i + 1] - reference[i, token].item()))
            theirs.append(abs((rounded[i, token] - reference[i, token]).item()))
    if variant == "gemma3":
        assert max(ours) < 2 * max(theirs)
    # How far off a token is after a router has changed its mind is chance; how often it does is not.
    assert max(ours) > 1e-4 and sum(ours) < 2 * sum(theirs)
    assert sorted(ours)[-len(ours) // 20] < 2 * sorted(theirs)[-len(theirs) // 20]
