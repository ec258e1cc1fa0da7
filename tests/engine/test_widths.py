"""Widths that are no multiple of a vector: what a compiled loop leaves to PyTorch, or does at a
row's end.

Programs of decode layers were removed because of them: they wrote into memory that PyTorch had
freed.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from flexgen_helm import Engine, GenerationRequest
from tests.helpers.parity import assert_equals_reference, prompts
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import TinyModel, config_like_llama, save_random

FAMILIES = (
    "LlamaConfig",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Phi3Config",
    "Gemma2Config",
)
PROMPTS, NEW_TOKENS = 8, 8


def drawn_config(seed):
    """Draw a family, and widths of the hidden states, the MLP and the heads; none is a multiple of
    16.
    """
    draw = random.Random(seed)

    def width(least, most, multiple=2):
        return draw.choice(
            [size for size in range(least, most) if size % 16 and size % multiple == 0]
        )

    key_heads, group, head_dim = draw.randint(1, 3), draw.randint(1, 3), width(6, 50)
    heads, kind = key_heads * group, FAMILIES[seed % len(FAMILIES)]
    hidden = heads * head_dim if kind == "Phi3Config" else width(20, 300, heads)
    return config_like_llama(
        kind, hidden_size=hidden, intermediate_size=width(20, 500), num_hidden_layers=2,
        head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=key_heads,
        initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip


def compare(folder, first, last):
    """Compare cases with `transformers`, in this process."""
    for seed in range(first, last):
        path = Path(folder, str(seed))
        model = TinyModel(path, save_random(path, drawn_config(seed), seed=seed))
        asked = prompts(PROMPTS, 40, seed=seed)
        requests = [
            GenerationRequest(
                prompt_token_ids=prompt, max_tokens=NEW_TOKENS, echo_logprobs=True, ignore_eos=True
            )
            for prompt in asked
        ]
        with Engine.from_pretrained(path, device="cpu", unverified=True) as engine:
            results = engine.run(requests)
        for prompt, request, result in zip(asked, requests, results, strict=True):
            assert_equals_reference(model, prompt, request, result)
        print(seed)


@pytest.mark.fast(1)
@pytest.mark.parametrize("first, loops", [(10, "0"), (0, "1"), (20, "1"), (30, "0")])
def test_drawn_widths_equal_transformers(tmp_path, loops, first):
    """In new processes, whose freed memory has other bytes: what reads or writes there is seen."""
    call = f"compare({str(tmp_path)!r}, {first}, {first + 10})"
    variables = {
        "FLEXGEN_HELM_LOOPS": loops,
        "MALLOC_PERTURB_": str(85 + first),
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.engine.test_widths import *; {call}"],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(seed) for seed in range(first, first + 10)]
