"""On a CUDA device: the same answers as `transformers`, within the tolerances of 16-bit compute. `make gpu-check`."""

from __future__ import annotations

import random

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from tests.conftest import VARIANTS, VOCABULARY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (make gpu-check)"),
]
# Log-probabilities in 16-bit compute: each within 5e-2, on the mean within 5e-3.
WORST, MEAN = 5e-2, 5e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("schedule", ["row", "zigzag"])
def test_scores_equal_transformers(tiny, variant, schedule):
    model = tiny(variant)
    draw = random.Random(0)
    prompts = [[draw.randrange(2, VOCABULARY) for _ in range(draw.randint(2, 70))] for _ in range(17)]
    requests = [
        GenerationRequest(prompt_token_ids=p, max_tokens=6, echo_logprobs=True, n=1 + 2 * (i % 2), ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    with Engine.from_pretrained(model.path, device="cuda", schedule=schedule) as engine:
        results = engine.run(requests)
        engine.ledger.check({"weights": engine.ledger.in_use})
    differences = []
    for prompt, result in zip(prompts, results):
        assert result.error is None, result.error
        completion = result.completions[0]
        reference = model.logprobs(prompt + list(completion.token_ids))
        scores = [*result.prompt_logprobs[1:], *completion.logprobs]
        tokens = [*prompt[1:], *completion.token_ids]
        differences += [abs(s - reference[i, t].item()) for i, (s, t) in enumerate(zip(scores, tokens))]
    assert max(differences) < WORST and sum(differences) / len(differences) < MEAN
