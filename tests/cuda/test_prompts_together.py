"""Prompts of a layer together on a device: one call of attention, one quantization; and the values
stay those.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from flexgen_helm.models import attention
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import assert_close, requests, run
from tests.helpers.layers import replace_layers


def launches_by_prompts(path, asked, precision="fp16"):
    """Prompts of a batch -> the most launches of a layer; and the results."""
    found = defaultdict(int)
    with cuda_in_host_memory() as device, pytest.MonkeyPatch.context() as patch:

        def step(compute, _, batches):
            before = sum(device.kernels.values())
            hidden = compute()
            (batch,) = batches
            number = len(batch.attend.backend.metadata.prompts)
            found[number] = max(found[number], sum(device.kernels.values()) - before)
            return hidden

        replace_layers(patch, step)
        results, _ = run(path, asked, torch.float16, precision=precision)
    device.check()
    return found, results


@pytest.mark.fast(2)
@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma3", "qwen3"])
def test_one_call_attends_to_all_prompts(tiny, monkeypatch, variant):
    """With windows, shared prefixes, several completions; the inverse is a release without that
    call.
    """
    asked = requests(6) + requests(5, shared=20)
    found, results = launches_by_prompts(tiny(variant).path, asked)
    assert_close(tiny(variant), results, torch.float16)
    most = max(found)
    assert most >= 4 and found[most] <= 60 + 2 * most
    monkeypatch.setattr(attention, "_varlen", lambda: None)
    alone, results = launches_by_prompts(tiny(variant).path, asked)
    assert_close(tiny(variant), results, torch.float16)
    assert alone[most] > found[most] + 4 * most


def test_prompts_are_quantized_once(tiny):
    """A prompt more costs its masks and its attention, not a quantization, which is a hundred
    launches.
    """
    asked = requests(7, longest=90)
    launches_by_prompts(tiny("llama").path, asked, "4bit")  # makes a table that is kept
    found, _ = launches_by_prompts(tiny("llama").path, asked, "4bit")
    most = max(found)
    assert most >= 4 and found[most] <= 112 + 19 * most
