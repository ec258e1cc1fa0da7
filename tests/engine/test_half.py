"""What a CUDA device runs, mirrored on the CPU: products and caches in 16 bits, attention by the direct formula."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.models import attention
from tests.helpers.parity import differences, prompts

# Log-probabilities in 16-bit compute: each within 5e-2, on the mean within 5e-3.
WORST, MEAN = 5e-2, 5e-3


STEADY = ["llama", "opt-350m", "gemma2", "bloom"]


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


@pytest.mark.parametrize("variant", STEADY)
def test_16_bit_compute_stays_within_its_tolerance(tiny, half, variant):
    model, asked = tiny(variant), [*requests(max_tokens=6), *requests(max_tokens=6, n=3, temperature=1.0)]
    with Engine.from_pretrained(model.path) as engine:
        results = engine.run(asked)
        assert engine.last_run["hardware"]["compute_dtype"] == "float16"
    found = [x for r, result in zip(asked, results) for x in differences(model.logprobs, r.prompt_token_ids, result)]
    assert max(found) < WORST and sum(found) / len(found) < MEAN
    assert max(found) > 1e-4  # it did run in 16 bits
