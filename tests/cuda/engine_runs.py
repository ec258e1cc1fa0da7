"""Runs of the engine on the CUDA device in host memory, and what their values are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, GenerationResult, MemoryLimits
from tests.helpers.tiny_models import VOCABULARY, TinyModel

MIB = 1 << 20
LIMITS = MemoryLimits(gpu=64 * MIB, cpu=128 * MIB, disk=256 * MIB)
# So much that the share of CUDA graphs in what the weights leave is enough for them.
ROOMY = MemoryLimits(gpu=2048 * MIB, cpu=256 * MIB, disk=256 * MIB)
# Log-probabilities, each and on the mean, as on a GPU (tests/engine/test_gpu_parity.py); bfloat16 has 3 bits less.
TOLERANCE = {torch.float32: (1e-3, 1e-4), torch.float16: (5e-2, 5e-3), torch.bfloat16: (0.4, 4e-2)}
COSTLY, COSTLY_FACTOR = ("gemma", "mixtral", "qwen3-moe"), 4


def requests(count: int = 5, longest: int = 40, new: int = 3, shared: int = 0, **options: Any) -> list[Any]:
    """Scored prompts with answers, some with several completions; `shared` tokens begin every prompt."""
    draw = random.Random(count)
    common = [draw.randrange(2, VOCABULARY) for _ in range(shared)]
    return [
        GenerationRequest(
            prompt_token_ids=[*common, *(draw.randrange(2, VOCABULARY) for _ in range(draw.randint(2, longest)))],
            max_tokens=new, echo_logprobs=True, n=1 + 2 * (i % 2) if new > 1 else 1, ignore_eos=True, **options,
        )
        for i in range(count)
    ]  # fmt: skip


def run(
    path: Any, asked: Sequence[Any], dtype: torch.dtype, *, device: str = "cuda", **settings: Any
) -> tuple[list[GenerationResult], dict[str, Any]]:
    """Answer requests on the device in a compute dtype; return the results and the record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexgen_helm.engine.engine.compute_dtype", lambda *_: dtype)
        # Three units of a tiny model: its memory is used again and again.
        patch.setattr("flexgen_helm.planner.memory.MIN_STAGING_BYTES", 1 << 16)
        with Engine.from_pretrained(path, device=device, **{"limits": LIMITS, **settings}) as engine:
            results = engine.run(asked)
            for result in results:
                assert result.error is None, result.error
            return results, engine.last_run


def assert_close(model: TinyModel, results: Sequence[GenerationResult], dtype: torch.dtype, variant: str) -> None:
    """Scores of prompts and answers equal those of `transformers` for the same tokens."""
    differences = []
    for result in results:
        completion = result.completions[0]
        tokens = [*result.prompt_token_ids, *completion.token_ids]
        scores = [*result.prompt_logprobs[1:], *completion.logprobs]
        reference = model.logprobs(tokens)
        differences += [abs(s - reference[i, t].item()) for i, (s, t) in enumerate(zip(scores, tokens[1:]))]
    worst, mean = TOLERANCE[dtype]
    if variant.startswith(COSTLY):
        worst, mean = 50 * worst, COSTLY_FACTOR * mean
    assert max(differences) < worst and sum(differences) / len(differences) < mean
