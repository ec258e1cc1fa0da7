"""Models that run by the modules of `transformers`, on the CUDA device in host memory."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.cuda.counts import check, counted
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import PLACEMENTS, assert_close, requests, run
from tests.helpers.backend_models import saved
from tests.helpers.shares import share
from tests.helpers.tiny_models import TinyModel

# Norms with biases and a parallel MLP, biased experts with attention sinks, latent attention with
# experts, chunks with experts whose input is weighed, several streams with inputs of every layer
# and shared keys, states of sequences.
CLASSES = (
    "CohereForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM",
    "Gemma3nForCausalLM", "Qwen3_5ForCausalLM",
)  # fmt: skip
WITH_EXPERTS = ("GptOssForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM")


@pytest.mark.fast(2)
@pytest.mark.parametrize(("name", "placement"), share(itertools.product(CLASSES, PLACEMENTS), 2))
def test_modules_of_transformers_wait_for_the_choice_of_experts_only(name, placement, tmp_path):
    """Their values are those of the class itself; no race, no pageable copy."""
    model = TinyModel(tmp_path / "model", saved(name, tmp_path / "model"))
    asked = requests(4, 30, 3, shared=10, tokens=60)
    # a token behind what is shared
    asked.append(replace(asked[0], prompt_token_ids=asked[0].prompt_token_ids[:11]))
    settings = dict(schedule="zigzag", cpu_attention=False, offload_dir=tmp_path / "tiers")
    if PLACEMENTS[placement] is not None:
        settings |= dict(policy=PLACEMENTS[placement])
    with cuda_in_host_memory() as device, counted(device) as counts:
        results, _ = run(model.path, asked, torch.float16, **settings)
    device.check()
    routed = [line for line in counts.waits if line.startswith("models/routing.py")]
    assert bool(routed) == (name in WITH_EXPERTS)
    counts.waits = [line for line in counts.waits if line not in routed]
    check(counts)
    assert_close(model, results, torch.float16)
