"""What a CUDA device runs, mirrored on the CPU: products and caches in 16 bits, attention by the direct formula."""

from __future__ import annotations

import random

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from tests.conftest import VOCABULARY

# Log-probabilities in 16-bit compute: each within 5e-2, on the mean within 5e-3.
WORST, MEAN = 5e-2, 5e-3


@pytest.mark.parametrize("variant", ["llama", "llama-untied-biases", "opt-350m", "mistral", "qwen3-windows"])
def test_16_bit_compute_stays_within_its_tolerance(tiny, variant, monkeypatch):
    monkeypatch.setattr("flexgen_helm.exec.engine.compute_dtype", lambda device, rest: torch.float16)
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
