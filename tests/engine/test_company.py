"""A request's numbers have the same bits alone and in any company, as far as no prefix is shared."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.kernels.attention import can_attend
from tests.helpers.tiny_models import VOCABULARY

MIB = 1 << 20
CPUINFO = Path("/proc/cpuinfo")
IS_AMD = CPUINFO.is_file() and "AuthenticAMD" in CPUINFO.read_text()


def prompts(seed: int) -> list[GenerationRequest]:
    """Requests without a common beginning."""
    draw = random.Random(seed)
    firsts = draw.sample(range(2, VOCABULARY), 12)
    return [
        GenerationRequest(
            prompt_token_ids=[first, *(draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(90)))],
            max_tokens=draw.choice([0, 5]), echo_logprobs=True, ignore_eos=True,
        )
        for first in firsts
    ]  # fmt: skip


def bits(result) -> tuple:
    return result.prompt_logprobs, [(c.token_ids, c.logprobs) for c in result.completions]


@pytest.mark.skipif(not IS_AMD, reason="tried on AMD's processors alone; Intel's matrix unit does not take few rows")
@pytest.mark.parametrize("variant", ["llama", "gemma2", "opt-350m", "bloom", "mixtral"])
def test_bits_do_not_depend_on_the_company(tiny, tmp_path, variant):
    if not can_attend(torch.zeros(1, 1, 1)):
        pytest.skip("no compiled loop attends here")
    asked = prompts(1)
    with Engine.from_pretrained(tiny(variant).path) as engine:
        alone = [bits(engine.run([request])[0]) for request in asked]
        torch.set_num_threads(1)
        assert [bits(result) for result in engine.run(asked[::-1])] == alone[::-1]
    streamed = dict(policy="3x2,0,0,0,50,0,100", limits=MemoryLimits(cpu=64 * MIB), offload_dir=tmp_path)
    with Engine.from_pretrained(tiny(variant).path, schedule="zigzag", **streamed) as engine:
        assert [bits(result) for result in engine.run(asked)] == alone


def test_the_comparison_sees_a_product_that_follows_the_batch(tiny, monkeypatch):
    from flexgen_helm.offload import linear

    def product(x, weight, bias):
        kind = torch.float64 if len(x) > 100 else torch.float32
        return torch.nn.functional.linear(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)).float()

    monkeypatch.setattr(linear, "linear", product)
    monkeypatch.setattr(linear, "linear_as_stored", product)
    asked = prompts(1)
    with Engine.from_pretrained(tiny("llama").path) as engine:
        alone = [bits(engine.run([request])[0]) for request in asked]
        assert [bits(result) for result in engine.run(asked)] != alone
