"""Runs of the engine on the CUDA device in host memory, and what their values are compared with."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.engine import opening
from tests.helpers.shares import IS_WHOLE
from tests.helpers.tiny_models import VOCABULARY

MIB = 1 << 20
LIMITS = MemoryLimits(gpu=64 * MIB, cpu=128 * MIB, disk=256 * MIB)
THIRDS = Policy(3, 2, *(0.3,) * 6)
HOST = Policy(3, 2, 0, 1, 0, 1, 0, 1)
DISK = Policy(3, 2, 0, 0, 0, 0, 0, 0)
PLACEMENTS = {"resident": None, "thirds": THIRDS, "host": HOST, "disk": DISK}
# Log-probabilities in float32, each and on the mean. In 16 bits the errors are compared with those
# of `transformers` in the same 16 bits on the processor: as factors, of the worst and of the mean.
# Both round differently, and not better.
EXACT, OF_PEERS = (1e-3, 1e-4), (4.0, 2.0)


def each_family(variants, dtypes):
    """Each family in one of the types by turns, or, where matrices are whole, in all."""
    if IS_WHOLE:
        return list(itertools.product(variants, dtypes))
    return [(variant, dtypes[number % len(dtypes)]) for number, variant in enumerate(variants)]


def requests(count=5, longest=40, new=3, shared=0, tokens=VOCABULARY, **options):
    """Scored prompts with answers, some with several completions; `shared` tokens begin every
    prompt.
    """
    draw = random.Random(count)
    common = [draw.randrange(2, tokens) for _ in range(shared)]
    return [
        GenerationRequest(
            prompt_token_ids=[*common, *(draw.randrange(2, tokens) for _ in range(draw.randint(2, longest)))],
            max_tokens=new, echo_logprobs=True, n=1 + 2 * (i % 2) if new > 1 else 1, ignore_eos=True, **options,
        )
        for i in range(count)
    ]  # fmt: skip


def run(path, asked, dtype, *, device="cuda", stops=None, **settings):
    """Answer requests on the device in a compute dtype; return the results and the record.

    stops: named arguments of `Engine.run`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "compute_dtype", lambda *_: dtype)
        # Three units of a tiny model: its memory is used again and again.
        patch.setattr("flexgen_helm.planner.staging.MIN_STAGING_BYTES", 1 << 16)
        with Engine.from_pretrained(
            path, device=device, **{"limits": LIMITS, **settings}
        ) as engine:
            results = engine.run(asked, **(stops or {}))
            for result in results:
                assert result.error is None, result.error
            return results, engine.last_run


def assert_close(model, results, dtype):
    """Scores of prompts and answers are as near to `transformers` in float32 as `transformers` in
    `dtype` is.
    """
    errors: list[float] = []
    peer: list[float] = []
    for result in results:
        completion = result.completions[0]
        tokens = [*result.prompt_token_ids, *completion.token_ids]
        scores = [*result.prompt_logprobs[1:], *completion.logprobs]
        drawn = range(len(scores)), tokens[1:]
        exact = model.logprobs(tokens)[drawn]
        errors += (torch.tensor(scores) - exact).abs().tolist()
        if dtype != torch.float32:
            with torch.no_grad():
                logits = _in_dtype(model, dtype)(torch.tensor([tokens])).logits[0]
            peer += (torch.log_softmax(logits.float(), -1)[drawn] - exact).abs().tolist()
    worst, mean = (
        EXACT if not peer else (OF_PEERS[0] * max(peer), OF_PEERS[1] * sum(peer) / len(peer))
    )
    found = max(errors), sum(errors) / len(errors)
    assert found[0] < worst and found[1] < mean, (found, (worst, mean))


def _in_dtype(model, dtype):
    """The reference in 16 bits, made once."""
    key = str(model.path), dtype
    if key not in _peers:
        _peers[key] = copy.deepcopy(model.reference).to(dtype)
    return _peers[key]


_peers: dict[tuple[str, torch.dtype], Any] = {}
